"""Records a session of the verifier, so that it can be run again: `SSD_RECORD`.

What an engine hears from outside, and what it is asked to do, goes onto a tape in order; what it decides goes
there too, to be compared. The recording holds prompts and outputs: folder 0700, files 0600. A recording that
cannot go on never ends the session. Knows the engine's seams; replays nothing.
"""

import contextlib
import errno
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ssd_serve.errors import PermissionProblemError
from ssd_serve.logs import Logger
from ssd_serve.messages import Hello
from ssd_serve.models.fingerprint import fingerprint
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import Model, ModelFacts
from ssd_serve.owned import is_private
from ssd_serve.settings import SECRETS, Settings
from ssd_serve.verifier.build import EngineKind
from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.outside import Environment
from ssd_serve.verifier.replay.recorded import RecordedDrafters, RecordedEngine, RecordedModel
from ssd_serve.verifier.replay.tape import FORMAT, HEADER, TAPE, Kind, TapeWriter

T = TypeVar("T")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """`header.json`: what a tape is of, for people and for whoever replays it."""

    format: int
    started: str
    versions: dict[str, str]
    processor: str
    settings: dict[str, Any]
    """Without secrets."""
    model: str
    weights: str
    """A digest that tells one checkpoint from another."""
    tokenizer: str
    attention: str
    kernels: str
    ranks: int
    found: dict[str, Any]
    """What was measured or found at the start, by name."""


class SessionRecorder(Environment):
    """The world, and a tape of it in a new folder below `folder`."""

    def __init__(self, folder: Path, max_bytes: int, log: Logger) -> None:
        self.path = _session_folder(folder.expanduser())
        self._tape = TapeWriter(
            self.path / TAPE, max_bytes, lambda why: log.warning("the recording has ended", reason=why)
        )
        self._found: dict[str, Any] = {}
        log.warning("this session is recorded, with all prompts and outputs", folder=str(self.path))

    def begin(self, settings: Settings, facts: ModelFacts, hello: Hello) -> None:
        """Write the header, once everything is loaded and measured."""
        header = Header(
            format=FORMAT,
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            versions=versions(),
            processor=platform.processor() or platform.machine(),
            settings=settings.model_dump(mode="json", exclude=set(SECRETS)),
            model=facts.name,
            weights=fingerprint(find_model(settings, settings.target, "target")),
            tokenizer=hello.tokenizer,
            attention=facts.attention,
            kernels=facts.kernels,
            ranks=facts.ranks,
            found=self._found,
        )
        path = self.path / HEADER
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(header), indent=1))
        except OSError as error:
            self._tape.stop(f"{path} cannot be written: {error.strerror}")
        self._tape.flush()

    @property
    def clock(self) -> Callable[[], float]:
        """See `Environment.clock`."""
        return self._now

    def found(self, name: str, kind: type[T], find: Callable[[], T]) -> T:
        """See `Environment.found`."""
        value = super().found(name, kind, find)
        self._found[name] = msgspec.to_builtins(value, str_keys=True)
        return value

    def model(self, model: Model) -> Model:
        """See `Environment.model`."""
        return RecordedModel(model, self._tape)

    def drafters(self, hello: Hello, log: Logger) -> Drafters:
        """See `Environment.drafters`."""
        return RecordedDrafters(self._tape, hello, self._now, log)

    @property
    def engine_kind(self) -> EngineKind:
        """See `Environment.engine_kind`."""
        return partial(RecordedEngine, self._tape)

    def _now(self) -> float:
        now = time.perf_counter()
        self._tape.note(Kind.CLOCK, now)
        return now


def recorded_bytes(folder: Path) -> int:
    """Of all sessions in a folder."""
    total = 0
    for path in folder.expanduser().glob(f"*/{TAPE}"):
        with contextlib.suppress(OSError):  # somebody deletes old ones meanwhile
            total += path.lstat().st_size
    return total


def is_full(error: BaseException | None) -> bool:
    """Whether it says that there is no room on a disk."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def versions() -> dict[str, str]:
    """What a replay should run with."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("ssd-serve", "torch", "numpy")},
    }


def _session_folder(folder: Path) -> Path:
    """A new folder for this process, which nobody else may read; so must be the one above it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        if not is_private(facts):
            raise PermissionProblemError(
                f"SSD_RECORD={folder} must belong to you alone, it will hold prompts: chmod 700 it, "
                "or name another folder"
            )
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
        path.mkdir(mode=0o700)
    except OSError as error:
        raise PermissionProblemError(
            f"SSD_RECORD={folder} cannot be used: {error.strerror}; name a folder you can write to"
        ) from error
    return path
