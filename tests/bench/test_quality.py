"""Held-out quality by dtype: which positions are scored, and that scores are those of the model."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.bench.quality import measurement
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.load import ModelOptions, load_model


def text(length: int, first: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(first, first + length, dtype=np.int64)


def test_every_text_gives_its_first_chunk_before_any_gives_a_second() -> None:
    chunks = list(measurement.chosen_chunks([text(3000), text(5, 9000), text(1), text(1500, 5000)], 10**9))
    assert [int(chunk[0]) for chunk in chunks] == [0, 9000, 5000, 1024, 6024, 2048]
    assert [len(chunk) - 1 for chunk in chunks] == [1024, 4, 1024, 1024, 475, 951]


def test_it_ends_when_there_are_enough_positions() -> None:
    assert len(list(measurement.chosen_chunks([text(5000), text(5000)], 2049))) == 3
    with pytest.raises(UserError, match="no held-out text"):
        list(measurement.chosen_chunks([text(1)], 10))


def test_scores_are_those_of_the_model(tmp_path: Path) -> None:
    folder = resolve_model("embedded", "draft")
    model = load_model(folder, ModelOptions(device="cpu", dtype="fp32", slots=64, context=64))
    tokens = text(40, 100)
    whole = measurement.score(model, tokens)
    part = measurement.score(model, tokens[:21])
    torch.testing.assert_close(part.losses, whole.losses[:20], atol=1e-4, rtol=0)
    assert whole.best.shape == whole.losses.shape == (39,)
    assert (whole.losses > 0).all()


def test_dtypes_are_compared_with_the_first() -> None:
    def scores(losses: list[float], best: list[int]) -> measurement.Scores:
        return measurement.Scores(torch.tensor(losses, dtype=torch.float64), torch.tensor(best))

    found = {
        "fp32": [scores([1.0, 2.0], [5, 6]), scores([3.0], [7])],
        "int8": [scores([1.5, 2.0], [5, 6]), scores([3.1], [8])],
    }
    rows = measurement.compare(found)
    assert rows["fp32"] == {
        "nats_per_token": 2.0,
        "more_nats_per_token": 0.0,
        "more_nats_standard_error": 0.0,
        "same_best_token": 1.0,
    }
    assert rows["int8"]["more_nats_per_token"] == pytest.approx(0.2)
    assert rows["int8"]["same_best_token"] == pytest.approx(2 / 3, abs=1e-5)


@pytest.mark.slow
def test_the_embedded_target_in_three_dtypes() -> None:
    said: list[str] = []
    result = measurement.measure_quality(resolve_model("embedded", "target"), positions=600, say=said.append)
    rows = {row["dtype"]: row for row in result["results"]}  # type: ignore[attr-defined]
    assert list(rows) == ["fp32", "bf16", "int8"]
    assert int(str(result["positions"])) >= 600
    assert all(0.5 < row["nats_per_token"] < math.log(4096) / 2 for row in rows.values())
    assert all(abs(row["more_nats_per_token"]) < 0.05 for row in rows.values())
    assert all(row["same_best_token"] > 0.9 for row in rows.values())
    assert "int8" in measurement.table(json.loads(json.dumps(result)))
