"""Results as Markdown: every mode has its line, absent figures are blank."""

import json
from pathlib import Path

import pytest

from ssd_serve.bench.document import read_json
from ssd_serve.bench.report import modes_tables
from ssd_serve.cli.main import main
from ssd_serve.errors import UserError


def row(mode: str, speed: float, **fields: object) -> dict[str, object]:
    return {
        "setting": "real",
        "mode": mode,
        "shape": f"{mode} 3" if mode == "sd-chain" else mode,
        "temperature": 0.0,
        "tokens_per_s": speed,
        "tokens_per_s_quartiles": [speed - 1, speed, speed + 1],
        "tokens_per_round": 2.5,
        "acceptance": 0.25,
        "hit_rate": 0.875,
        "forward_share": 0.9,
        "wait_share": 0.06,
        "host_share": 0.04,
        "requests": 24,
        "a_new_field": 1,
        **fields,
    }


EQUAL = row("ar", 80.0, setting="real-both-cores", acceptance=None, hit_rate=None)
RESULT: dict[str, object] = {
    "results": [
        row("ar", 50.0, acceptance=None, hit_rate=None),
        row("sd-chain", 80.0),
        row("ssd", 120.0),
        EQUAL,
    ],
    "ratios": [
        {
            "setting": "real",
            "temperature": 0.0,
            "ratio": "ssd/ar",
            "median": 2.4,
            "quartiles": [2.0, 2.4, 2.8],
        }
    ],
    "notes": {"real": {"replaced_prompts_share_t0": 0.125, "target_step_ms": {"1": 20.0}}},
    "hardware": {"cpu": "A processor", "cores": 2, "memory_gib": 23.4},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
}


def test_every_mode_has_its_line() -> None:
    lines = modes_tables(RESULT).splitlines()
    assert "| plain (ar) | 0 | 50.0 (49.0 to 51.0) | 2.40x | 2.50 |  |  | 0.90 / 0.06 / 0.04 |" in lines
    assert "| plain (ar) | 0 | 80.0 (79.0 to 81.0) | 1.50x | 2.50 |  |  | 0.90 / 0.06 / 0.04 |" in lines
    assert any(line.startswith("| chain (sd) 3 | 0 |") for line in lines)
    assert "0.125" in next(line for line in lines if line.startswith("- share of prompts"))
    assert "A processor, 2 cores" in lines[-1]
    columns = {line.count("|") for line in lines if line.startswith("|")}
    assert columns == {9}


def test_a_table_of_gpus_names_them() -> None:
    where = {"devices": {"target": "cuda:0", "draft": "cuda:1"}, "hardware": {"gpus": ["A card", "Another"]}}
    table = modes_tables({**RESULT, **where})
    assert table.splitlines()[0].endswith("target on cuda:0, drafter on cuda:1.")
    assert "A card, Another; Python" in table


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, readme = tmp_path / "modes.json", tmp_path / "README.md"
    file.write_text(json.dumps(RESULT))
    readme.write_text("<!-- modes:begin -->\n<!-- modes:end -->\n")
    assert main(["bench", "report", str(file)]) == 0
    assert capsys.readouterr().out.startswith("**Real devices**")
    assert main(["bench", "report", str(file), "--readme", str(readme)]) == 0
    assert "| SSD (ssd) | 0 |" in readme.read_text()


@pytest.mark.parametrize("content", ["[]", "{}", "no JSON"])
def test_something_else_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(UserError, match="not a result"):
        modes_tables(read_json(file, "ssd bench modes"))
