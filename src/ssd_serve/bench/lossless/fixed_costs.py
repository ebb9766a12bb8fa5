"""Fixed cost models: the nodes that a round verifies must not depend on how busy the machine is."""

from ssd_serve.base.cost import CostTable, HostCost, Reading, Timing


class FixedCost(CostTable):
    """A fixed cost curve."""

    def __init__(self) -> None:
        super().__init__([Timing(1, 0, 0.010), Timing(64, 0, 0.012)])

    def observe(self, rows: int, seconds: float, reading: Reading | None = None) -> None:
        """Ignore the measurement."""


class FixedHost(HostCost):
    """The host cost before any measurement."""

    def observe(self, requests: int, nodes: int, seconds: float) -> None:
        """Ignore the measurement."""
