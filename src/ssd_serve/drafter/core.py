"""The drafter's core: keeps one live tree for each request and grows it best-first, one step at a time.

    drain outcomes -> pick the W most probable unexpanded nodes -> one forward -> append F children each ->
    publish.

Its interface is messages; it owns no socket, KV or model. Losslessness never depends on it.
"""

import heapq
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

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
from ssd_serve.cache.expansions import Expansion, pack, pack_arrays, unpack
from ssd_serve.cache.node import Node
from ssd_serve.cache.vectors import from_bytes
from ssd_serve.drafter.blocks import (
    BlockTree,
    CandidateRows,
    TreeGrower,
    branches_of,
    grow_tree,
)
from ssd_serve.drafter.calibration import DEEPEST, UNIT_SCALES, Calibration
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.grammar_paths import GrammarPaths, only
from ssd_serve.drafter.request import DraftRequest, address_of, chain, expansion_of, finite
from ssd_serve.drafter.sources.contract import (
    Block,
    CandidateBatch,
    Candidates,
    ChunkedPrefillSource,
    DraftSource,
    ExpandResult,
    FeatureSource,
    NodeRequest,
    Scales,
    Subtree,
)
from ssd_serve.drafter.sources.registry import NODE_BY_NODE, SourceDescription
from ssd_serve.drafter.step_time import LiveWidth

if TYPE_CHECKING:
    import torch

_ANY_TOKEN = 1 << 31
_NO_RESULT: tuple[Sequence[ExpandResult], int, int] = ((None,), 0, 0)


