"""The drafter process: *drain outcomes, pick, forward, append, publish*, and sleep on the sockets otherwise.

It drafts for one verifier or for several, and waits for those that are not there.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ssd_serve.cluster.channels.polling import poll
from ssd_serve.cluster.channels.reconnect import Dial
from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.step_time import StepTime
from ssd_serve.drafter.verifier_connection import VerifierConnection
from ssd_serve.errors import PairMismatchError
from ssd_serve.kernels.native.library import native_library
from ssd_serve.logs import get_logger
from ssd_serve.memory import Heap, settle_memory
from ssd_serve.messages import Growth, Heartbeat
from ssd_serve.settings import Settings

_BEAT_S = 0.5
_DIALLING_S = 0.05
"""How often those that are not there are looked for, at most."""


def run(
    settings: Settings,
    name: str,
    addresses: Sequence[str],
    patient: bool = False,
    alive_file: Path | None = None,
    on_loaded: Callable[[], None] = lambda: None,
) -> int:
    """Load, join the verifiers at these addresses, and draft for ever. Raises `PairMismatchError` when none
    of them wants this draft model, unless it is patient: then one that does may take its place.

    `on_loaded` is called once, when the draft model is in memory; `alive_file` is touched every half second
    while a verifier takes drafts.
    """
    log = get_logger(name, settings.log_level, settings.log_format)
    native = native_library(settings, log)
    drafter = assemble_drafter(settings, name, settings.draft_device or "cpu", native)
    settle_memory()
    on_loaded()
    key = settings.cluster_key or ""
    targets = [
        VerifierConnection(
            drafter.core, drafter.hello, log, (place, len(addresses)), Dial(address, log, key=key)
        )
        for place, address in enumerate(addresses)
    ]
    step_s = drafter.hello.step_ms / 1e3
    DrafterLoop(targets, drafter.core, step_s, patient, alive_file).run()
    return 0


class DrafterLoop:
    """Steps the core for as long as there is anybody to draft for."""

    def __init__(
        self,
        targets: Sequence[VerifierConnection],
        core: DrafterCore,
        step_s: float,
        patient: bool = False,
        alive_file: Path | None = None,
    ) -> None:
        """`patient`: go on when all verifiers refuse this drafter; they are asked again."""
        self._alive_file = alive_file
        self._targets = targets
        self._core = core
        self._step_time = StepTime(step_s)
        self._patient = patient
        self._beat_at = 0.0
        self._heap = Heap()

    def run(self) -> None:
        """Until all verifiers are gone for good. Never spins: without work it sleeps on the sockets."""
        while not all(target.over for target in self._targets):
            self.turn()

    def turn(self) -> None:
        """One step, or a sleep."""
        for target in self._targets:
            target.hear()
        if not self._patient and all(target.refused for target in self._targets):
            raise PairMismatchError(self._targets[0].refused)
        started = time.perf_counter()
        growth = self._core.step()
        if growth:
            self._publish(growth)
            if not self._core.captured_now:
                self._step_time.observe(time.perf_counter() - started)
        else:
            self._sleep()
        self._beat()

    def _publish(self, growth: list[Growth]) -> None:
        for message in growth:
            self._targets[message.request % len(self._targets)].grew(message)

    def _sleep(self) -> None:
        channels = [target.channel for target in self._targets if target.channel is not None]
        missing = any(target.channel is None and not target.over for target in self._targets)
        if channels:
            poll(channels, _DIALLING_S if missing else _BEAT_S)
        elif missing:
            time.sleep(_DIALLING_S)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= _BEAT_S:
            self._beat_at = now
            beat = Heartbeat(step_ms=1e3 * self._step_time.seconds, nodes=self._core.nodes)
            for target in self._targets:
                target.beat(beat)
            if self._alive_file is not None and any(target.joined for target in self._targets):
                with contextlib.suppress(OSError):  # its age tells
                    self._alive_file.touch()
            self._heap.trim_when_due()
