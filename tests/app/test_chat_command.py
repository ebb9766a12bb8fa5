"""Tests of `ssd chat`: turns of a conversation, and the colour of accepted draft tokens."""

import io
import json
import shutil
from pathlib import Path

import pytest

from ssd_serve.app.cli import main as cli
from ssd_serve.app.cli.generate import ChatTerminal
from ssd_serve.app.llm.engine import Piece
from ssd_serve.models.hub import embedded_folder

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
Captured = pytest.CaptureFixture[str]


def a_model(folder: Path, template: str | None) -> Path:
    shutil.copytree(embedded_folder("target"), folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": template}))
    return folder


def test_a_conversation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    model = a_model(tmp_path / "model", TEMPLATE)
    told: list[str] = []
    for lines in ("x = 1\ny = 2\n\n", "x = 1\n/new\ny = 2\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        words = ["--max-tokens", "5", "--temperature", "0", "--mode", "sd", "--draft", "ngram"]
        assert cli.main(["chat", str(model), *words]) == 0
        told.append(capsys.readouterr().out)
    figures = [line for line in told[0].splitlines() if line.startswith("[5 tokens, mode sd")]
    assert len(figures) == 2
    assert "\x1b" not in told[0]
    first, second = (each.split("[5 tokens")[0] for each in told)
    assert first == second


def test_a_model_without_a_template_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert cli.main(["chat", str(a_model(tmp_path / "model", None)), "--mode", "ar"]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_what_was_guessed_is_green_on_a_terminal() -> None:
    for colours, shown in ((True, "\x1b[32mab\x1b[0mc"), (False, "abc")):
        out = io.StringIO()
        ChatTerminal(io.StringIO(), out, colours).show(Piece("abc"), "ab")
        assert out.getvalue() == shown


def test_lines_are_read_until_an_empty_one() -> None:
    terminal = ChatTerminal(io.StringIO("a\n b \n\nc\n"), io.StringIO(), colours=False)
    assert list(terminal.asked()) == ["a", "b"]
