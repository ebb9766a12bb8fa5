"""Structured log lines on stderr, one for each event: as text or as JSON.

A logger is an object that callers pass on: importing this module configures nothing. It never raises because
of a line that cannot be written.
"""

import contextlib
import json
import logging
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

Level = Literal["debug", "info", "warning", "error"]
Style = Literal["text", "json"]

_SEVERITY: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}


@dataclass(frozen=True, slots=True)
class Logger:
    """Writes log lines of one process. `stream` None means the current `sys.stderr`."""

    process: str
    level: Level = "info"
    style: Style = "text"
    fields: Mapping[str, object] = field(default_factory=dict[str, object])
    stream: TextIO | None = None

    def bind(self, **fields: object) -> "Logger":
        """A logger that adds these fields to every line."""
        return Logger(self.process, self.level, self.style, {**self.fields, **fields}, self.stream)

    def debug(self, event: str, **fields: object) -> None:
        """Log a detail that helps to find faults."""
        self._log("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log that something expected happened."""
        self._log("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a problem after which the process continues."""
        self._log("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log that something failed."""
        self._log("error", event, fields)

    def _log(self, level: Level, event: str, fields: Mapping[str, object]) -> None:
        if _SEVERITY[level] < _SEVERITY[self.level]:
            return
        merged = {**self.fields, **fields}
        line = _as_json if self.style == "json" else _as_text
        stream = self.stream if self.stream is not None else sys.stderr
        # One write for a line, so that lines of several processes do not mix; a closed stderr is no error.
        with contextlib.suppress(OSError, ValueError):
            stream.write(line(_now(), level, self.process, event, merged) + "\n")
            stream.flush()


class RateLimitedLogger:
    """Warnings that clients can cause at will: one a minute, with the number of suppressed ones."""

    def __init__(
        self, log: Logger, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._due = -math.inf
        self._suppressed = 0

    def warning(self, event: str, **fields: object) -> None:
        """Log the event, or count it for the `suppressed` field of the next line."""
        if self._clock() < self._due:
            self._suppressed += 1
            return
        self._due = self._clock() + self._every_s
        suppressed, self._suppressed = self._suppressed, 0
        self._log.warning(event, **fields, **({"suppressed": suppressed} if suppressed else {}))


def get_logger(process: str, level: Level = "info", style: Style = "text") -> Logger:
    """The logger of a process: `get_logger("verifier", settings.log_level, settings.log_format)`."""
    return Logger(process, level, style)


class Bridge(logging.Handler):
    """Handler that passes records of the standard library's `logging` to a `Logger`.

    A library's warning from one line of code is limited to one a minute, since clients can cause some at
    will. The fields of a line are those of `context` and the record's `fields` (`extra={"fields": {...}}`).
    """

    def __init__(self, log: Logger, context: Callable[[], Mapping[str, object]] = dict) -> None:
        super().__init__()
        self._to = log
        self._context = context
        self._warned: dict[tuple[str, int], RateLimitedLogger] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, a traceback included."""
        own = record.name.startswith("ssd_serve") and self._to.style == "text"
        fields: dict[str, object] = {
            **({} if own else {"logger": record.name}),
            **self._context(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info is not None and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        if record.levelno == logging.WARNING and not record.name.startswith("ssd_serve"):
            place = self._warned.setdefault((record.pathname, record.lineno), RateLimitedLogger(self._to))
            place.warning(record.getMessage().rstrip("."), **fields)
            return
        levels = (
            (logging.ERROR, self._to.error),
            (logging.WARNING, self._to.warning),
            (logging.INFO, self._to.info),
            (0, self._to.debug),
        )
        write = next(write for least, write in levels if record.levelno >= least)
        write(record.getMessage().rstrip("."), **fields)


def carry_library_logs(log: Logger, context: Callable[[], Mapping[str, object]] = dict) -> None:
    """Send log records of libraries (warnings and errors) and of this package through `log`. `context`
    returns fields for every line."""
    logging.basicConfig(handlers=[Bridge(log, context)], level=logging.WARNING, force=True)
    logging.getLogger("ssd_serve").setLevel(_SEVERITY[log.level])


def _now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"


def _as_text(moment: str, level: str, process: str, event: str, fields: Mapping[str, object]) -> str:
    pairs = "".join(f" {name}={_text_value(value)}" for name, value in fields.items())
    return f"{moment} {level:<7} {process}: {_one_line(event)}{pairs}"


def _text_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    plain = bool(text) and text.isprintable() and not any(sign in text for sign in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)


def _as_json(moment: str, level: str, process: str, event: str, fields: Mapping[str, object]) -> str:
    record = {"time": moment, "level": level, "process": process, "event": event, **fields}
    return json.dumps(record, ensure_ascii=False, default=str)


DETAIL = ": "
"""Separates a step from what changes within it, in a text of progress."""


class ProgressLine:
    """Shows the current step on stderr: on a terminal as a bar with its elapsed seconds, else as plain lines.

    What follows `DETAIL` in a text changes within a step, such as a rate: only terminals show it.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._shown = ""
        self._bar: Progress | None = None

    def show(self, text: str) -> None:
        """Replace the text; the same text twice is shown once."""
        if text == self._shown or not text:
            return
        step, same = text.partition(DETAIL)[0], self._shown.partition(DETAIL)[0]
        self._shown = text
        if not self._stream.isatty():
            if step != same:
                self._stream.write(f"{step}\n")
                self._stream.flush()
        elif self._bar is None:
            self._bar = _bar(self._stream)
            self._bar.add_task(text, total=None)
            self._bar.start()
        elif step == same:
            self._bar.update(self._bar.task_ids[0], description=text)
        else:
            self._bar.reset(self._bar.task_ids[0], description=text)

    def clear(self) -> None:
        """Remove the bar from a terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._shown = ""


def _bar(stream: TextIO) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(12), TimeElapsedColumn()
    return Progress(
        *columns, console=Console(file=stream), transient=True, redirect_stdout=False, refresh_per_second=4
    )
