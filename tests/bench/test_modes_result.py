"""Results of the modes as Markdown: every line with its devices, and in words what equal hardware gives."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ssd_serve.app.cli.main import main
from ssd_serve.base.errors import UserError
from ssd_serve.bench.document import read_json
from ssd_serve.bench.modes_result import ModesRow, modes_tables
from ssd_serve.bench.statistics import Interval
from tests.bench.modes_rows import modes_row as row


def faster(ratio: float) -> Interval:
    return Interval(ratio, ratio, ratio - 0.05, ratio + 0.05)


ROWS = [
    row("ar", 50.0, acceptance=None, hit_rate=None, ssd=faster(2.4)),
    row("sd-chain", 80.0, shape="sd-chain 3", ssd=faster(1.5)),
    row("sd-chain", 130.0, shape="sd-chain 4", target="cpu:0-1", devices=2, ssd=faster(0.92)),
    row("ssd", 120.0, draft="cpu:1", devices=2),
]


def result(rows: list[ModesRow], **fields: object) -> dict[str, Any]:
    return {
        "results": msgspec.to_builtins(rows),
        "pairs": {rows[0].setting: "a target with a draft"},
        "prompts": "places in held-out files",
        "notes": {rows[0].setting: {"left_out": {"0": 0.125}, "target_overrun_share": 0.0}},
        "hardware": {"cpu": "A processor", "cores": 2, "memory_gib": 23.4},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        **fields,
    }


def test_every_line_names_its_devices_and_what_each_of_them_gives() -> None:
    lines = modes_tables(result(ROWS)).splitlines()
    shares = "0.90 / 0.06 / 0.04 |"
    assert (
        "| plain (ar) | 0 | 1: cpu:0 | 50.0 (49.0 to 51.0) | 50.0 | 2.40x (2.35 to 2.45) | better "
        f"| 1.20x (1.18 to 1.22) | better | 2.50 |  |  | {shares}" in lines
    )
    assert (
        "| chain (sd) 4 | 0 | 2: cpu:0-1 | 130.0 (129.0 to 131.0) | 65.0 | 0.92x (0.87 to 0.97) | worse "
        f"| 0.92x (0.87 to 0.97) | worse | 2.50 | 0.25 | 0.88 | {shares}" in lines
    )
    assert any(line.startswith("| SSD (ssd) | 0 | 2: cpu:0 and cpu:1 | 120.0") for line in lines)
    assert "0.125" in next(line for line in lines if line.startswith("- share of prompts left out"))
    assert {line.count("|") for line in lines if line.startswith("|")} == {14}
    assert "A processor, 2 cores" in lines[-1]
    assert "64 prompts a line (places in held-out files)" in lines[-1]


def test_equal_hardware_is_told_in_words_against_the_best_of_them() -> None:
    text = modes_tables(result(ROWS))
    words = (
        "with 2 devices each**: SSD (ssd) gives 0.92x (0.87 to 0.97) of chain (sd) 4, "
        "the best of the others: worse"
    )
    assert f"- **temperature 0, {words}" in text


def test_who_is_faster_with_fewer_devices_may_leave_some_idle() -> None:
    """Two cores can be slower than one."""
    alone = row("ar", 150.0, ssd=faster(0.8))
    words = "with 2 devices each**: SSD (ssd) gives 0.80x (0.75 to 0.85) of plain (ar) on cpu:0, the best"
    assert words in modes_tables(result([alone, *ROWS[1:]]))


def test_where_nobody_has_as_many_devices_the_words_are_by_device() -> None:
    rows = [
        row("ar", 50.0, devices=4, setting="emulated", ssd=faster(4.0)),
        row("sd-tree", 184.0, devices=4, setting="emulated", ssd=faster(1.25)),
        row("ssd", 230.0, devices=5, setting="emulated"),
    ]
    words = "by device**: SSD (ssd) gives 1.00x (0.96 to 1.04) of tree (sd), the best of the others: not"
    assert f"- **temperature 0, {words}" in modes_tables(result(rows))


def test_ssd_with_lookup_is_what_all_are_compared_with_and_ssd_without_is_no_other() -> None:
    rows = [*ROWS[:3], row("ssd", 120.0, draft="cpu:1", devices=2, ssd=faster(0.7))]
    text = modes_tables(result([*rows, row("ssd", 84.0, shape="ssd + lookup", draft="cpu:1", devices=2)]))
    assert "| SSD (ssd) + lookup is faster by |" in text
    words = "SSD (ssd) + lookup gives 0.92x (0.87 to 0.97) of chain (sd) 4, the best of the others: worse"
    assert words in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, readme = tmp_path / "modes.json", tmp_path / "README.md"
    file.write_text(json.dumps(result(ROWS)))
    readme.write_text("<!-- modes:begin -->\n<!-- modes:end -->\n")
    assert main(["bench", "report", str(file)]) == 0
    assert capsys.readouterr().out.startswith("**Real devices**: a target with a draft.")
    assert main(["bench", "report", str(file), "--readme", str(readme)]) == 0
    assert "| SSD (ssd) | 0 |" in readme.read_text()


@pytest.mark.parametrize("content", ["[]", "{}", "no JSON"])
def test_something_else_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(UserError, match="not a result"):
        modes_tables(read_json(file, "ssd bench modes"))
