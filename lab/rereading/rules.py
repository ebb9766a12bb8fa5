"""What becomes of a head's guesses below one that was right: three rules, each a drafter's core.

Beyond the last committed token a head reads its own output. A token that was right is read once more with
what the target has computed there; what stands below it was guessed without that.
"""

from collections.abc import Sequence

from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.draft_messages import Growth
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.contract import DraftSource, Found, NodeRequest


class AllAgain(DrafterCore):
    """What every drafter does: all of it is guessed anew. The verifier still has the old guesses, and where
    both name a token takes the better estimate."""

    def __init__(self, source: DraftSource, limits: GrowthLimits, ends: frozenset[int]) -> None:
        super().__init__(source, limits, ends, "head")


class Kept(AllAgain):
    """All of it stays as it is."""

    def moved(self, tree: SpeculationTree) -> None:
        """Nothing changes below the root."""


class RootAgain(AllAgain):
    """The root's candidates are guessed once more in the next step; one that is named twice has the better
    of both estimates. What stands deeper stays as it is."""

    def __init__(self, source: DraftSource, limits: GrowthLimits, ends: frozenset[int]) -> None:
        super().__init__(source, limits, ends)
        self._again: set[int] = set()

    def moved(self, tree: SpeculationTree) -> None:
        """Its new root's name is noted."""
        if tree.root.expanded:
            self._again.add(tree.root.name)

    def _pick(self) -> list[NodeRequest]:
        roots = ((request, drafted.tree.root) for request, drafted in self._requests.items())
        again = [NodeRequest(request, root) for request, root in roots if root.name in self._again]
        return [*again, *super()._pick()]

    def _grow(self, picked: Sequence[NodeRequest], found: Sequence[Found]) -> list[Growth]:
        growth = super()._grow(picked, list(found))  # one by one, as nodes that have candidates want it
        for request in {pick.request for pick in picked if pick.node in self._again}:
            self._requests[request].frontier.rebuild()
        self._again.clear()
        return growth


KEPT, ROOT_AGAIN, ALL_AGAIN = "kept", "root again", "all again"
RULES: dict[str, type[AllAgain]] = {KEPT: Kept, ROOT_AGAIN: RootAgain, ALL_AGAIN: AllAgain}
