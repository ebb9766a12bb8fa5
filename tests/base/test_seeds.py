"""Seeds and names: known values, bijections, and choice 0 keeping the seed."""

from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.base.seeds import MASK64, choice_seed, mix, random_seed

WORD = st.integers(min_value=0, max_value=MASK64)


def test_mix_is_splitmix64() -> None:
    # The published first outputs of splitmix64 seeded with 1234567.
    assert [mix(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(WORD, WORD, WORD)
def test_mix_is_a_bijection_of_each_argument(a: int, b: int, c: int) -> None:
    assert 0 <= mix(a, b) <= MASK64
    assert (mix(a, b) == mix(a, c)) == (b == c)
    assert (mix(a, c) == mix(b, c)) == (a == b)


def test_mix_is_not_symmetric() -> None:
    assert mix(1, 2) != mix(2, 1)


def test_choice_zero_keeps_the_seed_and_others_differ() -> None:
    seeds = [choice_seed(42, i) for i in range(64)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 64


def test_random_seeds_fit_signed_64_bit() -> None:
    assert all(0 <= random_seed() < 2**63 for _ in range(100))
