"""Tests of `ssd draft`: errors that a retry cannot fix are reported at once."""

from pathlib import Path

import pytest

from ssd_serve.app.cli.main import main

KEY = "a key of some length"


@pytest.mark.parametrize(
    ("address", "key", "why"),
    [
        ("tcp://127.0.0.1:99999", KEY, "must look like tcp://127.0.0.1:4711"),
        ("10.0.0.5:4711", KEY, "must look like tcp://127.0.0.1:4711"),
        ("tcp://127.0.0.1:4711", "", "set SSD_CLUSTER_KEY to 16 characters"),
    ],
)
def test_an_address_that_can_never_answer_is_refused(
    address: str,
    key: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SSD_CLUSTER_KEY", key)
    assert main(["draft", "--connect", address]) == 2
    assert why in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSD_CLUSTER_KEY", KEY)
    path = str(tmp_path / "nowhere" / "alive")
    assert main(["draft", "--connect", "tcp://127.0.0.1:4711", "--alive-file", path]) == 2
    assert f"--alive-file: {path} cannot be written" in capsys.readouterr().err


def test_a_file_that_holds_something_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSD_CLUSTER_KEY", KEY)
    path = tmp_path / "thesis.tex"
    path.write_text("all of it", encoding="utf-8")
    assert main(["draft", "--connect", "tcp://127.0.0.1:4711", "--alive-file", str(path)]) == 2
    assert "holds something" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "all of it"
