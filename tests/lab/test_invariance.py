"""What batch invariance costs: a row for each shape that the model can run, with and without it."""

from pathlib import Path

import pytest

from lab.invariance.experiment import SHAPES, InvariancePlan, run_invariance
from ssd_serve.bench.lossless.random_pair import write_random_pair
from ssd_serve.settings import Settings

pytestmark = pytest.mark.slow


def test_every_shape_that_fits_has_two_rows(tmp_path: Path) -> None:
    target, _ = write_random_pair("random-llama", tmp_path)
    settings = Settings(target=str(target), dtype="bf16", native_kernels=False)
    said: list[str] = []
    fitting, long = "256 rows of a prompt", "1 row after 4,096"
    assert {fitting, long} <= set(SHAPES)
    result = run_invariance(settings, InvariancePlan((fitting, long), repeats=2), said.append)
    rows = result["results"]
    assert isinstance(rows, list)
    assert [(row["shape"], row["scattered"]) for row in rows] == [(fitting, False), (fitting, True)]
    for row in rows:
        assert row["ratio"] > 0
    assert len(said) == 2
    assert (result["dtype"], result["kernels"], result["attention"]) == ("bf16", "torch", ["sdpa", "sdpa"])
