"""Turns of `ssd chat` with a model of its own."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest

from ssd_serve.app.cli import main as cli
from ssd_serve.models.hub import embedded_folder

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
Captured = pytest.CaptureFixture[str]


CHEAP = ["--no-native-kernels", "--kv-memory-mb", "64", "--context", "256", "--mode", "ar"]


def model_with(folder: Path, template: str | None) -> Path:
    shutil.copytree(embedded_folder("target"), folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": template}))
    return folder


def test_chat_keeps_the_conversation_until_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    model = model_with(tmp_path / "model", TEMPLATE)
    monkeypatch.setattr("sys.stdin", io.StringIO("x = 1\nx = 1\n/new\nx = 1\n\n"))
    assert cli.main(["chat", str(model), "--max-tokens", "5", "--temperature", "0", *CHEAP]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    first, second, third = re.split(r"\n\[5 tokens, mode ar.*\]\n", shown)[:-1]
    assert first == third != second


@pytest.mark.slow
def test_chat_without_a_template_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert cli.main(["chat", str(model_with(tmp_path / "model", None)), *CHEAP]) == 2
    assert "has no chat template" in capsys.readouterr().err
