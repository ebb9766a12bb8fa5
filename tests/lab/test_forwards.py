"""Forwards beside the device table: weights of the model's own shape, one figure for each kind of forward."""

from pathlib import Path

import pytest

from lab.forwards import experiment
from lab.forwards.experiment import ForwardsPlan, measure, sheet_of
from lab.forwards.report import table
from lab.forwards.weights import write_random
from ssd_serve.errors import UserError
from ssd_serve.models.load import ModelWish, load_model
from ssd_serve.plan import known_models

TINY = (["Qwen3ForCausalLM"], 64, 96, 2, 4, 2, 16, 128, 256, True)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Well-known models of a size for tests, one of each family."""
    shapes = {
        "tiny-llama": (["LlamaForCausalLM"], *TINY[1:-1], False),
        "tiny-qwen2": (["Qwen2ForCausalLM"], *TINY[1:]),
        "tiny-qwen3": TINY,
    }
    monkeypatch.setattr(known_models, "_shapes", lambda: shapes)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_what_is_written_is_a_model_of_the_known_shape(name: str, tmp_path: Path) -> None:
    write_random(name, tmp_path / "model", "cpu")
    model = load_model(tmp_path / "model", ModelWish(device="cpu", dtype="fp32", slots=64, context=None))
    known = known_models.known_model(name)
    assert known is not None
    assert (model.facts.vocabulary, model.facts.context) == (known.config.vocabulary, known.config.context)
    assert model.facts.layers == TINY[3]


def test_an_unknown_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gpt-7 is not known; there are tiny-llama"):
        write_random("gpt-7", tmp_path / "model", "cpu")


def test_every_kind_of_forward_has_a_row_beside_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "_copied", lambda device: 3e12)
    said: list[str] = []
    plan = ForwardsPlan(
        models=["tiny-llama"],
        device="cpu",
        sheet="h100",
        attention=("sdpa", "flashinfer"),
        rows=(1, 4),
        contexts=(8, 16),
        repeats=2,
        folder=tmp_path,
    )
    result = measure(plan, said.append)
    rows = result["results"]
    assert isinstance(rows, list)
    assert [(row["rows"], row["context"]) for row in rows] == [(1, 8), (4, 8), (1, 16), (4, 16)]
    assert all(0 < row["best_ms"] <= row["ms"] and row["said_ms"] > 0 for row in rows)
    assert not any(row["captured"] for row in rows), "nothing is captured on cores"
    assert any("flashinfer" in line for line in said), "what cannot be measured is told"
    told = table({**result, "hardware": {"gpus": ["NVIDIA H100 80GB HBM3"]}})
    assert told.count("| tiny-llama | sdpa |") == 2
    assert "a copy moves 3,000 GB/s, the data sheet of H100 says 3,350" in told
    assert not list(tmp_path.iterdir()), "weights are gone afterwards"


def test_the_sheet_is_that_of_the_gpus_name() -> None:
    assert sheet_of("NVIDIA H100 80GB HBM3") == "h100"
    assert sheet_of("AMD Instinct MI300X") == "mi300x"
    with pytest.raises(UserError, match="GTX 970 is not in the device table; name a row of it with --sheet"):
        sheet_of("GTX 970")
