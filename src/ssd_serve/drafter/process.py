"""The drafter process: *drain outcomes, pick, forward, append, publish*, and sleep on the sockets otherwise.

It drafts for one verifier or for several, and waits for those that are not there. Several draft models in one
process take turns, step by step; to verifiers each is a drafter of its own.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ssd_serve.base.draft_messages import Heartbeat
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import PairMismatchError
from ssd_serve.base.logs import carry_library_logs, get_logger
from ssd_serve.base.memory import Heap, settle_memory
from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.step_time import StepTime
from ssd_serve.drafter.verifier_connection import VERIFIER_LIMITS, VerifierConnection
from ssd_serve.kernels.native.library import native_library
from ssd_serve.transport.channel import poll
from ssd_serve.transport.listener import Reconnector

_BEAT_S = 0.5
_DIALLING_S = 0.05
"""How often those that are not there are looked for, at most."""


def run(
    config: EngineConfig,
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
    log = get_logger(name, config.log_level, config.log_format)
    carry_library_logs(log)
    native = native_library(config, log)
    drafters = [
        assemble_drafter(replace(config, drafts=(model,)), own, config.draft_device or "cpu", native)
        for own, model in _names(name, config.draft_models)
    ]
    settle_memory()
    on_loaded()
    key = config.cluster_key or ""
    cores = [
        DrafterRunner(
            each.core,
            [
                VerifierConnection(
                    each.core,
                    each.hello,
                    log,
                    (place, len(addresses)),
                    Reconnector(address, log, key=key, intake=VERIFIER_LIMITS),
                )
                for place, address in enumerate(addresses)
            ],
            each.hello.step_ms / 1e3,
        )
        for each in drafters
    ]
    DrafterLoop(cores, patient, alive_file).run()
    return 0


def _names(name: str, models: Sequence[str]) -> list[tuple[str, str]]:
    """A name for each draft model of a process of this name."""
    if len(models) < 2:
        return [(name, model) for model in models]
    return [(f"{name}.{place}", model) for place, model in enumerate(models)]


class DrafterRunner:
    """A core and the verifiers that it drafts for. `step_s`: what its step takes, until that is observed."""

    def __init__(self, core: DrafterCore, targets: Sequence[VerifierConnection], step_s: float) -> None:
        self.targets = targets
        self._core = core
        self._step_time = StepTime(step_s)

    @property
    def refused(self) -> str:
        """Why none of its verifiers wants it; empty while one may."""
        return self.targets[0].refused if all(target.refused for target in self.targets) else ""

    def hear(self) -> None:
        """Take what has come."""
        for target in self.targets:
            target.hear()

    def step(self) -> bool:
        """Grow and publish; whether there was anything to do."""
        started = time.perf_counter()
        growth = self._core.step()
        for message in growth:
            self.targets[message.request % len(self.targets)].grew(message)
        if growth and not self._core.is_warmup_step:
            self._step_time.observe(time.perf_counter() - started)
        return bool(growth) or self._core.reading

    def beat(self) -> None:
        """Say how it is."""
        beat = Heartbeat(step_ms=1e3 * self._step_time.seconds, nodes=self._core.nodes)
        for target in self.targets:
            target.beat(beat)


class DrafterLoop:
    """Steps the cores for as long as there is anybody to draft for."""

    def __init__(
        self, cores: Sequence[DrafterRunner], patient: bool = False, alive_file: Path | None = None
    ) -> None:
        """`patient`: go on when all verifiers refuse a draft; they are asked again."""
        self._alive_file = alive_file
        self._cores = cores
        self._targets = [target for core in cores for target in core.targets]
        self._patient = patient
        self._beat_at = 0.0
        self._heap = Heap()

    def run(self) -> None:
        """Until all verifiers are gone for good. Never spins: without work it sleeps on the sockets."""
        while not all(target.over for target in self._targets):
            self.turn()

    def turn(self) -> None:
        """One step of each core, or a sleep."""
        for core in self._cores:
            core.hear()
        refused = next((core.refused for core in self._cores if core.refused), "")
        if refused and not self._patient:
            raise PairMismatchError(refused)
        if not sum([core.step() for core in self._cores]):
            self._sleep()
        self._beat()

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
            for core in self._cores:
                core.beat()
            if self._alive_file is not None and any(target.joined for target in self._targets):
                with contextlib.suppress(OSError):  # its age tells
                    self._alive_file.touch()
            self._heap.trim_when_due()
