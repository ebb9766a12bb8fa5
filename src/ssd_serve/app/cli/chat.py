"""`ssd chat`: a conversation in the terminal, in which what was guessed stands out.

Knows lines and colours; nothing of how tokens come about.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TextIO

from ssd_serve.app.cli.generate import GenerateOptions, summary
from ssd_serve.app.llm.llm import LLM
from ssd_serve.app.llm.outputs import Piece
from ssd_serve.app.llm.sampling_params import SamplingParams
from ssd_serve.base.errors import RequestError, SettingsError
from ssd_serve.base.logs import ProgressLine
from ssd_serve.base.settings import Settings

_GREETING = "An empty line ends it; /new begins a new conversation. Green was guessed, and found right."
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


@dataclass(slots=True)
class ChatTerminal:
    """Where people type and read. `colours`: whether it shows them."""

    lines: TextIO
    out: TextIO
    colours: bool
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def asked(self) -> Iterator[str]:
        """What is said, line by line, until an empty one or the end."""
        while True:
            if self.colours:
                self.out.write("> ")
                self.out.flush()
            line = self.lines.readline().strip()
            if not line:
                return
            if line == "/new":
                self.messages.clear()
            else:
                yield line

    def show(self, piece: Piece, guessed: str) -> None:
        """More of an answer, of which `guessed` is the beginning that had been drafted."""
        text = piece.text
        if self.colours and guessed and text.startswith(guessed):
            text = f"{_GREEN}{guessed}{_PLAIN}{text[len(guessed) :]}"
        self.out.write(text)
        self.out.flush()


def run_chat(settings: Settings, wish: GenerateOptions) -> int:
    """Start an engine, talk, end it."""
    wish.check()
    line = ProgressLine()
    terminal = ChatTerminal(sys.stdin, sys.stdout, sys.stdin.isatty() and sys.stdout.isatty())
    with LLM.of(settings, line.show) as llm:
        params = wish.params(llm.get_default_sampling_params())
        line.clear()
        if not llm.tokenizer.chat_template:
            raise SettingsError(f"{llm.ready.target} has no chat template; try `ssd generate`")
        if terminal.colours:
            print(_GREETING)
        for said in terminal.asked():
            _answer(llm, terminal, said, params)
    return 0


def _answer(llm: LLM, terminal: ChatTerminal, said: str, params: SamplingParams) -> None:
    """One turn; what cannot be answered is said, and not part of the conversation."""
    terminal.messages.append({"role": "user", "content": said})
    try:
        for piece in llm.stream_chat(terminal.messages, params):
            drafted = piece.token_ids[:-1]
            terminal.show(piece, llm.tokenizer.decode(drafted) if drafted else "")
            if piece.output is not None:
                terminal.messages.append({"role": "assistant", "content": piece.output.text})
                terminal.out.write(f"\n{summary(piece.output, llm.ready)}\n")
    except RequestError as error:
        terminal.messages.pop()
        print(f"ssd: {error}", file=sys.stderr)
