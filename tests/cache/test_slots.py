"""The slot pool: invariants after random operations, placement, and errors without effects."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssd_serve.cache.slots import SlotError, SlotPool
from tests.examples import examples

SLOTS = 24


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(SLOTS)
        self.model: set[int] = set()

    @rule(count=st.integers(0, 9), near=st.none() | st.integers(0, SLOTS - 1))
    def allocate(self, count: int, near: int | None) -> None:
        slots = self.pool.allocate(count, near)
        if count > SLOTS - len(self.model):
            assert slots is None
            return
        assert slots is not None
        assert slots == sorted(set(slots))
        assert len(slots) == count
        assert all(0 <= slot < SLOTS and slot not in self.model for slot in slots)
        if near is not None:
            self._is_closest(slots, near)
        self.model.update(slots)

    def _is_closest(self, slots: list[int], near: int) -> None:
        """No slot left free is closer than a taken one; slots above count one less."""

        def distance(slot: int) -> int:
            return slot - near - 1 if slot > near else near - slot

        left = set(range(SLOTS)) - self.model - set(slots)
        if slots and left and slots != list(range(near + 1, near + 1 + len(slots))):
            assert max(map(distance, slots)) <= min(map(distance, left)) + 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=9, unique=True))
        self.pool.free(slots)
        self.model.difference_update(slots)

    @rule(slots=st.lists(st.integers(-1, SLOTS), min_size=1, max_size=4))
    def misuse_changes_nothing(self, slots: list[int]) -> None:
        fine = self.model.issuperset(slots) and len(set(slots)) == len(slots)
        assert self.pool.in_use(slots) == fine
        if not fine:
            with pytest.raises(SlotError):
                self.pool.free(slots)

    @invariant()
    def no_slot_is_lost(self) -> None:
        assert {slot for slot in range(SLOTS) if self.pool.in_use([slot])} == self.model
        assert self.pool.used == len(self.model)
        assert self.pool.available == SLOTS - len(self.model)


PoolMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestPool = PoolMachine.TestCase


def allocate(pool: SlotPool, count: int, near: int | None = None) -> list[int]:
    slots = pool.allocate(count, near)
    assert slots is not None
    return slots


def test_growing_requests_stay_compact() -> None:
    pool = SlotPool(16 * 256)
    requests = [allocate(pool, 40) for _ in range(16)]
    for _ in range(30):
        for request in requests:
            tree = allocate(pool, 5, near=request[-1])
            pool.free(tree[3:])  # two of five nodes are rejected
            request += tree[:3]
    for request in requests:
        assert max(request) - min(request) + 1 <= 1.5 * len(request) + 64


def test_holes_are_filled_before_the_span_grows() -> None:
    pool = SlotPool(100)
    mine = allocate(pool, 20)
    pool.free([mine[17], mine[18]])
    assert allocate(pool, 4, near=19) == [20, 21, 22, 23]  # a run right behind is best
    assert pool.allocate(1, near=23) == [24]
    assert allocate(pool, 3, near=19) == [17, 18, 25]


def test_a_new_request_starts_away_from_its_neighbour() -> None:
    pool = SlotPool(1000)
    assert allocate(pool, 10) == list(range(10))
    second = allocate(pool, 10)
    assert second[0] == 505
    assert allocate(pool, 900)[0] == 10  # fits nowhere whole: takes what is free around its start
    assert pool.available == 80
    assert pool.allocate(81) is None
    assert len(allocate(pool, 80)) == 80
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_large_request_starts_where_it_fits_whole() -> None:
    pool = SlotPool(100)
    allocate(pool, 10)
    assert allocate(pool, 80) == list(range(20, 100))


def test_invalid_pools_and_positions_are_rejected() -> None:
    with pytest.raises(ValueError, match="negative"):
        SlotPool(-1)
    with pytest.raises(SlotError):
        SlotPool(4).allocate(1, near=4)
    with pytest.raises(SlotError):
        SlotPool(4).allocate(-1)
    assert SlotPool(0).allocate(1) is None
