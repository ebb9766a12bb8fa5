"""Results of the load benchmark as tables and as a plot; what it cannot read is refused."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd_serve.app.cli.main import main
from ssd_serve.base.errors import UserError
from ssd_serve.bench.load import run
from ssd_serve.bench.load.plot import Panel, plot
from ssd_serve.bench.load.report import load_plot, load_tables

BEGIN, END = "<!-- load:begin -->", "<!-- load:end -->"


def row(mode: str, concurrency: int, speed: float, **fields: object) -> dict[str, object]:
    return {
        "setting": "ballast",
        "mode": mode,
        "concurrency": concurrency,
        "tokens_per_s": speed,
        "tokens_per_s_quartiles": [speed - 1, speed, speed + 1],
        "requests": 24,
        "failed": 0,
        "ttft_ms": {"p50": 50.4, "p90": 90.0, "p99": 99.0},
        "tpot_ms": {"p50": 15.25, "p90": 19.0, "p99": 20.0},
        "goodput_shares": {"0.5": 0.25, "1": 0.875, "2": 1.0},
        "tokens_per_round": 2.5,
        "nodes_per_round": None,
        "client_cpu_share": 0.07,
        "idle_servers_cpu_share": 0.004,
        "a_new_field": 1,
        **fields,
    }


def ratio(other: str, concurrency: int, mean: float, **fields: object) -> dict[str, object]:
    return {
        "setting": "ballast",
        "concurrency": concurrency,
        "ratio": f"auto/{other}",
        "best": False,
        "pairs": 12,
        "faster": {"median": mean, "mean": mean, "low": mean - 0.01, "high": mean + 0.01},
        **fields,
    }


STEPS = {"first_chunk_ms": 10.0, "speculated_ms": 20.0, "longest_gap_ms": 30.0, "tokens_per_chunk": 2.0}
RESULT: dict[str, Any] = {
    "benchmark": "load",
    "plan": {
        "setting": "ballast",
        "temperature": 1.0,
        "launches": 3,
        "limits": {"ttft_ms": 450.0, "tpot_ms": 40.0},
        "time_scale": 4.0,
        "length_scale": 0.5,
        "mix": {"shortest": 64, "longest": 1500, "tokens": 64, "shared": 0.25, "prefix": 256},
    },
    "results": [
        row("ar", 1, 60.0),
        row("ar-all-devices", 1, 70.0),
        row("auto", 1, 100.0, failed=2),
        row("ar", 8, 240.0),
        row("auto", 8, 230.0),
    ],
    "ratios": [
        ratio("ar", 1, 1.6, best=True),
        ratio("ar", 1, 1.4, ratio="auto-all-devices/ar-all-devices", best=True),
        ratio("ar", 8, 0.96, best=True),
    ],
    "trace": [row("ar", 0, 33.0, tokens_per_s_quartiles=[])],
    "resume": [
        {
            "mode": "auto",
            "concurrency": 8,
            "outlived_the_burst": True,
            "tokens_per_chunk_under_load": 1.25,
            "survivor_after_burst": STEPS,
            "single_before_burst": STEPS,
            "single_after_burst": {**STEPS, "speculated_ms": None},
        }
    ],
    "notes": {
        "target_device": "cpu:0",
        "draft_device": "cpu:1",
        "client_device": "cpu:1",
        "trace": {
            **{"arrivals": 20, "context": 2048, "clipped_prompts": 3, "left_out": 100},
            **{"prompt_tokens_lost_share": 0.0, "output_tokens_lost_share": 0.04},
        },
        "device_table": None,
    },
    "hardware": {"cpu": "A processor", "cores": 2, "memory_gib": 23.4},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
}


def test_every_mode_has_its_line_and_the_devices_their_tables() -> None:
    same, _, whole = load_tables(RESULT).partition("**All devices")
    line = "| 60.0 (59.0 to 61.0) | 50 / 90 / 99 | 15.2 / 19.0 / 20.0 | 0.25 / 0.88 / 1.00 | 2.50 |  |"
    assert f"| 1 | plain (ar) {line}" in same.splitlines()
    assert ", all devices" not in same
    assert any(each.startswith("| 1 | plain (ar), all devices | 70.0") for each in whole.splitlines())
    assert "1.00, 2 failed" in same


def test_the_best_mode_is_marked_and_judged() -> None:
    lines = load_tables(RESULT).splitlines()
    assert "| at once | auto/ar | auto is |" in lines
    assert "| 1 | **1.60x (1.59 to 1.61)** | better |" in lines
    assert "| 8 | **0.96x (0.95 to 0.97)** | worse |" in lines
    assert "| at once | auto-all-devices/ar-all-devices | auto is |" in lines
    assert "| 1 | **1.40x (1.39 to 1.41)** | better |" in lines


def test_open_loops_have_tables_of_their_own() -> None:
    whole = {"p50": 1234.0, "p90": 2000.0, "p99": 3000.0}
    open_loop = row("auto", 0, 90.0, offered=0.7, whole_ms=whole, most_at_once=17)
    result = {
        **RESULT,
        "results": [*RESULT["results"], open_loop],
        "ratios": [*RESULT["ratios"], ratio("sd", 0, 1.2, offered=0.7, best=True)],
        "capacities": {"ar": 3.0, "auto": 4.25},
    }
    text = load_tables(result)
    assert "as a share of the 4.25 requests/s that auto gave" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| 0.7 | auto ")]
    assert line.endswith("| 1.23 / 2.00 / 3.00 | 17 |")
    assert "good at 0.5 / 1 / 2 times the limits" in text
    assert "| offered | auto/sd | auto is |" in text
    assert "| 0.7 | **1.20x (1.19 to 1.21)** | better |" in text
    assert "0.7" not in load_plot(result)


def test_the_requests_are_told() -> None:
    assert "Prompts of 64 to 1500 tokens, evenly on a logarithmic scale, 25% of them" in load_tables(RESULT)
    old = {**RESULT["plan"], "mix": None, "prompt_tokens": 32, "tokens": 8}
    assert "Prompts of up to 32 tokens, outputs of 8" in load_tables({**RESULT, "plan": old})


def test_trace_and_resumption() -> None:
    text = load_tables(RESULT)
    assert (
        "20 arrivals, times multiplied by 4 and lengths by 0.5, clipped to a context of 2048 tokens (at most "
        "4% of the tokens are lost)" in text
    )
    assert "no intervals. A processor, 2 cores" in text
    assert "| plain (ar) | 33.0 | 0.05 / 0.09 / 0.10 |" in text
    assert "| auto | 8 | 1.25 | 20.00, 30.00 | never, 30.00 | 20.00, 30.00 |" in text
    assert "client on cpu:1, where it took up to 0.07 of a core" in text


def test_tables_have_as_many_cells_as_columns() -> None:
    for block in load_tables(RESULT).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_the_plot_has_a_line_for_each_mode_in_both_panels() -> None:
    lines = {"ar": [(2, 9.0), (1, 0.0)], "auto": [(1, 4.0), (8, 5.0)]}
    figure = plot([Panel("speed", lines), Panel("wait", {"ar": [(4, 1.0)]})])
    first, second = figure.axes
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in first.get_lines()}
    assert drawn == {"ar": [[1, 0.0], [2, 9.0]], "auto": [[1, 4.0], [8, 5.0]]}
    assert [text.get_text() for text in first.get_xticklabels()] == ["1", "2", "8"]
    assert [len(second.get_lines()), first.get_title(loc="left")] == [1, "speed"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ar", "auto"]


def test_the_plot_names_what_it_shows_and_is_the_same_each_time() -> None:
    drawn = load_plot(RESULT)
    assert all(
        f">{text}</text>" in drawn for text in ("ar", "auto", "ar-all-devices", "tokens a second", "8")
    )
    assert drawn == load_plot(RESULT)
    assert "<dc:date>" not in drawn


def test_a_run_writes_its_result_and_draws_its_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {name: value for name, value in RESULT.items() if name not in ("hardware", "versions")}
    monkeypatch.setattr(run, "run_load", lambda *_: measured)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    file, drawn = tmp_path / "load.json", tmp_path / "load.svg"
    assert main(["bench", "load", "--json", str(file), "--plot", str(drawn)]) == 0
    result = json.loads(file.read_text())
    assert capsys.readouterr().out == load_tables(result) + "\n"
    assert drawn.read_text() == load_plot(result)


def test_a_replay_alone_has_no_closed_loop() -> None:
    alone = {**RESULT, "results": [], "ratios": [], "resume": []}
    text = load_tables(alone)
    assert "Closed loop" not in text
    assert "Replay of a trace" in text
    assert "requests at once" in load_plot(alone)


def test_the_report_command_knows_whose_result_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, readme = tmp_path / "load.json", tmp_path / "README.md"
    file.write_text(json.dumps(RESULT))
    readme.write_text(f"{BEGIN}\n{END}\n")
    assert main(["bench", "report", str(file)]) == 0
    assert capsys.readouterr().out == load_tables(RESULT) + "\n"
    assert main(["bench", "report", str(file), "--readme", str(readme)]) == 0
    assert readme.read_text() == f"{BEGIN}\n\n{load_tables(RESULT)}\n\n{END}\n"


@pytest.mark.parametrize("result", [{}, {**RESULT, "results": [{"mode": "ar"}]}])
def test_something_else_is_refused(result: dict[str, object]) -> None:
    with pytest.raises(UserError, match="not a result"):
        load_tables(result)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--pairs", "0"], "--pairs: must be at least 1"),
        (["--time-scale", "-1"], "--time-scale: must be greater than 0"),
        (["--temperature", "nan"], "--temperature: must be 0 or more, and finite"),
        (["--temperature", "-1"], "--temperature: must be 0 or more"),
        (["--modes", "fast"], "invalid choice"),
        (["--no-closed-loop", "--offered"], "leave nothing to do"),
        (["--offered", "0"], "--offered: must be greater than 0, and finite"),
        (["--shared-prefixes", "1.5"], "must be from 0 to 1"),
        (["--port", "1"], "the flag --port is unknown"),
        (["--learning", "-1"], "--learning: must be 0 or more"),
    ],
)
def test_wrong_arguments(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", *arguments]) == 2
    assert told in capsys.readouterr().err
