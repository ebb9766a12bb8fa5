"""The roofline: what a round must take at least, how far measured speeds are from it, and refusals."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from lab.roofline import experiment
from lab.roofline.__main__ import main
from lab.roofline.experiment import distances, page, run_roofline
from ssd_serve.bench.machine import hardware
from ssd_serve.bench.modes_result import ModesRow
from ssd_serve.errors import UserError
from ssd_serve.models.sizes import model_sizes
from ssd_serve.models.weights import linear
from ssd_serve.plan.roof import Effort, Roof, measure_roof
from tests.bench.modes_rows import modes_row
from tests.models.fp8_checkpoints import FORMS, write

WEIGHTS = 400e6
FLOPS = 400e6
ONE_CORE = Roof(1, "bfloat16", {1: 1 / 40e9, 8: 1 / 20e9}, 100e9)
"""Weights are read in 10 ms; a row computes for 4 ms."""


def row(
    mode: str, tokens_per_s: float, tokens: float, nodes: float, setting: str = "real", target: str = "cpu:0"
) -> ModesRow:
    return modes_row(
        mode,
        tokens_per_s,
        setting=setting,
        target=target,
        tokens_per_round=tokens,
        nodes_per_round=nodes,
        forward_share=0.9,
    )


def test_a_roof_is_the_longer_of_reading_and_computing() -> None:
    assert ONE_CORE.bandwidth == pytest.approx(40e9)
    assert ONE_CORE.seconds(WEIGHTS, FLOPS) == pytest.approx(0.010)
    assert ONE_CORE.seconds(WEIGHTS, 5 * FLOPS) == pytest.approx(0.020)


def test_plain_decoding_is_measured_against_reading_the_weights_once() -> None:
    """80 tokens/s where 100 are possible; the forward, nine tenths of 12.5 ms, could take 10 ms."""
    (found,) = distances([row("ar", 80.0, 1.0, 0.0)], [ONE_CORE], WEIGHTS, FLOPS)
    assert found.roof_tokens_per_s == pytest.approx(100.0)
    assert found.reached == pytest.approx(0.8)
    assert found.forward_reached == pytest.approx(0.8 / 0.9)
    assert found.bound_by == "memory"


def test_a_round_of_several_tokens_has_a_roof_as_many_times_higher() -> None:
    (found,) = distances([row("ssd", 150.0, 3.0, 1.0)], [ONE_CORE], WEIGHTS, FLOPS)
    assert found.rows_per_round == 2.0
    assert found.roof_tokens_per_s == pytest.approx(300.0)
    assert found.reached == pytest.approx(0.5)


def test_many_nodes_are_bound_by_computing() -> None:
    (found,) = distances([row("ssd", 100.0, 4.0, 9.0)], [ONE_CORE], WEIGHTS, FLOPS)
    assert found.bound_by == "computing"
    assert found.roof_tokens_per_s == pytest.approx(4.0 / 0.040)


def test_rows_without_a_roof_are_left_out() -> None:
    emulated, wider = row("ar", 50.0, 1.0, 0.0, "emulated"), row("ar", 50.0, 1.0, 0.0, target="cpu:0-1")
    assert distances([emulated, wider], [ONE_CORE], WEIGHTS, FLOPS) == []


def test_a_roof_is_measured_and_threads_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_serve.plan.roof._SIDE", 64)
    monkeypatch.setattr("ssd_serve.plan.roof._SQUARE", {"cpu": 64})
    monkeypatch.setattr("ssd_serve.plan.roof._MIN_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr("ssd_serve.plan.roof.last_level_cache", lambda: 0)
    before = torch.get_num_threads()
    roof = measure_roof("cpu", "float32", (0,), Effort((1, 4), 2))
    assert torch.get_num_threads() == before
    assert roof.cores == 1
    assert list(roof.seconds_per_byte) == [1, 4]
    assert roof.bandwidth > 0
    assert roof.flops > 0


def result_file(folder: Path, **changes: object) -> Path:
    """A small result of `ssd bench modes`, measured here unless `changes` say otherwise."""
    where = (("real", "cpu:0"), ("real", "cpu:0-1"), ("emulated", "cpu:0"))
    rows = [msgspec.to_builtins(row("ar", 60.0, 1.0, 0.0, *each)) for each in where]
    content = {"results": rows, "hardware": hardware() | changes}
    path = folder / "modes.json"
    path.write_text(json.dumps(content))
    return path


def fake_roof(device: str, dtype: str, cores: tuple[int, ...]) -> Roof:
    return Roof(len(cores), dtype, {1: 1 / (30e9 * len(cores))}, 200e9 * len(cores))


def test_the_page_compares_real_settings_with_the_roof_of_their_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "measure_roof", fake_roof)
    result = run_roofline(result_file(tmp_path), None, "cpu", "bf16", (0, 1))
    found = result["distances"]
    assert isinstance(found, list)
    assert [each["cores"] for each in found] == [1, 2]
    assert found[1]["roof_tokens_per_s"] == pytest.approx(2 * found[0]["roof_tokens_per_s"])
    text = page(json.loads(json.dumps(result | {"hardware": {}, "versions": {}})))
    assert f"| {found[0]['roof_tokens_per_s']:.1f} | {found[0]['reached']:.2f} |" in text
    assert "| 2 core(s) | 1: 60.0 | 400 |" in text


@pytest.mark.parametrize("native", [torch.float8_e4m3fn, None])
def test_weights_in_fp8_are_counted_as_the_device_reads_them(
    native: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "measure_roof", lambda *_: ONE_CORE)
    monkeypatch.setattr(linear, "native_format", lambda _: native)
    write(FORMS["fp8-static"], tmp_path / "model")
    found = run_roofline(result_file(tmp_path), tmp_path / "model", "cuda:0", "bf16", ())["target"]
    assert isinstance(found, dict)
    assert (
        found["weight_bytes"] == model_sizes(tmp_path / "model", device="cuda:0", dtype="bf16").matrix_bytes
    )
    wide = found["flops_per_row"]  # as many as bytes of bf16
    assert found["weight_bytes"] == wide if native is None else found["weight_bytes"] < 0.7 * wide


def test_figures_of_another_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "measure_roof", fake_roof)
    with pytest.raises(UserError, match=r"another machine \(cpu: Z80"):
        run_roofline(result_file(tmp_path, cpu="Z80"), None, "cpu", "bf16", (0,))


def test_a_file_that_is_no_result_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "measure_roof", fake_roof)
    wrong = tmp_path / "modes.json"
    wrong.write_text("[]")
    for path, words in ((wrong, "is not a result"), (tmp_path / "none.json", "cannot read")):
        with pytest.raises(UserError, match=words):
            run_roofline(path, None, "cpu", "bf16", (0,))


def test_the_command_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiment, "measure_roof", fake_roof)
    files = tmp_path / "new" / "roofline.json", tmp_path / "new" / "roofline.md"
    command = ["--no-modes", "--device", "cpu:0", "--dtype", "fp32"]
    assert main([*command, "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    assert json.loads(files[0].read_text())["roofs"][0]["gb_per_s"] == 30.0
    assert files[1].read_text() == capsys.readouterr().out
