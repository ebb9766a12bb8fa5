"""Tests of the scheduler: admission, chunks and preemption, without allocation failures or lost slots."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssd_serve.base.messages import RequestOptions
from ssd_serve.verifier.request import Request
from tests.examples import examples
from tests.verifier.scheduler_factory import (
    SLOTS,
    commit,
    make_request,
    make_scheduler,
    run_until_preemption,
)

PROMPT = st.lists(st.integers(1, 3), min_size=1, max_size=30)


class Rounds(RuleBasedStateMachine):
    """Requests of random length are submitted, run and aborted while memory is short."""

    prefix = True

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(prefix=self.prefix, min_reused_tokens=3)
        self.submitted: list[Request] = []
        self.texts: dict[int, list[int]] = {}
        self.content: dict[int, list[int]] = {}
        """Tokens up to and including the one last written to each slot."""

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
        chunks, preempted = self.scheduler.plan()
        assert chunks, "a running request always has work and slots for it"
        numbers = [chunk.request.number for chunk in chunks]
        assert numbers == sorted(numbers)
        assert not {request.number for request in preempted} & set(numbers)
        assert sum(len(chunk.slots) for chunk in chunks if not chunk.request.decoding) <= 8
        wanted = [
            data.draw(st.integers(0, 6))
            if chunk.request.decoding and chunk.request.remaining_tokens > 1
            else 0
            for chunk in chunks
        ]
        trees = self.scheduler.tree_slots(chunks, wanted)
        prefix = self.scheduler.prefix
        spare = self.scheduler.pool.available + (prefix.evictable if prefix is not None else 0)
        enough = sum(map(len, trees)) == sum(wanted)
        assert enough or spare <= len(self.scheduler.running), "nothing that nobody needs was kept instead"
        for chunk, count, tree in zip(chunks, wanted, trees, strict=True):
            assert len(tree) <= count
            accepted = min(data.draw(st.integers(0, len(tree))), chunk.request.remaining_tokens - 1)
            first = len(chunk.request.slots)
            commit(self.scheduler, chunk, tree, accepted, data.draw(st.integers(1, 3)))
            for position, slot in enumerate(chunk.request.slots.view()[first:].tolist(), start=first):
                self.content[slot] = chunk.request.tokens[: position + 1]
            self.texts[chunk.request.number] = list(chunk.request.tokens)
            if chunk.request.remaining_tokens <= 0:
                self.end(chunk.request)

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
    def what_a_request_reads_is_what_was_written_for_its_tokens(self) -> None:
        for request in self.submitted:
            for position, slot in enumerate(request.slots.view().tolist()):
                assert self.content[slot] == request.tokens[: position + 1]

    @invariant()
    def every_slot_is_free_cached_or_one_requests(self) -> None:
        prefix = self.scheduler.prefix
        cached = prefix._owned if prefix else bytearray(SLOTS)  # pyright: ignore[reportPrivateUsage]
        slots = [slot for request in self.submitted for slot in request.slots.view().tolist()]
        own = [slot for slot in slots if not cached[slot]]
        assert len(set(own)) == len(own)
        assert self.scheduler.pool.used == len(own) + (prefix.size if prefix else 0)

    def teardown(self) -> None:
        for request in list(self.submitted):
            self.end(request)
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.evict(SLOTS)
        assert self.scheduler.pool.available == SLOTS


class WithoutPrefix(Rounds):
    """Rounds without a prefix cache."""

    prefix = False


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestWithoutPrefix = WithoutPrefix.TestCase
TestWithoutPrefix.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)


def test_chunked_prefill_beside_decoding() -> None:
    scheduler = make_scheduler()
    short, long = make_request(0, [1], 9), make_request(1, [2] * 20, 9)
    for request in (short, long):
        scheduler.submit(request)
    scheduler.admit()
    lengths: list[list[int]] = []
    finals: list[bool] = []
    for _ in range(3):
        chunks, _ = scheduler.plan()
        lengths.append([len(chunk.slots) for chunk in chunks])
        finals = [chunk.final for chunk in chunks]
        for chunk in chunks:
            commit(scheduler, chunk, [], 0, 1)
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


def test_request_without_memory_waits() -> None:
    scheduler = make_scheduler(slots=20)
    for number in range(2):
        scheduler.submit(make_request(number, [1] * 10, 4))
    assert [request.number for request in scheduler.admit()] == [0]
    scheduler.remove(scheduler.running[0])
    assert [request.number for request in scheduler.admit()] == [1]


def test_preemption_takes_the_youngest_which_is_scheduled_next() -> None:
    scheduler = make_scheduler(slots=12, prefix=False)
    for number in range(3):
        scheduler.submit(make_request(number, [1, 2], 8))
    scheduler.admit()
    preempted = run_until_preemption(scheduler)
    assert [request.number for request in preempted] == [2]
    assert scheduler.waiting[0].number == 2
    assert scheduler.preemptions == preempted[0].figures.preemptions == 1


def test_priority_orders_admission_and_preemption() -> None:
    scheduler = make_scheduler(slots=16, prefix=False, max_running=3, max_waiting=9, chunk=64)
    requests = [make_request(number, [number] * 3, 20) for number in range(1, 6)]
    for request, priority in zip(requests, (1, 0, 1, 0, -1), strict=True):
        request.options = RequestOptions(priority=priority)
        scheduler.submit(request)
    assert [each.number for each in scheduler.waiting] == [5, 2, 4, 1, 3]
    assert [each.number for each in scheduler.admit()] == [5, 2, 4]
    late = make_request(6, [6], 20)
    late.options = RequestOptions(priority=-2)
    scheduler.remove(requests[3])
    scheduler.submit(late)
    scheduler.admit()
    assert [each.number for each in scheduler.running] == [6, 5, 2]
    preempted = run_until_preemption(scheduler)
    assert [each.number for each in preempted] == [2]
    assert [each.number for each in scheduler.waiting] == [2, 1, 3]
