"""Results on stdout and in JSON files: provenance, secrets, tables."""

import argparse
import json
from pathlib import Path

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.bench import report
from ssd_serve.bench.report import Report, add_report, need, processor, text_table, without_secrets

CPUINFO = "model name\t: A CPU\nflags\t\t: avx2 avx512f fma\n\nmodel name\t: another\n"


def run(result: Report, *words: str) -> int:
    parser = argparse.ArgumentParser()
    add_report(parser, lambda _args: result)
    args = parser.parse_args(list(words))
    code: int = args.run(args)
    return code


def test_result_file_records_code_command_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ssd", "bench", "modes", "--hf-token", "s3cret"])
    monkeypatch.setenv("SSD_API_KEY", "s3cret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "new" / "result.json"
    assert run(Report({"results": [1]}, exit_code=3), "--json", str(file)) == 3
    found = json.loads(file.read_text())
    provenance = found["provenance"]
    assert found["results"] == [1]
    assert provenance["command"] == "ssd bench modes --hf-token ****"
    assert provenance["environment"]["OMP_NUM_THREADS"] == "1"
    assert "s3cret" not in file.read_text()
    assert len(provenance["commit"]) in (0, 40)
    assert provenance["machine"]["cores"] >= 1
    assert provenance["versions"]["python"]
    assert capsys.readouterr().out == ""


def test_result_is_printed_as_json_without_file_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Report({"answer": 42})) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == 42


def test_tables_print_the_named_columns(capsys: pytest.CaptureFixture[str]) -> None:
    interval = {"median": 1.3, "mean": 1.3, "low": 1.2, "high": 1.41, "more": 1}
    rows = [{"name": "a", "ratio": interval, "parts": [1.0, 2.5]}, {"name": "b", "ratio": None, "other": 3}]
    run(Report({"results": rows, "empty": []}, {"results": ("name", "ratio", "parts"), "empty": ("x",)}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "ratio", "parts"]
    assert lines[1].split() == ["a", "1.30", "(1.20", "to", "1.41)", "1", "/", "2.5"]
    assert lines[2].split() == ["b"]


def test_text_table_aligns_numbers_to_the_right() -> None:
    assert text_table(("name", "n"), [("a", 5), ("bb", 12)]) == "name   n\na      5\nbb    12"


def test_absolute_paths_are_shortened_in_commands() -> None:
    assert without_secrets(["modes", "/home/me/pair", "--json=/tmp/x.json", "--api-key=k"]) == [
        *("modes", "pair", "--json=x.json", "--api-key=****"),
    ]


def test_processor_is_named_with_its_widest_vectors() -> None:
    assert processor(CPUINFO) == "A CPU (AVX-512)"


def test_missing_package_is_named_with_the_extra() -> None:
    need("ssd bench modes", "numpy")
    with pytest.raises(UserError, match=r"needs no_such: pip install 'ssd-serve\[bench\]'"):
        need("ssd bench modes", "numpy", "no_such")


def test_commit_is_empty_for_an_installed_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "_SOURCE", tmp_path / "site-packages" / "ssd_serve")
    assert report._git("rev-parse", "HEAD") == ""  # pyright: ignore[reportPrivateUsage]
