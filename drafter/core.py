"""The drafter's core: keeps one live tree a request and grows it best-first, one step at a time.

    drain outcomes -> pick the W most probable unexpanded nodes -> one forward -> append F children each ->
    publish

It speaks in messages but owns no socket, holds no KV and runs no model: those are its channel's and its
source's. Losslessness never depends on it.
"""

import heapq
import math
import time
from collections.abc import Collection, Sequence

from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.cache.tree import Node, SpeculationTree
from ssd_serve.drafter.calibration import Calibration
from ssd_serve.drafter.frontier import Frontier, GrowthLimits
from ssd_serve.drafter.sources.contract import Candidates, DraftSource, NodeRequest
from ssd_serve.drafter.width import LiveWidth
from ssd_serve.logs import Logger, get_logger
from ssd_serve.messages import Close, DrafterMessage, Growth, Open, Outcome, Pause, Resync, SamplingParameters


class _Drafted:
    """What the core remembers about one request."""

    __slots__ = ("candidates", "epoch", "frontier", "parameters", "paused", "position", "sequence", "tree")

    def __init__(self, message: Open, limits: GrowthLimits, ends: frozenset[int], paused: bool) -> None:
        self.epoch = message.epoch
        self.paused = paused
        self.parameters: SamplingParameters = message.parameters
        self.position = len(message.prompt) + len(message.output) - 1
        self.tree = SpeculationTree(message.root, limits.nodes)
        left = message.parameters.max_tokens - len(message.output)
        stops = frozenset(message.parameters.stop_token_ids)
        if not message.parameters.ignore_eos:
            stops |= ends
        # A node at the last position is an output token, but nothing can follow it; and what the draft model
        # has no position for it cannot expand.
        deepest = min(left - 1, limits.context - self.position)
        self.frontier = Frontier(self.tree, limits, deepest, stops)
        self.sequence = 0
        self.candidates: dict[int, Candidates] = {}

    def reach(self) -> float:
        """Log reach of the next node to expand, or -inf. While it pauses, a root is still read."""
        if self.paused and self.tree.root.expanded:
            return -math.inf
        return self.frontier.reach()


