"""The terminal of a chat: lines and commands of the user, answers as they come, and their speed."""

import contextlib
import importlib
import math
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TextIO

from rich.cells import cell_len

from ssd_serve.base.logs import DETAIL, ProgressLine
from ssd_serve.base.messages import PromptProgress
from ssd_serve.base.names import suggestion

COMMANDS = {
    "/help": "this list",
    "/new": "begin a new conversation",
    "/exit": "end the chat, as Ctrl-D does",
}
_NOTES = (
    "Ctrl-C stops an answer. A line that begins with // is sent with one /.",
    "Green text was drafted and accepted (`ssd chat` without --url).",
)
_GREEN, _DIM, _PLAIN, _ERASE = "\x1b[32m", "\x1b[2m", "\x1b[0m", "\x1b[K"


_PATIENCE_S = 1.0
"""Seconds without a token until a line shows the reason for waiting."""
_WAITING = "waiting for the first token"


class WaitingLine:
    """A line of progress that appears `_PATIENCE_S` after `begin`, unless `end` comes first."""

    def __init__(self, out: TextIO) -> None:
        self._line = ProgressLine(out)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._text, self._due = "", 0.0

    def begin(self) -> None:
        """Start to wait."""
        self._text, self._due = _WAITING, time.monotonic() + _PATIENCE_S
        self._timer = threading.Timer(_PATIENCE_S, self.update)
        self._timer.daemon = True
        self._timer.start()

    def update(self, text: str = "") -> None:
        """Change the text."""
        with self._lock:
            self._text = text or self._text
            if self._timer is not None and time.monotonic() >= self._due:
                self._line.show(self._text)

    def end(self) -> None:
        """Remove the line. A second call does nothing."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._line.clear()


@dataclass(slots=True)
class ChatTerminal:
    """Input and output of a terminal. `colours`: it shows colours and the current rate."""

    lines: TextIO
    out: TextIO
    colours: bool
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    _column: int = 0
    _tokens: int = 0
    _first: tuple[float, int] | None = None
    """Time of the first piece of an answer, and its tokens."""
    _waiting: WaitingLine | None = None

    def asked(self) -> Iterator[str]:
        """Lines of the user, until /exit or the end. Commands are carried out; empty lines are ignored."""
        while True:
            line = self._typed() if self.colours else self.lines.readline()
            text = line.strip()
            if not line or text == "/exit":
                return
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
            elif text:
                yield text[text.startswith("//") :]

    def _typed(self) -> str:
        """A line of the terminal, edited with readline: a terminal alone cuts it after 4,095 bytes, and pasted text at
        its first newline."""
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
        self.out.flush()
        try:
            return input("> ") + "\n"
        except EOFError:
            return ""

    def ask(self, text: str) -> None:
        """Add a message of the user, and begin to measure the answer."""
        self.messages.append({"role": "user", "content": text})
        self._column, self._tokens, self._first = 0, 0, None
        if self.colours:
            self._waiting = WaitingLine(self.out)
            self._waiting.begin()

    def read(self, done: PromptProgress) -> None:
        """Show how much of the prompt has been computed."""
        rate = max(1, done.processed - done.cache) / max(1e-3, done.time_ms / 1e3)
        left = f"{rate:,.0f} tokens/s, {math.ceil((done.total - done.processed) / rate)} s left"
        if self._waiting is not None:
            self._waiting.update(
                f"reading the prompt{DETAIL}{done.processed:,} of {done.total:,} tokens, {left}"
            )

    def show(self, text: str, tokens: int, guessed: str = "") -> None:
        """More of an answer, of which `guessed` is the beginning that had been drafted."""
        self._tokens += tokens
        now = time.perf_counter()
        if self._first is None and self._tokens:
            self._first = now, self._tokens
        before, _, last = text.rpartition("\n")
        shown = text
        if self.colours and guessed and text.startswith(guessed):
            shown = f"{_GREEN}{guessed}{_PLAIN}{text[len(guessed) :]}"
        self._write(shown, erase=True)
        columns = shutil.get_terminal_size().columns
        self._column = ((0 if before or "\n" in text else self._column) + cell_len(last)) % columns
        rate = self.rate(now)
        if self.colours and rate is not None:
            label = f"  {rate:.0f} tokens/s"
            if self._column + len(label) < columns:
                self._write(f"{_DIM}{label}{_PLAIN}\x1b[{len(label)}D")

    def rate(self, now: float) -> float | None:
        """Tokens a second of the answer after its first piece; None before the second."""
        if self._first is None or self._tokens == self._first[1]:
            return None
        return (self._tokens - self._first[1]) / max(1e-9, now - self._first[0])

    def end(self, answer: str, summary: str) -> None:
        """Keep the whole answer in the conversation, and show its figures."""
        self.messages.append({"role": "assistant", "content": answer})
        self._write(f"\n{summary}\n", erase=True)

    def drop(self, reason: str) -> None:
        """Leave the last question and its answer out of the conversation."""
        self.messages.pop()
        self._write(f"\n[{reason}; this question is not part of the conversation]\n", erase=True)

    def _command(self, name: str) -> None:
        if name == "/new":
            self.messages.clear()
        elif name == "/help":
            width = max(map(len, COMMANDS)) + 2
            self._write("".join(f"{each:{width}}{what}\n" for each, what in COMMANDS.items()))
            self._write("".join(f"{note}\n" for note in _NOTES))
        else:
            self._write(f"{name} is no command{suggestion(name, COMMANDS)} (/help lists them)\n")

    def _write(self, text: str, erase: bool = False) -> None:
        if self._waiting is not None:
            self._waiting.end()
        self.out.write((_ERASE if erase and self.colours else "") + text)
        self.out.flush()
