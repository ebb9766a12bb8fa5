"""The table of hidden states and its byte encoding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.base.errors import ProtocolError
from ssd_serve.cache.vectors import VectorTable, as_bytes, from_bytes


@given(st.integers(0, 9), st.lists(st.integers(0, 40), max_size=8))
def test_the_table_returns_appended_rows(first: int, sizes: list[int]) -> None:
    table, whole = VectorTable(), torch.zeros((0, 3))
    table.begin(first)
    for size in sizes:
        rows = torch.randn((size, 3))
        table.extend(rows)
        whole = torch.cat((whole, rows))
        assert (table.first, table.end, len(table)) == (first, first + len(whole), len(whole))
        assert torch.equal(table.part(first, len(whole)), whole)
        assert len(table) == len(whole)
    for start, count in ((first - 1, 1), (first, len(whole) + 1)):
        with pytest.raises(IndexError):
            table.part(start, count)


def test_begin_empties_the_table() -> None:
    table = VectorTable()
    table.extend(torch.ones((2, 3)))
    table.begin(7)
    assert (len(table), table.first, table.end) == (0, 7, 7)


def test_bytes_are_bfloat16_rows() -> None:
    rows = torch.randn((5, 6)).to(torch.bfloat16)
    assert torch.equal(from_bytes(as_bytes(rows), 6), rows)
    assert torch.equal(from_bytes(as_bytes(rows.float()), 6), rows)
    assert from_bytes(b"", 6).shape == (0, 6)


@pytest.mark.parametrize(("raw", "width"), [(b"123", 1), (b"1234", 4), (b"1234", 0), (b"1234", -1)])
def test_partial_rows_are_rejected(raw: bytes, width: int) -> None:
    with pytest.raises(ProtocolError, match="not whole rows"):
        from_bytes(raw, width)
