"""The generator of covering designs, and the judge's own arithmetic."""

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.lossless.covering import covering_pairs, everything, pairs_of


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
@settings(max_examples=30)
def test_every_pair_of_values_occurs(sizes: list[int]) -> None:
    factors = {f"factor{index}": range(size) for index, size in enumerate(sizes)}
    rows = covering_pairs(factors)
    product = list(everything(factors))
    assert set().union(*map(pairs_of, rows)) == set().union(*map(pairs_of, product))
    assert all(row in product for row in rows)


def test_a_design_is_much_smaller_than_the_product() -> None:
    factors = {name: range(4) for name in "abcd"}
    assert len(covering_pairs(factors)) <= 26 < len(list(everything(factors))) == 256
