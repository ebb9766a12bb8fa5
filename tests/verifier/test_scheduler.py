"""The scheduler: admission, chunks, preemption; never an allocation failure, never a lost slot."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssd_serve.cache.prefix import PrefixCache, PrefixHandle
from ssd_serve.cache.slots import SlotPool
from ssd_serve.messages import SamplingParameters, Submit
from ssd_serve.verifier.request import Request, accept, share
from ssd_serve.verifier.scheduler import ScheduledChunk, Scheduler, SchedulerLimits
from tests.examples import examples

SLOTS = 64
VOCABULARY = 50
PROMPT = st.lists(st.integers(1, 3), min_size=1, max_size=30)


def make_request(number: int, prompt: list[int], max_tokens: int) -> Request:
    parameters = SamplingParameters(max_tokens=max_tokens)
    submit = Submit(number, tuple(prompt), parameters, number)
    return accept(submit, share(submit, ()), 64, VOCABULARY)


def make_scheduler(
    slots: int = SLOTS,
    prefix: bool = True,
    max_running: int = 4,
    chunk: int = 8,
    max_waiting: int = 2,
    worth_reusing: int = 16,
) -> Scheduler:
    pool = SlotPool(slots)
    limits = SchedulerLimits(max_running, max_waiting, chunk, worth_reusing)
    return Scheduler(pool, PrefixCache(pool) if prefix else None, limits)


def commit(scheduler: Scheduler, part: ScheduledChunk, tree: list[int], accepted: int, token: int) -> None:
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
        self.scheduler = make_scheduler(prefix=self.prefix, worth_reusing=3)
        self.submitted: list[Request] = []
        self.texts: dict[int, list[int]] = {}
        self.content: dict[int, list[int]] = {}
        """Which text a slot was last written with."""

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
        prefix = self.scheduler.prefix
        if sum(map(len, trees)) < sum(wanted):
            spare = self.scheduler.pool.available + (prefix.evictable if prefix is not None else 0)
            assert spare <= len(self.scheduler.running), "nothing that nobody needs was kept instead"
        for part, count, tree in zip(parts, wanted, trees, strict=True):
            assert len(tree) <= count
            accepted = min(data.draw(st.integers(0, len(tree))), part.request.left - 1)
            first = len(part.request.slots)
            commit(self.scheduler, part, tree, accepted, data.draw(st.integers(1, 3)))
            for position, slot in enumerate(part.request.slots.view()[first:].tolist(), start=first):
                self.content[slot] = part.request.tokens[: position + 1]
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
    """The same without reuse between requests."""

    prefix = False


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestWithoutPrefix = WithoutPrefix.TestCase
TestWithoutPrefix.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)


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
    assert scheduler.preemptions == preempted[0].figures.preemptions == 1


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


def test_cached_texts_make_room_for_tree_rows() -> None:
    """However full of them a server is, and no more of them go than there are rows."""
    scheduler = make_scheduler(slots=24)
    for number in range(4):
        over = make_request(number, [number, 2, 3, 4, 5, 6], 4)
        scheduler.submit(over)
        scheduler.admit()
        commit(scheduler, scheduler.plan()[0][0], [], 0, 3)
        scheduler.remove(over)
    assert scheduler.pool.available == 0
    request = make_request(9, [9, 9], 8)
    scheduler.submit(request)
    scheduler.admit()
    for _ in range(2):
        parts, _ = scheduler.plan()
        trees = scheduler.tree_slots(parts, [5])
        assert [len(tree) for tree in trees] == [5]
        commit(scheduler, parts[0], trees[0], 0, 3)
    assert scheduler.prefix is not None
    assert scheduler.prefix.size == 24 - len(request.slots) - 6


@pytest.mark.parametrize("worth_reusing", [4, 5])
def test_a_cached_prefix_is_not_read_again(worth_reusing: int) -> None:
    """Where it is long enough to be worth it."""
    scheduler = make_scheduler(worth_reusing=worth_reusing)
    first = make_request(0, [1, 2, 3, 4, 5], 4)
    scheduler.submit(first)
    scheduler.admit()
    for part in scheduler.plan()[0]:
        commit(scheduler, part, [], 0, 3)
    scheduler.remove(first)
    second = make_request(1, [1, 2, 3, 4, 9], 4)
    scheduler.submit(second)
    scheduler.admit()
    assert second.pending == (1 if worth_reusing == 4 else 5)
    assert second.figures.cached_prompt_tokens == (4 if worth_reusing == 4 else 0)


def read_all(scheduler: Scheduler, rounds: int = 100) -> int:
    """Rounds until all are decoding; how many prompt tokens were computed, roots included."""
    computed = 0
    for _ in range(rounds):
        scheduler.admit()
        if not scheduler.waiting and all(request.decoding for request in scheduler.running):
            return computed
        parts, _ = scheduler.plan()
        for part in parts:
            computed += 0 if part.request.decoding else len(part.slots)
            commit(scheduler, part, [], 0, 1)
    raise AssertionError("a prompt is never read")


@pytest.mark.parametrize("chunk", [16, 40, 400])
@pytest.mark.parametrize("max_running", [2, 4])
def test_choices_of_one_prompt_read_it_once(chunk: int, max_running: int) -> None:
    scheduler = make_scheduler(slots=1000, chunk=chunk, max_running=max_running)
    prompt = [1 + place % 7 for place in range(100)]
    choices = [make_request(number, prompt, 60 - 20 * number) for number in range(4)]
    for request in choices[:max_running]:
        scheduler.submit(request)
    assert read_all(scheduler) <= 100 + 15 * max_running
    assert [request.figures.cached_prompt_tokens > 80 for request in choices[:max_running]] == [
        False,
        *[True] * (max_running - 1),
    ]
    assert scheduler.prefix is not None
    assert scheduler.prefix.size == 100


def test_later_requests_go_on_with_what_is_being_read() -> None:
    """The second begins when a part of the prompt is read, and differs from the first after 70 tokens."""
    scheduler = make_scheduler(slots=1000, chunk=20)
    first = make_request(0, [1] * 100, 9)
    scheduler.submit(first)
    for _ in range(2):
        scheduler.admit()
        (part,) = scheduler.plan()[0]
        commit(scheduler, part, [], 0, 1)
    second = make_request(1, [1] * 70 + [2] * 30, 9)
    scheduler.submit(second)
    assert [request.number for request in scheduler.admit()] == [1]
    assert (len(first.slots), len(second.slots)) == (40, 40)
    assert read_all(scheduler) == 60 + 30
    assert second.figures.cached_prompt_tokens == 70
    assert second.slots.view()[:70].tolist() == first.slots.view()[:70].tolist()


def test_few_shared_tokens_are_not_waited_for() -> None:
    scheduler = make_scheduler(slots=1000, chunk=100)
    for number in range(2):
        scheduler.submit(make_request(number, [5] * 10 + [number] * 20, 9))
    scheduler.admit()
    assert [len(part.slots) for part in scheduler.plan()[0]] == [30, 30]


def test_without_a_prefix_cache_nobody_waits() -> None:
    scheduler = make_scheduler(slots=1000, prefix=False, chunk=100)
    for number in range(3):
        scheduler.submit(make_request(number, [5] * 30, 9))
    scheduler.admit()
    assert [len(part.slots) for part in scheduler.plan()[0]] == [30, 30, 30]


def test_a_reader_that_leaves_is_followed_by_the_next() -> None:
    scheduler = make_scheduler(slots=1000, chunk=20)
    choices = [make_request(number, [1] * 100, 9) for number in range(3)]
    for request in choices:
        scheduler.submit(request)
    scheduler.admit()
    (part,) = scheduler.plan()[0]
    commit(scheduler, part, [], 0, 1)
    scheduler.remove(choices[0])
    assert read_all(scheduler) == 80
    assert len(choices[0].slots) == 0
    assert choices[1].slots.view()[:99].tolist() == choices[2].slots.view()[:99].tolist()


def test_choices_that_share_their_prompt_need_its_memory_once() -> None:
    scheduler = make_scheduler(slots=150, chunk=20, max_running=8)
    for number in range(8):
        scheduler.submit(make_request(number, [1] * 100, 9))
    assert len(scheduler.admit()) == 1
    read_all(scheduler)
    assert len(scheduler.running) == 8
    assert scheduler.preemptions == 0


class CountingPrefix(PrefixCache):
    """Notes how many tokens each look may cover."""

    def __init__(self, pool: SlotPool) -> None:
        super().__init__(pool)
        self.looks: list[int] = []

    def follow(self, handle: PrefixHandle, text: Sequence[int], end: int, least: int = 1) -> list[int]:
        self.looks.append(end - handle.length)
        return super().follow(handle, text, end, least)


def test_a_long_request_that_finds_no_memory_is_not_looked_up_every_round() -> None:
    scheduler = make_scheduler(slots=70_000, chunk=100)
    scheduler.prefix = prefix = CountingPrefix(scheduler.pool)
    first, second = (make_request(number, [1 + number] * 40_000, 9) for number in range(2))
    for request in (first, second):
        scheduler.submit(request)
    for _ in range(30):
        scheduler.admit()
        for part in scheduler.plan()[0]:
            commit(scheduler, part, [], 0, 1)
    assert prefix.looks.count(39_999) <= 1 + 30 // 4
    scheduler.remove(first)
    assert scheduler.admit() == [second], "when nobody runs there is nothing to wait for"


def test_long_requests_are_looked_up_over_several_rounds() -> None:
    scheduler = make_scheduler(slots=1_000_000, max_running=8)
    for number in range(4):
        scheduler.submit(make_request(number, [1 + number] * 140_000, 9))
    assert [len(scheduler.admit()) for _ in range(3)] == [2, 2, 0]


def test_the_urgent_go_first_and_make_room_last() -> None:
    scheduler = make_scheduler(slots=16, prefix=False, max_running=3, max_waiting=9, chunk=64)
    asked = [make_request(number, [number] * 3, 20) for number in range(1, 6)]
    for request, priority in zip(asked, (1, 0, 1, 0, -1), strict=True):
        request.priority = priority
        scheduler.submit(request)
    assert [each.number for each in scheduler.waiting] == [5, 2, 4, 1, 3]
    assert [each.number for each in scheduler.admit()] == [5, 2, 4]
    late = make_request(6, [6], 20)
    late.priority = -2
    scheduler.remove(asked[3])
    scheduler.submit(late)
    scheduler.admit()
    assert [each.number for each in scheduler.running] == [6, 5, 2]
    preempted: list[Request] = []
    while not preempted:  # until memory is short
        parts, preempted = scheduler.plan()
        for part in parts:
            commit(scheduler, part, [], 0, 1)
    assert [each.number for each in preempted] == [2]
    assert [each.number for each in scheduler.waiting] == [2, 1, 3]
