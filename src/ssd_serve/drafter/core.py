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

import numpy as np

from ssd_serve.base.draft_messages import (
    Close,
    DrafterMessage,
    Features,
    Growth,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.base.logs import Logger, get_logger
from ssd_serve.cache.expansions import Expansion, pack, pack_uniform
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.cache.vectors import from_bytes
from ssd_serve.drafter.calibration import DEEPEST, Calibration
from ssd_serve.drafter.draft_request import DraftRequest, expanded, numbered, place_of
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.grammar_paths import GrammarPaths, only
from ssd_serve.drafter.sources.contract import (
    CandidateBatch,
    Candidates,
    ChunkedPrefillSource,
    DraftSource,
    ExpandResult,
    FeatureSource,
    NodeRequest,
    Subtree,
)
from ssd_serve.drafter.step_time import StepWidth

_NOTHING: tuple[Sequence[ExpandResult], int, int] = ((None,), 0, 0)


class DrafterCore:
    """Grows trees for all open requests. `ends` are the EOS ids; `name` is the source name in growth
    messages. `widths`, where given, chooses the width of a step instead of `limits`; `paths` says which
    guesses grammars leave out."""

    def __init__(
        self,
        source: DraftSource,
        limits: GrowthLimits,
        ends: Collection[int],
        name: str,
        log: Logger | None = None,
        widths: StepWidth | None = None,
        paths: GrammarPaths | None = None,
    ) -> None:
        self._widths = widths
        self._paths = paths
        self._source = source
        self._reads_features = isinstance(source, FeatureSource)
        self._texts = source if isinstance(source, ChunkedPrefillSource) else None
        self._limits = limits
        self._ends = frozenset(ends)
        self._name = name
        self._log = log or get_logger(name)
        self._requests: dict[int, DraftRequest] = {}
        self._calibration = Calibration()
        self._paused = False
        self.reading = False
        """Whether the last step has read a part of a text, of which there is more."""

    @property
    def is_warmup_step(self) -> bool:
        """Whether the last step's time says nothing of later ones: `DraftSource.is_warmup_step`."""
        return self._source.is_warmup_step

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
        elif isinstance(message, Features):
            self._read(message)
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
        if self._paths is not None:
            self._paths.close(request)

    def step(self) -> list[Growth]:
        """One draft step over all requests; empty when nothing is worth expanding, or while it is
        `reading`."""
        started = time.perf_counter()
        self.reading = False
        picked = self._pick()
        if not picked:
            return []
        if self._paths is not None:
            picked = self._paths.followed(picked)
        scales = {request: self._scales(request) for request in {pick.request for pick in picked}}
        found = self._source.expand(
            picked, [scales[request][min(self._depth(request, node), DEEPEST)] for request, node, _ in picked]
        )
        growth = self._grow(picked, found)
        for request in self._texts.unread if self._texts is not None else ():
            self._requests[request].frontier.rebuild()
            self.reading = True
        if self._widths is not None and not self.is_warmup_step:
            self._widths.observe(len(picked), time.perf_counter() - started)
        return growth

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
            _, order, request, drafted = heapq.heappop(heap)
            beyond, ties = (-heap[0][0], order < heap[0][1]) if heap else (-math.inf, True)
            taken = drafted.frontier.take(width - len(picked), beyond, ties)
            picked.extend([NodeRequest(request, node) for node in taken])
            if len(picked) < width and (reach := drafted.reach()) > -math.inf:
                heapq.heappush(heap, (-reach, order, request, drafted))
        return picked

    def _grow(self, picked: Sequence[NodeRequest], found: Sequence[ExpandResult]) -> list[Growth]:
        """Append what was found to the trees; what there is to publish."""
        free = all(pick.allowed is None for pick in picked)
        if free and isinstance(found, CandidateBatch) and np.isfinite(found.log_probabilities).all():
            return self._grow_together(picked, found)
        grown: dict[int, list[Expansion]] = {}
        for index, ((request, node, allowed), candidates) in enumerate(zip(picked, found, strict=True)):
            if candidates is None:
                continue  # no memory now: considered again when the root moves
            drafted = self._requests[request]
            if isinstance(candidates, Subtree):
                branches = candidates.branches
                if allowed is not None and self._paths is not None:
                    branches = self._paths.branches(request, node, branches)
                given = drafted.attach(node, branches)
                if given:
                    grown.setdefault(request, []).extend(given)
                continue
            tokens, values = numbered(candidates.tokens.tolist(), candidates.log_probabilities.tolist())
            if allowed is not None:
                tokens, values = only(allowed, tokens, values)
            if tokens and drafted.tree.expand(node, tokens, values):
                drafted.grew([(index, node)], found)
                grown.setdefault(request, []).append(expanded(node, tokens, values))
        return [self._growth(request, new) for request, new in grown.items()]

    def _grow_together(self, picked: Sequence[NodeRequest], found: CandidateBatch) -> list[Growth]:
        """The same by arrays: numbers are added and written for all nodes at once."""
        tokens: list[list[int]] = found.tokens.tolist()
        above = np.array([pick.at.cumulative for pick in picked])[:, None]
        cumulatives: list[list[float]] = (np.minimum(found.log_probabilities, 0.0) + above).tolist()
        grown: dict[int, list[tuple[int, Node]]] = {}
        for index, (request, node, _) in enumerate(picked):
            if self._requests[request].tree.grow(node, tokens[index], cumulatives[index]):
                grown.setdefault(request, []).append((index, node))
        for request, nodes in grown.items():
            self._requests[request].grew(nodes, found)
        return [self._published(request, nodes, found) for request, nodes in grown.items()]

    def _published(self, request: int, nodes: Sequence[tuple[int, Node]], found: CandidateBatch) -> Growth:
        drafted = self._requests[request]
        tokens, values = found.tokens, found.log_probabilities
        if len(nodes) < len(found):
            rows = [index for index, _ in nodes]
            tokens, values = tokens[rows], values[rows]
        places = [place_of(node) for _, node in nodes]
        growth = pack_uniform(request, drafted.epoch, drafted.sequence, places, (tokens, values), self._name)
        drafted.sequence += 1
        return growth

    def _scales(self, request: int) -> list[float]:
        return self._calibration.scales(self._requests[request].parameters.temperature)

    def _depth(self, request: int, node: Node) -> int:
        return node.depth - self._requests[request].tree.root.depth

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
        self._requests[message.request] = DraftRequest(message, self._limits, self._ends, self._paused)
        self._source.open(message.request, message.prompt + message.output, message.parameters, message.seed)
        if self._paths is not None:
            self._paths.open(message.request, message.parameters, message.output)

    def _read(self, message: Features) -> None:
        known = self._requests.get(message.request)
        if known is not None and known.epoch == message.epoch and isinstance(self._source, FeatureSource):
            features = from_bytes(message.data, message.width)
            self._source.read(message.request, message.position, features)
            if not known.tree.root.expanded:
                known.frontier.rebuild()  # where it could not be read without these

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
        if self._paths is not None:
            self._paths.commit(message.request, message.tokens)
        self.moved(drafted.tree)
        drafted.frontier.rebuild()
        kept = [node.name for node in drafted.tree.expanded()]
        alive = set(kept)
        drafted.guesses = {name: each for name, each in drafted.guesses.items() if name in alive}
        self._source.commit(message.request, message.tokens, [node.name for node in advance.path], kept)
        return []

    def moved(self, tree: SpeculationTree) -> None:
        """The root has moved. Whoever reads features guesses anew what stands below it: it was guessed before
        the root's were there. The verifier has the old guesses until then."""
        if self._reads_features:
            tree.clear()

    def _learn(self, drafted: DraftRequest, tokens: Sequence[int]) -> None:
        node: Node | None = drafted.tree.root
        for token in tokens:
            found, index, depth = drafted.guesses.get(node.name, _NOTHING) if node is not None else _NOTHING
            candidates = found[index]
            if node is None or not isinstance(candidates, Candidates):
                return
            self._calibration.observe(drafted.parameters.temperature, candidates, token, depth)
            node = node.children.get(token)

    def _snapshot(self, message: Resync) -> list[DrafterMessage]:
        drafted = self._requests.get(message.request)
        if drafted is None or drafted.epoch != message.epoch:
            return []
        expansions = [
            expanded(node, node.tokens, [value - node.cumulative for value in node.cumulatives])
            for node in drafted.tree.expanded()
        ]
        return [self._growth(message.request, expansions, snapshot=True)]
