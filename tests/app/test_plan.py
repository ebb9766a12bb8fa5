"""Tests of `ssd plan`: the layout that it chooses, and its report."""

import json

import pytest

from ssd_serve.app.cli import main as cli
from ssd_serve.app.plan.device_tables import device_sheet
from ssd_serve.app.plan.devices import MeasuredRoofs, Sheets
from ssd_serve.app.plan.page import as_json, page
from ssd_serve.app.plan.plan import PlanEstimate, PlanOptions, make_plan
from ssd_serve.app.plan.roof import Roof
from ssd_serve.verifier.drafters.pool import SpeculationMode
from tests.app.plan_parts import known, small_model

Captured = pytest.CaptureFixture[str]


def plan(devices: int, acceptance: float = 0.75, sheet: str = "mi300x") -> PlanEstimate:
    wish = PlanOptions(acceptance=acceptance, context=512)
    return make_plan(
        Sheets(device_sheet(sheet), devices), known("llama-3.1-70b"), known("llama-3.2-1b"), wish
    )


@pytest.fixture(scope="module")
def of_five() -> PlanEstimate:
    return plan(5)


def test_five_devices_give_four_to_the_target_and_one_to_the_drafter(of_five: PlanEstimate) -> None:
    best = of_five.best
    assert best is not None
    assert (best.drafting, best.target, best.draft) == (SpeculationMode.ASYNC, 4, 1)
    assert best.speed > 2 * of_five.layouts[0].speed
    text = page([of_five])
    assert len(text.splitlines()) <= 10
    assert "take: draft beside (mode ssd, SSD_TENSOR_PARALLEL=4)" in text
    assert "assumed" in text


def test_two_devices_are_better_used_by_the_target() -> None:
    """A second device halves the bytes that the target reads; a drafter would take that device."""
    best = plan(2).best
    assert best is not None
    assert (best.drafting, best.target) == (SpeculationMode.SYNC, 2)


def test_useless_draft_gives_plain_mode_and_break_even_acceptance() -> None:
    found = plan(1, acceptance=0.02)
    best = found.best
    assert best is not None
    assert best.drafting is SpeculationMode.PLAIN
    assert found.pays_from is not None
    assert 0.05 < found.pays_from < 0.5
    assert f"from an acceptance of {found.pays_from:.2f} on" in page([found])


def test_target_that_does_not_fit_names_devices_needed() -> None:
    found = plan(1, sheet="h100")
    assert found.best is None
    assert found.devices_needed == 2
    assert "does NOT fit" in page([found])
    assert "fits from 2 x H100 on" in page([found])


def test_target_that_fits_nowhere_is_reported() -> None:
    found = make_plan(
        Sheets(device_sheet("h100"), 16), known("llama-3.1-405b"), None, PlanOptions(context=512)
    )
    assert (found.best, found.devices_needed) == (None, None)
    assert "does not fit on 8 x H100, the most that can share it" in page([found])


def test_the_json_holds_every_layout(of_five: PlanEstimate) -> None:
    (entry,) = json.loads(json.dumps(as_json([of_five])))
    assert [layout["mode"] for layout in entry["layouts"]] == ["ar", "sd", "ssd"]
    assert entry["take"] == "ssd"
    assert entry["layouts"][2]["target_devices"] == 4
    plain = entry["layouts"][0]
    assert sum(plain["target_step_parts"].values()) == pytest.approx(plain["target_step_s"])
    assert plain["tokens_per_s"] > 0


def test_the_command_for_a_machine_that_is_not_here(capsys: Captured) -> None:
    command = ["plan", "llama-3.1-8b", "llama-3.2-1b", "--device", "h200", "--devices", "2"]
    assert cli.main([*command, "--context", "512"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-3.1-8b (15.0 GiB) with llama-3.2-1b (2.3 GiB) on 2 x H200")
    assert "data sheet: 141 GB, 4.8 TB/s" in text


def test_the_command_ends_with_5_where_the_target_does_not_fit(capsys: Captured) -> None:
    assert cli.main(["plan", "llama-3.1-405b", "--device", "mi300x"]) == 5
    assert "fits from 8 x MI300X on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "abacus"], "not in the table"),
        (["--acceptance", "1"], "--acceptance must be"),
        (["--acceptance", "0.5", "0.6"], "one for each draft"),
        (["--requests", "0"], "--requests must be"),
        (["--context", "0"], "--context must be"),
        (["--device", "h100", "--devices", "0"], "--devices must be"),
        (["--device", "h100", "--dtype", "fp32"], "--dtype bf16"),
    ],
)
def test_mistakes(arguments: list[str], sentence: str, capsys: Captured) -> None:
    assert cli.main(["plan", "llama-3.1-8b", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_target_that_fits_the_cache_is_noted() -> None:
    roofs = {1: Roof(1, "bfloat16", {1: 1e-10, 64: 1e-9}, 1e12)}
    platform = MeasuredRoofs("CPU core", 1, roofs, 1e10, True, cache_bytes=32 << 20)
    small, large = (
        page([make_plan(platform, small_model(size), None, PlanOptions(context=64))]) for size in (1e6, 1e9)
    )
    assert "fits the cache" in small
    assert "fits the cache" not in large
