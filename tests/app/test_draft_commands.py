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
def test_invalid_verifier_address_is_refused(
    address: str,
    key: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SSD_CLUSTER_KEY", key)
    assert main(["draft", "--connect", address]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "why"),
    [("nowhere/alive", "cannot be written"), ("thesis.tex", "holds something")],
)
def test_alive_file_must_be_writable_and_empty(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSD_CLUSTER_KEY", KEY)
    (tmp_path / "thesis.tex").write_text("all of it", encoding="utf-8")
    path = str(tmp_path / name)
    assert main(["draft", "--connect", "tcp://127.0.0.1:4711", "--alive-file", path]) == 2
    error = capsys.readouterr().err
    assert f"--alive-file: {path}" in error
    assert why in error
    assert (tmp_path / "thesis.tex").read_text(encoding="utf-8") == "all of it"
