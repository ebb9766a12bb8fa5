"""Speculation that has become useless is noticed; chance is not."""

import random

import pytest

from ssd_serve.base.messages import AcceptanceHealth
from ssd_serve.verifier.acceptance import AcceptanceMonitor


def run(monitor: AcceptanceMonitor, rounds: int, rate: float, seed: int = 0) -> list[AcceptanceHealth]:
    """Rounds in which the likeliest guess is right with this probability; the changes of health."""
    chance, changes = random.Random(seed), [monitor.health]
    for _ in range(rounds):
        monitor.observe(chance.random() < rate, hit=chance.random() < rate)
        monitor.judge(drafting=True)
        if monitor.health is not changes[-1]:
            changes.append(monitor.health)
    return changes[1:]


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(5))
def test_chance_is_no_collapse(rate: float, seed: int) -> None:
    assert run(AcceptanceMonitor(), 20_000, rate, seed) == []


def test_acceptance_collapse_lasts_until_recovery() -> None:
    monitor = AcceptanceMonitor()
    run(monitor, 3000, 0.65)
    assert run(monitor, 400, 0.1) == [AcceptanceHealth.COLLAPSED]
    assert run(monitor, 20_000, 0.1) == []
    assert run(monitor, 2000, 0.65) == [AcceptanceHealth.GOOD]


def test_texts_that_are_harder_are_no_collapse() -> None:
    monitor = AcceptanceMonitor()
    run(monitor, 3000, 0.65)
    assert run(monitor, 5000, 0.4) == []


def test_rounds_without_nodes_say_nothing_of_acceptance() -> None:
    monitor = AcceptanceMonitor()
    run(monitor, 3000, 0.65)
    for _ in range(5000):
        monitor.observe(None, hit=True)
        monitor.judge(drafting=True)
    assert monitor.health is AcceptanceHealth.GOOD


def in_vain(monitor: AcceptanceMonitor, rounds: int, right: bool | None = None, requests: int = 1) -> str:
    for _ in range(rounds):
        for _ in range(requests):
            monitor.observe(right, hit=False)
        monitor.judge(drafting=True)
    return monitor.health.value


def test_drafts_that_never_hit_are_reported_until_one_does() -> None:
    monitor = AcceptanceMonitor()
    assert in_vain(monitor, 300) == "never hits"
    monitor.observe(None, hit=True)
    monitor.judge(drafting=True)
    assert monitor.health is AcceptanceHealth.GOOD


def test_some_rounds_of_misses_are_no_alarm() -> None:
    assert in_vain(AcceptanceMonitor(), 30, requests=64) == "good"


def test_accepted_chain_without_hits_is_no_alarm() -> None:
    assert in_vain(AcceptanceMonitor(), 5000, right=True) == "good"


def test_without_drafting_nothing_is_wrong_with_drafts() -> None:
    monitor = AcceptanceMonitor()
    assert in_vain(monitor, 300) == "never hits"
    monitor.judge(drafting=False)
    assert monitor.health.value == "good"
