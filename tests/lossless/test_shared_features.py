"""A head that reads features from shared memory drafts what it drafts when they come in messages, and the
text is that of plain decoding."""

import socket
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from ssd_serve.base.logs import get_logger
from ssd_serve.bench.lossless.drafters import MemoryDrafter, RigDraft
from ssd_serve.bench.lossless.rig import Case
from ssd_serve.drafter.verifier_connection import VERIFIER_LIMITS, VerifierConnection
from ssd_serve.transport.channel import DEFAULT_LIMITS, ReceiveLimits, SocketChannel
from ssd_serve.transport.shared_memory import SharedReader, SharedSpan
from ssd_serve.verifier.engine import Engine
from tests.lossless.every_source import EverySource


class WorkedSocket(SocketChannel):
    """The verifier's end: the drafter works when it is waited for."""

    work: Callable[[], object] = staticmethod(lambda: None)

    def fileno(self) -> int:
        return -1  # so that polls call `wait`

    def wait(self, timeout_s: float) -> bool:
        if timeout_s > 0:
            self.work()
        return super().wait(0.0)


class SocketDrafter(MemoryDrafter):
    """A drafter behind a socket, in the thread of the verifier."""

    def __init__(self, intake: ReceiveLimits, stack: ExitStack, draft: RigDraft, engine: Engine) -> None:
        first, second = socket.socketpair()
        mine, its = WorkedSocket(first), SocketChannel(second, intake=intake)
        stack.callback(mine.close)
        stack.callback(its.close)
        self._core = draft.core()
        self._verifier = VerifierConnection(
            self._core, draft.hello, get_logger("drafter", "error"), channel=its
        )
        mine.work = self.work
        engine.drafters.connect(mine)

    def work(self) -> None:
        self._verifier.hear()
        assert self._verifier.channel is not None  # it is not hung up on
        for growth in self._core.step():
            self._verifier.grew(growth)
        self._verifier.channel.flush()


@contextmanager
def sockets(intake: ReceiveLimits) -> Generator[Callable[[RigDraft, Engine], MemoryDrafter]]:
    with ExitStack() as stack:
        yield partial(SocketDrafter, intake, stack)


@pytest.mark.parametrize("head", ["head", "both heads"])
def test_shared_memory_features_equal_message_features(
    head: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = SharedReader.copied
    pieces = 0

    def counted(reader: SharedReader, place: SharedSpan) -> bytes:
        nonlocal pieces
        pieces += 1
        return copied(reader, place)

    monkeypatch.setattr(SharedReader, "copied", counted)
    sources = EverySource(tmp_path_factory.mktemp("sources"))
    with sockets(DEFAULT_LIMITS) as make:
        told = sources.check(head, Case("ssd", 4, 12), make, 6)
    assert not pieces
    with sockets(VERIFIER_LIMITS) as make:
        shared = sources.check(head, Case("ssd", 4, 12), make, 6)
    assert pieces > 6
    assert shared == told
    assert shared.accepted > 0
