"""What becomes of a head's guesses below one that was right: three rules, each a drafter's core.

Beyond the last committed token a head reads its own output. A token that was right is read once more with
what the target has computed there; what stands below it was guessed without that.
"""

from collections.abc import Sequence

from ssd_serve.cache.tree import Node
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.contract import DraftSource, Found, NodeRequest
from ssd_serve.messages import DrafterMessage, Growth, Outcome


class Kept(DrafterCore):
    """Whatever stands below the new root stays as it is."""

    def __init__(self, source: DraftSource, limits: GrowthLimits, ends: frozenset[int]) -> None:
        super().__init__(source, limits, ends, "head")

    def handle(self, message: DrafterMessage) -> list[DrafterMessage]:
        replies = super().handle(message)
        if isinstance(message, Outcome) and not replies:
            root = self._requests[message.request].tree.root
            if root.expanded:
                self.hit(message.request, root)
        return replies

    def hit(self, request: int, root: Node) -> None:
        """A request has a new root, whose candidates are guessed already."""


class RootAgain(Kept):
    """The new root's candidates are guessed once more in the next step; one that is named twice has the
    better of both estimates. What stands deeper stays as it is."""

    def __init__(self, source: DraftSource, limits: GrowthLimits, ends: frozenset[int]) -> None:
        super().__init__(source, limits, ends)
        self._again: dict[int, Node] = {}

    def hit(self, request: int, root: Node) -> None:
        self._again[request] = root

    def _pick(self) -> list[NodeRequest]:
        again = [
            NodeRequest(request, root)
            for request, root in self._again.items()
            if request in self._requests and self._requests[request].tree.root is root
        ]
        return [*again, *super()._pick()]

    def _grow(self, picked: Sequence[NodeRequest], found: Sequence[Found]) -> list[Growth]:
        growth = super()._grow(picked, list(found))  # one by one, as nodes that have candidates want it
        for request in {pick.request for pick in picked} & self._again.keys():
            self._requests[request].frontier.rebuild()
            del self._again[request]
        return growth


class AllAgain(Kept):
    """Whatever stands below the new root is forgotten and guessed anew. The verifier still has it, and where
    both name a token takes the better estimate."""

    def hit(self, request: int, root: Node) -> None:
        drafted = self._requests[request]
        root.tokens, root.cumulatives, root.children = [], [], {}
        drafted.tree.advance(())
        drafted.frontier.rebuild()
        drafted.guesses.clear()
        self._source.commit(request, (), (), ())


KEPT, ROOT_AGAIN, ALL_AGAIN = "kept", "root again", "all again"
RULES: dict[str, type[Kept]] = {KEPT: Kept, ROOT_AGAIN: RootAgain, ALL_AGAIN: AllAgain}
