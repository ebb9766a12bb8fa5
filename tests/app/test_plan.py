"""Tests of `ssd plan`: the layout that it chooses, and its report."""

import json
from pathlib import Path

import pytest

from ssd_serve.app.cli import main as cli
from ssd_serve.app.plan.device_tables import device_sheet
from ssd_serve.app.plan.devices import MeasuredRoofs, Sheets
from ssd_serve.app.plan.plan import Plan, PlanOptions, page
from ssd_serve.models.roof import Roof
from ssd_serve.verifier.drafters.pool import SpeculationMode
from tests.app.plan_parts import known, small_model

Captured = pytest.CaptureFixture[str]


def plan(devices: int, acceptance: float = 0.75, sheet: str = "mi300x") -> Plan:
    options = PlanOptions(acceptance=acceptance, context=512)
    return Plan(Sheets(device_sheet(sheet), devices), known("llama-3.1-70b"), known("llama-3.2-1b"), options)


def test_five_devices_give_four_to_the_target_and_one_to_the_drafter() -> None:
    found = plan(5)
    best = found.best
    assert best is not None
    assert (best.mode, best.target, best.draft) == (SpeculationMode.ASYNC, 4, 1)
    assert best.speed > 2 * found.plain.speed
    text = page([found])
    assert len(text.splitlines()) <= 10
    assert "take: draft beside (mode ssd, SSD_TENSOR_PARALLEL=4)" in text
    assert "assumed" in text
    entry = json.loads(json.dumps(found.as_json()))
    assert [layout["mode"] for layout in entry["layouts"]] == ["ar", "sd", "ssd"]
    assert (entry["take"], entry["layouts"][2]["target_devices"]) == ("ssd", 4)
    plain = entry["layouts"][0]
    assert sum(plain["target_step_parts"].values()) == pytest.approx(plain["target_step_s"])
    assert plain["tokens_per_s"] > 0


def test_two_devices_are_better_used_by_the_target() -> None:
    """A second device halves the bytes that the target reads; a drafter would take that device."""
    best = plan(2).best
    assert best is not None
    assert (best.mode, best.target) == (SpeculationMode.SYNC, 2)


def test_useless_draft_gives_plain_mode_and_break_even_acceptance() -> None:
    found = plan(1, acceptance=0.02)
    best = found.best
    assert best is not None
    assert best.mode is SpeculationMode.PLAIN
    assert found.pays_from is not None
    assert 0.05 < found.pays_from < 0.5
    assert f"from an acceptance of {found.pays_from:.2f} on" in page([found])


def test_several_drafts_are_compared() -> None:
    text = page([plan(1, acceptance=0.3), plan(1, acceptance=0.8)])
    assert "acceptance 0.8" in text.splitlines()[1]
    assert "drafts: llama-3.2-1b at 0.3 1." in text


def test_target_that_does_not_fit_names_devices_needed() -> None:
    found = plan(1, sheet="h100")
    assert (found.best, found.devices_needed) == (None, 2)
    assert "does NOT fit" in page([found])
    assert "fits from 2 x H100 on" in page([found])
    options = PlanOptions(context=512)
    found = Plan(Sheets(device_sheet("h100"), 16), known("llama-3.1-405b"), None, options)
    assert (found.best, found.devices_needed) == (None, None)
    assert "does not fit on 8 x H100, the most that can share it" in page([found])


@pytest.mark.parametrize(("size", "noted"), [(1e6, True), (1e9, False)])
def test_target_that_fits_the_cache_is_noted(size: float, noted: bool) -> None:
    roofs = {1: Roof(1, "bfloat16", {1: 1e-10, 64: 1e-9}, 1e12)}
    platform = MeasuredRoofs("CPU core", 1, roofs, 1e10, True, cache_bytes=32 << 20)
    text = page([Plan(platform, small_model(size), None, PlanOptions(context=64))])
    assert ("fits the cache" in text) is noted


def test_command_prints_the_plan_of_an_absent_machine(capsys: Captured) -> None:
    command = ["plan", "llama-3.1-8b", "llama-3.2-1b", "--device", "h200", "--devices", "2"]
    assert cli.main([*command, "--context", "512"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-3.1-8b (15.0 GiB) with llama-3.2-1b (2.3 GiB) on 2 x H200")
    assert "data sheet: 141 GB, 4.8 TB/s" in text
    assert cli.main(["plan", "llama-3.1-405b", "--device", "mi300x"]) == 5
    assert "fits from 8 x MI300X on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ngram"], "of whole draft models only, and ngram is none"),
        (["self:4"], "ssd bench modes TARGET self:4"),
        (["--device", "abacus"], "there are mi300x, mi325x, mi350x, mi355x, h100, h200"),
        (["--acceptance", "1"], "--acceptance must be"),
        (["--acceptance", "0.5", "0.6"], "one for each draft"),
        (["--requests", "0"], "--requests must be"),
        (["--context", "0"], "--context must be"),
        (["--device", "h100", "--devices", "0"], "--devices must be"),
        (["--device", "h100", "--dtype", "fp32"], "--dtype bf16"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], sentence: str, capsys: Captured) -> None:
    assert cli.main(["plan", "llama-3.1-8b", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_heads_are_refused_as_drafts(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    assert cli.main(["plan", "llama-3.1-8b", str(tmp_path), "--device", "h100"]) == 2
    assert f"and {tmp_path} is none: measure it with `ssd bench modes" in capsys.readouterr().err


def test_file_instead_of_a_folder_is_refused(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert cli.main(["plan", str(file), "--device", "h100"]) == 6
    assert f"{file} is a file; name the folder of the model" in capsys.readouterr().err
