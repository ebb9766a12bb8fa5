"""Tests of messages: their shapes belong to a protocol version; counts of tokens by depth."""

import ast
import hashlib
import inspect
from types import ModuleType

import pytest

from ssd_serve.base import draft_messages, messages
from ssd_serve.base.messages import (
    POSITIONS,
    acceptance_rates,
    bounded_positions,
    by_position,
    sum_histograms,
)

SHAPES = {5: "aa392d55cccfe365", 6: "0ad3ce217928ac00", 7: "8ef00a072ee4fb75"}
"""Digest of all messages by protocol version. Another shape needs another version, and its line here."""


def _statements(module: ModuleType) -> list[ast.stmt]:
    return ast.parse(inspect.getsource(module)).body


def shape() -> str:
    """Names and types of all fields of all messages, without words and defaults, in short."""
    lines: list[str] = []
    for node in (node for module in (messages, draft_messages) for node in _statements(module)):
        if isinstance(node, ast.ClassDef):
            lines.append(node.name)
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            lines += [f"{ast.unparse(each.target)}: {ast.unparse(each.annotation)}" for each in fields]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def test_messages_of_another_shape_have_another_version() -> None:
    assert {draft_messages.PROTOCOL_VERSION: shape()}.items() <= SHAPES.items(), (
        "raise PROTOCOL_VERSION unless it was raised since the last release, and write down the new shape"
    )


def test_counts_by_position_are_cumulative() -> None:
    assert by_position([5, 1, 0, 2]) == [3, 2, 2]
    assert by_position([5]) == by_position([]) == []


def test_bounded_positions_keep_the_sum() -> None:
    histogram = [3, *range(40)]
    told = bounded_positions(by_position(histogram))
    assert len(told) == POSITIONS + 1
    assert sum(told) == sum(depth * count for depth, count in enumerate(histogram))
    assert told[POSITIONS] == sum((depth - POSITIONS) * histogram[depth] for depth in range(POSITIONS, 41))
    assert bounded_positions([]) == [0] * (POSITIONS + 1)


def test_histograms_of_different_depths_are_summed() -> None:
    assert sum_histograms([[1, 2], [], [0, 1, 4]]) == [1, 3, 4]
    assert sum_histograms([]) == []


def test_acceptance_rates_count_rounds_with_a_node() -> None:
    assert acceptance_rates([2, 0, 4, 4], [5, 3, 1, 1]) == [pytest.approx(5 / 8), pytest.approx(2 / 8), 1 / 4]
    assert acceptance_rates([0, 0, 3], [3]) == [0.0, 0.0]
    assert acceptance_rates([7], [7]) == []
    assert len(acceptance_rates([0] * 30 + [1], [1])) == POSITIONS
