"""Forecasts the gain of each mode before it was tried, from measured step times and level acceptance.

The mode controller starts from the forecast and tries only modes that it puts near the best; measured rounds
count more as soon as there are some. `ModeForecaster` reads step times of drafters; chooses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssd_serve.base.cost import CostTable, HostCost, Reading
from ssd_serve.verifier.control.execution import ExecutionPlanner, ModeConfig
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.request import Request

_ACCEPTANCE_PRIOR = 0.7
"""Prior of the acceptance rate of a tree level."""
_PRIOR_LEVELS = 16.0
"""Levels that this weighs."""
_DISCOUNT = 1 - 1 / 1024
_MAX_DEPTH = 8
_NODES_PER_LEVEL = (1, 2)
"""Nodes that a round verifies for each level that a tree has grown: fewer where many requests share it."""
_PREFILL_TOKENS = 256
"""Typical prompt tokens of a round with prefill."""
_LEVELS_IN_FLIGHT = 3
"""Levels in verification while a concurrent drafter grows below them; its growth is useful only if all of
them are accepted."""
_STEPS_PER_LEVEL = 0.6
"""Steps that an inline draft takes for a verified level: a tree that is re-rooted has some of the next."""


class LevelAcceptance:
    """Share of tree levels with verified nodes at which the target's choice was among them."""

    def __init__(self) -> None:
        self._level_acceptance, self._levels = _ACCEPTANCE_PRIOR * _PRIOR_LEVELS, _PRIOR_LEVELS

    @property
    def share(self) -> float:
        """Acceptance rate, from 0 to 1."""
        return self._level_acceptance / self._levels

    def observe(self, acceptance_rate: int, levels: int) -> None:
        """Count `levels` tree levels with nodes; `acceptance_rate` of them had an accepted node. Tokens that
        were not drafted or not verified do not count as rejected."""
        faded = _DISCOUNT**levels
        self._level_acceptance = faded * self._level_acceptance + acceptance_rate
        self._levels = faded * self._levels + levels


@dataclass(frozen=True, slots=True)
class DecodingLoad:
    """A number of decoding `requests` of `context` tokens each."""

    requests: int
    context: float = 0.0

    def reading(self, nodes_each: int = 0) -> Reading:
        """Return the KV reads of a decode round with `nodes_each` nodes per request."""
        tokens = int(self.requests * self.context)
        return Reading(tokens, tokens * (1 + nodes_each))


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Draft step of a mode: its seconds (0: unknown), and the nodes that it expands over all requests."""

    seconds: float
    width: int

    def level_s(self, requests: int) -> float:
        """Seconds for one level more of every request's tree."""
        return self.seconds * max(1.0, requests / self.width)


def forecast(
    load: DecodingLoad,
    unit_s: float,
    costs: Mapping[SpeculationMode, CostTable],
    steps: Mapping[SpeculationMode, DraftStep],
    host: HostCost,
    acceptance_rate: float,
) -> dict[SpeculationMode, float]:
    """Return tokens per request in `unit_s` seconds for each mode with a known draft step time.
    `acceptance_rate` is `LevelAcceptance.share`."""
    gains: dict[SpeculationMode, float] = {}
    shapes = [(depth, depth * nodes) for depth in range(1, _MAX_DEPTH + 1) for nodes in _NODES_PER_LEVEL]
    for mode, cost in costs.items():
        if mode is SpeculationMode.PLAIN:
            gains[mode] = unit_s / _round_s(cost, host, load, 0)
        elif mode in steps and steps[mode].seconds > 0:
            speed = _sync_rate if mode is SpeculationMode.SYNC else _async_rate
            level_s = steps[mode].level_s(load.requests)
            gains[mode] = unit_s * max(
                speed(_round_s(cost, host, load, nodes), depth, level_s, acceptance_rate)
                for depth, nodes in shapes
            )
    return gains


def with_prefill(gain: float, plain_s: float, read_s: float, concurrent: bool) -> float:
    """Return the gain of a mode including its drafters' prefill of `read_s` seconds, for texts of `plain_s`
    seconds of plain decoding. A `concurrent` drafter lets the target decode plainly meanwhile, a synchronous
    one stops it."""
    lost_s = read_s * max(0.0, 1 - 1 / gain) if concurrent else read_s
    return plain_s / (plain_s / gain + lost_s)


def prefill_slowdown_by_drafts(plain: CostTable, prefill_s_per_token: float) -> float:
    """Factor by which rounds with prefill take longer if the target's device prefills the draft as well, at
    `prefill_s_per_token`."""
    return 1 + prefill_s_per_token * _PREFILL_TOKENS / max(
        plain.first_seconds(_PREFILL_TOKENS, Reading()), 1e-9
    )


def _sync_rate(round_s: float, depth: int, level_s: float, acceptance_rate: float) -> float:
    """Tokens a second of a request where `depth` levels are grown before each round of `round_s`."""
    return _tokens(depth, acceptance_rate) / (_STEPS_PER_LEVEL * depth * level_s + round_s)


