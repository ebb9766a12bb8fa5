"""Ways of growing that best-first trees are compared with: uniform trees, and SSD's table of outcomes.

Both speak the drafter's messages and use its draft sources, for one request at a time and over a channel
that loses nothing. They are for the benchmark only. Source of the table and its fan-out: "Speculative
Speculative Decoding", arXiv 2603.03251.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.virtual.rig import TREE_NODES
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.draft_messages import (
    Close,
    DrafterMessage,
    Growth,
    Open,
    Outcome,
)
from ssd_serve.drafter.calibration import Calibration
from ssd_serve.drafter.sources.contract import Candidates, DraftSource, NodeRequest
from ssd_serve.errors import SsdError
from ssd_serve.messages import SamplingParameters

_MIN_RATE, _MAX_RATE = 0.05, 0.98


class OneRequest:
    """What both share: the tree of the one open request, expanding some of its nodes, and saying so."""

    def __init__(self, source: DraftSource, name: str) -> None:
        self._source = source
        self._name = name
        self._calibration = Calibration()
        self._request: int | None = None
        self._epoch = 0
        self._sequence = 0
        self._parameters = SamplingParameters()
        self.tree = SpeculationTree(0, TREE_NODES)

    def handle(self, message: DrafterMessage) -> list[DrafterMessage]:
        if isinstance(message, Open):
            self._request, self._epoch, self._sequence = message.request, message.epoch, 0
            self._parameters = message.parameters
            self.tree = SpeculationTree(message.root, TREE_NODES)
            tokens = message.prompt + message.output
            self._source.open(message.request, tokens, message.parameters, message.seed)
            self.moved(hit=False)
        elif isinstance(message, Outcome) and message.request == self._request:
            self.learn(message.tokens)
            advance = self.tree.advance(message.tokens)
            if self.tree.root.name != message.root:
                raise SsdError("the benchmark's drafter has lost an outcome")
            if not self.keeps:
                self.tree = SpeculationTree(message.root, TREE_NODES)
            kept = [node.name for node in self.tree.expanded()]
            self._source.commit(message.request, message.tokens, [node.name for node in advance.path], kept)
            self.moved(hit=self.tree.root.expanded)
        elif isinstance(message, Close) and message.request == self._request:
            self._source.close(message.request)
            self._request = None
        return []

    keeps = True
    """Whether what was drafted below the new root is kept."""

    def learn(self, tokens: Sequence[int]) -> None:
        """The target went along `tokens`; the tree still has its old root."""

    def moved(self, hit: bool) -> None:
        """The root has moved; `hit`: something has been drafted below it."""
        raise NotImplementedError

    def expand(self, nodes: Sequence[Node], fan_out: int) -> list[Growth]:
        """One draft step over these nodes, with `fan_out` candidates each."""
        if self._request is None or not nodes:
            return []
        picks = [NodeRequest(self._request, node) for node in nodes]
        scale = self._calibration.scale(self._parameters.temperature)
        grown: list[Expansion] = []
        for node, found in zip(nodes, self._source.expand(picks, [scale] * len(picks)), strict=True):
            if not isinstance(found, Candidates):
                raise SsdError("the benchmark's drafter has no memory left")
            tokens_, values = found.tokens[:fan_out].tolist(), found.log_probabilities[:fan_out].tolist()
            self.tree.expand(node, tokens_, values)
            parent, step = (node.name, ROOT_STEP) if node.parent is None else (node.parent.name, node.token)
            grown.append(Expansion(parent, step, tokens_, values))
        growth = pack(self._request, self._epoch, self._sequence, grown, self._name, snapshot=False)
        self._sequence += 1
        return [growth]

    @property
    def busy(self) -> bool:
        """Whether a request is open."""
        return self._request is not None


class UniformCore(OneRequest):
    """A tree of `fan_out` children a node, level by level, at most `width` nodes of each level, and no more
    than `levels`. It is thrown away at every outcome and drafted while the verifier waits."""

    keeps = False

    def __init__(self, source: DraftSource, width: int, fan_out: int, levels: int) -> None:
        super().__init__(source, "uniform-tree")
        self._width, self._fan_out, self._levels = width, fan_out, levels
        self._level = 0
        self._next: list[Node] = []

    def moved(self, hit: bool) -> None:
        del hit  # nothing is kept
        self._level, self._next = 0, [self.tree.root]

    def step(self) -> list[Growth]:
        if not self.busy or self._level >= self._levels:
            return []
        growth = self.expand(self._next, self._fan_out)
        self._level += 1
        children = [self.tree.child_at(node, rank) for node in self._next for rank in range(len(node.tokens))]
        children.sort(key=lambda node: -node.cumulative)
        self._next = children[: self._width]
        return growth


@dataclass(frozen=True, slots=True)
class TableShape:
    """`length`: longest chain; `fallback`: chain after a miss; `geometric` fan-out, else uniform."""

    length: int
    fallback: int
    geometric: bool


class FanOut:
    """How many bonus tokens are prepared for each number of accepted tokens.

    The paper's, for acceptance rate a and a miss rate of F^-r with F guesses: F_k = F_0 a^(k/(1+r)) for k < K
    and F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)). Both are learned from outcomes, and F_0 follows from the rows.
    """

    def __init__(self, geometric: bool, most: int) -> None:
        self._geometric = geometric
        self._most = most
        self._accepted, self._tried = 7.0, 10.0
        self._ranks = [1.0] * (most + 1)

    def observe_chain(self, accepted: int, rejected: bool) -> None:
        """So many tokens of a chain were accepted, and then one was rejected or the chain ended."""
        self._accepted += accepted
        self._tried += accepted + rejected

    def observe_bonus(self, rank: int | None) -> None:
        """The bonus token had this rank among the guesses for it; None: it was none of them."""
        self._ranks[self._most if rank is None else min(rank, self._most)] += 1

    @property
    def acceptance(self) -> float:
        """a"""
        return min(_MAX_RATE, max(_MIN_RATE, self._accepted / self._tried))

    @property
    def exponent(self) -> float:
        """r: least squares of -log(miss rate) on log F."""
        total, above, below = sum(self._ranks), 0.0, 0.0
        for guesses in range(2, self._most + 1):
            missed = sum(self._ranks[guesses:]) / total
            above -= math.log(missed) * math.log(guesses)
            below += math.log(guesses) ** 2
        return above / below

    def split(self, rows: int, length: int) -> list[int]:
        """`rows` guesses over 0..`length` accepted tokens: integers in proportion, the last at least 1."""
        weights = [1.0] * (length + 1)
        if self._geometric:
            a, share = self.acceptance, 1 / (1 + self.exponent)
            weights = [a ** (k * share) for k in range(length + 1)]
            weights[length] *= (1 - a) ** -share
        found = [0] * length + [1]
        for _ in range(rows - 1):
            open_ = [k for k in range(length + 1) if found[k] < self._most - (k < length)]
            if not open_:
                break
            best = max(open_, key=lambda k: weights[k] / (found[k] + 1))
            found[best] += 1
        return found


class TableCore(OneRequest):
    """SSD as published: while a chain is verified, a chain is drafted for every prepared outcome (number of
    accepted tokens, bonus token). The one that comes true is verified next; the others are thrown away."""

    def __init__(self, source: DraftSource, width: int, fan_out: int, shape: TableShape) -> None:
        super().__init__(source, "geometric-table" if shape.geometric else "uniform-table")
        self._width, self._fan_out, self._shape = width, fan_out, shape
        self.fan = FanOut(shape.geometric, fan_out)
        self._chain: list[Node] = []
        self._wanted = 0
        self._tips: list[tuple[Node, int]] | None = None
        """Ends of the chains of prepared outcomes, and how many tokens each has."""

    def learn(self, tokens: Sequence[int]) -> None:
        accepted = 0
        while (
            accepted < min(len(tokens), len(self._chain)) and tokens[accepted] == self._chain[accepted].token
        ):
            accepted += 1
        if accepted == len(tokens):
            return  # the text ended, or only a part of the chain was verified
        rejected = accepted < len(self._chain)
        self.fan.observe_chain(accepted, rejected)
        end = self._chain[accepted - 1] if accepted else self.tree.root
        if end.expanded:
            guesses = end.tokens[1:] if rejected else end.tokens
            bonus = tokens[accepted]
            self.fan.observe_bonus(guesses.index(bonus) if bonus in guesses else None)

    def moved(self, hit: bool) -> None:
        self._chain, self._tips = [], None
        self._wanted = 0 if hit else self._shape.fallback
        node = self.tree.root
        while node.expanded and len(self._chain) < self._shape.length:
            node = self.tree.child_at(node, 0)
            self._chain.append(node)

    def step(self) -> list[Growth]:
        if not self.busy:
            return []
        if len(self._chain) < self._wanted:
            tip = self._chain[-1] if self._chain else self.tree.root
            growth = self.expand([tip], self._fan_out)
            self._chain.append(self.tree.child_at(tip, 0))
            return growth
        return self._prepare()

    def _prepare(self) -> list[Growth]:
        """One more token for every prepared outcome."""
        last = self._chain[-1]
        first = self._tips is None
        if self._tips is None:
            self._tips = self._outcomes(0, len(self._chain))
        self._tips = [self._along(tip, length) for tip, length in self._tips]
        growing = [(tip, length) for tip, length in self._tips if length < self._shape.length]
        nodes = [tip for tip, _ in growing] + ([last] if first and not last.expanded else [])
        growth = self.expand(nodes[: self._width], self._fan_out)
        self._tips = [(self.tree.child_at(tip, 0), length + 1) for tip, length in growing]
        if first:
            self._tips += self._outcomes(len(self._chain), len(self._chain) + 1)
        return growth

    def _along(self, tip: Node, length: int) -> tuple[Node, int]:
        """The end of the chain that has been drafted below this node already."""
        while tip.expanded and length < self._shape.length:
            tip, length = self.tree.child_at(tip, 0), length + 1
        return tip, length

    def _outcomes(self, start: int, end: int) -> list[tuple[Node, int]]:
        """The prepared bonus tokens after `start` to `end` - 1 accepted tokens."""
        fans = self.fan.split(self._width, len(self._chain))
        found: list[tuple[Node, int]] = []
        for accepted in range(start, end):
            node = self._chain[accepted - 1] if accepted else self.tree.root
            best = 1 if accepted < len(self._chain) else 0  # rank 0 goes on along the chain
            ranks = range(best, min(best + fans[accepted], len(node.tokens)))
            found += [(self.tree.child_at(node, rank), 0) for rank in ranks]
        return found
