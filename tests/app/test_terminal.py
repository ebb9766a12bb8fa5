"""The terminal of a chat: commands stay in it, accepted drafts are green, and the rate is erased again."""

import io

import pytest

from ssd_serve.app.cli.terminal import COMMANDS, ChatTerminal
from ssd_serve.base.messages import PromptProgress


def terminal(lines: str = "", colours: bool = False) -> tuple[ChatTerminal, io.StringIO]:
    out = io.StringIO()
    return ChatTerminal(io.StringIO(lines), out, colours), out


def test_lines_are_read_until_the_end_or_exit() -> None:
    assert list(terminal("a\n\n b \nc")[0].asked()) == ["a", "b", "c"]
    assert list(terminal("a\n/exit\nb\n")[0].asked()) == ["a"]


@pytest.mark.parametrize("line", ["/help", "/nwe", "/new things", "/exit now", "/", "/new"])
def test_commands_are_not_sent(line: str) -> None:
    assert list(terminal(f"{line}\nx\n")[0].asked()) == ["x"]


def test_commands_are_listed_and_the_nearest_is_named() -> None:
    shown, out = terminal("/help\n/nwe\n//etc\n")
    assert list(shown.asked()) == ["/etc"]
    assert all(each in out.getvalue() for each in COMMANDS)
    assert "/nwe is no command; did you mean /new?" in out.getvalue()


def test_dropped_questions_leave_the_conversation() -> None:
    shown, out = terminal()
    shown.ask("user")
    shown.drop("stopped")
    assert shown.messages == []
    assert "[stopped; this question is not part of the conversation]" in out.getvalue()


def test_accepted_draft_tokens_are_green_on_a_terminal() -> None:
    for colours, expected in ((True, "\x1b[K\x1b[32mab\x1b[0mc"), (False, "abc")):
        shown, out = terminal(colours=colours)
        shown.ask("")
        shown.show("abc", 3, "ab")
        assert out.getvalue() == expected


def test_rate_is_shown_where_it_fits_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown, out = terminal(colours=True)
    shown.ask("")
    shown.show("one", 2)
    assert out.getvalue() == "\x1b[Kone"
    shown.show(" two", 3)
    label = out.getvalue().removeprefix("\x1b[Kone\x1b[K two")
    assert label.startswith("\x1b[2m  ")
    width = len(label.removeprefix("\x1b[2m").partition("\x1b[0m")[0])
    assert label.endswith(f" tokens/s\x1b[0m\x1b[{width}D")
    shown.show("x" * 30, 1)
    assert out.getvalue().endswith("x" * 30)
    shown.show("\nnew", 1)
    assert " tokens/s" in out.getvalue().rpartition("\nnew")[2]


def test_long_wait_for_the_first_token_is_shown_until_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out = terminal(colours=True)
    shown.ask("")
    shown.read(PromptProgress(512, 3124, 256, 500))
    assert out.getvalue() == ""
    monkeypatch.setattr("ssd_serve.app.cli.terminal._PATIENCE_S", 0.0)
    monkeypatch.setattr(out, "isatty", lambda: True)
    shown.ask("")
    shown.read(PromptProgress(512, 3124, 256, 500))
    assert "512 of 3,124 tokens, 512 tokens/s, 6 s left" in out.getvalue()
    shown.show("one", 1)
    before = out.getvalue()
    shown.read(PromptProgress(1024, 3124, 256, 1000))
    assert out.getvalue() == before
