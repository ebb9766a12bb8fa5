"""The prefix cache: after any sequence of operations, a slot still has the content of its holder."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssd_serve.cache.prefix import PrefixCache, PrefixHandle
from ssd_serve.cache.slots import SlotError, SlotPool
from tests.examples import examples

SLOTS = 30
SALTS = st.sampled_from([b"", b"anna", b"ben"])
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=9)  # few tokens: prefixes meet often


def match(cache: PrefixCache, tokens: list[int] | range, salt: bytes = b"") -> tuple[list[int], PrefixHandle]:
    """Slots of the cached tokens, the last one never, as a request looks them up; and a handle on them."""
    handle = cache.begin(salt)
    return cache.follow(handle, tokens, len(tokens) - 1), handle


def insert(cache: PrefixCache, tokens: list[int], slots: list[int]) -> int:
    return cache.insert(tokens, slots, cache.begin())


@dataclass(slots=True, eq=False)
class Running:
    """A request: tokens, the slots of those that are committed, and which of these are its own."""

    salt: bytes
    tokens: list[int]
    slots: list[int]
    handle: PrefixHandle
    own: set[int] = field(default_factory=set[int])


class PrefixMachine(RuleBasedStateMachine):
    """Requests as in the verifier. `content` has the salt and prefix that a slot was last written for,
    which no other request may read."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(SLOTS)
        self.cache = PrefixCache(self.pool)
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.running: list[Running] = []

    def _allocate(self, count: int) -> list[int] | None:
        short = count - self.pool.available
        if short > 0:
            evictable = self.cache.evictable
            assert self.cache.evict(short) == min(short, evictable)
        return self.pool.allocate(count)

    def _cached(self, salt: bytes, tokens: list[int]) -> list[int]:
        """The slots of the cached part of these tokens, the last one included."""
        slots, handle = match(self.cache, [*tokens, -1], salt)
        self.cache.unlock(handle)
        return slots

    @precondition(lambda self: len(self.running) < 4)
    @rule(salt=SALTS, tokens=TEXT)
    def begin(self, salt: bytes, tokens: list[int]) -> None:
        slots, handle = match(self.cache, tokens, salt)
        assert len(slots) <= len(tokens) - 1
        self.running.append(Running(salt, tokens, slots, handle))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        """Write the next slots, as a forward would, if they are free."""
        request = data.draw(st.sampled_from(self.running))
        first = len(request.slots)
        slots = self._allocate(max(0, min(count, len(request.tokens) - 1 - first)))
        for position, slot in enumerate(slots or (), start=first):
            self.content[slot] = request.salt, tuple(request.tokens[: position + 1])
            request.slots.append(slot)
            request.own.add(slot)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=TEXT)
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        request = data.draw(st.sampled_from(self.running))
        request.tokens = request.tokens + more

    def _draw_caught_up(self, data: st.DataObject) -> Running:
        """A request with all slots after its handle."""
        request = data.draw(st.sampled_from(self.running))
        self._share(request, len(request.slots))
        return request

    @precondition(lambda self: self.running)
    @rule(data=st.data(), least=st.integers(0, 3))
    def follow(self, data: st.DataObject, least: int) -> None:
        """Go on with what others have read meanwhile: as much as a look from the beginning finds."""
        request = self._draw_caught_up(data)
        end = data.draw(st.integers(request.handle.length, len(request.tokens)))
        known = request.handle.length
        cached = len(self._cached(request.salt, request.tokens[:end]))
        found = self.cache.follow(request.handle, request.tokens, end, least)
        assert len(found) == (cached - known if cached - known >= least else 0)
        assert request.handle.length == known + len(found)
        request.slots += found

    def _share(self, request: Running, count: int) -> None:
        known, before = request.handle.length, list(request.slots)
        tokens = request.tokens[:count]
        taken = request.slots[len(self._cached(request.salt, tokens)) : count]
        size = self.cache.size
        self.cache.share(request.handle, tokens[known:], request.slots[known:count])
        assert request.slots == before
        assert request.own.issuperset(taken)
        request.own -= set(taken)
        assert self.cache.size == size + len(taken)
        assert request.handle.length == len(self._cached(request.salt, tokens)) == count

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Let others read what is committed, or a part of it: the cache takes over what it did not have."""
        request = data.draw(st.sampled_from(self.running))
        self._share(request, data.draw(st.integers(request.handle.length, len(request.slots))))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        tokens, known = request.tokens[: len(request.slots)], request.handle.length
        if keep:
            size, available = self.cache.size, self.pool.available
            duplicates = self.cache.insert(tokens[known:], request.slots[known:], request.handle)
            assert self.cache.size == size + len(request.own) - duplicates
            assert self.pool.available == available + duplicates
            assert len(self._cached(request.salt, tokens)) == len(tokens)
        else:
            self.pool.free(sorted(request.own))
            self.cache.unlock(request.handle)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        evictable = self.cache.evictable
        assert self.cache.evict(count) == min(count, evictable)

    @rule(salt=SALTS, tokens=TEXT)
    def peek(self, salt: bytes, tokens: list[int]) -> None:
        """Look up without use, which splits nodes at any place."""
        slots, handle = match(self.cache, tokens, salt)
        for position, slot in enumerate(slots):
            assert self.content[slot] == (salt, tuple(tokens[: position + 1]))
        self.cache.unlock(handle)
        with pytest.raises(SlotError):
            self.cache.unlock(handle)

    @invariant()
    def what_a_request_reads_is_what_was_written_for_its_tokens(self) -> None:
        for request in self.running:
            for position, slot in enumerate(request.slots):
                assert self.content[slot] == (request.salt, tuple(request.tokens[: position + 1]))
                assert self.pool.in_use([slot])

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        own = [slot for request in self.running for slot in request.own]
        assert len(set(own)) == len(own)
        assert self.pool.used == len(own) + self.cache.size
        assert 0 <= self.cache.evictable <= self.cache.size
        assert self.cache.salts <= len({request.salt for request in self.running}) + self.cache.evictable

    def teardown(self) -> None:
        for request in self.running:
            self.pool.free(sorted(request.own))
            self.cache.unlock(request.handle)
        size = self.cache.size
        assert self.cache.evictable == size
        assert self.cache.evict(SLOTS) == size
        assert self.pool.available == SLOTS
        assert self.cache.salts == 0


PrefixMachine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=30)
TestPrefix = PrefixMachine.TestCase


@given(st.lists(st.tuples(SALTS, TEXT), max_size=20), SALTS, TEXT)
def test_prefix_cache_hits_match_a_reference_by_salt(
    kept: list[tuple[bytes, list[int]]], salt: bytes, wanted: list[int]
) -> None:
    """The cache is compared with a list of all texts."""
    pool = SlotPool(256)
    cache = PrefixCache(pool)
    for owner, text in kept:
        slots = pool.allocate(len(text))
        assert slots is not None
        cache.insert(text, slots, cache.begin(owner))
    own = [text for owner, text in kept if owner == salt]
    ends = [end for text in own for end in range(len(wanted)) if text[:end] == wanted[:end]]
    found, handle = match(cache, wanted, salt)
    assert len(found) == max(ends, default=0)
    cache.unlock(handle)
    assert cache.size == len(
        {(owner, tuple(text[:end])) for owner, text in kept for end in range(1, len(text) + 1)}
    )
    assert cache.salts == len({owner for owner, _ in kept})


def filled(*texts: list[int], slots: int = 64) -> PrefixCache:
    pool = SlotPool(slots)
    cache = PrefixCache(pool)
    for text in texts:
        given = pool.allocate(len(text))
        assert given is not None
        insert(cache, text, given)
    return cache


def length(cache: PrefixCache, text: list[int]) -> int:
    slots, handle = match(cache, [*text, -1])
    cache.unlock(handle)
    return len(slots)


def test_lookups_are_counted_by_the_caller() -> None:
    cache = filled([1, 2, 3])
    match(cache, [1, 2, 3])
    assert (cache.queries, cache.hits) == (0, 0)
    cache.count(3, 1)
    cache.count(0, 1)
    assert (cache.queries, cache.hits) == (3, 2)


def test_eviction_is_lru_from_the_ends_of_leaves() -> None:
    cache = filled([1, 2, 3, 4], [1, 2, 7, 8, 9], [5, 5, 5])
    assert length(cache, [1, 2, 3, 4]) == 4  # now [1, 2, 7, 8, 9] is the oldest
    assert cache.evict(2) == 2
    assert length(cache, [5, 5, 5]) == 3
    assert length(cache, [1, 2, 3, 4]) == 4
    cache_size = cache.size
    assert cache.evict(1) == 1
    assert cache_size == cache.size + 1
    assert length(cache, [1, 2, 7, 8, 9]) == 2


def test_only_the_callers_slots_can_be_shared() -> None:
    pool = SlotPool(16)
    cache = PrefixCache(pool)
    slots = pool.allocate(4)
    assert slots is not None
    with pytest.raises(SlotError):
        insert(cache, [1, 2], slots)
    with pytest.raises(SlotError):
        insert(cache, [1, 2, 3, 4], [slots[0], slots[1], slots[2], 15])
    with pytest.raises(SlotError):
        insert(cache, [1, 2], [slots[0], slots[0]])
    assert insert(cache, [1, 2, 3, 4], slots) == 0
    with pytest.raises(SlotError):
        insert(cache, [9, 9], slots[:2])  # they belong to the cache now
    assert (cache.size, pool.used) == (4, 4)
    assert insert(cache, [1, 2, 3, 4], slots) == 0
    assert cache.evict(9) == 4


class Text(list[int]):
    """Counts how many of its tokens are looked at."""

    looked = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.looked += len(found) if isinstance(at, slice) else 1
        return found


def test_follow_costs_do_not_grow_with_the_number_of_chunks() -> None:
    length, chunk = 64_000, 64
    pool = SlotPool(length)
    cache = PrefixCache(pool)
    text = Text(range(length))
    handle, reader = cache.begin(), cache.begin()
    for start in range(0, length, chunk):
        slots = pool.allocate(chunk)
        assert slots is not None
        cache.share(handle, text[start : start + chunk], slots)
        assert cache.follow(reader, text, length - 1) == slots[: length - 1 - start]
        assert cache.follow(reader, text, length - 1) == []
    assert text.looked < 6 * length


def test_a_single_reader_extends_one_node() -> None:
    """A path of a node a chunk would be walked whenever it is given back."""
    pool = SlotPool(100)
    cache = PrefixCache(pool)
    handle = cache.begin()
    for start in range(0, 100, 10):
        cache.share(handle, range(start, start + 10), pool.allocate(10) or [])
    assert cache._nodes == 1  # pyright: ignore[reportPrivateUsage]
    assert len(match(cache, range(51))[0]) == 50


def test_unlock_updates_the_use_of_all_ancestors() -> None:
    cache = filled([1, 2, 3], [5, 5, 5])
    _, handle = match(cache, [1, 2, 3, 0])
    length(cache, [5, 5, 5])
    cache.share(handle, [4], cache._pool.allocate(1) or [])  # pyright: ignore[reportPrivateUsage]
    cache.unlock(handle)
    assert cache.evict(3) == 3
    assert length(cache, [5, 5, 5]) == 0
    assert length(cache, [1, 2, 3, 4]) == 4


def test_the_eviction_heap_stays_small() -> None:
    cache = filled([1, 2, 3], [4, 5, 6])
    for _ in range(2000):
        length(cache, [1, 2, 3])
        length(cache, [4, 5, 6])
    assert len(cache._leaves) < 200  # pyright: ignore[reportPrivateUsage]
    assert cache.evict(6) == 6


def test_insert_frees_duplicate_slots() -> None:
    pool = SlotPool(16)
    cache = PrefixCache(pool)
    first, second = pool.allocate(3), pool.allocate(5)
    assert first is not None
    assert second is not None
    insert(cache, [1, 2, 3], first)
    assert insert(cache, [1, 2, 3, 4, 5], second) == 3
    assert pool.used == 5
    assert match(cache, [1, 2, 3, 4, 5, 6])[0] == first + second[3:]
