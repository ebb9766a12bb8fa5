"""The float64 decoder knows no scales: folders with fp8 weights are refused."""

from pathlib import Path

import pytest

from ssd_serve.base.errors import CheckpointError
from ssd_serve.bench.lossless.judge import Float64Decoder
from tests.models import checkpoints
from tests.models.fp8_checkpoints import FORMS, write


def test_fp8_weights_are_refused(tmp_path: Path) -> None:
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    checkpoints.save(checkpoints.make("llama-linear-biases"), wide)
    assert Float64Decoder(wide).last_logits([1, 2, 3]).shape == (199,)
    write(FORMS["quark-tensor-static"], narrow)
    with pytest.raises(
        CheckpointError, match=r"holds fp8 weights.* use a model that is not quantised"
    ) as error:
        Float64Decoder(narrow)
    assert "\n" not in str(error.value)