def _async_rate(round_s: float, depth: int, level_s: float, acceptance_rate: float) -> float:
    """The same where at most `depth` levels are verified of what grows meanwhile; a miss waits for one."""
    grown = min(float(depth), acceptance_rate**_LEVELS_IN_FLIGHT * round_s / level_s)
    return _tokens(grown, acceptance_rate) / (round_s + (1 - acceptance_rate) * level_s)


def _tokens(depth: float, acceptance_rate: float) -> float:
    return (
        depth + 1
        if acceptance_rate >= 1
        else float((1 - acceptance_rate ** (depth + 1)) / (1 - acceptance_rate))
    )


def _round_s(cost: CostTable, host: HostCost, load: DecodingLoad, nodes_each: int) -> float:
    nodes = nodes_each * load.requests
    forward_s = cost.seconds(load.requests + nodes, load.reading(nodes_each))
    return max(1e-9, forward_s + host.seconds(load.requests, nodes))


class ModeForecaster:
    """Forecasts the gain of each mode. `width`: nodes of a draft step; the planner updates `host` and
    `acceptance_rate`."""

    def __init__(
        self,
        drafters: DrafterPool,
        execution: ExecutionPlanner,
        mode_config: ModeConfig,
        width: int,
        host: HostCost,
        acceptance_rate: LevelAcceptance,
    ) -> None:
        self._drafters = drafters
        self._execution = execution
        self._costs = mode_config.costs
        self._width = width
        self._host = host
        self._level_acceptance = acceptance_rate
        self._running: Sequence[Request] = ()
        self._context = 0.0
        mode_config.controller.forecast = self._forecast
        mode_config.controller.remaining_benefit = self._remaining_benefit
        mode_config.controller.prefill_slowdown = self._prefill_slowdown

    def begin(self, running: Sequence[Request], context: float) -> None:
        """Start a round with these running requests; `context` is their average number of tokens."""
        self._running, self._context = tuple(running), context

    def _forecast(self, requests: int) -> dict[SpeculationMode, float]:
        """Return the expected gain of each mode with `requests` requests."""
        steps = {mode: DraftStep(self._drafters.step_s_in(mode), self._width) for mode in self._costs}
        load = DecodingLoad(requests, self._context)
        unit_s = self._costs[SpeculationMode.PLAIN].first_seconds(requests, load.reading())
        gains = forecast(
            load, unit_s, self._execution.costs(requests), steps, self._host, self._level_acceptance.share
        )
        late = {
            SpeculationMode.SYNC: 1 - self._overlapping_share,
            SpeculationMode.ASYNC: float(self._execution.prefills_alone),
        }
        for mode, share in late.items():
            if mode in gains and share:
                plain_s, read_s = self._plain_and_prefill_s(mode)
                concurrent = mode is SpeculationMode.ASYNC
                gains[mode] = with_prefill(gains[mode], plain_s, share * read_s, concurrent)
        return gains

    @property
    def _overlapping_share(self) -> float:
        """The share of prompts that an inline draft reads while others decode and wait for it: in rounds that
        read prompts. The prompt of a request alone is read when its first round that decodes waits."""
        return 1 - 1 / max(1, len(self._running))

    def _remaining_benefit(self, mode: SpeculationMode) -> float:
        """Share of a mode's gain that is left if it starts now: its drafters must prefill all running
        requests, for fewer remaining tokens."""
        if mode is SpeculationMode.PLAIN or not (unread_s := self._drafters.pending_prefill_s(mode)):
            return 1.0
        left_s = self._plain_s(sum([request.remaining_tokens for request in self._running]))
        whole_s, read_s = self._plain_and_prefill_s(mode)
        return min(1.0, left_s * (whole_s + read_s) / (whole_s * (left_s + unread_s)))

    def _plain_and_prefill_s(self, mode: SpeculationMode) -> tuple[float, float]:
        """Seconds of plain decoding for the running requests from beginning to end, and those for which the
        layout's drafters read their prompts."""
        prompts = sum([request.prompt_length for request in self._running])
        tokens = sum([request.parameters.max_tokens for request in self._running])
        return max(self._plain_s(tokens), 1e-9), self._drafters.prefill_s_per_token(mode) * prompts

    def _prefill_slowdown(self, mode: SpeculationMode) -> float:
        """Expected factor by which the mode slows rounds with prefill: synchronous drafters prefill on the
        target's device."""
        if mode is not SpeculationMode.SYNC:
            return 1.0
        return prefill_slowdown_by_drafts(
            self._costs[SpeculationMode.PLAIN],
            self._overlapping_share * self._drafters.prefill_s_per_token(mode),
        )

    def _plain_s(self, tokens: int) -> float:
        """Return the seconds of plain decoding for `tokens` tokens of all running requests together."""
        requests = len(self._running)
        return (
            tokens / max(1, requests) * self._costs[SpeculationMode.PLAIN].first_seconds(requests, Reading())
        )
