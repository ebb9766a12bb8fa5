"""What each layout should give before it was tried: from measured step times and how often guesses are right.

The governor begins with it, and tries only layouts that it puts near the best; what rounds really give
counts more as soon as it is known. Plain Python; knows cost tables, not drafters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ssd_serve.verifier.planning.cost import CostTable, HostCost
from ssd_serve.verifier.planning.layout import Layout

_RIGHT = 0.7
"""How often the next level of a grown tree has the target's choice, while nothing is known."""
_MEMORY = 1 / 256
_DEEPEST = 8
_NODES_A_LEVEL = 2
"""Nodes that a round verifies for each level that a tree has grown."""
_IN_TIME = 0.5
"""Share of what a drafter beside the target grows that lies where the text goes on."""


class Rightness:
    """How often the next level of a grown tree has the target's choice, by the tokens of drafting rounds."""

    def __init__(self) -> None:
        self._tokens = 1 / (1 - _RIGHT)

    @property
    def share(self) -> float:
        """From 0 to below 1."""
        return 1 - 1 / self._tokens

    def observe(self, tokens_each: float) -> None:
        """A round of drafted requests gave so many tokens to each; it may have drafted less than it could."""
        self._tokens += _MEMORY * (max(1.0, tokens_each) - self._tokens)


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A draft step of a layout: its seconds, 0: not known, and the nodes that it expands over all
    requests."""

    seconds: float
    width: int

    def level_s(self, requests: int) -> float:
        """Seconds for one level more of every request's tree."""
        return self.seconds * max(1.0, requests / self.width)


def forecast(
    requests: int,
    unit_s: float,
    costs: Mapping[Layout, CostTable],
    steps: Mapping[Layout, DraftStep],
    host: HostCost,
    right: float,
) -> dict[Layout, float]:
    """Of each layout: how many tokens of a request it gives in `unit_s` seconds; none for a layout whose
    draft steps are not known."""
    gains: dict[Layout, float] = {}
    for layout, cost in costs.items():
        if layout is Layout.OFF:
            gains[layout] = unit_s / _round_s(cost, host, requests, 0)
        elif layout in steps and steps[layout].seconds > 0:
            level_s = steps[layout].level_s(requests)
            depths = range(1, _DEEPEST + 1)
            if layout is Layout.SYNC:
                each = (_inline(cost, host, requests, depth, level_s, right) for depth in depths)
            else:
                each = (_beside(cost, host, requests, depth, level_s, right) for depth in depths)
            gains[layout] = unit_s * max(each)
    return gains


def _inline(
    cost: CostTable, host: HostCost, requests: int, depth: int, level_s: float, right: float
) -> float:
    """Tokens a second of a request where `depth` levels are grown before each forward."""
    seconds = depth * level_s + _round_s(cost, host, requests, _NODES_A_LEVEL * depth)
    return _tokens(depth, right) / seconds


def _beside(
    cost: CostTable, host: HostCost, requests: int, depth: int, level_s: float, right: float
) -> float:
    """The same where at most `depth` levels are verified of what grows meanwhile; a miss waits for one."""
    seconds = _round_s(cost, host, requests, _NODES_A_LEVEL * depth)
    grown = min(float(depth), _IN_TIME * seconds / level_s)
    return _tokens(grown, right) / (seconds + (1 - right) * level_s)


def _tokens(depth: float, right: float) -> float:
    return float((1 - right ** (depth + 1)) / (1 - right))


def _round_s(cost: CostTable, host: HostCost, requests: int, nodes_each: int) -> float:
    nodes = nodes_each * requests
    return max(1e-9, cost.seconds(requests + nodes) + host.seconds(requests, nodes))
