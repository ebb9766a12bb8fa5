"""The scheduler: admission, chunks, preemption; never an allocation failure, never a lost slot."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssd_serve.cache.prefix import PrefixCache
from ssd_serve.cache.slots import SlotPool
from ssd_serve.messages import SamplingParameters, Submit
from ssd_serve.verifier.request import Request, accept
from ssd_serve.verifier.scheduler import Limits, Part, Scheduler

SLOTS = 64
VOCABULARY = 50
PROMPT = st.lists(st.integers(1, 3), min_size=1, max_size=30)


def make_request(number: int, prompt: list[int], max_tokens: int) -> Request:
    parameters = SamplingParameters(max_tokens=max_tokens)
    return accept(Submit(number, tuple(prompt), parameters, number), (), None, 64, VOCABULARY)


def make_scheduler(
    slots: int = SLOTS, prefix: bool = True, max_running: int = 4, chunk: int = 8, max_waiting: int = 2
) -> Scheduler:
    pool = SlotPool(slots)
    return Scheduler(pool, PrefixCache(pool) if prefix else None, Limits(max_running, max_waiting, chunk))


def commit(scheduler: Scheduler, part: Part, tree: list[int], accepted: int, token: int) -> None:
    """What the engine does after a round: keep some tree slots, free the rest, extend the text."""
    request, final = part.request, part.final
    request.slots.extend([*part.slots, *tree[:accepted]])
    scheduler.pool.free(tree[accepted:])
    if final:
        request.tokens.extend([token] * (accepted + 1))


class Rounds(RuleBasedStateMachine):
    """Requests of any length come and go while memory is short."""

    prefix = True

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(prefix=self.prefix)
        self.submitted: list[Request] = []
        self.texts: dict[int, list[int]] = {}

    @rule(prompt=PROMPT, max_tokens=st.integers(1, 30))
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        request = make_request(len(self.texts), prompt, max_tokens)
        self.scheduler.submit(request)
        self.submitted.append(request)
        self.texts[request.number] = list(prompt)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def round(self, data: st.DataObject) -> None:
        self.scheduler.admit()
        parts, preempted = self.scheduler.plan()
        assert parts, "a running request always has work and slots for it"
        numbers = [part.request.number for part in parts]
        assert numbers == sorted(numbers)
        assert not {request.number for request in preempted} & set(numbers)
        assert sum(len(part.slots) for part in parts if not part.request.decoding) <= 8
        wanted = [
            data.draw(st.integers(0, 6)) if part.request.decoding and part.request.left > 1 else 0
            for part in parts
        ]
        trees = self.scheduler.tree_slots(parts, wanted)
        for part, count, tree in zip(parts, wanted, trees, strict=True):
            assert len(tree) <= count
            accepted = min(data.draw(st.integers(0, len(tree))), part.request.left - 1)
            commit(self.scheduler, part, tree, accepted, data.draw(st.integers(1, 3)))
            self.texts[part.request.number] = list(part.request.tokens)
            if part.request.left <= 0:
                self.end(part.request)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.submitted)))

    def end(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.submitted.remove(request)

    @invariant()
    def the_order_of_submission_is_kept(self) -> None:
        assert [*self.scheduler.running, *self.scheduler.waiting] == self.submitted

    @invariant()
    def nothing_is_lost(self) -> None:
        for request in self.submitted:
            assert request.tokens == self.texts[request.number]
            assert request in self.scheduler.running or (len(request.slots) == 0 and request.handle is None)

    @invariant()
    def every_slot_is_free_cached_or_one_requests(self) -> None:
        borrowed = {id(request): request.handle.length if request.handle else 0 for request in self.submitted}
        own = sum(len(request.slots) - borrowed[id(request)] for request in self.submitted)
        cached = self.scheduler.prefix.size if self.scheduler.prefix else 0
        assert self.scheduler.pool.used == own + cached

    def teardown(self) -> None:
        for request in list(self.submitted):
            self.end(request)
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.evict(SLOTS)
        assert self.scheduler.pool.available == SLOTS


class WithoutPrefix(Rounds):
    """The same without reuse between requests."""

    prefix = False


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWithoutPrefix = WithoutPrefix.TestCase
TestWithoutPrefix.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_a_prompt_is_read_in_chunks_and_decoding_goes_on_beside_it() -> None:
    scheduler = make_scheduler()
    short, long = make_request(0, [1], 9), make_request(1, [2] * 20, 9)
    for request in (short, long):
        scheduler.submit(request)
    scheduler.admit()
    lengths: list[list[int]] = []
    finals: list[bool] = []
    for _ in range(3):
        parts, _ = scheduler.plan()
        lengths.append([len(part.slots) for part in parts])
        finals = [part.final for part in parts]
        for part in parts:
            commit(scheduler, part, [], 0, 1)
    assert lengths == [[1, 8], [1, 8], [1, 4]]
    assert finals == [True, True]


def test_no_more_than_max_running_are_admitted() -> None:
    scheduler = make_scheduler(max_running=2)
    for number in range(3):
        scheduler.submit(make_request(number, [1, 2], 4))
    assert [request.number for request in scheduler.admit()] == [0, 1]
    assert not scheduler.full()
    scheduler.submit(make_request(3, [1], 4))
    assert scheduler.full()


def test_who_does_not_fit_beside_the_running_waits() -> None:
    scheduler = make_scheduler(slots=20)
    for number in range(2):
        scheduler.submit(make_request(number, [1] * 10, 4))
    assert [request.number for request in scheduler.admit()] == [0]
    scheduler.remove(scheduler.running[0])
    assert [request.number for request in scheduler.admit()] == [1]


def test_the_youngest_gives_way_and_is_next() -> None:
    scheduler = make_scheduler(slots=12, prefix=False)
    for number in range(3):
        scheduler.submit(make_request(number, [1, 2], 8))
    scheduler.admit()
    preempted: list[Request] = []
    while not preempted:
        parts, preempted = scheduler.plan()
        for part in parts:
            commit(scheduler, part, [], 0, 3)
    assert [request.number for request in preempted] == [2]
    assert scheduler.waiting[0].number == 2
    assert scheduler.preemptions == preempted[0].tally.preemptions == 1


def test_tree_rows_take_only_what_no_running_request_needs() -> None:
    scheduler = make_scheduler(slots=12, prefix=False)
    for number in range(2):
        scheduler.submit(make_request(number, [1, 2], 8))
    scheduler.admit()
    parts, _ = scheduler.plan()
    for part in parts:
        commit(scheduler, part, [], 0, 3)
    parts, _ = scheduler.plan()
    trees = scheduler.tree_slots(parts, [9, 9])
    assert [len(tree) for tree in trees] == [4, 0]
    assert scheduler.pool.available == 2


def test_a_cached_prefix_is_not_read_again() -> None:
    scheduler = make_scheduler()
    first = make_request(0, [1, 2, 3, 4, 5], 4)
    scheduler.submit(first)
    scheduler.admit()
    for part in scheduler.plan()[0]:
        commit(scheduler, part, [], 0, 3)
    scheduler.remove(first)
    second = make_request(1, [1, 2, 3, 4, 9], 4)
    scheduler.submit(second)
    scheduler.admit()
    assert second.pending == 1
    assert second.tally.cached_prompt_tokens == 4
