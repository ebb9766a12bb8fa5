"""One round: build the batch, forward, sample the target's choice at every row, and walk.

`launch(work)` and `finish(flight)` are separate so that host work may overlap the forward. The round decides
tokens; who is scheduled, and what happens to slots and drafters afterwards, is the engine's business.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.cache.tree import Node
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.noise import NoiseRows
from ssd_serve.kernels.sampling import Sampled, SamplingRow, noise_keys, sample
from ssd_serve.messages import SamplingParameters, TokenLogprobs
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.verifier.cost import Reading
from ssd_serve.verifier.scheduler import Part


@dataclass(frozen=True, slots=True)
class Work:
    """One request's rows in a round: its pending tokens, and tree nodes with their slots, parents first."""

    part: Part
    nodes: tuple[Node, ...] = ()
    node_slots: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the forward."""
        return len(self.part.slots) + len(self.nodes)

    @property
    def scoring(self) -> range:
        """Rows of the prompt whose logits are wanted to tell the probability of the prompt's next token."""
        first, unscored = len(self.part.request.slots), self.part.request.unscored
        start = max(unscored.start - first, 0)
        return range(start, max(start, min(unscored.stop - first, len(self.part.slots))))

    @property
    def wanted(self) -> int:
        """Rows whose logits are wanted: scoring ones, then the root's and every node's."""
        return len(self.scoring) + (1 + len(self.nodes) if self.part.final else 0)


@dataclass(frozen=True, slots=True)
class Flight:
    """A forward under way, or done."""

    work: tuple[Work, ...]
    sampling: Sequence[SamplingRow]
    result: ForwardResult
    rows: int
    reading: Reading
    started: float

    def ready(self) -> bool:
        """Whether the device is done."""
        return self.result.completion.ready()

    def wait(self) -> float:
        """Wait until it is; returns the seconds that the forward took."""
        return self.result.completion.wait() - self.started


@dataclass(frozen=True, slots=True)
class Walk:
    """What a round decided for one request."""

    work: Work
    accepted: tuple[int, ...]
    """Indices of the accepted nodes, in order."""
    tokens: tuple[int, ...]
    """The accepted nodes' tokens and the bonus token; empty for a prompt chunk that is not the last."""
    ended: str
    """'stop', 'length' or '' when the text goes on."""
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Rounds:
    """Runs rounds of one target model. `eos` are the model's end ids."""

    def __init__(self, model: Model, noise: NoiseRows, eos: tuple[int, ...]) -> None:
        self._model = model
        self._noise = noise
        self._eos = eos

    def launch(self, work: Sequence[Work]) -> Flight:
        """Start the forward of all rows."""
        batch = build_batch([_rows(each) for each in work])
        started = time.perf_counter()
        result = self._model.forward(batch)
        # What the choices need besides the logits is made while the device is busy.
        sampling = [row for each in work if each.wanted for row in self._sampling_rows(each)]
        self._noise.prepare(*noise_keys(sampling))
        return Flight(tuple(work), sampling, result, batch.rows, _reading(work), started)

    def finish(self, flight: Flight) -> list[Walk]:
        """Choose a token at every wanted row, and walk each request's tree."""
        flight.wait()
        sampled = sample(flight.result.logits, flight.sampling, self._noise)
        walks: list[Walk] = []
        start = 0
        for each in flight.work:
            walks.append(_walk(each, sampled, start))
            start += each.wanted
        return walks

    def _sampling_rows(self, work: Work) -> list[SamplingRow]:
        """Scoring rows, the root's row, then one for each node, in the order of the forward's rows."""
        request = work.part.request
        rows = _scoring_rows(work)
        if not work.part.final:
            return rows
        parameters, seed, counts = request.parameters, request.seed, request.counts
        first, generated = len(request.tokens), request.generated
        eos = () if parameters.ignore_eos else self._eos
        paths: dict[int, tuple[int, ...]] = {}
        for node in work.nodes:
            above = () if node.parent is None else paths.get(node.parent.name, ())
            paths[node.name] = (*above, node.token)
        rows += [
            SamplingRow(parameters, seed, first + len(path), counts, path, generated + len(path), eos)
            for path in ((), *paths.values())
        ]
        return rows


def _scoring_rows(work: Work) -> list[SamplingRow]:
    """Rows of the prompt whose next token is known: greedy, so that nothing changes the logits."""
    request, first = work.part.request, len(work.part.request.slots) + 1
    parameters = SamplingParameters(temperature=0.0, logprobs=request.parameters.prompt_logprobs)
    return [
        SamplingRow(parameters, request.seed, first + index, known=request.tokens[first + index])
        for index in work.scoring
    ]


def _reading(work: Sequence[Work]) -> Reading:
    contexts = [len(each.part.request.slots) for each in work]
    return Reading(
        sum(contexts), sum(context * each.rows for context, each in zip(contexts, work, strict=True))
    )


def _rows(work: Work) -> RequestRows:
    request, slots = work.part.request, work.part.slots
    computed, count = len(request.slots), len(work.part.slots)
    tokens = request.tokens[computed : computed + count]
    positions = list(range(computed, computed + count))
    wanted = [*work.scoring, *([count - 1] if work.part.final else ())]
    if not work.nodes:
        return RequestRows(tokens, positions, slots, request.slots.view(), wanted)
    ancestry = [(2 << index) - 1 for index in range(count)]
    index_of: dict[int, int] = {}
    for node in work.nodes:
        parent = count - 1 if node.parent is None else index_of.get(node.parent.name, count - 1)
        index = index_of[node.name] = len(ancestry)
        tokens.append(node.token)
        positions.append(positions[parent] + 1)
        wanted.append(index)
        ancestry.append(ancestry[parent] | 1 << index)
    return RequestRows(tokens, positions, (*slots, *work.node_slots), request.slots.view(), wanted, ancestry)


def _walk(work: Work, sampled: Sampled, start: int) -> Walk:
    """Follow the child that equals the target's choice while that child was a row of this forward.

    Accept-if-equal: the choice itself is emitted, the draft only saves computing it (arXiv 2408.07978). The
    first choice without such a row is the bonus token; its KV is never assumed.
    """
    request = work.part.request
    first, start = start, start + len(work.scoring)
    told = tuple(each for each in sampled.logprobs[first:start] if each is not None)
    if not work.part.final:
        return Walk(work, (), (), "", (), told)
    children: dict[tuple[int, int], int] = {}
    row_of = {node.name: index for index, node in enumerate(work.nodes)}
    for index, node in enumerate(work.nodes):
        above = -1 if node.parent is None else row_of.get(node.parent.name, -1)
        children[(above, node.token)] = index
    tokens: list[int] = []
    accepted: list[int] = []
    logprobs: list[TokenLogprobs] = []
    here, ended = -1, ""
    while True:
        row = start + 1 + here
        token = sampled.choices[row]
        tokens.append(token)
        found = sampled.logprobs[row]
        if found is not None:
            logprobs.append(found)
        if token in request.ends:
            ended = "stop"
        elif len(tokens) >= request.left:
            ended = "length"
        child = children.get((here, token))
        if ended or child is None:
            break
        accepted.append(child)
        here = child
    return Walk(work, tuple(accepted), tuple(tokens), ended, tuple(logprobs), told)
