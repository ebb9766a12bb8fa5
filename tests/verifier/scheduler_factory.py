"""A scheduler over few slots, requests for it, and what an engine does with its rounds."""

from ssd_serve.base.messages import RequestOptions, SamplingParameters, Submit
from ssd_serve.cache.prefix import PrefixCache
from ssd_serve.cache.slots import SlotPool
from ssd_serve.verifier.request import Request, RequestLimits, create_request, shared_state
from ssd_serve.verifier.scheduler import ScheduledChunk, Scheduler, SchedulerLimits

SLOTS = 64
VOCABULARY = 50


def request_of(
    submit: Submit, eos: tuple[int, ...] = (), tree_nodes: int = 64, vocabulary: int = VOCABULARY
) -> Request:
    """Return the request of a message."""
    return create_request(submit, shared_state(submit, eos), RequestLimits(4096, vocabulary, eos, tree_nodes))


def make_request(number: int, prompt: list[int], max_tokens: int, salt: bytes = b"") -> Request:
    parameters = SamplingParameters(max_tokens=max_tokens)
    return request_of(Submit(number, tuple(prompt), parameters, number, options=RequestOptions(salt=salt)))


def make_scheduler(
    slots: int = SLOTS,
    prefix: bool = True,
    max_running: int = 4,
    chunk: int = 8,
    max_waiting: int = 2,
    min_reused_tokens: int = 16,
) -> Scheduler:
    pool = SlotPool(slots)
    limits = SchedulerLimits(max_running, max_waiting, chunk, min_reused_tokens)
    return Scheduler(pool, PrefixCache(pool) if prefix else None, limits)


def commit(scheduler: Scheduler, chunk: ScheduledChunk, tree: list[int], accepted: int, token: int) -> None:
    request, final = chunk.request, chunk.final
    request.slots.extend([*chunk.slots, *tree[:accepted]])
    scheduler.pool.free(tree[accepted:])
    if final:
        request.tokens.extend([token] * (accepted + 1))


def prefill_and_remove(scheduler: Scheduler, request: Request) -> None:
    """Prefill a request of one chunk, and remove it."""
    scheduler.submit(request)
    scheduler.admit()
    (chunk,) = scheduler.plan()[0]
    commit(scheduler, chunk, [], 0, 3)
    scheduler.remove(request)


def run_until_preemption(scheduler: Scheduler) -> list[Request]:
    preempted: list[Request] = []
    while not preempted:
        chunks, preempted = scheduler.plan()
        for chunk in chunks:
            commit(scheduler, chunk, [], 0, 3)
    return preempted


def prefill_all(scheduler: Scheduler, rounds: int = 100) -> int:
    """Run until all decode, and return the number of computed prompt tokens, roots included."""
    computed = 0
    for _ in range(rounds):
        scheduler.admit()
        if not scheduler.waiting and all(request.decoding for request in scheduler.running):
            return computed
        chunks, _ = scheduler.plan()
        for chunk in chunks:
            computed += 0 if chunk.request.decoding else len(chunk.slots)
            commit(scheduler, chunk, [], 0, 1)
    raise AssertionError("a prompt is never prefilled")
