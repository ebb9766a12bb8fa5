"""`ssd run` in a terminal: answers, Ctrl-C in an answer, and no process that outlives the chat."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.servers import gone

CHEAP = ["--draft", "ngram", "--mode", "sd", "--context", "512", "--kv-memory-mb", "64", "--temperature", "0"]


class Chat:
    def __init__(self, terminal: int, process: "subprocess.Popen[bytes]") -> None:
        self.terminal, self.process, self.shown = terminal, process, ""

    def say(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def until(self, pattern: str) -> str:
        """Read until the pattern is shown; return what was shown, and forget it."""
        deadline = time.monotonic() + 240
        while re.search(pattern, self.shown) is None:
            assert time.monotonic() < deadline, self.shown
            try:
                self.shown += os.read(self.terminal, 4096).decode()
            except OSError:  # Linux: the other end is closed
                raise AssertionError(f"the chat has ended: {self.shown}") from None
        shown, self.shown = self.shown, ""
        return shown

    def workers(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))


@contextmanager
def chatting(*flags: str) -> Generator[Chat]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ssd_serve", "run", "embedded", *CHEAP, *flags]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        yield Chat(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_answers_ctrl_c_and_the_end(tmp_path: Path) -> None:
    with chatting("--run-dir", str(tmp_path)) as chat:
        greeting = chat.until("> $")
        assert re.search(r"served at http://127\.0\.0\.1:\d+", greeting), greeting
        for _ in range(2):
            chat.say("x = 1\n")
            chat.until(r"tokens/s")
            os.killpg(chat.process.pid, signal.SIGINT)
            chat.until(r"\[stopped; [^>]*> $")
        chat.say("/help\nx = 1\n")
        assert "/exit" in chat.until(
            r"\d+ tokens, [\d.]+ tokens/s, [\d.]+ tokens a round, .* accepted\]\s+> $"
        )
        workers = chat.workers()
        assert workers
        chat.say("/exit\n")
        assert chat.process.wait(60) == 0
        assert gone(workers)
    assert list(tmp_path.iterdir()) == []


def test_no_process_outlives_a_killed_chat() -> None:
    with chatting() as chat:
        chat.until("> $")
        workers = chat.workers()
        chat.process.kill()
        assert gone(workers)
