"""Tests of device tables: forward times of a pair on devices of other machines."""

import numpy as np
import pytest

from ssd_serve.app.plan.devices import Forward
from ssd_serve.base.errors import SettingsError
from ssd_serve.bench.device_tables import device_table, forward_of
from ssd_serve.kernels.batch import RequestRows, build_batch

ONE = Forward.of_one(1, 384)


def ms(name: str, forward: Forward) -> float:
    return 1e3 * device_table(name).target.seconds(forward)


def test_the_mi300x_pair_takes_what_was_published_of_it() -> None:
    """52.32 tokens/s on 4 devices, 32.87 on 2; rows of a tree are not free."""
    assert ms("mi300x-70b-1b", ONE) == pytest.approx(1000 / 52.32, rel=0.005)
    assert ms("mi300x-70b-1b-tp2", ONE) == pytest.approx(1000 / 32.87, rel=0.005)
    assert ms("mi300x-70b-1b", Forward.of_one(36, 384)) > 1.2 * ms("mi300x-70b-1b", ONE)


def test_a_chunk_of_a_prompt_computes_at_a_rate_of_its_own() -> None:
    """Many times cheaper a row than decoding, and dearer than one row."""
    chunk, decoding = ms("mi300x-70b-1b", Forward(256, 256)), ms("mi300x-70b-1b", Forward(256))
    assert ms("mi300x-70b-1b", ONE) < chunk < 2 * ms("mi300x-70b-1b", ONE) < decoding


def test_a_table_may_be_slower() -> None:
    slow = device_table("mi300x-70b-1b*3")
    assert 1e3 * slow.target.seconds(ONE) == pytest.approx(3 * ms("mi300x-70b-1b", ONE))
    assert slow.draft.seconds(ONE) == pytest.approx(3 * device_table("mi300x-70b-1b").draft.seconds(ONE))


@pytest.mark.parametrize("wrong", ["a100", "mi300x-70b-1b*0", "mi300x-70b-1b*x", "mi300x-70b-1b*", "*2"])
def test_unknown_tables_are_refused_with_the_names_that_there_are(wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"mi300x-70b-1b, mi300x-70b-1b-tp2"):
        device_table(wrong)


def test_a_asynchronous_occupies_a_device_of_its_own() -> None:
    table = device_table("mi300x-70b-1b")
    assert (table.devices(asynchronous=False), table.devices(asynchronous=True)) == (4, 5)


def test_a_batch_is_told_by_its_rows_and_by_what_they_attend_to() -> None:
    """A root with two nodes after 5 tokens, and a chunk of 4 prompt tokens after none."""
    nothing = np.empty(0, dtype=np.int32)
    tree = RequestRows([1, 2, 3], [5, 6, 6], [5, 6, 7], np.arange(5, dtype=np.int32), [0, 1, 2], [1, 3, 5])
    chunk = RequestRows([1, 2, 3, 4], [0, 1, 2, 3], [10, 11, 12, 13], nothing, [])
    assert forward_of(build_batch([tree, chunk])) == Forward(7, 4, 5 + 3 + 4, 3 * 8 + 4 * 4)
