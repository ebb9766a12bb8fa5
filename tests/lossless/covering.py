"""Pairwise covering designs: few cases in which every pair of values of any two factors occurs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, object]
Pairs = set[tuple[str, object, str, object]]


def pairs_of(row: Mapping[str, object]) -> Pairs:
    """All pairs of a row's values, with their factors."""
    return {(one, row[one], other, row[other]) for one, other in combinations(row, 2)}


def everything(factors: Mapping[str, Sequence[object]]) -> Iterator[Row]:
    """The full product."""
    for values in product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def covering_pairs(factors: Mapping[str, Sequence[object]]) -> list[Row]:
    """Greedy: always the row of the product that covers most uncovered pairs, the first of equals."""
    rows = list(everything(factors))
    missing: Pairs = set().union(*map(pairs_of, rows))
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
