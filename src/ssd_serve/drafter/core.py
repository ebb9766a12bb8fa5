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
from ssd_serve.base.seeds import mix
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, PackedExpansion, pack, pack_arrays, unpack
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.cache.vectors import from_bytes
from ssd_serve.drafter.blocks import (
    BlockTree,
    CandidateRows,
    TreeGrower,
    branches_of,
    candidate_rows,
    grow_tree,
)
from ssd_serve.drafter.calibration import DEEPEST, UNIT_SCALES, Calibration
from ssd_serve.drafter.frontier import Frontier, GrowthLimits
from ssd_serve.drafter.grammar_paths import GrammarPaths, only
from ssd_serve.drafter.sources.contract import (
    Block,
    Branch,
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

_ROOT_NODES, _ANCHOR_NODES = 32, 8
"""Nodes of a block below the root, and below a later anchor: many anchors share a tree."""
_LENT, _LENT_LEAVES, _LENT_NODES, _LENT_CANDIDATES = -2.0, 8, 4, 4
"""Factor on the probability of a lent block, as a logarithm; leaves of a step that get one; nodes of each, and their
candidates."""
_ANY_TOKEN = 1 << 31
_NO_RESULT: tuple[Sequence[ExpandResult], int, int] = ((None,), 0, 0)


class DraftRequest:
    """A request in the core: tree, frontier and the candidates that calibrate."""

    def __init__(self, message: Open, limits: GrowthLimits, ends: frozenset[int], paused: bool) -> None:
        self.epoch = message.epoch
        self.paused = paused
        self.prefills_paused = limits.prefills_paused
        self.parameters = message.parameters
        self.position = len(message.prompt) + len(message.output) - 1
        self.tree = SpeculationTree(message.root, limits.nodes)
        left = message.parameters.max_tokens - len(message.output)
        stops = frozenset(message.parameters.stop_token_ids)
        if not message.parameters.ignore_eos:
            stops |= ends
        # Nothing follows a node at the last position, and the draft model has no position beyond its context.
        deepest = min(left - 1, limits.context - self.position)
        self.frontier = Frontier(self.tree, limits, deepest, stops)
        self.sequence = 0
        self.anchors: set[int] = set()
        """Names of nodes that blocks were drafted below."""
        self.results: dict[int, tuple[Sequence[ExpandResult], int, int]] = {}
        """The results of the step that expanded a node, its index there and its depth, by name."""

    def record(self, nodes: Sequence[tuple[int, Node]], results: Sequence[ExpandResult]) -> None:
        """Offer newly expanded nodes to the frontier; each has its index in the step's results."""
        known, top = self.results, self.tree.root.depth
        for index, node in nodes:
            known[node.name] = results, index, node.depth - top
        self.frontier.offer_all([node for _, node in nodes])

    def attach(self, top: Node, branches: Sequence[Branch]) -> list[Expansion]:
        """Expand the nodes of a subtree within the limits; returns the expansions made."""
        tree, made = self.tree, list[Expansion]()
        for branch in branches:
            node: Node | None = top
            for token in branch.path:
                node = tree.child(node, token) if node is not None else None
            if node is None or node.tokens or not self.frontier.may_grow(node):
                continue
            tokens, values = finite(branch.tokens, branch.log_probabilities)
            if tokens and tree.expand(node, tokens, values):
                if branch.scores:
                    self.results[node.name] = (_candidates(branch),), 0, node.depth - tree.root.depth
                self.frontier.offer_all((node,))
                made.append(expansion_of(node, tokens, values))
        return made

    def rows_of(self, node: Node, block: Block) -> CandidateRows | None:
        """Return a block's rows of candidates as far as this text goes."""
        return candidate_rows(block, self.frontier.levels_below(node), self.frontier.ends)

    def room_of(self, node: Node, rows: CandidateRows) -> int:
        """Return the number of nodes with such candidates that a block may add; at least 1."""
        candidates: int = rows.tokens.shape[1]
        most = _ROOT_NODES if node.parent is None else _ANCHOR_NODES
        return max(1, min(most, (self.tree.limit - len(self.tree)) // candidates))

    def leaves_beside(self, top: Node) -> list[tuple[Node, int]]:
        """Return parents and ranks of unexpanded candidates of its parent and that one's siblings, best first."""
        above = top.parent
        parents = [above] if above is None or above.parent is None else above.parent.children.values()
        found = [
            (node, rank)
            for node in parents
            if node is not None
            for rank, token in enumerate(node.tokens)
            if (child := node.children.get(token)) is None or not child.tokens
        ]
        return sorted(found, key=lambda each: -each[0].cumulatives[each[1]])

    def least_below(self, node: Node) -> float:
        """Return the least log reach of nodes below this one, relative to it."""
        return self.frontier.least - (node.cumulative - self.tree.root.cumulative)

    def attach_block(
        self, top: Node, block: Block, names: Sequence[int], tree: BlockTree, made: Sequence[PackedExpansion]
    ) -> bool:
        """Add the nodes of a block; returns False if the tree is full."""
        before = len(self.tree)
        for expansion in made:
            self.tree.take(expansion)
        if len(self.tree) == before and not top.tokens:
            return False
        self.anchors.add(top.name)
        levels = [Candidates(*each) for each in zip(*block[:3], block.expected_scores.tolist(), strict=True)]
        depth = top.depth - self.tree.root.depth
        for name, row in zip(names, tree.rows, strict=True):
            if block.pairs is None or row == 0:
                self.results[name] = levels, row, depth + row
        if not self.frontier.roots_only:
            nodes = [node for name in names if (node := self.tree.get(name)) is not None and node.tokens]
            self.frontier.offer_all(nodes)
        return True

    def reach(self) -> float:
        """Log reach of the next node to expand, or -inf. A paused request expands its root at most."""
        if self.paused and (self.tree.root.expanded or not self.prefills_paused):
            return -math.inf
        return self.frontier.reach()


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
        names, places = _chain(node.name, address_of(node), rows, tree)
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
        rows = draft.rows_of(top, block)
        if rows is None:
            return []
        width = min(_LENT_CANDIDATES, rows.tokens.shape[1])
        rows = CandidateRows(
            np.ascontiguousarray(rows.tokens[:, :width]),
            np.ascontiguousarray(rows.log_probabilities[:, :width]),
            np.ascontiguousarray(rows.following[:, :width]),
        )
        rows.log_probabilities[0] += _LENT
        places, chosen = list[tuple[int, int]](), list[int]()
        for parent, rank in draft.leaves_beside(top)[:_LENT_LEAVES]:
            least = draft.frontier.least - (parent.cumulatives[rank] - draft.tree.root.cumulative)
            if rows.log_probabilities[0, 0] >= least and parent.tokens[rank] not in draft.frontier.ends:
                tree, place = self._trees(rows, _LENT_NODES, least), (parent.name, parent.tokens[rank])
                places += _chain(mix(*place), place, rows, tree)[1]
                chosen += tree.rows
        if not places:
            return []
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


def _chain(
    top: int, place: tuple[int, int], rows: CandidateRows, tree: BlockTree
) -> tuple[list[int], list[tuple[int, int]]]:
    """Names of a tree's nodes below the node `top`, and their places: each one's parent and step."""
    names, places = [top], [place]
    tokens: list[list[int]] = rows.tokens.tolist()
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        step = tokens[tree.rows[parent]][rank]
        places.append((names[parent], step))
        names.append(mix(names[parent], step))
    return names, places


def _candidates(branch: Branch) -> Candidates:
    return Candidates(
        np.array(branch.tokens, dtype=np.int32),
        np.array(branch.log_probabilities, dtype=np.float32),
        np.array(branch.scores, dtype=np.float32),
        branch.expected_score,
    )


def finite(tokens: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Candidates with finite log-probabilities: the verifier disconnects a drafter that sends others."""
    if all(map(math.isfinite, values)):
        return tokens, values
    kept = [(token, value) for token, value in zip(tokens, values, strict=True) if math.isfinite(value)]
    return [token for token, _ in kept], [value for _, value in kept]


def expansion_of(node: Node, tokens: list[int], log_probabilities: list[float]) -> Expansion:
    return Expansion(*address_of(node), tokens, log_probabilities)


def address_of(node: Node) -> tuple[int, int]:
    """The parent's name and the token that leads to the node; for a root its own name and `ROOT_STEP`."""
    return (node.name, ROOT_STEP) if node.parent is None else (node.parent.name, node.token)
