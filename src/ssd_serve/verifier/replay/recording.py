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
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from ssd_serve.base.draft_messages import Refusal
from ssd_serve.base.errors import PermissionProblemError
from ssd_serve.base.logs import Logger
from ssd_serve.base.messages import ServerMessage
from ssd_serve.models.hub import fingerprint
from ssd_serve.models.hub import find_model
from ssd_serve.base.owned import is_private
from ssd_serve.base.settings import SECRETS, Settings
from ssd_serve.verifier.assembly import AssembledVerifier
from ssd_serve.verifier.environment import MeasuredStart
from ssd_serve.verifier.observer import Observer, Turn
from ssd_serve.verifier.planning.decision import Decision
from ssd_serve.verifier.replay.tape import (
    FORMAT,
    HEADER,
    TAPE,
    ChunkTrace,
    Kind,
    RoundTrace,
    TapeWriter,
)
from ssd_serve.verifier.replay.taped import taped
from ssd_serve.verifier.round import Walk


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
    measured: MeasuredStart


class SessionRecorder(Observer):
    """A tape of the world and of what the engine makes of it, in a new folder below `folder`."""

    def __init__(self, folder: Path, max_bytes: int, log: Logger) -> None:
        self.path = _session_folder(folder.expanduser())
        self._tape = TapeWriter(
            self.path / TAPE, max_bytes, lambda why: log.warning("the recording has ended", reason=why)
        )
        self.environment = taped(self._tape, self)
        """What the verifier must be given that is to be recorded."""
        log.warning("this session is recorded, with all prompts and outputs", folder=str(self.path))

    def begin(self, settings: Settings, verifier: AssembledVerifier) -> None:
        """Write the header, once everything is loaded and measured."""
        facts = verifier.facts
        header = Header(
            format=FORMAT,
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            versions=versions(),
            processor=platform.processor() or platform.machine(),
            settings=settings.model_dump(mode="json", exclude=set(SECRETS)),
            model=facts.name,
            weights=fingerprint(find_model(settings, settings.target, "target")),
            tokenizer=verifier.hello.tokenizer,
            attention=facts.attention,
            kernels=facts.kernels,
            ranks=facts.ranks,
            measured=verifier.measured,
        )
        path = self.path / HEADER
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(header), indent=1))
        except OSError as error:
            self._tape.stop(f"{path} cannot be written: {error.strerror}")
        self._tape.flush()

    def asked(self, what: ServerMessage | Turn) -> None:
        if isinstance(what, Turn):
            self._tape.note(Kind.TURN, what)
            self._tape.flush_when_due()
        else:
            self._tape.say(Kind.ASKED, what)

    def rests(self) -> None:
        self._tape.flush()  # the process may be ended now

    def decided(self, walks: Sequence[Walk], decision: Decision) -> None:
        self._tape.say(Kind.ROUND, round_trace(walks, decision))

    def short(self, reason: str) -> None:
        self._tape.say(Kind.SHORT, Refusal(reason))


def round_trace(walks: Sequence[Walk], decision: Decision) -> RoundTrace:
    """What a round decided; call before it is committed."""
    return RoundTrace(tuple([_chunk_trace(walk) for walk in walks]), decision.told())


def _chunk_trace(walk: Walk) -> ChunkTrace:
    part, tree = walk.work.part, walk.work.tree
    request = part.request
    return ChunkTrace(
        request.number,
        len(request.tokens),
        len(part.slots),
        tuple(tree.tokens),
        tuple(tree.parents),
        len(walk.accepted),
        walk.tokens,
    )


def session_recorder(settings: Settings, log: Logger) -> SessionRecorder | None:
    """The recorder that is asked for. A disk that earlier ones have filled ends nothing, and they count:
    a server that is started again and again fills no disk."""
    if settings.record is None:
        return None
    left = (settings.record_mb << 20) - recorded_bytes(settings.record)
    if left <= 0:
        log.warning(
            "this session is not recorded: those before it have reached SSD_RECORD_MB; delete old ones",
            folder=str(settings.record),
        )
        return None
    try:
        return SessionRecorder(settings.record, left, log)
    except PermissionProblemError as error:
        if not _is_full(error.__cause__):
            raise
        log.warning("this session is not recorded", reason=str(error))
        return None


def recorded_bytes(folder: Path) -> int:
    """Of all sessions in a folder."""
    total = 0
    for path in folder.expanduser().glob(f"*/{TAPE}"):
        with contextlib.suppress(OSError):  # somebody deletes old ones meanwhile
            total += path.lstat().st_size
    return total


def _is_full(error: BaseException | None) -> bool:
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
