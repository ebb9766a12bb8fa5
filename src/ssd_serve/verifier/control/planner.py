"""Decides each round: the mode, the nodes, and whether the trees grow first.

The one objective is the expected number of committed tokens per second, under measured times of forwards,
host work, waits and modes. Knows drafters as something to wait for; runs no forward and owns no request.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from ssd_serve.base.cost import MAX_ROWS, CostTable, HostCost, Reading
from ssd_serve.base.devices import Device
from ssd_serve.base.messages import CostEstimate, DecisionMessage, DecisionReason, FixedShape
from ssd_serve.verifier.control.budget import RankedNode, Ranking, Rate, choose, rank
from ssd_serve.verifier.control.mode_controller import DecodingLoad, DraftStep, ModeController, RunningTexts
from ssd_serve.verifier.control.wait import RoundEstimate, WaitPolicy
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.request import Request
from ssd_serve.verifier.scheduler import ScheduledChunk

_MIN_PREFILL_TOKENS = 16
"""Prompt tokens that a round reads at least: prompts must not starve."""
_CLEARLY_FASTER = 0.85
"""Share of the time from which another way to read prompts counts as faster: a smaller saving may be noise. Smaller
chunks delay the first token of a prompt, and reading on all cores stops the drafter."""
_CANDIDATES, _CANDIDATES_EACH = 64, 8
"""Most nodes of a round, and per request if there are many, without a budget in the settings; the cost model
chooses among them. The cost of one more node is averaged over `_CANDIDATES_EACH` nodes."""
_FIXED_SHAPE_WAIT_S = 1.0
"""Longest wait of a round for the nodes of a fixed shape."""
_FIXED_SHAPE_IDLE_S, _FIXED_SHAPE_IDLE_STEPS = 0.02, 10
"""Time without growth, or draft steps if those take longer, after which a round stops waiting for a fixed shape. The
drafter has nothing more to expand then."""


@dataclass(frozen=True, slots=True)
class DraftBounds:
    """Limits of drafting. `budget`: maximum number of nodes of a round; None: the cost model alone decides.
    `width`: nodes of a draft step. `max_tpot_s`: target for the time per token of a running request. `shape`:
    fixed shape of requests that name none."""

    context: int
    budget: int | None
    width: int
    max_tpot_s: float = math.inf
    shape: FixedShape | None = None


class Cores:
    """Cores of the target: with a concurrent drafter, or `exclusive`. Other devices than CPUs do not
    change."""

    def __init__(self, shared: Device, exclusive: Device | None) -> None:
        self._shared = shared
        self._exclusive = exclusive or shared
        self.has_exclusive = exclusive is not None
        """True if the target may also use the drafter's cores, in modes without a drafter of its own."""

    @property
    def differ(self) -> bool:
        """True if the target's cores depend on the mode."""
        return self._shared != self._exclusive

    def of(self, mode: SpeculationMode) -> Device:
        """Return the cores of a mode."""
        return self._shared if mode is SpeculationMode.ASYNC else self._exclusive

    def enter(self, mode: SpeculationMode) -> None:
        """Bind the process to the cores of this mode, with as many threads."""
        device = self.of(mode)
        if device.kind != "cpu" or not device.indices or not self.differ:
            return
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # cores may be taken from this process while it runs
                os.sched_setaffinity(0, device.indices)
        torch.set_num_threads(len(device.indices))


@dataclass(frozen=True, slots=True)
class ModeConfig:
    """The controller, and the cores and wait policies of its modes."""

    controller: ModeController
    cores: Cores
    policies: Mapping[SpeculationMode, WaitPolicy]


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements of a round: `requests` decoding requests and `prompts` prompts in `rows` rows gave the
    decoding ones `tokens` tokens, `looked_up` of which only lookups had proposed."""

    requests: int
    prompts: int
    prefill_tokens: int
    rows: int
    reading: Reading
    tokens: int
    looked_up: int
    forward_s: float
    host_s: float
    total_s: float


class _PendingRound(NamedTuple):
    """Work of a round without nodes: `rows` rows of `requests` decoding requests and of prompts."""

    chunks: Sequence[ScheduledChunk]
    requests: int
    rows: int
    reading: Reading
    shapes: Mapping[int, FixedShape]
    """Fixed shapes by index of the chunk."""

    @property
    def context(self) -> float:
        """Tokens of a request's context, on average."""
        return self.reading.context / max(1, len(self.chunks))


