"""The figures of the comparison: a row for each way, and ratios to the fastest peer with their intervals.

Pure functions of samples; knows no process and no clock.
"""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ssd_serve.bench.peers.client import Sample
from ssd_serve.bench.peers.result import Ratio, Row
from ssd_serve.bench.peers.ways import OUR_MODES, OURS, PLAIN, Way
from ssd_serve.bench.statistics import Interval, quartiles, ratio_interval

Answers = Mapping[tuple[int, int], Sample]
"""Of one way, by number of the launch and of the prompt."""
_AIMS = {0.0: 1.15, 0.6: 1.3, 1.0: 1.3}
"""Of `auto` against the best peer, by temperature."""


def wrong_speculation(way: Way, samples: Iterable[Sample]) -> str | None:
    """Why these samples are not of the mode that they should be; None: they are."""
    found = list(samples)
    drafted, accepted = sum(one.drafted for one in found), sum(one.accepted for one in found)
    if way.speculates and not drafted:
        return "it drafted nothing: it does not speculate"
    if way.speculates and not accepted:
        return "none of its drafts was accepted"
    if way.speculates is False and drafted:
        return "it drafted although it should decode plainly"
    return None


def speed(samples: Collection[Sample]) -> float:
    """Tokens a second of whole requests; 0 without any."""
    return sum(one.tokens for one in samples) / sum(one.whole_s for one in samples) if samples else 0.0


def speeds(found: Mapping[Way, Sequence[Sample | None]]) -> dict[Way, float]:
    """Of each way `speed` over the prompts that all of them answered, so that all are compared by the same.

    A prompt on which one text loops tells nothing about a shape, and counts for none. Who answered fewer than
    half of the prompts has 0, and takes no prompt from the others.
    """
    able = [way for way, samples in found.items() if 2 * sum(map(bool, samples)) >= len(samples)]
    count = min((len(found[way]) for way in able), default=0)
    common = [prompt for prompt in range(count) if all(found[way][prompt] for way in able)]
    return {
        way: speed([one for prompt in common if way in able and (one := samples[prompt])])
        for way, samples in found.items()
    }


def row(way: Way, temperature: float, answers: Answers) -> Row:
    """The figures of a way that answered at least once."""
    samples = list(answers.values())
    tokens, drafted = sum(one.tokens for one in samples), sum(one.drafted for one in samples)
    accepted = sum(one.accepted for one in samples)
    rounds = max(1, tokens - accepted)
    launches = sorted({launch for launch, _ in answers})
    return Row(
        engine=way.engine,
        mode=way.mode,
        shape=way.shape,
        dtype=way.dtype,
        weights=way.weights,
        temperature=temperature,
        answers=len(samples),
        whole_ms=_rounded(quartiles([1e3 * one.whole_s for one in samples])),
        first_token_ms=_rounded(quartiles([1e3 * one.first_s for one in samples])),
        decoded_per_s=_rounded(quartiles([1 / one.step_s for one in samples])),
        launches=_rounded(
            speed([one for key, one in answers.items() if key[0] == number]) for number in launches
        ),
        tokens_per_round=round(tokens / rounds, 3),
        drafted_per_round=round(drafted / rounds, 2),
        acceptance=round(accepted / drafted, 3) if drafted else None,
    )


def ratios(dtype: str, temperature: float, group: Mapping[Way, Answers]) -> list[Ratio]:
    """Each of our modes against the peer whose whole requests are the fastest, and our plain decoding against
    the fastest plain one. The best is chosen by the answers that are compared, which favours the peers."""
    peers = {way: found for way, found in group.items() if way.engine != OURS and found}
    plain = {way: found for way, found in peers.items() if way.mode == PLAIN}
    best, best_plain = _fastest(peers), _fastest(plain)
    pairs = [(mode, best) for mode in reversed(OUR_MODES)]
    if best_plain != best:
        pairs.append(("ar", best_plain))
    found: list[Ratio] = []
    for mode, theirs in pairs:
        ours = Way(OURS, mode, dtype=dtype)
        if theirs is not None and group.get(ours):
            mine, other = group[ours], peers[theirs]
            found.append(
                Ratio(
                    dtype=dtype,
                    temperature=temperature,
                    ours=ours.label,
                    theirs=theirs.label,
                    whole=paired(mine, other, lambda one: one.whole_s),
                    first_token=paired(mine, other, lambda one: one.first_s),
                    decoding=paired(mine, other, lambda one: one.step_s),
                    aim=_AIMS.get(temperature) if mode == "auto" else None,
                )
            )
    return found


def paired(ours: Answers, theirs: Answers, seconds: Callable[[Sample], float]) -> Interval | None:
    """How many times as fast ours are, answer by answer. Answers to one prompt are alike, and so are those of
    one launch: the interval is the wider one of that over prompts and that over launches."""
    pairs = {key: seconds(theirs[key]) / seconds(ours[key]) for key in sorted(ours.keys() & theirs.keys())}
    found: list[Interval] = []
    for place in (0, 1):
        alike: dict[int, list[float]] = {}
        for key, ratio in pairs.items():
            alike.setdefault(key[place], []).append(ratio)
        interval = ratio_interval([statistics.geometric_mean(some) for some in alike.values()])
        if interval is not None:
            found.append(interval)
    return max(found, key=lambda one: one.high / one.low, default=None)


def _fastest(ways: Mapping[Way, Answers]) -> Way | None:
    return max(ways, key=lambda way: speed(ways[way].values()), default=None)


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 2) for value in values]


def mapped(rotations: Mapping[int, Sequence[Sample | None]]) -> Answers:
    """The answers of one way, of those that did not fail, from its samples by launch."""
    return {
        (launch, prompt): sample
        for launch, samples in rotations.items()
        for prompt, sample in enumerate(samples)
        if sample is not None
    }