class DrafterCore:
    """Grows the trees of all open requests."""

    def __init__(
        self,
        source: DraftSource,
        limits: GrowthLimits,
        ends: Collection[int],
        name: str,
        log: Logger | None = None,
        widths: LiveWidth | None = None,
        paths: GrammarPaths | None = None,
        description: SourceDescription = NODE_BY_NODE,
        trees: TreeGrower = grow_tree,
    ) -> None:
        """`ends` are EOS ids; `name` is the source name in growth messages. `trees` builds trees from blocks.

        `widths` overrides the width of `limits` at each step; `paths` drops candidates that a grammar
        forbids.
        """
        if description.block is not None:
            limits = replace(limits, depth=description.block, roots_only=True)
        if description.depth is not None:
            limits = replace(limits, depth=min(limits.depth, description.depth))
        self._description = description
        self._trees = trees
        self._widths = widths
        self._paths = paths
        self._source = source
        self._prefills = source if isinstance(source, ChunkedPrefillSource) else None
        self._reads = source if isinstance(source, FeatureSource) else None
        self._limits = limits
        self._ends = frozenset(ends)
        self._name = name
        self._log = log or get_logger(name)
        self._requests: dict[int, DraftRequest] = {}
        self._calibration = Calibration()
        self._paused = False
        self.prefilling = False
        """True if the last step left a prefill unfinished."""

    @property
    def is_warmup_step(self) -> bool:
        """See `DraftSource.is_warmup_step`."""
        return self._source.is_warmup_step

    @property
    def requests(self) -> Collection[int]:
        return self._requests.keys()

    @property
    def nodes(self) -> int:
        """Candidates held over all requests."""
        return sum(len(draft.tree) for draft in self._requests.values())

    def handle(self, message: DrafterMessage) -> list[DrafterMessage]:
        """Process one message of the verifier; returns the replies."""
        if isinstance(message, Outcome):
            return self._outcome(message)
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Close):
            self._close(message)
        elif isinstance(message, Resync):
            return self._snapshot(message)
        elif isinstance(message, Features):
            self.read(message, from_bytes(message.data, message.width))
        elif isinstance(message, Pause):
            self._paused = message.paused
            self.pause(self.requests, message.paused)
        return []

    def pause(self, requests: Collection[int], paused: bool) -> None:
        """Pause or resume some open requests."""
        for request in requests:
            self._requests[request].paused = paused

    def forget(self, request: int) -> None:
        """Free all state of an open request."""
        del self._requests[request]
        self._source.close(request)
        if self._paths is not None:
            self._paths.close(request)

    def step(self) -> list[Growth]:
        """Run one draft step over all requests; empty if no node should be expanded, or while `prefilling`."""
        started = time.perf_counter()
        self.prefilling = False
        picked = self._pick(self._limits.width if self._widths is None else self._widths.width)
        if not picked:
            return []
        if self._paths is not None:
            picked = self._paths.with_allowed(picked)
        growth = self._grow(picked, self._source.expand(picked, self._scales(picked)))
        for request in self._prefills.pending_prefill if self._prefills is not None else ():
            self._requests[request].frontier.rebuild()
            self.prefilling = True
        if self._widths is not None and not self.is_warmup_step:
            self._widths.observe(len(picked), time.perf_counter() - started)
        return growth

    def _pick(self, width: int) -> list[NodeRequest]:
        """The nodes of highest reach over all requests; ties go to the request opened first."""
        picked: list[NodeRequest] = []
        # Taking a node of one request changes no other request's reach: one heap entry for each request.
        heap = [
            (-reach, order, request, draft)
            for order, (request, draft) in enumerate(self._requests.items())
            if (reach := draft.reach()) > -math.inf
        ]
        heapq.heapify(heap)
        while heap and len(picked) < width:
            _, order, request, draft = heapq.heappop(heap)
            beyond, ties = (-heap[0][0], order < heap[0][1]) if heap else (-math.inf, True)
            taken = draft.frontier.take(width - len(picked), beyond, ties)
            picked.extend([NodeRequest(request, node) for node in taken])
            if len(picked) < width and (reach := draft.reach()) > -math.inf:
                heapq.heappush(heap, (-reach, order, request, draft))
        return picked

    def _scales(self, picked: Sequence[NodeRequest]) -> list[Scales]:
        if not self._description.calibrated:
            return [UNIT_SCALES[0]] * len(picked)
        by_depth = {
            request: self._calibration.scales(self._requests[request].parameters.temperature)
            for request in {pick.request for pick in picked}
        }
        tops = {request: self._requests[request].tree.root.depth for request in by_depth}
        return [by_depth[request][min(node.depth - tops[request], DEEPEST)] for request, node, _ in picked]

    def _grow(self, picked: Sequence[NodeRequest], results: Sequence[ExpandResult]) -> list[Growth]:
        """Append a step's results to the trees; returns the messages to publish."""
        free = all(pick.allowed is None for pick in picked)
        if free and isinstance(results, CandidateBatch) and np.isfinite(results.log_probabilities).all():
            return self._grow_batch(picked, results)
        made: dict[int, list[Expansion]] = {}
        blocks: list[Growth] = []
        for index, ((request, node, allowed), result) in enumerate(zip(picked, results, strict=True)):
            if result is None:
                continue
            draft = self._requests[request]
            if isinstance(result, Block):
                if (rows := draft.rows_of(node, result)) is None:
                    continue
                tree = self._trees(rows, draft.room_of(node, rows), draft.least_below(node))
                if allowed is None:
                    blocks += self._block_growth(picked[index], result, rows, tree)
                    continue
                result = Subtree(branches_of(rows, tree))
            if isinstance(result, Subtree):
                branches = result.branches
                if allowed is not None and self._paths is not None:
                    branches = self._paths.branches(request, picked[index].tokens, branches)
                attached = draft.attach(node, branches)
                if attached:
                    made.setdefault(request, []).extend(attached)
                continue
            tokens, values = finite(result.tokens.tolist(), result.log_probabilities.tolist())
            if allowed is not None:
                tokens, values = only(allowed, tokens, values)
            if tokens and draft.tree.expand(node, tokens, values):
                draft.record([(index, node)], results)
                made.setdefault(request, []).append(expansion_of(node, tokens, values))
        sent = blocks + [self._growth(request, new) for request, new in made.items()]
        if self._description.lends and free:
            best: dict[int, tuple[Node, Block]] = {}
            for (request, node, _), result in zip(picked, results, strict=True):
                if isinstance(result, Block):
                    best.setdefault(request, (node, result))
            for request, (node, block) in best.items():
                sent += self._lend(request, node, block)
        return sent

    def _block_growth(
        self, picked: NodeRequest, block: Block, rows: CandidateRows, tree: BlockTree
    ) -> list[Growth]:
        """Attach the tree of a block; returns the message, if anything fits."""
        draft, node = self._requests[picked.request], picked.at
        names, places = chain(node.name, address_of(node), rows, tree)
        growth = self._tree_growth(picked.request, places, rows, tree.rows)
        if not draft.attach_block(node, block, names, tree, unpack(growth, _ANY_TOKEN) or ()):
            return []
        draft.sequence += 1
        return [growth]

    def _tree_growth(
        self, request: int, places: Sequence[tuple[int, int]], rows: CandidateRows, chosen: Sequence[int]
    ) -> Growth:
        draft, counts = self._requests[request], [rows.tokens.shape[1]] * len(rows.tokens)
        order = request, draft.epoch, draft.sequence
        return pack_arrays(
            *order, places, counts, rows.tokens, rows.log_probabilities, self._name, rows=chosen
        )

    def _lend(self, request: int, top: Node, block: Block) -> list[Growth]:
        """Send the block of `top` for leaves as deep as it, each with nodes of its own.

        That is Full Tree Attention (Gumiho, arXiv 2503.10135) without its inexact keys and values. The drafter's tree
        stays as it is: a leaf that is drafted later replaces what it was lent.
        """
        draft = self._requests[request]
        lent = draft.lent(top, block, self._trees)
        if lent is None:
            return []
        rows, places, chosen = lent
        growth = self._tree_growth(request, places, rows, chosen)
        draft.sequence += 1
        return [growth]

    def _grow_batch(self, picked: Sequence[NodeRequest], results: CandidateBatch) -> list[Growth]:
        """`_grow` with array operations over all nodes."""
        tokens: list[list[int]] = results.tokens.tolist()
        above = np.array([pick.at.cumulative for pick in picked])[:, None]
        cumulatives: list[list[float]] = (np.minimum(results.log_probabilities, 0.0) + above).tolist()
        made: dict[int, list[tuple[int, Node]]] = {}
        for index, (request, node, _) in enumerate(picked):
            if self._requests[request].tree.grow(node, tokens[index], cumulatives[index]):
                made.setdefault(request, []).append((index, node))
        for request, nodes in made.items():
            self._requests[request].record(nodes, results)
        return [self._batch_growth(request, nodes, results) for request, nodes in made.items()]

    def _batch_growth(
        self, request: int, nodes: Sequence[tuple[int, Node]], results: CandidateBatch
    ) -> Growth:
        draft = self._requests[request]
        tokens, values = results.tokens, results.log_probabilities
        if len(nodes) < len(results):
            rows = [index for index, _ in nodes]
            tokens, values = tokens[rows], values[rows]
        addresses = [address_of(node) for _, node in nodes]
        counts = [tokens.shape[1]] * len(addresses)
        place = request, draft.epoch, draft.sequence
        growth = pack_arrays(*place, addresses, counts, tokens, values, self._name)
        draft.sequence += 1
        return growth

    def _growth(self, request: int, expansions: Sequence[Expansion], snapshot: bool = False) -> Growth:
        draft = self._requests[request]
        growth = pack(request, draft.epoch, draft.sequence, expansions, self._name, snapshot)
        draft.sequence += 1
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

    def read(self, message: Features, features: "torch.Tensor") -> None:
        """Take the features of a message, bfloat16 [positions, width]."""
        known = self._requests.get(message.request)
        if known is not None and known.epoch == message.epoch and self._reads is not None:
            self._reads.read(message.request, message.position, features)
            if not known.tree.root.expanded:
                known.frontier.rebuild()  # the root may have waited for these features

    def _close(self, message: Close) -> None:
        known = self._requests.get(message.request)
        if known is not None and known.epoch <= message.epoch:
            self.forget(message.request)

    def _outcome(self, message: Outcome) -> list[DrafterMessage]:
        draft = self._requests.get(message.request)
        if draft is None or message.epoch > draft.epoch:
            return [Resync(message.request, message.epoch)]
        if message.epoch < draft.epoch or message.position <= draft.position or not message.tokens:
            return []
        if message.position != draft.position + 1:
            return [Resync(message.request, message.epoch)]
        if self._description.calibrated:
            self._calibrate(draft, message.tokens)
        advance = draft.tree.advance(message.tokens)
        draft.position += len(message.tokens)
        if draft.tree.root.name != message.root:
            self._log.warning("derived root differs", request=message.request, position=message.position)
            self.forget(message.request)  # the tree and the source have different roots
            return [Resync(message.request, message.epoch)]
        if self._paths is not None:
            self._paths.commit(message.request, message.tokens)
        within = draft.anchors and draft.tree.root.name not in draft.anchors  # within an older block
        if within or not self._description.keeps_tree:
            draft.tree.clear()
        draft.frontier.rebuild()
        kept = [node.name for node in draft.tree.expanded()]
        alive = set(kept)
        draft.anchors &= alive
        draft.results = {name: each for name, each in draft.results.items() if name in alive}
        self._source.commit(message.request, message.tokens, [node.name for node in advance.path], kept)
        return []

    def _calibrate(self, draft: DraftRequest, tokens: Sequence[int]) -> None:
        """Observe the target's choice at each node with scored candidates on the committed path."""
        node: Node | None = draft.tree.root
        for token in tokens:
            results, index, depth = (
                draft.results.get(node.name, _NO_RESULT) if node is not None else _NO_RESULT
            )
            candidates = results[index]
            if node is None or not isinstance(candidates, Candidates):
                return
            self._calibration.observe(draft.parameters.temperature, candidates, token, depth)
            node = draft.tree.child(node, token)

    def _snapshot(self, message: Resync) -> list[DrafterMessage]:
        draft = self._requests.get(message.request)
        if draft is None or draft.epoch != message.epoch:
            return []
        expansions = [
            expansion_of(node, node.tokens, [value - node.cumulative for value in node.cumulatives])
            for node in draft.tree.expanded()
        ]
        return [self._growth(message.request, expansions, snapshot=True)]
