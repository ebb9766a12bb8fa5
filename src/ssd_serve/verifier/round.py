"""A round: build the batch, run the forward, sample the target's choices, and walk the trees.

`launch(work)` and `finish(flight)` are separate so that host work may overlap the forward. The round decides
tokens; the engine schedules requests and handles slots and drafters afterwards.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ssd_serve.base.cost import Reading
from ssd_serve.base.messages import SamplingParameters, TokenLogprobs
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.memory import within_memory
from ssd_serve.sampling.choice import Sampled, sample, trusted_choice
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.rows import SamplingRows
from ssd_serve.verifier.scheduler import ScheduledChunk

_NO_ROWS = range(0)


@dataclass(frozen=True, slots=True)
class TreeTokens:
    """The nodes of one request's rows: parallel lists, parents first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Index of each node's parent; -1: the root."""
    depths: list[int] = field(default_factory=list)
    """1 for the root's children."""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int) -> None:
        """Append a node below an earlier node or below the root."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)

    def first(self, count: int) -> "TreeTokens":
        """The first `count` nodes."""
        if count >= len(self):
            return self
        return TreeTokens(self.tokens[:count], self.parents[:count], self.depths[:count])


_NO_NODES = TreeTokens()


@dataclass(frozen=True, slots=True)
class RequestStep:
    """Rows of one request in a round: pending tokens, and tree nodes with their slots."""

    chunk: ScheduledChunk
    tree: TreeTokens = _NO_NODES
    node_slots: Sequence[int] = ()

    @property
    def rows(self) -> int:
        """Rows of the forward."""
        return len(self.chunk.slots) + len(self.tree)

    @property
    def scoring(self) -> range:
        """Rows of the prompt with logits that give the probability of the prompt's next token."""
        request = self.chunk.request
        if request.parameters.prompt_logprobs is None:
            return _NO_ROWS
        first, unscored = len(request.slots), request.unscored
        start = max(unscored.start - first, 0)
        return range(start, max(start, min(unscored.stop - first, len(self.chunk.slots))))

    @property
    def wanted(self) -> int:
        """Number of rows to return logits for: scoring rows, then the root's and every node's."""
        return len(self.scoring) + (1 + len(self.tree) if self.chunk.final else 0)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched forward."""

    work: tuple[RequestStep, ...]
    sampling: Sequence[SamplingRows]
    result: ForwardResult
    rows: int
    reading: Reading
    started: float

    @property
    def nodes(self) -> int:
        """Tree nodes among the rows."""
        return sum([len(each.tree) for each in self.work])

    def ready(self) -> bool:
        return self.result.completion.ready()

    def wait(self) -> float:
        """Wait for the end of the forward; return the seconds that it took."""
        return self.result.completion.wait() - self.started


class Walk(NamedTuple):
    """Result of a round for one request."""

    work: RequestStep
    accepted: tuple[int, ...]
    """Indices of the accepted nodes, in order."""
    tokens: tuple[int, ...]
    """The accepted nodes' tokens and the bonus token; empty for a prompt chunk that is not the last."""
    ended: str
    """'stop', 'length', or '' if the output continues."""
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def decoded(self) -> bool:
        """True for a decode step without prefill."""
        return len(self.work.chunk.slots) == 1 and bool(self.tokens)

    @property
    def kept(self) -> list[int]:
        """Slots of the accepted nodes."""
        return [self.work.node_slots[index] for index in self.accepted]

    @property
    def rejected(self) -> list[int]:
        """Slots of the other nodes."""
        accepted = self.accepted
        return [slot for index, slot in enumerate(self.work.node_slots) if index not in accepted]


