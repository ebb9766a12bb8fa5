"""Tests of the scheduler with a prefix cache: shared prefill, bounded lookups, eviction for tree rows."""

from collections.abc import Sequence

import pytest

from ssd_serve.cache.prefix import PrefixCache, PrefixHandle
from ssd_serve.cache.slots import SlotPool
from tests.verifier.scheduler_factory import (
    commit,
    make_request,
    make_scheduler,
    prefill_all,
    prefill_and_remove,
)


def test_cached_prefixes_are_evicted_for_tree_rows() -> None:
    """Even a full cache evicts only as many slots as there are rows."""
    scheduler = make_scheduler(slots=24)
    for number in range(4):
        prefill_and_remove(scheduler, make_request(number, [number, 2, 3, 4, 5, 6], 4))
    assert scheduler.pool.available == 0
    request = make_request(9, [9, 9], 8)
    scheduler.submit(request)
    scheduler.admit()
    for _ in range(2):
        chunks, _ = scheduler.plan()
        trees = scheduler.tree_slots(chunks, [5])
        assert [len(tree) for tree in trees] == [5]
        commit(scheduler, chunks[0], trees[0], 0, 3)
    assert scheduler.prefix is not None
    assert scheduler.prefix.size == 24 - len(request.slots) - 6


@pytest.mark.parametrize("min_reused_tokens", [4, 5])
def test_prefix_cache_hit_is_not_computed_again(min_reused_tokens: int) -> None:
    scheduler = make_scheduler(min_reused_tokens=min_reused_tokens)
    prefill_and_remove(scheduler, make_request(0, [1, 2, 3, 4, 5], 4))
    second = make_request(1, [1, 2, 3, 4, 9], 4)
    scheduler.submit(second)
    scheduler.admit()
    assert second.pending == (1 if min_reused_tokens == 4 else 5)
    assert second.figures.cached_prompt_tokens == (4 if min_reused_tokens == 4 else 0)


def test_request_joins_a_prefill_in_progress() -> None:
    """The second request starts in the middle of the prefill, and differs from the first after 70 tokens."""
    scheduler = make_scheduler(slots=1000, chunk=20)
    first = make_request(0, [1] * 100, 9)
    scheduler.submit(first)
    for _ in range(2):
        scheduler.admit()
        (chunk,) = scheduler.plan()[0]
        commit(scheduler, chunk, [], 0, 1)
    second = make_request(1, [1] * 70 + [2] * 30, 9)
    scheduler.submit(second)
    assert [request.number for request in scheduler.admit()] == [1]
    assert (len(first.slots), len(second.slots)) == (40, 40)
    assert prefill_all(scheduler) == 60 + 30
    assert second.figures.cached_prompt_tokens == 70
    assert second.slots.view()[:70].tolist() == first.slots.view()[:70].tolist()


@pytest.mark.parametrize(("salt", "rows"), [(b"a", [100]), (b"b", [100, 100])])
def test_prefill_waits_only_for_a_prompt_of_the_same_salt(salt: bytes, rows: list[int]) -> None:
    """A wait across salts would be a timing channel between tenants."""
    scheduler = make_scheduler(slots=1000, chunk=200)
    scheduler.submit(make_request(0, [1] * 100, 9, salt=b"a"))
    scheduler.submit(make_request(1, [1] * 100, 9, salt=salt))
    scheduler.admit()
    assert [len(chunk.slots) for chunk in scheduler.plan()[0]] == rows


@pytest.mark.parametrize("prefix", [True, False])
def test_few_shared_tokens_or_no_cache_do_not_wait(prefix: bool) -> None:
    scheduler = make_scheduler(slots=1000, prefix=prefix, chunk=100)
    shared = 10 if prefix else 30
    for number in range(2):
        scheduler.submit(make_request(number, [5] * shared + [number] * (30 - shared), 9))
    scheduler.admit()
    assert [len(chunk.slots) for chunk in scheduler.plan()[0]] == [30, 30]


def test_abort_of_a_shared_prefill_is_continued_by_another() -> None:
    scheduler = make_scheduler(slots=1000, chunk=20)
    choices = [make_request(number, [1] * 100, 9) for number in range(3)]
    for request in choices:
        scheduler.submit(request)
    scheduler.admit()
    (chunk,) = scheduler.plan()[0]
    commit(scheduler, chunk, [], 0, 1)
    scheduler.remove(choices[0])
    assert prefill_all(scheduler) == 80
    assert len(choices[0].slots) == 0
    assert choices[1].slots.view()[:99].tolist() == choices[2].slots.view()[:99].tolist()


def test_choices_need_the_memory_of_their_prompt_once() -> None:
    scheduler = make_scheduler(slots=150, chunk=20, max_running=8)
    for number in range(8):
        scheduler.submit(make_request(number, [1] * 100, 9))
    assert len(scheduler.admit()) == 1
    prefill_all(scheduler)
    assert len(scheduler.running) == 8
    assert scheduler.preemptions == 0


class CountingPrefix(PrefixCache):
    """Prefix cache that records how many tokens each lookup may cover."""

    def __init__(self, pool: SlotPool) -> None:
        super().__init__(pool)
        self.looks: list[int] = []

    def follow(self, handle: PrefixHandle, text: Sequence[int], end: int, least: int = 1) -> list[int]:
        self.looks.append(end - handle.length)
        return super().follow(handle, text, end, least)


def test_long_request_without_memory_is_retried_seldom() -> None:
    scheduler = make_scheduler(slots=70_000, chunk=100)
    scheduler.prefix = prefix = CountingPrefix(scheduler.pool)
    first, second = (make_request(number, [1 + number] * 40_000, 9) for number in range(2))
    for request in (first, second):
        scheduler.submit(request)
    for _ in range(30):
        scheduler.admit()
        for chunk in scheduler.plan()[0]:
            commit(scheduler, chunk, [], 0, 1)
    assert prefix.looks.count(39_999) <= 1 + 30 // 4
    scheduler.remove(first)
    assert scheduler.admit() == [second], "when nobody runs there is nothing to wait for"


def test_long_requests_are_looked_up_over_several_rounds() -> None:
    scheduler = make_scheduler(slots=1_000_000, max_running=8)
    for number in range(4):
        scheduler.submit(make_request(number, [1 + number] * 140_000, 9))
    assert [len(scheduler.admit()) for _ in range(3)] == [2, 2, 0]
