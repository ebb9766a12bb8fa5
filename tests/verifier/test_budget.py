"""The budget equals trying every number of nodes; the averages behind it follow what is measured."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ssd_serve.verifier.budget import GrowthGain, Rate, choose

REACHES = st.lists(st.floats(0.0, 1.0), max_size=20).map(lambda values: sorted(values, reverse=True))
STEPS = st.lists(st.floats(0.0, 0.01), min_size=1, max_size=30)


def value(tokens: float, seconds: float, rate: float) -> float:
    return tokens - rate * seconds if rate > 0 else tokens / max(seconds, 1e-9)


@given(REACHES, STEPS, st.integers(1, 12), st.integers(0, 30), st.sampled_from([0.0, 10.0, 100.0, 1000.0]))
def test_it_chooses_what_trying_everything_chooses(
    reaches: list[float], steps: list[float], roots: int, other_rows: int, rate: float
) -> None:
    curve = np.array([0.0, *np.cumsum([0.01, *steps])], dtype=np.float64)
    choice = choose(np.array(reaches), roots, other_rows, curve, rate)
    base, last = roots + other_rows, len(curve) - 1
    possible: list[float] = []
    for nodes in range(len(reaches) + 1):
        if nodes and base + nodes > last:
            break  # beyond what the cost model knows nothing is verified
        seconds = float(curve[min(base + nodes, last)])
        possible.append(value(roots + sum(reaches[:nodes]), seconds, rate))
    assert 0 <= choice.nodes < len(possible)
    assert possible[choice.nodes] == pytest.approx(max(possible))
    assert value(choice.tokens, choice.seconds, rate) == pytest.approx(max(possible))


def test_free_rows_are_all_taken_and_dear_ones_not() -> None:
    reaches = np.array([0.9, 0.5, 0.1, 0.01])
    flat, steep = np.full(50, 0.02), np.linspace(0.02, 1.0, 50)
    assert choose(reaches, 1, 0, flat, 50.0).nodes == 4
    assert choose(reaches, 1, 0, steep, 50.0).nodes == 0
    middle = np.linspace(0.02, 0.22, 51)  # a row is worth 0.2 tokens at 50 tokens a second
    assert choose(reaches, 1, 0, middle, 50.0).nodes == 2


def test_nothing_to_choose_from() -> None:
    assert choose(np.array([]), 3, 0, np.full(10, 0.02), 0.0).nodes == 0
    assert choose(np.array([0.5]), 0, 99, np.full(10, 0.02), 0.0).nodes == 0


def test_the_rate_is_unknown_then_scales_with_the_requests() -> None:
    rate = Rate()
    assert rate.value(4) == 0.0
    rate.observe(0, 5.0, 1.0)
    rate.observe(2, 5.0, 0.0)
    assert rate.value(4) == 0.0
    rate.observe(2, 4.0, 0.1)
    assert rate.value(1) == pytest.approx(20.0)
    assert rate.value(3) == pytest.approx(60.0)


def test_the_rate_follows_and_a_pause_hardly_counts() -> None:
    rate = Rate()
    rate.observe(1, 2.0, 0.1)
    rate.observe(1, 2.0, 1000.0)
    assert rate.value(1) == pytest.approx(2.0 / 0.11)
    for _ in range(200):
        rate.observe(1, 3.0, 0.1)
    assert rate.value(1) == pytest.approx(30.0, rel=0.01)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(-2.0, 5.0)), max_size=40))
def test_the_gain_of_growing_stays_sensible(observed: list[tuple[float, float]]) -> None:
    gain = GrowthGain()
    for leaves, added in observed:
        gain.observe(leaves, added)
        gain.forget()
    assert 0.04 <= gain.share <= 1.5
    assert gain.expected(np.array([])) == 0.0
    assert gain.expected(np.array([0.5, 0.25])) == pytest.approx(0.75 * gain.share)


def test_the_gain_follows_what_waiting_brought() -> None:
    gain = GrowthGain(share=0.6)
    for _ in range(80):
        gain.observe(1.0, 0.2)
    assert gain.share == pytest.approx(0.2, abs=0.01)
    for _ in range(400):
        gain.forget()
    assert gain.share == pytest.approx(0.6, abs=0.01)