class Rounds:
    """Runs rounds of one target model. `eos` are the model's end ids; `native` chooses tokens on CPUs."""

    def __init__(
        self,
        model: Model,
        noise: NoiseRows,
        eos: tuple[int, ...],
        native: NativeLibrary | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self._clock = clock
        self._noise = noise
        self._eos = eos
        self._native = trusted_choice(native) if model.facts.device == "cpu" else None

    def launch(self, work: Sequence[RequestStep]) -> InFlight:
        """Start the forward of all rows. Raises `DeviceMemoryError`."""
        if self.model.facts.ranks > 1:  # the other ranks have started: it cannot be run again
            return self._launch(work)
        return within_memory(lambda: self._launch(work))

    def _launch(self, work: Sequence[RequestStep]) -> InFlight:
        batch = build_batch([_rows(each) for each in work])
        # Before the forward: on ROCm a copy to the device, however small, waits for what was started there.
        sampling = [rows for each in work for rows in self._sampling_rows(each)]
        if self._native is None:
            self._noise.lines([span for rows in sampling if (span := rows.noise_span) is not None])
        started = self._clock()
        result = self.model.forward(batch)
        sampling = _masked(work, sampling)  # while the device works
        return InFlight(tuple(work), sampling, result, batch.rows, _reading(work), started)

    def finish(self, flight: InFlight) -> list[Walk]:
        """Choose tokens at the wanted rows, and walk each request's tree. Raises `DeviceMemoryError`."""
        flight.wait()
        sampled = within_memory(
            lambda: sample(flight.result.logits, flight.sampling, self._noise, self._native, walk=True)
        )
        walks: list[Walk] = []
        start = 0
        for each in flight.work:
            walks.append(walk(each, sampled, start))
            start += each.wanted
        return walks

    def _sampling_rows(self, work: RequestStep) -> list[SamplingRows]:
        """Return scoring rows, then the root's and every node's, in the order of the forward's rows."""
        request, tree = work.chunk.request, work.tree
        rows = _scoring_rows(work)
        if not work.chunk.final:
            return rows
        choosing = SamplingRows(
            request.parameters,
            request.seed,
            len(request.tokens),
            request.counts,
            generated=request.generated,
            eos=() if request.parameters.ignore_eos else self._eos,
            tokens=tree.tokens,
            parents=tree.parents,
            depths=tree.depths,
            overrides=request.overrides,
        )
        return [*rows, choosing]


def _masked(work: Sequence[RequestStep], sampling: Sequence[SamplingRows]) -> list[SamplingRows]:
    """Return the rows with the masks of their grammars."""
    if all(each.chunk.request.grammar is None for each in work):
        return list(sampling)
    grammars = [
        each.chunk.request.grammar if choosing else None
        for each in work
        for choosing in [*[False] * len(each.scoring), *[True] * each.chunk.final]
    ]
    return [
        rows if grammar is None else rows._replace(masks=grammar.masks(rows.tokens, rows.parents))
        for rows, grammar in zip(sampling, grammars, strict=True)
    ]


def _scoring_rows(work: RequestStep) -> list[SamplingRows]:
    """Return the scoring rows, with their known next token: greedy, so that nothing changes the logits."""
    scoring = work.scoring
    if not scoring:
        return []
    request, first = work.chunk.request, len(work.chunk.request.slots) + 1
    parameters = SamplingParameters(temperature=0.0, logprobs=request.parameters.prompt_logprobs)
    return [
        SamplingRows(parameters, request.seed, first + index, known=request.tokens[first + index])
        for index in scoring
    ]


def _reading(work: Sequence[RequestStep]) -> Reading:
    contexts = [len(each.chunk.request.slots) for each in work]
    return Reading(
        sum(contexts), sum(context * each.rows for context, each in zip(contexts, work, strict=True))
    )


def _rows(work: RequestStep) -> RequestRows:
    request, slots, tree = work.chunk.request, work.chunk.slots, work.tree
    computed, count = len(request.slots), len(work.chunk.slots)
    tokens = request.tokens[computed : computed + count]
    positions = list(range(computed, computed + count))
    wanted = [*work.scoring, *([count - 1] if work.chunk.final else ())]
    if not len(tree):
        return RequestRows(tokens, positions, slots, request.slots.view(), wanted)
    root = computed + count - 1
    ancestry = [(2 << index) - 1 for index in range(count)]
    tokens += tree.tokens
    positions += [root + depth for depth in tree.depths]
    wanted += range(count, len(tokens))
    for index, parent in enumerate(tree.parents, count):
        ancestry.append(ancestry[count + parent] | 1 << index)
    return RequestRows(tokens, positions, (*slots, *work.node_slots), request.slots.view(), wanted, ancestry)


def walk(work: RequestStep, sampled: Sampled, start: int) -> Walk:
    """Follow the child that equals the target's choice while that child was a row of this forward.

    Accept-if-equal: the choice itself is emitted, the draft only saves computing it (arXiv 2408.07978). The
    first choice without such a row is the bonus token; its KV is never assumed.
    """
    request = work.chunk.request
    first, start = start, start + len(work.scoring)
    prompt_logprobs = tuple(each for each in sampled.logprobs[first:start] if each is not None)
    if not work.chunk.final:
        return Walk(work, (), (), "", (), prompt_logprobs)
    tree, choices = work.tree, sampled.choices
    rows, accepted = [start], []
    here, token, left = -1, choices[start], request.remaining_tokens
    ended = request.ended(token, left - 1)
    for index, parent in enumerate(tree.parents):  # parents come first: one pass meets the whole path
        if parent != here or ended or tree.tokens[index] != token:
            continue
        here = index
        accepted.append(index)
        rows.append(start + 1 + index)
        token = choices[start + 1 + index]
        ended = request.ended(token, left - len(rows))
    tokens = tuple([choices[row] for row in rows])
    logprobs = tuple([found for row in rows if (found := sampled.logprobs[row]) is not None])
    return Walk(work, tuple(accepted), tokens, ended, logprobs, prompt_logprobs)
