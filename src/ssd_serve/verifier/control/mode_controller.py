"""Chooses the mode of the next rounds: asynchronous drafts, synchronous drafts, or plain decoding.

The score of a mode is its forecast speed multiplied by a correction. The forecast follows from measured step
times and from the acceptance of the running requests' own texts. The correction is what rounds of the mode have
measured beside the forecast: messages, waits, a shared memory bus. Plain Python; knows no drafters and no trees.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ssd_serve.base.cost import CostTable, HostCost, Reading
from ssd_serve.verifier.drafters.pool import SpeculationMode

_MAX_DEPTH = 8
"""Levels that a forecast tries, with a node for each."""
_LEVELS_IN_FLIGHT = 3
"""Levels in verification while a concurrent drafter grows below them; its growth is useful only if all of
them are accepted."""
_STEPS_PER_LEVEL = 0.6
"""Steps that an inline draft takes for a verified level: a tree that is re-rooted has some of the next."""
_WINDOW = 8
"""Rounds between two decisions; also the rounds after a switch that are not counted, because a drafter has to
catch up or to fall silent."""
_MEMORY = 8
"""Windows over which a correction is averaged: a lasting disturbance counts after a second or two."""
_FADING = 1 / 32
"""Share of a correction that is forgotten in a window of another mode, divided by the windows that measured it. A
mode that did worse than forecast is tried again after some hundred rounds, and more rarely the more often it did."""
_SWITCH_MARGIN = 1.03
"""Factor by which another mode's score must exceed the running one's: a switch costs drafters their trees."""


@dataclass(frozen=True, slots=True)
class DecodingLoad:
    """A number of decoding `requests` of `context` tokens each."""

    requests: int
    context: float = 0.0

    @property
    def reading(self) -> Reading:
        """KV reads of a decode round without nodes."""
        tokens = int(self.requests * self.context)
        return Reading(tokens, tokens)


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
    costs: Mapping[SpeculationMode, CostTable],
    steps: Mapping[SpeculationMode, DraftStep],
    host: HostCost,
    acceptance: float,
) -> dict[SpeculationMode, float]:
    """Return the tokens a second of a request for each mode with a known draft step time. `acceptance` is the share
    of tree levels with an accepted node."""
    count, speeds = load.requests, dict[SpeculationMode, float]()
    for mode, cost in costs.items():
        forward_s = cost.span(count, count * (1 + _MAX_DEPTH), load.reading, load.context, live=False)
        seconds = [
            max(1e-9, float(forward_s[nodes]) + host.seconds(count, nodes))
            for nodes in range(0, len(forward_s), count)
        ]
        if mode is SpeculationMode.PLAIN:
            speeds[mode] = 1 / seconds[0]
        elif mode in steps and steps[mode].seconds > 0:
            speed = _sync_rate if mode is SpeculationMode.SYNC else _async_rate
            level_s = steps[mode].level_s(count)
            depths = range(1, _MAX_DEPTH + 1)
            speeds[mode] = max(speed(seconds[depth], depth, level_s, acceptance) for depth in depths)
    return speeds


def _sync_rate(round_s: float, depth: int, level_s: float, acceptance: float) -> float:
    """Tokens a second of a request where `depth` levels are grown before each round of `round_s`."""
    return _tokens(depth, acceptance) / (_STEPS_PER_LEVEL * depth * level_s + round_s)


def _async_rate(round_s: float, depth: int, level_s: float, acceptance: float) -> float:
    """The same where at most `depth` levels are verified of what grows meanwhile; a miss waits for one."""
    grown = min(float(depth), acceptance**_LEVELS_IN_FLIGHT * round_s / level_s)
    return _tokens(grown, acceptance) / (round_s + (1 - acceptance) * level_s)


def _tokens(depth: float, acceptance: float) -> float:
    return depth + 1 if acceptance >= 1 else float((1 - acceptance ** (depth + 1)) / (1 - acceptance))


@dataclass(frozen=True, slots=True)
class RunningTexts:
    """Describes the running requests for a forecast. `pending_prefill_s`: seconds that a mode's drafters must
    prefill before they can draft; modes without such work are left out."""

    load: DecodingLoad
    acceptance: float
    """Expected share of tree levels with an accepted node."""
    hopeful_acceptance: float
    """Upper estimate of it: a text that was hardly drafted yet may be easy."""
    steps: Mapping[SpeculationMode, DraftStep]
    remaining_tokens: float
    """Tokens of a request that may still come."""
    pending_prefill_s: Mapping[SpeculationMode, float] = field(default_factory=dict[SpeculationMode, float])


@dataclass(slots=True)
class _Correction:
    """Logarithm of the measured speed of a mode as a multiple of the forecast one."""

    log: float = 0.0
    windows: float = 0.0

    def add(self, ratio: float) -> None:
        self.windows = min(self.windows + 1.0, _MEMORY)
        self.log += (math.log(ratio) - self.log) / (self.windows + 1)

    def fade(self) -> None:
        self.log *= 1 - _FADING / (self.windows + 1)


@dataclass(slots=True)
class _Window:
    """Counted rounds since the last decision."""

    rounds: int = 0
    tokens: float = 0.0
    """Tokens of a request that lookups did not propose."""
    seconds: float = 0.0


class ModeController:
    """Chooses among decoding modes by the `costs` of their forwards and those of the `host`; the first runs first, the
    last is plain decoding. Corrections are kept for powers of two of running requests."""

    def __init__(self, costs: Mapping[SpeculationMode, CostTable], host: HostCost) -> None:
        self.costs = costs
        self.host = host
        self.exploring = False
        """True if the running mode is expected to be slower than another one: it is tried."""
        self.gains: dict[int, dict[SpeculationMode, float]] = {}
        """Speed of each mode as a multiple of plain decoding at the last decision, by power of two of running
        requests."""
        self._running = next(iter(costs))
        self._requests: tuple[int, ...] = ()
        self._corrections: dict[tuple[int, SpeculationMode], _Correction] = {}
        self._window = _Window()
        self._settling = 0

    def choose(self, requests: tuple[int, ...], texts: Callable[[], RunningTexts]) -> SpeculationMode:
        """Return the mode of the next round. `requests` are the numbers of the running requests; `texts` is called
        only if a decision is due: after a number of rounds, or because other requests run."""
        if requests and (requests != self._requests or self._window.rounds >= _WINDOW):
            self._decide(texts(), same=requests == self._requests)
            self._requests = requests
        return self._running

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        """Observe a round without prefill: `tokens` tokens of `requests` requests, without those that lookups
        proposed, in `seconds` seconds."""
        if self._settling:
            self._settling -= 1
        elif requests and tokens > 0 and seconds > 0:
            self._window.rounds += 1
            self._window.tokens += tokens / requests
            self._window.seconds += seconds

    def current_gains(self) -> tuple[float, float]:
        """Return the gain of the running mode at the last decision, and the best of the others; 0: unknown."""
        gains = self.gains.get(_power(len(self._requests)), {})
        others = [gain for mode, gain in gains.items() if mode is not self._running]
        return gains.get(self._running, 0.0), max(others, default=0.0)

    def _decide(self, texts: RunningTexts, same: bool) -> None:
        load, steps = texts.load, texts.steps
        expected = forecast(load, self.costs, steps, self.host, texts.acceptance)
        hopeful = forecast(load, self.costs, steps, self.host, texts.hopeful_acceptance)
        if self._window.rounds >= _WINDOW and same:
            self._learn(load, expected)
        self._window = _Window()
        factors = {mode: math.exp(self._correction(load, mode).log) for mode in expected}
        speeds = {mode: speed * factors[mode] for mode, speed in expected.items()}
        plain = speeds[SpeculationMode.PLAIN]
        scores = {mode: _with_prefill(hopeful[mode] * factors[mode], mode, texts, plain) for mode in hopeful}
        best = max(scores, key=scores.__getitem__)
        if scores[best] > _SWITCH_MARGIN * scores.get(self._running, 0.0):
            self._running, self._settling = best, _WINDOW
        self.exploring = max(speeds.values()) > _SWITCH_MARGIN * speeds.get(self._running, 0.0)
        self.gains[_power(load.requests)] = {mode: speed / plain for mode, speed in speeds.items()}

    def _learn(self, load: DecodingLoad, expected: Mapping[SpeculationMode, float]) -> None:
        """Correct the running mode by the last window, and forget a little about the others."""
        if self._running in expected:
            measured = self._window.tokens / self._window.seconds
            self._correction(load, self._running).add(measured / expected[self._running])
        for (_, mode), correction in self._corrections.items():
            if mode is not self._running:
                correction.fade()

    def _correction(self, load: DecodingLoad, mode: SpeculationMode) -> _Correction:
        """Return the correction of a mode; a new one starts as that of the nearest known load."""
        key = _power(load.requests), mode
        if key not in self._corrections:
            known = [
                (abs(math.log2(power / key[0])), each)
                for (power, of), each in self._corrections.items()
                if of is mode
            ]
            nearest = min(known, key=lambda item: item[0], default=(0.0, _Correction()))[1]
            self._corrections[key] = _Correction(nearest.log)
        return self._corrections[key]


def _with_prefill(speed: float, mode: SpeculationMode, texts: RunningTexts, plain: float) -> float:
    """Return the speed of a mode including the prefill of its drafters. A concurrent drafter lets the target decode
    plainly meanwhile; a synchronous one stops it."""
    prefill_s, tokens = texts.pending_prefill_s.get(mode, 0.0), max(1.0, texts.remaining_tokens)
    lost_s = prefill_s * max(0.0, 1 - plain / speed) if mode is SpeculationMode.ASYNC else prefill_s
    return tokens / (tokens / speed + lost_s)


def _power(requests: int) -> int:
    """Return the nearest power of two by ratio."""
    return 1 << round(math.log2(max(1, requests)))
