"""A target on several ranks gives the tokens of one rank in fp32: plain, sync and async.

Greedy and sampled requests with penalties, stops and truncation.
"""

from pathlib import Path

import pytest

from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.bench.lossless.judge import Judge
from ssd_serve.bench.lossless.proof import requests
from ssd_serve.bench.lossless.random_pair import write_random_pair
from ssd_serve.bench.lossless.rig import Case, LoadedPair, run_case
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.hub import resolve_model
from tests.models.ranked import ranked

pytestmark = pytest.mark.slow

CASES = (Case("ar", 16), Case("sd", 4, 8), Case("ssd", 4, 8), Case("ssd", 16, 4, "killed"))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("random-llama", 2),
        ("random-mistral-window", 4),
        ("random-qwen3", 4),
        ("random-llama", 8),
        (EMBEDDED, 2),
    ],
)
def test_tensor_parallel_equals_one_rank(
    name: str, ranks: int, tmp_path: Path, served_kernels: NativeLibrary | None
) -> None:
    if name == EMBEDDED:
        folders = resolve_model(name, "target"), resolve_model(name, "draft")
    else:
        folders = write_random_pair(name, tmp_path, heads=max(4, ranks))
    pair = LoadedPair(name, *folders, native=served_kernels)
    submits = requests(pair.vocabulary, 24 if ranks == 2 else 12)
    plain = run_case(pair, Case("ar", 1), submits)
    options = {"dtype": "fp32", "slots": pair.target.slots, "context": 512, "native": served_kernels}
    with ranked(folders[0], tmp_path / "store", ranks, **options) as several:
        pair.target = several
        for case in CASES:
            found = run_case(pair, case, submits)
            differences = Judge(pair).differences(submits, plain, found)
            assert all(each.near_tie for each in differences), (case, differences)
            assert len(differences) <= 1, "near-ties are far rarer than this"
            assert found.accepted > 0 or case.mode == "ar"
