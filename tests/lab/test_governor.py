"""Simulated loads, and what finding out which layout is best costs under them."""

import random
from collections.abc import Iterator

import pytest

from lab.governor import simulation
from lab.governor.simulation import LOADS, Gains, Once, compare, run, table

GAINS = {"async": 1.5, "sync": 0.8, "off": 1.0}


class Stubborn(Once):
    """Always in the same layout."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self._stays = way

    def choose(self, requests: int, decoding: bool = True) -> str:
        super().choose(requests, decoding)
        return self._stays


def load() -> Iterator[tuple[int, Gains]]:
    return ((2, GAINS) for _ in range(1000))


def test_whoever_stays_in_the_best_layout_loses_no_more_than_its_start() -> None:
    cost = run(Stubborn("async"), load(), seed=1)
    assert 0 <= cost.regret < 0.01
    assert (cost.elsewhere, cost.changes) == (0.0, 0.0)


def test_whoever_stays_in_another_layout_loses_what_it_gives_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "TEXTS_DIFFER", 0.0)
    cost = run(Stubborn("off"), load(), seed=1)
    assert abs(cost.regret - 0.5) < 1e-9
    assert cost.elsewhere == 1.0


def test_loads_are_the_same_for_the_same_seed() -> None:
    for name, each in LOADS.items():
        first, again = (list(each(random.Random(3), 500)) for _ in range(2))
        assert len(first) == 500
        assert first == again, name


def test_the_governor_costs_less_than_one_that_tries_once_where_gains_change() -> None:
    loads = {name: LOADS[name] for name in ("fresh", "changing", "coming and going")}
    rows = {(row.load, row.chooser): row for row in compare(seeds=2, rounds=12000, loads=loads)}
    for load in ("fresh", "changing"):
        assert rows[load, "governor"].regret < rows[load, "once"].regret
    assert all(row.regret < 0.1 for row in rows.values() if row.chooser == "governor")
    assert "changing" in table(list(rows.values()))
