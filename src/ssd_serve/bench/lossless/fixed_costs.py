"""Costs that are given and never learnt: what a round verifies must not depend on how busy the machine is."""

from ssd_serve.base.cost import CostTable, HostCost, Reading, Timing


class FixedCost(CostTable):
    """A fixed curve of few rows."""

    def __init__(self) -> None:
        super().__init__([Timing(1, 0, 0.010), Timing(64, 0, 0.012)])

    def observe(self, rows: int, seconds: float, reading: Reading | None = None) -> None:
        """Not at all."""


class FixedHost(HostCost):
    """The host's share as it is before anything was measured."""

    def observe(self, requests: int, nodes: int, seconds: float) -> None:
        """Not at all."""
