"""The wire format of expansions, and rejection of malformed buffers."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from msgspec.structs import replace

from ssd_serve.base.draft_messages import Growth
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.seeds import mix
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack, pack_arrays, unpack

VOCABULARY = 1000
CANDIDATES = st.lists(
    st.tuples(st.integers(0, VOCABULARY - 1), st.floats(-50, 0, width=32)), min_size=1, max_size=6
)
EXPANSIONS = st.lists(
    st.builds(
        lambda parent, step, pairs: Expansion(
            parent, step, [token for token, _ in pairs], [value for _, value in pairs]
        ),
        st.integers(0, 2**64 - 1),
        st.integers(ROOT_STEP, VOCABULARY - 1),
        CANDIDATES,
    ),
    max_size=5,
)


@given(EXPANSIONS)
def test_pack_and_unpack_round_trip(expansions: list[Expansion]) -> None:
    packed = unpack(pack(3, 1, 0, expansions, "d", snapshot=False), VOCABULARY)
    assert packed is not None
    read = [(each.parent, each.step, *map(list, each.read())) for each in packed]
    assert read == [tuple(each) for each in expansions]
    assert [each.size for each in packed] == [len(each.tokens) for each in expansions]


def test_names_follow_from_parent_and_step_except_for_roots() -> None:
    expansions = [Expansion(5, ROOT_STEP, [2], [-0.1]), Expansion(5, 9, [1], [-0.5])]
    packed = unpack(pack(3, 1, 0, expansions, "d", snapshot=False), VOCABULARY)
    assert packed is not None
    assert [each.name for each in packed] == [5, mix(5, 9)]


@given(
    st.binary(max_size=40),
    st.binary(max_size=20),
    st.binary(max_size=10),
    st.binary(max_size=20),
    st.binary(),
)
def test_random_bytes_are_rejected_or_valid(
    parents: bytes, steps: bytes, counts: bytes, tokens: bytes, values: bytes
) -> None:
    try:
        found = unpack(Growth(1, 1, 0, parents, steps, counts, tokens, values), VOCABULARY)
    except ProtocolError:
        return
    for each in found or []:
        read, log_probabilities = each.read()
        assert len(read) == len(log_probabilities) == each.size
        assert all(0 <= token < VOCABULARY for token in read)
        assert np.isfinite(log_probabilities).all()


def test_buffers_of_inconsistent_lengths_are_rejected() -> None:
    good = pack(1, 1, 0, [Expansion(5, 2, [1, 2], [-0.1, -0.2])], "d", snapshot=False)
    assert unpack(good, VOCABULARY) is not None
    for field in ("parents", "steps", "counts", "tokens", "log_probabilities"):
        buffer: bytes = getattr(good, field)
        for wrong in (buffer[:-1], buffer + b"\0", buffer + buffer, b""):
            with pytest.raises(ProtocolError):
                unpack(replace(good, **{field: wrong}), VOCABULARY)
    with pytest.raises(ProtocolError):
        unpack(replace(good, counts=np.array([3], dtype="<u2").tobytes()), VOCABULARY)


def test_invalid_tokens_and_values_are_rejected() -> None:
    for token in (-1, VOCABULARY):
        growth = pack(1, 1, 0, [Expansion(5, 2, [1, token], [-0.1, -0.2])], "d", snapshot=False)
        assert unpack(growth, VOCABULARY) is None
    for value in (float("nan"), float("inf"), float("-inf")):
        growth = pack(1, 1, 0, [Expansion(5, 2, [1, 2], [-0.1, value])], "d", snapshot=False)
        with pytest.raises(ProtocolError, match="not finite"):
            unpack(growth, VOCABULARY)


def test_empty_expansions_and_too_many_candidates_are_rejected() -> None:
    empty = pack(1, 1, 0, [Expansion(5, each, [], []) for each in range(3)], "d", snapshot=False)
    with pytest.raises(ProtocolError, match="without candidates"):
        unpack(empty, VOCABULARY)
    wide = pack(1, 1, 0, [Expansion(5, 1, [1] * 40_000, [-1.0] * 40_000)] * 2, "d", snapshot=False)
    with pytest.raises(ProtocolError, match="more than 65536 candidates"):
        unpack(wide, VOCABULARY)


def test_an_expansion_does_not_keep_a_large_message_in_memory() -> None:
    expansions = [Expansion(5, step, [step, 7], [-0.5, -1.0]) for step in range(900)]
    packed = unpack(pack(3, 1, 0, expansions, "d", snapshot=True), VOCABULARY)
    assert packed is not None
    assert {len(each.tokens) + len(each.log_probabilities) for each in packed} == {16}
    assert [each.read() for each in packed[:2]] == [((0, 7), (-0.5, -1.0)), ((1, 7), (-0.5, -1.0))]


def shared_rows() -> Growth:
    """Three expansions of which two share the candidates of a row."""
    tokens, values = np.array([[1, 2], [3, 4]], np.int32), np.array([[-0.1, -2.0], [-0.3, -1.5]], np.float32)
    places = [(5, ROOT_STEP), (5, 1), (5, 2)]
    return pack_arrays(1, 1, 0, places, [2, 2], tokens, values, "d", rows=[0, 1, 1])


def test_expansions_share_the_candidates_of_a_row() -> None:
    packed = unpack(shared_rows(), VOCABULARY)
    assert packed is not None
    assert [each.read()[0] for each in packed] == [(1, 2), (3, 4), (3, 4)]
    assert [each.name for each in packed] == [5, mix(5, 1), mix(5, 2)]
    assert packed[1].read()[1] == pytest.approx((-0.3, -1.5))


@pytest.mark.parametrize(
    "change",
    [
        {"rows": np.array([0, 1, 2], "<u2").tobytes()},
        {"rows": np.array([0, 1], "<u2").tobytes()},
        {"rows": b"\0" * 5},
        {"counts": np.array([2, 1], "<u2").tobytes()},
        {"counts": b"\1"},
        {"parents": b"", "steps": b""},
    ],
)
def test_malformed_rows_are_rejected(change: dict[str, bytes]) -> None:
    with pytest.raises(ProtocolError):
        unpack(replace(shared_rows(), **change), VOCABULARY)


def test_rows_cannot_multiply_a_small_message_into_a_large_tree() -> None:
    row = np.arange(200, dtype=np.int32)[None]
    places = [(5, step) for step in range(400)]
    growth = pack_arrays(1, 1, 0, places, [200], row, -row.astype(np.float32), "d", rows=[0] * 400)
    with pytest.raises(ProtocolError, match="more than 65536 candidates"):
        unpack(growth, VOCABULARY)
