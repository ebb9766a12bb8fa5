"""Chooses the decoding mode by the measured gain of each mode, by level of load.

The budget prices nodes, but not what a drafter costs by its presence: messages, waits, a shared memory bus, a
core that the target could use. So modes are the arms of a bandit with a prior (discounted upper confidence
bounds): the forecast from step times. The mode with the best score runs; a score is the measured gain plus a
bonus that grows while the mode does not run. A sudden change of round times discounts all measurements. Plain
Python; knows no drafters and no trees.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

from ssd_serve.verifier.control.load_bucket import DiscountedMean, LoadBucket, ModeT, RegressionTracker

_EXPLORATION = 0.6
"""Exploration bonus of a mode that was measured for one round; it falls with the root of the rounds."""
_PRIOR_GAIN = 1.2
"""Prior gain of a drafting mode without a forecast; its weight is one round."""
_FORECAST_WEIGHT = 32.0
"""Weight of a forecast in rounds. A mode that is forecast clearly below the best is not tried, and one is not
left after a few texts that are hard to draft."""
_FORECAST_PRIOR = 4.0
"""Pseudo-count of the prior that a mode performs as forecast."""
_PLAIN_PRIOR = 64.0
"""Permanent pseudo-count of the cost model's forecast for plain decoding: a mode that leads clearly is not
interrupted to measure plain decoding."""
_LOADED_ROUNDS = 6.0
"""Rounds that weighs what an earlier process has found."""
_PREFILL_PRIOR, _PREFILL_FORECAST_WEIGHT = 4.0, 32.0
"""Pseudo-counts of two priors on prefill slowdown: that of other buckets, and the forecast. They keep one
descheduled round from counting as a slow mode."""
_DECIDE_EVERY, _FORECAST_EVERY = 8, 64
_SWITCH_MARGIN = 1.02
"""Factor by which another mode's score must exceed the running one's: a switch costs drafters their trees."""
_LOAD_SMOOTHING = 1 / 16
_DISCOUNTED_ROUNDS, _DISCOUNTED_RUNNING_ROUNDS = 4.0, 16.0
"""Weights in rounds of earlier measurements after a sudden change of round times: of the other modes, and of
the running one."""
_BUCKET_HYSTERESIS = 0.15
"""Hysteresis of load buckets: share of an edge by which the load must exceed it."""


class ModeController(Generic[ModeT]):
    """Chooses among decoding modes; the first runs first, the last is plain decoding. Load buckets are
    centred on powers of two of running requests, those in prefill included."""

    def __init__(self, modes: Sequence[ModeT]) -> None:
        self.forecast: Callable[[int], Mapping[ModeT, float]] | None = None
        """Callback: expected gain of each mode with this number of requests."""
        self.prefill_slowdown: Callable[[ModeT], float | None] = lambda _: None
        """Callback: expected factor by which a mode slows rounds with prefill; None: unknown."""
        self.remaining_benefit: Callable[[ModeT], float] = lambda _: 1.0
        """Callback: share of a mode's gain that running requests still get if it starts now, after its
        drafters' prefill."""
        self._modes = tuple(modes)
        self._plain = self._modes[-1]
        self._buckets: dict[int, LoadBucket[ModeT]] = {}
        self._load = 0.0
        self._exponent = 0
        self._last: ModeT | None = None
        """Mode of the last round."""

    def choose(self, requests: int, decoding: bool = True) -> ModeT:
        """Return the mode of the next round while `requests` requests run, of which some are `decoding` or
        none.

        The bucket changes by the smoothed load, clearly past its edge, or by a sudden jump: a switch costs
        drafters their trees. It does not fall while nothing decodes, since a first prompt may be that of a
        burst. The running mode stays if the mode of a new bucket would start too late.
        """
        if decoding or requests >= self._load:
            jumped = requests >= 2 * self._load or 2 * requests <= self._load
            self._load += (1.0 if jumped else _LOAD_SMOOTHING) * (requests - self._load)
            least = 2 ** (self._exponent - 0.5) if self._exponent else 0.0
            if (
                not least * (1 - _BUCKET_HYSTERESIS)
                <= self._load
                < 2 ** (self._exponent + 0.5) * (1 + _BUCKET_HYSTERESIS)
            ):
                self._exponent = _exponent(self._load)
        bucket = self._bucket_at(self._exponent)
        mode = self._last
        if mode is not None and bucket.running != mode and self._starts_too_late(bucket, mode):
            bucket.switch(mode, settled=True)
        self._last = bucket.running
        return bucket.running

    def _starts_too_late(self, bucket: LoadBucket[ModeT], now: ModeT) -> bool:
        """Return whether the bucket's mode starts so slowly that its score is below that of the mode that
        runs."""
        share = self.remaining_benefit(bucket.running)
        return share < 1 and share * self._ucb_score(bucket, bucket.running) <= self._ucb_score(bucket, now)

    @property
    def exploring(self) -> bool:
        """True if the mode of the next round is a trial: another one was the best at the last decision."""
        bucket = self._buckets.get(self._exponent)
        return bucket is not None and bucket.explores

    def current_gains(self) -> tuple[float, float]:
        """Return the gain of the running mode at this load, and the best gain of the others; 0: unknown."""
        bucket = self._buckets.get(self._exponent)
        if bucket is None:
            return 0.0, 0.0
        others = [rounds.gain for mode, rounds in bucket.decoding.items() if mode != bucket.running]
        return bucket.decoding[bucket.running].gain, max(others, default=0.0)

    def gains(self) -> dict[int, dict[ModeT, float]]:
        """Return the gain of each mode as a multiple of plain decoding, by the middle number of requests of
        each bucket; 0: unknown."""
        return {
            1 << exponent: {mode: rounds.gain for mode, rounds in bucket.decoding.items()}
            for exponent, bucket in sorted(self._buckets.items())
        }

    def load_prior(self, gains: Mapping[int, Mapping[ModeT, float]]) -> None:
        """Start with the gains that an earlier process measured: the best mode runs, and all are still
        tried."""
        for requests, by_way in gains.items():
            bucket = self._bucket_at(_exponent(requests))
            for mode, gain in by_way.items():
                if mode in bucket.decoding and gain > 0:
                    bucket.decoding[mode] = DiscountedMean(
                        gain * _LOADED_ROUNDS, _LOADED_ROUNDS, _LOADED_ROUNDS
                    )
            bucket.running = self._best(bucket)

    def observe(self, gained_s: float, seconds: float, plain_s: float, prefill: bool = False) -> None:
        """Record that the last chosen round took `seconds`.

        Plain decoding should take `gained_s` for the same tokens, and `plain_s` for one of its rounds. Rounds
        with `prefill` count too, since drafting slows them, but separately. Their times are less predictable,
        and their number does not depend on the mode.
        """
        if gained_s <= 0 or seconds <= 0 or plain_s <= 0:
            return
        bucket = self._bucket_at(self._exponent)
        bucket.count_time(gained_s, prefill)
        settled = bucket.settled
        if prefill:
            if settled:
                bucket.prefill[bucket.running].add(gained_s, seconds)
            return
        bucket.age()
        if settled:
            bucket.decoding[bucket.running].add(gained_s / plain_s, seconds / plain_s)
            change = bucket.trend.observe(seconds / plain_s)
            if change:
                self._track_regression(bucket, slower=change > 0)
                self._discount(bucket, math.exp(change))
        for mode, regression in bucket.regressions.items():
            regression.observe(own=mode == bucket.running)
        if bucket.rounds % _DECIDE_EVERY == 0:
            self._retry_regressed(bucket)
            self._forecast(bucket)
            self._reconsider(bucket)

    def _reconsider(self, bucket: LoadBucket[ModeT]) -> None:
        """Switch to the mode with the best score if it clearly exceeds that of the running one."""
        scores = {mode: self._ucb_score(bucket, mode) for mode in self._modes}
        current = scores[bucket.running]
        worth = {
            mode: score * self.remaining_benefit(mode)
            for mode, score in scores.items()
            if score > _SWITCH_MARGIN * current
        }
        mode = max(worth, key=worth.__getitem__, default=bucket.running)
        if worth.get(mode, 0.0) > current:
            bucket.switch(mode)
        best = self._best(bucket)
        lead = self._gain(bucket, best) * self.remaining_benefit(best)
        bucket.explores = best != bucket.running and lead > self._gain(bucket, bucket.running)

    def _track_regression(self, bucket: LoadBucket[ModeT], slower: bool) -> None:
        """Note a sudden change: a slower mode may recover, a faster one has recovered."""
        mode = bucket.running
        if slower:
            bucket.regressions.setdefault(mode, RegressionTracker(bucket.decoding[mode].gain))
            return
        bucket.regressions.pop(mode, None)
        for regression in bucket.regressions.values():
            regression.retry_soon()

    def _retry_regressed(self, bucket: LoadBucket[ModeT]) -> None:
        """Reset modes that regressed to their former gain, from time to time, so that they are tried
        again."""
        for mode, regression in tuple(bucket.regressions.items()):
            gives = bucket.decoding[mode].gain
            if regression.has_recovered(gives):
                del bucket.regressions[mode]
            elif bucket.running != mode and regression.should_retry(
                gives, self._decoding(bucket, bucket.running)
            ):
                bucket.decoding[mode] = DiscountedMean(regression.gain, 1.0, 1.0)

    def _discount(self, changed: LoadBucket[ModeT], slower: float) -> None:
        """Rounds take `slower` times as long as before: all that was found is older than that."""
        for bucket in self._buckets.values():
            bucket.prior = min(bucket.prior, _DISCOUNTED_ROUNDS / _FORECAST_WEIGHT)
            for mode, rounds in bucket.decoding.items():
                if bucket is changed and mode == bucket.running:
                    rounds.discount(_DISCOUNTED_RUNNING_ROUNDS, slower)
                else:
                    rounds.discount(_DISCOUNTED_ROUNDS, math.sqrt(slower))  # it may be slower too

    def _forecast(self, bucket: LoadBucket[ModeT]) -> None:
        if self.forecast is not None and (not bucket.forecast or bucket.rounds % _FORECAST_EVERY == 0):
            bucket.raw_forecast = dict(self.forecast(1 << self._exponent))
        bucket.forecast = {
            mode: self._forecast_correction(bucket, mode) * gain for mode, gain in bucket.raw_forecast.items()
        }

    def _forecast_correction(self, bucket: LoadBucket[ModeT], mode: ModeT) -> float:
        """Factor between measured and forecast gain: of this mode in other buckets, the nearest most, and of
        all drafting modes in this one. Texts that are easy to draft are so in each mode."""
        seen = [(bucket, each, bucket.prior) for each in self._modes if self._plain not in (each, mode)]
        for exponent, other in self._buckets.items():
            if other is not bucket:
                seen.append((other, mode, 1 / abs(exponent - self._exponent)))
        correction, weights = 0.0, _FORECAST_PRIOR
        for where, each, share in seen:
            gave, is_forecast = where.decoding[each], where.raw_forecast.get(each, 0.0)
            if gave.gain and is_forecast > 0:
                weight = share * min(gave.rounds, _FORECAST_WEIGHT)
                correction += weight * math.log(gave.gain / is_forecast)
                weights += weight
        return math.exp(correction / weights)

    def _bucket_at(self, exponent: int) -> LoadBucket[ModeT]:
        """Return the bucket; a new one starts with the best mode of the nearest known bucket."""
        bucket = self._buckets.get(exponent)
        if bucket is None:
            nearest = min(self._buckets, key=lambda known: abs(known - exponent), default=None)
            best = self._modes[0] if nearest is None else self._best(self._buckets[nearest])
            decoding, prefill = ({mode: DiscountedMean() for mode in self._modes} for _ in range(2))
            bucket = self._buckets[exponent] = LoadBucket(best, decoding, prefill)
        return bucket

    def _best(self, bucket: LoadBucket[ModeT]) -> ModeT:
        """Return the measured mode with the largest gain; the running one among equals."""
        known = [
            mode
            for mode in self._modes
            if bucket.decoding[mode].gain or mode in (self._plain, bucket.running)
        ]
        return max(known, key=lambda mode: (self._gain(bucket, mode), mode == bucket.running))

    def _gain(self, bucket: LoadBucket[ModeT], mode: ModeT) -> float:
        """Gain over decoding and prefill together, at this bucket's share of prefill."""
        return self._total_gain(bucket, self._decoding(bucket, mode), self._prefill_time(bucket, mode)[0])

    def _ucb_score(self, bucket: LoadBucket[ModeT], mode: ModeT) -> float:
        """Upper confidence bound of the gain."""
        decoding, (prefill_time, is_forecast) = self._decoding(bucket, mode), self._prefill_time(bucket, mode)
        rounds = bucket.decoding[mode].rounds + self._prior(bucket, mode)[1]
        more = 1 + _EXPLORATION / math.sqrt(max(rounds, 1e-6)) / decoding
        return self._total_gain(bucket, decoding * more, prefill_time if is_forecast else prefill_time / more)

    @staticmethod
    def _total_gain(bucket: LoadBucket[ModeT], decoding: float, prefill_time: float) -> float:
        share = bucket.prefill_share
        return 1 / ((1 - share) / decoding + share * prefill_time)

    def _prior(self, bucket: LoadBucket[ModeT], mode: ModeT) -> tuple[float, float]:
        """Return the prior of a mode's gain and its weight in rounds."""
        if mode in bucket.forecast:
            return bucket.forecast[mode], bucket.prior * (
                1.0 if mode in bucket.regressions else _FORECAST_WEIGHT
            )
        return (1.0, _PLAIN_PRIOR) if mode == self._plain else (_PRIOR_GAIN, bucket.prior)

    def _prefill_time(self, bucket: LoadBucket[ModeT], mode: ModeT) -> tuple[float, bool]:
        """Time of rounds with prefill in units of the cost model, and whether it is a forecast. Without
        measurements of this mode, it is that of the mode that slows prefill least, times the expected
        slowdown."""
        mine = bucket.prefill[mode]
        known = {each: rounds.gain for each, rounds in bucket.prefill.items() if rounds.gain}
        if not known:
            return 1 / self._decoding(bucket, mode), False
        least = {each: 1 / (gain * self._expected_prefill_slowdown(each)) for each, gain in known.items()}
        best = min(least, key=least.__getitem__)
        is_forecast = None not in (self.prefill_slowdown(mode), self.prefill_slowdown(best))
        weight = _PREFILL_FORECAST_WEIGHT if is_forecast else _PREFILL_PRIOR
        seen = mine.rounds / mine.gain if mine.gain else 0.0
        prefill_time = (seen + weight * self._expected_prefill_slowdown(mode) * least[best]) / (
            mine.rounds + weight
        )
        return prefill_time, is_forecast

    def _expected_prefill_slowdown(self, mode: ModeT) -> float:
        """Factor by which rounds with prefill take longer than in plain decoding: the forecast, and the
        measurements of all buckets that have both."""
        prefill_slowdown = self.prefill_slowdown(mode)
        rounds = _PREFILL_PRIOR if prefill_slowdown is None else _PREFILL_FORECAST_WEIGHT
        slower = rounds * ((prefill_slowdown or 1.0) - 1)
        for bucket in self._buckets.values():
            plain, mine = bucket.prefill[self._plain], bucket.prefill[mode]
            if plain.gain and mine.gain:
                both = min(plain.rounds, mine.rounds)
                slower += both * (plain.gain / mine.gain - 1)
                rounds += both
        return 1 + slower / rounds

    def _decoding(self, bucket: LoadBucket[ModeT], mode: ModeT) -> float:
        """Gain in decoding: the measured one, blended with the prior while there are few rounds."""
        seen, (prior, weight) = bucket.decoding[mode], self._prior(bucket, mode)
        if mode not in bucket.forecast:
            return seen.gain or prior
        return (seen.gain * seen.rounds + prior * weight) / max(seen.rounds + weight, 1e-9)


def _exponent(requests: float) -> int:
    """Return the exponent of the nearest power of two by ratio."""
    return round(math.log2(max(1.0, requests)))