@dataclass(frozen=True, slots=True)
class _RoundCandidates:
    """The round of `requests` decoding requests if it starts now; `seconds` are its times with 0, 1, ...
    nodes."""

    requests: int
    estimate: RoundEstimate
    ranking: Ranking
    seconds: npt.NDArray[np.float64]


class RoundPlanner:
    """Decides rounds and learns from them. Without `mode_config` the mode, cost and policy never change."""

    def __init__(
        self,
        drafters: DrafterPool,
        cost: CostTable,
        policy: WaitPolicy,
        bounds: DraftBounds,
        host: HostCost | None = None,
        mode_config: ModeConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cost = cost
        """Cost of forwards where the next round computes."""
        self.mode: SpeculationMode | None = None
        """Mode that the controller has chosen; None without a controller."""
        self.host = host or HostCost()
        if mode_config is not None:
            self.host = mode_config.controller.host
        self._policy = policy
        self._drafters = drafters
        self.bounds = bounds
        self.mode_config = mode_config
        self._rate = Rate()
        self._requests = 1
        """Decoding requests of the last round without prompts."""
        self._clock = clock
        self._entered: SpeculationMode | None = None
        """Mode in which the round computes."""
        self._shape_is_fixed = False
        """True if a fixed shape, not the controller, has chosen the mode of the round."""

    @property
    def prefilling_alone(self) -> bool:
        """True if the round reads prompts on all cores, while the drafter pauses."""
        return self._entered is not self.mode

    def choose(
        self, running: Sequence[Request], chunks: Sequence[ScheduledChunk], drain: Callable[[], object]
    ) -> tuple[list[RankedNode], DecisionMessage]:
        """Return the nodes of a round of these chunks, best first, and the decision; `drain` receives pending
        messages. Running requests without a chunk wait for the prefill of their prompt."""
        pending = self._pending(chunks)
        self._shape_is_fixed = bool(pending.shapes)
        if self.mode_config is not None and running:
            self._choose_mode(running, pending, self.mode_config)
        if self.prefilling_alone:
            return [], DecisionMessage(SpeculationMode.PLAIN.value, DecisionReason.PROMPTS, 0, 0.0)
        if not self._drafters.working or self.bounds.budget == 0:
            return [], self._decide_plain(pending.requests)
        if pending.requests and not self._drafters.drafting and not _any_drafted(chunks):
            return [], self._decide_plain(pending.requests)  # lookups that found nothing cost nothing
        waited_s, idle_s, answers = 0.0, 0.0, True
        candidates = self._candidates(pending, 0)
        while (
            pending.requests
            and (answers := self._drafters.worth_waiting())
            and self._should_wait(candidates, waited_s, idle_s)
        ):
            estimate, started, before = candidates.estimate, self._clock(), self._drafters.expansions
            self._drafters.wait(2 * max(estimate.step_s, 1e-3))
            drain()
            spent_s = self._clock() - started
            waited_s += spent_s
            idle_s = idle_s + spent_s if self._drafters.expansions == before else 0.0
            candidates = self._candidates(pending, estimate.steps + 1)
            self._policy.observe(estimate, candidates.estimate, spent_s)
        nodes = candidates.ranking.nodes[: candidates.estimate.choice.nodes]
        return nodes, self._decide(candidates, waited_s, answers)

    def prefill_tokens(self, requests: int, most: int) -> int:
        """Return how many of `most` prompt tokens a round should prefill with `requests` decoding requests.

        It is the number by which prefill is fastest. A target for the time per token limits it, but it stays
        large enough that prompts do not starve.
        """
        seconds = self.cost.span(requests, requests + most)
        rows = cheapest_chunk(seconds)
        limit_s = self.bounds.max_tpot_s
        if limit_s < math.inf and requests:
            spent = seconds + self.host.seconds(requests, 0)
            fitting = int(np.searchsorted(spent, limit_s * self._rate.tokens_a_round, side="right")) - 1
            rows = min(rows, max(_MIN_PREFILL_TOKENS, fitting))
        return min(most, rows)

    def node_price(self) -> float:
        """Return the expected tokens that a node must give to pay for its row; 0 for nodes of a fixed shape."""
        if self._shape_is_fixed:
            return 0.0
        requests = self._requests
        row_s = self.cost.seconds(requests + _CANDIDATES_EACH) - self.cost.seconds(requests)
        return self._rate.value(requests) * (row_s / _CANDIDATES_EACH + self.host.node_s)

    def mode_gains(self) -> dict[int, dict[str, float]]:
        """Return the gain of each mode as a multiple of plain decoding, by power of two of running requests."""
        gains = self.mode_config.controller.gains if self.mode_config is not None else {}
        return {
            requests: {mode.value: gain for mode, gain in each.items()} for requests, each in gains.items()
        }

    def observe(self, round_: Round) -> None:
        """Take a round's times into account; those that read prompts do not tell what decoding takes."""
        self.cost.observe(round_.rows, round_.forward_s, round_.reading)
        if round_.prompts:
            return
        self._requests = round_.requests
        self.host.observe(round_.requests, round_.rows - round_.requests, round_.host_s)
        self._rate.observe(round_.requests, round_.tokens, round_.total_s)
        if self.mode_config is not None and not self._shape_is_fixed:
            self.mode_config.controller.observe(
                round_.requests, round_.tokens - round_.looked_up, round_.total_s
            )

    def _pending(self, chunks: Sequence[ScheduledChunk]) -> _PendingRound:
        contexts = [len(chunk.request.slots) for chunk in chunks]
        rows = [len(chunk.slots) for chunk in chunks]
        decoding = [chunk.request.decoding for chunk in chunks]
        return _PendingRound(
            chunks,
            sum(decoding),
            sum(rows),
            Reading(sum(contexts), sum([a * b for a, b in zip(contexts, rows, strict=True)])),
            fixed_shapes(chunks, self.bounds.shape, self._drafters.depth),
        )

    def _choose_mode(self, running: Sequence[Request], pending: _PendingRound, modes: ModeConfig) -> None:
        """Choose the mode of the next rounds, and the cores of this one: prompts are read on all cores if that
        saves more than a round without drafts costs."""
        numbers, costs = tuple([request.number for request in running]), modes.controller.costs
        if self._shape_is_fixed:
            self.mode = next(iter(costs))
        else:
            self.mode = modes.controller.choose(numbers, lambda: self._texts(running, pending, modes))
        entered = self.mode
        if modes.cores.differ and self.mode is SpeculationMode.ASYNC and pending.rows > pending.requests:
            shared, exclusive = costs[self.mode], costs[SpeculationMode.PLAIN]
            shared_s = shared.first_seconds(pending.rows, pending.reading)
            saved_s = shared_s - exclusive.first_seconds(pending.rows, pending.reading)
            round_s = shared.first_seconds(pending.requests, Reading()) if pending.requests else 0.0
            # At most one draft step and one decode round are lost without drafting.
            lost_s = self._drafters.step_s_in(self.mode) + round_s
            if saved_s > max(lost_s, (1 - _CLEARLY_FASTER) * shared_s):
                entered = SpeculationMode.PLAIN
        if entered is not self._entered:
            self._entered = entered
            self.cost, self._policy = costs[entered], modes.policies[entered]
            modes.cores.enter(entered)
            self._drafters.set_mode(entered)

    def _texts(self, running: Sequence[Request], pending: _PendingRound, modes: ModeConfig) -> RunningTexts:
        drafters, count = self._drafters, len(running)
        drafting = [mode for mode in modes.policies if mode is not SpeculationMode.PLAIN]
        return RunningTexts(
            DecodingLoad(count, pending.context),
            sum([request.levels.share for request in running]) / count,
            sum([request.levels.hopeful for request in running]) / count,
            {
                mode: DraftStep(self._step_s(mode), self.bounds.width)
                for mode in drafting
                if drafters.has(mode)
            },
            sum([request.remaining_tokens for request in running]) / count,
            {mode: drafters.pending_prefill_s(mode) for mode in drafting},
        )

    def _step_s(self, mode: SpeculationMode) -> float:
        """Seconds of a draft step; a quarter of a target's step while they are unknown, so that it is tried."""
        return self._drafters.step_s_in(mode) or self.cost.seconds(1) / 4

    def _has_drafters(self) -> bool:
        return self.mode_config is not None and any(map(self._drafters.has, self.mode_config.policies))

    def _should_wait(self, candidates: _RoundCandidates, waited_s: float, idle_s: float) -> bool:
        if candidates.ranking.incomplete:
            most_s = max(_FIXED_SHAPE_IDLE_S, _FIXED_SHAPE_IDLE_STEPS * candidates.estimate.step_s)
            idle = idle_s >= most_s and not self._drafters.pending_prefill_s(self._drafters.mode)
            return waited_s < _FIXED_SHAPE_WAIT_S and not idle
        return not candidates.ranking.forced and self._policy.should_wait(candidates.estimate)

    def _decide_plain(self, requests: int) -> DecisionMessage:
        """Decide a round without drafts."""
        controller = self.mode_config.controller if self.mode_config is not None else None
        mode, other_s = self._drafters.mode, 0.0
        if self.bounds.budget == 0:
            why = DecisionReason.OFF
        elif controller is None or mode is not SpeculationMode.PLAIN or not self._has_drafters():
            found = self._drafters.working  # by lookups
            why = DecisionReason.NOTHING_DRAFTED if found else DecisionReason.NO_DRAFTER
        else:
            why = DecisionReason.TRYING if controller.exploring else DecisionReason.SLOWER
            mine, others = controller.current_gains()
            other_s = self._rate.seconds_a_round * mine / others if others else 0.0
        tokens, seconds = requests * self._rate.tokens_a_round, self._rate.seconds_a_round
        chosen = CostEstimate(0, tokens, seconds) if tokens and seconds else None
        other = CostEstimate(None, tokens, other_s) if tokens and other_s else None
        return DecisionMessage(mode.value, why, 0, 0.0, chosen, other)

    def _decide(self, candidates: _RoundCandidates, waited_s: float, answers: bool) -> DecisionMessage:
        """Decide a round with working drafters, though they may have drafted nothing for it."""
        choice, ranking = candidates.estimate.choice, candidates.ranking
        if self.mode is SpeculationMode.PLAIN and not choice.nodes and self._has_drafters():
            return self._decide_plain(candidates.requests)
        if not choice.nodes:
            why = _why_none(candidates, answers)
        elif ranking.forced:
            why = DecisionReason.FIXED
        elif self.mode_config is not None and self.mode_config.controller.exploring:
            why = DecisionReason.TRYING
        else:
            why = DecisionReason.PAYS
        chosen = CostEstimate(choice.nodes, choice.tokens, choice.seconds)
        requests, nodes, seconds = candidates.requests, ranking.nodes, candidates.seconds
        other = None
        if choice.nodes:
            other = CostEstimate(0, float(requests), float(seconds[0]))
        elif nodes and len(seconds) > 1:
            other = CostEstimate(1, requests + nodes[0][0], float(seconds[1]))
        return DecisionMessage(self._drafters.mode.value, why, choice.nodes, waited_s, chosen, other)

    def _candidates(self, pending: _PendingRound, steps: int) -> _RoundCandidates:
        """Return the round if it starts now, after `steps` awaited draft steps."""
        bounds, requests = self.bounds, pending.requests
        rate = self._rate.value(len(pending.chunks))  # requests in prefill wait too
        most = max(_CANDIDATES, _CANDIDATES_EACH * requests) if bounds.budget is None else bounds.budget
        least = rate * self.host.node_s / 2  # skip nodes that are worth less than their host time
        instant = self._drafters.lookup_sources if self._drafters.step_s else 0
        ranking = rank(pending.chunks, most, bounds.context, bounds.width, least, instant, pending.shapes)
        reaches = np.array([item[0] for item in ranking.nodes])
        seconds = self._round_seconds(pending, max(len(reaches), _CANDIDATES_EACH))
        averaged = seconds[: _CANDIDATES_EACH + 1]
        row_s = float(averaged[-1] - averaged[0]) / max(1, len(averaged) - 1)
        seconds = seconds[: len(reaches) + 1]
        choice = choose(reaches, requests, seconds, rate, bounds.max_tpot_s, ranking.forced)
        # Nodes below a leaf need rows, too: only a reach above the cost of a row is worth growing.
        leaves = np.maximum(ranking.leaves - rate * row_s, 0.0)
        estimate = RoundEstimate(choice, leaves, rate, self._drafters.step_s, steps, ranking.missed)
        return _RoundCandidates(requests, estimate, ranking, seconds)

    def _round_seconds(self, pending: _PendingRound, most: int) -> npt.NDArray[np.float64]:
        """Seconds of the round with 0 to `most` nodes: array of at most `most` + 1, as far as the cost table
        reaches."""
        rows = pending.rows
        most = max(0, min(most, MAX_ROWS - rows))
        forward_s = self.cost.span(rows, rows + most, pending.reading, pending.context)
        return forward_s + self.host.node_s * np.arange(most + 1)


def _any_drafted(chunks: Sequence[ScheduledChunk]) -> bool:
    return any((each.request.replica and each.request.replica.tree.root.tokens) for each in chunks)


def _why_none(candidates: _RoundCandidates, answers: bool) -> DecisionReason:
    """Why a round verifies no node though drafters work."""
    ranking = candidates.ranking
    if not candidates.requests:
        return DecisionReason.PROMPTS
    if not ranking.trees:
        return DecisionReason.ENDING
    if not ranking.nodes and ranking.missed:
        return DecisionReason.NOTHING_DRAFTED if answers else DecisionReason.NO_DRAFTER
    if len(candidates.seconds) < 2 and ranking.nodes:
        return DecisionReason.FULL
    return DecisionReason.LATE if candidates.estimate.choice.held_back else DecisionReason.NOT_WORTH


def cheapest_chunk(seconds: npt.NDArray[np.float64]) -> int:
    """Return the number of prompt tokens per round by which prefill is fastest.

    `seconds` [most + 1] is the time of a round with 0, 1, ... most of them. The result is `most` unless fewer
    are clearly faster. The time of the decoding requests counts too: a longer prefill takes more of their
    rounds.
    """
    most = len(seconds) - 1
    if most <= _MIN_PREFILL_TOKENS:
        return most
    prices = seconds[_MIN_PREFILL_TOKENS:] / np.arange(_MIN_PREFILL_TOKENS, most + 1)
    if prices.min() >= _CLEARLY_FASTER * prices[-1]:
        return most
    return _MIN_PREFILL_TOKENS + int(prices.argmin())


def fixed_shapes(
    chunks: Sequence[ScheduledChunk], default: FixedShape | None, depth: int
) -> dict[int, FixedShape]:
    """Return the fixed shapes of decoding requests by index of the chunk.

    Chains end at `depth`, the most tokens that a drafter guesses (0: no limit): rounds must not wait for others.
    """
    shapes: dict[int, FixedShape] = {}
    for index, chunk in enumerate(chunks):
        shape = chunk.request.options.shape or default
        if shape is not None and chunk.request.decoding and chunk.request.drafted:
            longest = depth if shape.chain and depth else shape.nodes
            shapes[index] = replace(shape, nodes=min(shape.nodes, longest))
    return shapes
