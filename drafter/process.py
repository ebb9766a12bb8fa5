"""The drafter process: *drain outcomes, pick, forward, append, publish*, and sleep on the socket
otherwise."""

import time

from ssd_serve.cluster.channel import Channel
from ssd_serve.cluster.listener import connect
from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.errors import EngineDeadError, PairMismatchError
from ssd_serve.kernels.native.library import native_library
from ssd_serve.logs import get_logger
from ssd_serve.memory import settle_memory
from ssd_serve.messages import Close, Growth, Heartbeat, Hello, Open, Outcome, Pause, Refusal, Resync
from ssd_serve.models.emulated import EmulatedModel
from ssd_serve.settings import Settings

_BEAT_S = 0.5
_JOIN_S = 600.0
_BLEND = 0.05


def run(settings: Settings, name: str, drafter_socket: str) -> int:
    """Load, join the verifier, draft until it is gone. Returns the exit code."""
    log = get_logger(name, settings.log_level, settings.log_format)
    native = native_library(settings, log)
    drafter = assemble_drafter(settings, name, settings.draft_device or "cpu", native)
    settle_memory()
    channel = connect(drafter_socket, _JOIN_S, key=settings.cluster_key or "")
    _join(channel, drafter.hello)
    log.info("joined", step_ms=round(drafter.hello.step_ms, 2))
    Loop(channel, drafter.core, drafter.hello.step_ms / 1e3, drafter.emulated).run()
    return 0


class Loop:
    """Steps the core for as long as the channel lives."""

    def __init__(
        self, channel: Channel, core: DrafterCore, step_s: float, emulated: EmulatedModel | None = None
    ) -> None:
        self._channel = channel
        self._emulated = emulated
        self._core = core
        self._step_s = step_s
        self._beat_at = 0.0

    def run(self) -> None:
        """Until the verifier is gone. Never spins: without work it sleeps on the socket."""
        while not self._channel.closed:
            self._drain()
            started = time.perf_counter()
            growth = self._core.step()
            if growth:
                self._publish(growth)
                self._step_s += _BLEND * (time.perf_counter() - started - self._step_s)
            else:
                self._channel.wait(_BEAT_S)
            self._beat()

    def _drain(self) -> None:
        for message in self._channel.receive():
            if isinstance(message, Refusal):
                raise PairMismatchError(message.message)
            if isinstance(message, Open | Outcome | Close | Resync | Pause):
                for reply in self._core.handle(message):
                    self._channel.send(reply)

    def _publish(self, growth: list[Growth]) -> None:
        """A full queue drops growth: the verifier sees the gap in the sequence and asks for a snapshot."""
        for message in growth:
            self._channel.send(message)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= _BEAT_S:
            self._beat_at = now
            forwards = self._emulated.forwards if self._emulated else 0
            overruns = self._emulated.overruns if self._emulated else 0
            self._channel.send(
                Heartbeat(
                    step_ms=1e3 * self._step_s, nodes=self._core.nodes, forwards=forwards, overruns=overruns
                )
            )


def _join(channel: Channel, hello: Hello) -> None:
    """Greet the verifier and wait for its answer."""
    channel.send(hello)
    while not channel.closed:
        channel.wait(1.0)
        for message in channel.receive():
            if isinstance(message, Hello):
                return
            if isinstance(message, Refusal):
                raise PairMismatchError(message.message)
    raise EngineDeadError("the verifier went away before the drafter could join")
