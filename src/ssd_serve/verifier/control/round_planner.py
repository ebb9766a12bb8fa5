"""Decides each round: the mode, the nodes, and whether the trees grow first.

The one objective is the expected number of committed tokens per second, under measured times of forwards,
host work, waits and modes. Knows drafters as something to wait for; runs no forward and owns no request.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd_serve.base.cost import MAX_ROWS, CostTable, HostCost, Reading
from ssd_serve.base.messages import CostEstimate, DecisionMessage, DecisionReason
from ssd_serve.verifier.control.budget import Rate, RoundEstimate, WaitPolicy, choose
from ssd_serve.verifier.control.execution import ExecutionPlanner, ModeConfig
from ssd_serve.verifier.control.forecast import LevelAcceptance, ModeForecaster
from ssd_serve.verifier.control.ranking import RankedNode, Ranking, rank
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.request import Request
from ssd_serve.verifier.scheduler import ScheduledChunk

_MIN_PREFILL_TOKENS = 16
_MIN_CHUNK_SAVING = 0.85
"""A smaller chunk than the largest must cost at most this share of the largest one's time per row. A smaller
saving may be noise, and smaller chunks delay the first token of a prompt."""
_EQUAL_COST = 1.03
_CANDIDATES, _CANDIDATES_EACH = 64, 8
"""Most nodes of a round, and per request if there are many, without a budget in the settings; the cost model
chooses among them."""
_AVERAGED_NODES = 8
"""Number of nodes over which the cost of one more node is averaged."""


@dataclass(frozen=True, slots=True)
class DraftBounds:
    """Limits of drafting. `budget`: maximum number of nodes of a round; None: the cost model alone decides.
    `width`: nodes of a draft step. `max_tpot_s`: target for the time per token of a running request."""

    context: int
    budget: int | None
    width: int
    max_tpot_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements of a round: `requests` decoding requests and `prompts` prompts in `rows` rows gave the
    decoding ones `tokens` tokens. `levels`: tree levels with nodes that their texts reached."""

    requests: int
    prompts: int
    prefill_tokens: int
    rows: int
    reading: Reading
    tokens: int
    forward_s: float
    host_s: float
    total_s: float
    levels: int


