"""Recorded forwards through FlashInfer's doubles give what a decoder with other attention gives."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.sdpa import SdpaAttention
from ssd_serve.kernels.flashinfer.attention import FlashInferAttention
from tests.kernels.flashinfer_double import WORKSPACE, Doubles
from tests.kernels.flashinfer_signatures import ALL, Recorded
from tests.models import checkpoints
from tests.models.tape import Tape
from tests.models.test_captured import Pair, batch_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.make("llama3-gqa-tied"), tmp_path_factory.mktemp("model"))


def attention(doubles: Doubles, cache: KVCache, heads: int) -> FlashInferAttention:
    return FlashInferAttention(cache, heads, doubles.package(), workspace_bytes=WORKSPACE, page_size=4)


@pytest.fixture(params=ALL, ids=str)
def pair(folder: Path, request: pytest.FixtureRequest) -> Pair:
    captured: Recorded = request.param
    tape = Tape()
    return Pair(folder, tape, partial(attention, Doubles(captured, tape)), "slots", SdpaAttention)


def test_one_recording_serves_batches_of_one_shape(pair: Pair) -> None:
    """Other requests, trees, slots, prefixes, counts of requests: one is captured, all are replayed."""
    pair.compare(batch_of(1, (9, 3), (20, 2), (0, 1)))
    pair.compare(batch_of(2, (14, 4), (30, 3)))
    pair.compare(batch_of(3, (1, 8)))
    assert (pair.tape.runs, pair.tape.replays) == (1, 3)


def test_rows_without_a_tree_have_a_recording_of_their_own(pair: Pair) -> None:
    pair.compare(batch_of(4, (9, 1), (3, 1)))
    pair.compare(batch_of(5, (9, 3), (3, 5)))
    pair.compare(batch_of(6, (0, 1), (40, 1)))
    pair.compare(batch_of(7, (9, 5), (3, 3)))
    assert (pair.tape.runs, pair.tape.replays) == (2, 4)


def test_what_is_not_recorded_runs_between(pair: Pair) -> None:
    """More rows than are captured use other wrappers."""
    whole = batch_of(8, (5, 4), (2, 3))
    pair.compare(whole)
    pair.compare(batch_of(9, (5, 60), (2, 6)))
    pair.compare(replace(whole, rows_wanted=whole.rows_wanted[[6]]))
    pair.compare(whole)
    assert (pair.tape.runs, pair.tape.replays) == (1, 3)