class DrafterCore:
    """Grows trees for all open requests. `ends` are the EOS ids; `name` is the source name in growth
    messages. `widths`, where given, chooses the width of a step instead of `limits`."""

    def __init__(
        self,
        source: DraftSource,
        limits: GrowthLimits,
        ends: frozenset[int],
        name: str,
        log: Logger | None = None,
        widths: LiveWidth | None = None,
    ) -> None:
        self._widths = widths
        self._source = source
        self._limits = limits
        self._ends = ends
        self._name = name
        self._log = log or get_logger(name)
        self._requests: dict[int, _Drafted] = {}
        self._calibration = Calibration()
        self._paused = False

    @property
    def captured_now(self) -> bool:
        """Whether the last step's time says nothing of later ones: it was recorded first."""
        return self._source.captured_now

    @property
    def requests(self) -> Collection[int]:
        """The open requests."""
        return self._requests.keys()

    @property
    def nodes(self) -> int:
        """Nodes held over all requests."""
        return sum(len(drafted.tree) for drafted in self._requests.values())

    def handle(self, message: DrafterMessage) -> list[DrafterMessage]:
        """Take one message of the verifier; returns what must be answered at once."""
        if isinstance(message, Outcome):
            return self._outcome(message)
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Close):
            self._close(message)
        elif isinstance(message, Resync):
            return self._snapshot(message)
        elif isinstance(message, Pause):
            self._paused = message.paused
            self.pause(self.requests, message.paused)
        return []

    def pause(self, requests: Collection[int], paused: bool) -> None:
        """Pause with some open requests, or go on."""
        for request in requests:
            self._requests[request].paused = paused

    def forget(self, request: int) -> None:
        """Free everything of an open request."""
        del self._requests[request]
        self._source.close(request)

    def step(self) -> list[Growth]:
        """One draft step over all requests; empty when nothing is worth expanding."""
        started = time.perf_counter()
        picked = self._pick()
        if not picked:
            return []
        scales = [
            self._calibration.scale(self._requests[request].parameters.temperature) for request, _ in picked
        ]
        found = self._source.expand(picked, scales)
        grown: dict[int, list[Expansion]] = {}
        for (request, node), candidates in zip(picked, found, strict=True):
            if candidates is not None:  # else no memory now: considered again when the root moves
                expanded = self._append(self._requests[request], node, candidates)
                if expanded is not None:
                    grown.setdefault(request, []).append(expanded)
        if self._widths is not None and not self.captured_now:
            self._widths.observe(len(picked), time.perf_counter() - started)
        return [self._growth(request, new) for request, new in grown.items()]

    def _pick(self) -> list[NodeRequest]:
        """The most probable nodes of all requests; of equal ones that of the earlier request first."""
        picked: list[NodeRequest] = []
        width = self._limits.width if self._widths is None else self._widths.width
        # Taking a node of one request changes no other request's reach: one entry for each.
        heap = [
            (-reach, order, request, drafted)
            for order, (request, drafted) in enumerate(self._requests.items())
            if (reach := drafted.reach()) > -math.inf
        ]
        heapq.heapify(heap)
        while heap and len(picked) < width:
            _, order, request, drafted = heap[0]
            picked.append(NodeRequest(request, drafted.frontier.pop()))
            reach = drafted.reach()
            if reach > -math.inf:
                heapq.heapreplace(heap, (-reach, order, request, drafted))
            else:
                heapq.heappop(heap)
        return picked

    def _append(self, drafted: _Drafted, node: Node, candidates: Candidates) -> Expansion | None:
        tokens: list[int] = candidates.tokens.tolist()
        values: list[float] = candidates.log_probabilities.tolist()
        if not tokens or not drafted.tree.expand(node, tokens, values):
            return None
        drafted.candidates[node.name] = candidates
        drafted.frontier.offer(node)
        return _expanded(node, tokens, values)

    def _growth(self, request: int, expansions: Sequence[Expansion], snapshot: bool = False) -> Growth:
        drafted = self._requests[request]
        growth = pack(request, drafted.epoch, drafted.sequence, expansions, self._name, snapshot)
        drafted.sequence += 1
        return growth

    def _open(self, message: Open) -> None:
        known = self._requests.get(message.request)
        if known is not None and known.epoch > message.epoch:
            return
        if known is not None:
            self._source.close(message.request)
        self._requests[message.request] = _Drafted(message, self._limits, self._ends, self._paused)
        self._source.open(message.request, message.prompt + message.output, message.parameters, message.seed)

    def _close(self, message: Close) -> None:
        known = self._requests.get(message.request)
        if known is not None and known.epoch <= message.epoch:
            self.forget(message.request)

    def _outcome(self, message: Outcome) -> list[DrafterMessage]:
        drafted = self._requests.get(message.request)
        if drafted is None or message.epoch > drafted.epoch:
            return [Resync(message.request, message.epoch)]
        if message.epoch < drafted.epoch or message.position <= drafted.position or not message.tokens:
            return []
        if message.position != drafted.position + 1:
            return [Resync(message.request, message.epoch)]
        self._learn(drafted, message.tokens)
        advance = drafted.tree.advance(message.tokens)
        drafted.position += len(message.tokens)
        if drafted.tree.root.name != message.root:
            self._log.warning("derived root differs", request=message.request, position=message.position)
            self.forget(message.request)  # its tree and its source stand at different roots now
            return [Resync(message.request, message.epoch)]
        drafted.frontier.rebuild()
        kept = [node.name for node in drafted.tree.expanded()]
        alive = set(kept)
        drafted.candidates = {name: each for name, each in drafted.candidates.items() if name in alive}
        self._source.commit(message.request, message.tokens, [node.name for node in advance.path], kept)
        return []

    def _learn(self, drafted: _Drafted, tokens: Sequence[int]) -> None:
        node: Node | None = drafted.tree.root
        for token in tokens:
            candidates = None if node is None else drafted.candidates.get(node.name)
            if node is None or candidates is None:
                return
            self._calibration.observe(drafted.parameters.temperature, candidates, token)
            node = node.children.get(token)

    def _snapshot(self, message: Resync) -> list[DrafterMessage]:
        drafted = self._requests.get(message.request)
        if drafted is None or drafted.epoch != message.epoch:
            return []
        expansions = [
            _expanded(node, node.tokens, [value - node.cumulative for value in node.cumulatives])
            for node in drafted.tree.expanded()
        ]
        return [self._growth(message.request, expansions, snapshot=True)]


def _expanded(node: Node, tokens: list[int], log_probabilities: list[float]) -> Expansion:
    if node.parent is None:
        return Expansion(node.name, ROOT_STEP, tokens, log_probabilities)
    return Expansion(node.parent.name, node.token, tokens, log_probabilities)