class _PendingRound(NamedTuple):
    """Work of a round without nodes: `rows` rows of `requests` decoding requests and of prompts."""

    chunks: Sequence[ScheduledChunk]
    requests: int
    rows: int
    reading: Reading

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
        self.execution = ExecutionPlanner(drafters, cost, policy, mode_config, clock)
        self.host = host or HostCost()
        self._drafters = drafters
        self._bounds = bounds
        self._rate = Rate()
        self._clock = clock
        self._level_acceptance = LevelAcceptance()
        self._expectations: ModeForecaster | None = None
        if mode_config is not None:
            self._expectations = ModeForecaster(
                drafters, self.execution, mode_config, bounds.width, self.host, self._level_acceptance
            )

    @property
    def cost(self) -> CostTable:
        """Cost of forwards where the next round computes."""
        return self.execution.cost

    def choose(
        self, running: Sequence[Request], chunks: Sequence[ScheduledChunk], drain: Callable[[], object]
    ) -> tuple[list[RankedNode], DecisionMessage]:
        """Return the nodes of a round of these chunks, best first, and the decision; `drain` receives pending
        messages. Running requests without a chunk wait for the prefill of their prompt."""
        requests = sum([chunk.request.decoding for chunk in chunks])
        pending = _PendingRound(
            chunks, requests, sum([len(chunk.slots) for chunk in chunks]), _reading(chunks)
        )
        if self._expectations is not None:
            self._expectations.begin(running, pending.context)
        self.execution.choose(len(running), requests, pending.rows, pending.reading)
        if self.execution.prefilling_alone:
            return [], DecisionMessage(SpeculationMode.PLAIN.value, DecisionReason.PROMPTS, 0, 0.0)
        if not self._drafters.working or self._bounds.budget == 0:
            return [], self._decide_plain(requests)
        waited_s, answers = 0.0, True
        candidates = self._candidates(pending, 0)
        while (
            requests
            and (answers := self._drafters.worth_waiting())
            and self.execution.policy.should_wait(estimate := candidates.estimate)
        ):
            started = self._clock()
            self._drafters.wait(2 * max(estimate.step_s, 1e-3))
            drain()
            spent_s = self._clock() - started
            waited_s += spent_s
            candidates = self._candidates(pending, estimate.steps + 1)
            self.execution.policy.observe(estimate, candidates.estimate, spent_s)
        nodes = candidates.ranking.nodes[: candidates.estimate.choice.nodes]
        return nodes, self._decide(candidates, waited_s, answers)

    def prefill_tokens(self, requests: int, most: int) -> int:
        """Return how many of `most` prompt tokens a round should prefill with `requests` decoding requests.

        It is the number by which prefill is fastest. A target for the time per token limits it, but it stays
        large enough that prompts do not starve.
        """
        seconds = self.cost.span(requests, requests + most)
        rows = cheapest_chunk(seconds)
        limit_s = self._bounds.max_tpot_s
        if limit_s < math.inf and requests:
            spent = seconds + self.host.seconds(requests, 0)
            fitting = int(np.searchsorted(spent, limit_s * self._rate.tokens_a_round, side="right")) - 1
            rows = min(rows, max(_MIN_PREFILL_TOKENS, fitting))
        return min(most, rows)

    def mode_gains(self) -> dict[int, dict[str, float]]:
        """Return the gain of each mode as a multiple of plain decoding, by the middle number of requests of
        each bucket."""
        mode_config = self.execution.mode_config
        gains = mode_config.controller.gains() if mode_config is not None else {}
        return {
            requests: {mode.value: gain for mode, gain in each.items()} for requests, each in gains.items()
        }

    def observe(self, round_: Round) -> None:
        """Take a round's times into account; those that read prompts do not tell what decoding takes."""
        nodes = round_.rows - round_.requests - round_.prefill_tokens
        self.execution.observe(round_.rows, nodes, round_.reading, round_.forward_s)
        mode_config = self.execution.mode_config
        if mode_config is not None and self._drafters.num_joined:
            self._update_controller(round_, mode_config)
        if round_.prompts:
            return
        self.host.observe(round_.requests, round_.rows - round_.requests, round_.host_s)
        self._rate.observe(round_.requests, round_.tokens, round_.total_s)
        self._level_acceptance.observe(round_.tokens - round_.requests, round_.levels)

    def _update_controller(self, round_: Round, mode_config: ModeConfig) -> None:
        """Report to the mode controller what plain decoding would have taken for the same tokens and prompt
        rows."""
        cost, reading = mode_config.costs[SpeculationMode.PLAIN], round_.reading
        rows = round_.requests + round_.prefill_tokens
        if not round_.prompts:
            plain_s = cost.first_seconds(rows, Reading(reading.context, reading.context))
            gained_s = round_.tokens / rows * plain_s
        else:
            share = rows / round_.rows  # of what attention read: nodes read too
            plain_s = cost.first_seconds(rows, Reading(reading.context, int(share * reading.row_context)))
            # Requests in prefill decode soon: a token saves its share of a round.
            together = round_.requests + round_.prompts
            saved_s = cost.first_seconds(together, Reading()) / together
            gained_s = plain_s + (round_.tokens - round_.requests) * saved_s
        mode_config.controller.observe(gained_s, round_.total_s, plain_s, prefill=round_.prompts > 0)

    def _decide_plain(self, requests: int) -> DecisionMessage:
        """Decide a round without drafts."""
        mode_config = self.execution.mode_config
        controller = mode_config.controller if mode_config is not None else None
        mode, other_s = self._drafters.mode, 0.0
        if self._bounds.budget == 0:
            why = DecisionReason.OFF
        elif controller is None or mode is not SpeculationMode.PLAIN or not self._drafters.num_joined:
            why = DecisionReason.NO_DRAFTER
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
        choice = candidates.estimate.choice
        if not choice.nodes:
            why = _why_none(candidates, answers)
        elif (mode_config := self.execution.mode_config) is not None and mode_config.controller.exploring:
            why = DecisionReason.TRYING
        else:
            why = DecisionReason.PAYS
        chosen = CostEstimate(choice.nodes, choice.tokens, choice.seconds)
        requests, nodes, seconds = candidates.requests, candidates.ranking.nodes, candidates.seconds
        other = None
        if choice.nodes:
            other = CostEstimate(0, float(requests), float(seconds[0]))
        elif nodes and len(seconds) > 1:
            other = CostEstimate(1, requests + nodes[0][0], float(seconds[1]))
        return DecisionMessage(self._drafters.mode.value, why, choice.nodes, waited_s, chosen, other)

    def _candidates(self, pending: _PendingRound, steps: int) -> _RoundCandidates:
        """Return the round if it starts now, after `steps` awaited draft steps."""
        bounds, requests = self._bounds, pending.requests
        rate = self._rate.value(len(pending.chunks))  # requests in prefill wait too
        most = max(_CANDIDATES, _CANDIDATES_EACH * requests) if bounds.budget is None else bounds.budget
        least = rate * self.host.node_s / 2  # skip nodes that are worth less than their host time
        instant = self._drafters.lookup_sources if self._drafters.step_s else 0
        ranking = rank(pending.chunks, most, bounds.context, bounds.width, least, instant)
        reaches = np.array([item[0] for item in ranking.nodes])
        seconds = self._round_seconds(pending, max(len(reaches), _AVERAGED_NODES))
        shared_cores = seconds[: _AVERAGED_NODES + 1]
        row_s = float(shared_cores[-1] - shared_cores[0]) / max(1, len(shared_cores) - 1)
        seconds = seconds[: len(reaches) + 1]
        choice = choose(reaches, requests, seconds, rate, bounds.max_tpot_s)
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
    rows = np.arange(_MIN_PREFILL_TOKENS, most + 1)
    prices = seconds[_MIN_PREFILL_TOKENS:] / rows
    if prices.min() >= _MIN_CHUNK_SAVING * prices[-1]:
        return most
    return int(rows[prices <= _EQUAL_COST * prices.min()][-1])


def _reading(chunks: Sequence[ScheduledChunk]) -> Reading:
    """KV reads of the pending tokens alone."""
    contexts = [len(chunk.request.slots) for chunk in chunks]
    rows = [len(chunk.slots) for chunk in chunks]
    return Reading(sum(contexts), sum(a * b for a, b in zip(contexts, rows, strict=True)))
