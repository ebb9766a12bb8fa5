"""Pairwise covering designs: few cases in which every pair of values of any two factors occurs.

And the factors of sampling parameters, so that every two of them meet under speculation.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

from ssd_serve.base.messages import SamplingParameters

Row = dict[str, object]
Pairs = set[tuple[str, object, str, object]]


def pairs_of(row: Mapping[str, object]) -> Pairs:
    return {(one, row[one], other, row[other]) for one, other in combinations(row, 2)}


def everything(factors: Mapping[str, Sequence[object]]) -> Iterator[Row]:
    for values in product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def covering_pairs(factors: Mapping[str, Sequence[object]]) -> list[Row]:
    """Greedy: the row of the product that covers most uncovered pairs, the first of equals."""
    rows = list(everything(factors))
    missing: Pairs = set().union(*map(pairs_of, rows))
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def parameter_design(
    words: Sequence[tuple[int, ...]], allowed: Sequence[int], stops: Sequence[int], max_tokens: int
) -> list[SamplingParameters]:
    """Sampling parameters in which every two kinds of restriction meet.

    `words` are sequences to ban, `allowed` tokens to keep, `stops` stop ids.
    """
    kinds: dict[str, dict[str, dict[str, object]]] = {
        "temperature": {str(heat): {"temperature": heat} for heat in (0.0, 0.7, 1.5)},
        "truncation": {"none": {}, "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.01}},
        "penalties": {
            "none": {},
            "all": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        },
        "bias": {"none": {}, "some": {"logit_bias": {3: 2.0, 4: -100.0}}},
        "ends": {"ignored": {"ignore_eos": True}, "late": {"stop_token_ids": tuple(stops), "min_tokens": 6}},
        "allowed": {"all": {}, "some": {"allowed_token_ids": tuple(allowed)}},
        "bad words": {
            "none": {},
            "single": {"bad_words": tuple(word[-1:] for word in words[:2])},
            "long": {"bad_words": tuple(words)},
        },
    }
    chosen: list[SamplingParameters] = []
    for row in covering_pairs({factor: tuple(values) for factor, values in kinds.items()}):
        fields: dict[str, object] = {"max_tokens": max_tokens}
        for factor, value in row.items():
            fields |= kinds[factor][str(value)]
        chosen.append(SamplingParameters(**fields))  # type: ignore[arg-type]
    return chosen
