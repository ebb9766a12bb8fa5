"""One changing line on the terminal while something loads; plain lines where there is no terminal."""

import sys
from typing import TextIO

_CLEAR = "\r\x1b[2K"


class ProgressLine:
    """Shows what goes on right now, on stderr, and disappears when done."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._in_place = self._stream.isatty()
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace what is shown; the same text twice is shown once."""
        if text == self._shown or not text:
            return
        self._shown = text
        self._stream.write(f"{_CLEAR}{text} ..." if self._in_place else f"{text}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._shown and self._in_place:
            self._stream.write(_CLEAR)
            self._stream.flush()
        self._shown = ""
