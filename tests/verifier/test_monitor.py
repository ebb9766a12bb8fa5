"""Speculation that has become useless is noticed; chance is not."""

import random

import pytest

from ssd_serve.base.messages import AcceptanceHealth
from ssd_serve.verifier.acceptance import AcceptanceMonitor


def run(watch: AcceptanceMonitor, rounds: int, rate: float, seed: int = 0) -> list[AcceptanceHealth]:
    """Rounds in which the likeliest guess is right with this probability; the changes of health."""
    chance, changes = random.Random(seed), [watch.health]
    for _ in range(rounds):
        watch.observe(chance.random() < rate, hit=chance.random() < rate)
        watch.judge(drafting=True)
        if watch.health is not changes[-1]:
            changes.append(watch.health)
    return changes[1:]


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(5))
def test_chance_is_no_collapse(rate: float, seed: int) -> None:
    assert run(AcceptanceMonitor(), 20_000, rate, seed) == []


def test_a_collapse_is_told_once_stays_until_it_is_over_and_does_not_become_usual() -> None:
    watch = AcceptanceMonitor()
    run(watch, 3000, 0.65)
    assert run(watch, 400, 0.1) == [AcceptanceHealth.COLLAPSED]
    assert run(watch, 20_000, 0.1) == []
    assert run(watch, 2000, 0.65) == [AcceptanceHealth.GOOD]


def test_texts_that_are_harder_are_no_collapse() -> None:
    watch = AcceptanceMonitor()
    run(watch, 3000, 0.65)
    assert run(watch, 5000, 0.4) == []


def test_rounds_without_nodes_say_nothing_of_acceptance() -> None:
    watch = AcceptanceMonitor()
    run(watch, 3000, 0.65)
    for _ in range(5000):
        watch.observe(None, hit=True)
        watch.judge(drafting=True)
    assert watch.health is AcceptanceHealth.GOOD


def in_vain(watch: AcceptanceMonitor, rounds: int, right: bool | None = None, requests: int = 1) -> str:
    for _ in range(rounds):
        for _ in range(requests):
            watch.observe(right, hit=False)
        watch.judge(drafting=True)
    return watch.health.value


def test_drafts_that_never_hit_are_told_from_the_start_until_one_does() -> None:
    watch = AcceptanceMonitor()
    assert in_vain(watch, 300) == "never hits"
    watch.observe(None, hit=True)
    watch.judge(drafting=True)
    assert watch.health is AcceptanceHealth.GOOD


def test_a_crowd_that_misses_for_some_rounds_is_no_alarm() -> None:
    assert in_vain(AcceptanceMonitor(), 30, requests=64) == "good"


def test_a_chain_whose_guesses_are_right_need_not_hit() -> None:
    assert in_vain(AcceptanceMonitor(), 5000, right=True) == "good"


def test_without_drafting_nothing_is_wrong_with_drafts() -> None:
    watch = AcceptanceMonitor()
    assert in_vain(watch, 300) == "never hits"
    watch.judge(drafting=False)
    assert watch.health.value == "good"
