"""The drafter process: drain outcomes, pick, forward, append, publish; otherwise sleep on the sockets.

It drafts for one or several verifiers and reconnects to those that are gone. Several draft models in one
process take turns, step by step; a verifier sees each as a drafter of its own.
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
from ssd_serve.base.resources import Heap, settle_memory
from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.step_time import StepTime
from ssd_serve.drafter.verifier_connection import VERIFIER_LIMITS, VerifierConnection
from ssd_serve.kernels.native.library import native_library
from ssd_serve.transport.channel import poll
from ssd_serve.transport.listener import Reconnector

_HEARTBEAT_S = 0.5
_RECONNECT_POLL_S = 0.05
"""Interval of checks for reconnected verifiers."""


def run(
    config: EngineConfig,
    name: str,
    addresses: Sequence[str],
    patient: bool = False,
    alive_file: Path | None = None,
    on_loaded: Callable[[], None] = lambda: None,
) -> int:
    """Load the draft models, connect to the verifiers and draft until all of them are gone for good.

    Raises `PairMismatchError` if all of them refuse a draft model, unless `patient`. `on_loaded` is called
    when the models are in memory; `alive_file` is touched every half second while a verifier accepts drafts.
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
                    Reconnector(address, log, key=key, limits=VERIFIER_LIMITS),
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
    if len(models) < 2:
        return [(name, model) for model in models]
    return [(f"{name}.{place}", model) for place, model in enumerate(models)]


class DrafterRunner:
    """Runs one core for its verifiers; `step_s` is the measured step time."""

    def __init__(self, core: DrafterCore, targets: Sequence[VerifierConnection], step_s: float) -> None:
        self.targets = targets
        self._core = core
        self._step_time = StepTime(step_s)

    @property
    def refused(self) -> str:
        """The reason why all verifiers refuse this drafter; empty while one may accept it."""
        return self.targets[0].refused if all(target.refused for target in self.targets) else ""

    def receive(self) -> None:
        for target in self.targets:
            target.receive()

    def step(self) -> bool:
        """Run a draft step and publish; False if there was nothing to do."""
        started = time.perf_counter()
        growth = self._core.step()
        for message in growth:
            self.targets[message.request % len(self.targets)].send(message)
        if growth and not self._core.is_warmup_step:
            self._step_time.observe(time.perf_counter() - started)
        return bool(growth) or self._core.prefilling

    def send_heartbeat(self) -> None:
        heartbeat = Heartbeat(step_ms=1e3 * self._step_time.seconds, nodes=self._core.nodes)
        for target in self.targets:
            target.send_heartbeat(heartbeat)


class DrafterLoop:
    """Runs the steps of all cores while a verifier is connected or may reconnect."""

    def __init__(
        self, cores: Sequence[DrafterRunner], patient: bool = False, alive_file: Path | None = None
    ) -> None:
        """`patient`: keep trying when all verifiers refuse a draft."""
        self._alive_file = alive_file
        self._cores = cores
        self._targets = [target for core in cores for target in core.targets]
        self._patient = patient
        self._heartbeat_at = 0.0
        self._heap = Heap()

    def run(self) -> None:
        """Run until all verifiers are gone for good; without work, sleep on the sockets."""
        while not all(target.gone for target in self._targets):
            self.turn()

    def turn(self) -> None:
        """Run one step of each core, or wait if none has work."""
        for core in self._cores:
            core.receive()
        refused = next((core.refused for core in self._cores if core.refused), "")
        if refused and not self._patient:
            raise PairMismatchError(refused)
        if not sum([core.step() for core in self._cores]):
            self._wait()
        self._send_heartbeats()

    def _wait(self) -> None:
        channels = [target.channel for target in self._targets if target.channel is not None]
        missing = any(target.channel is None and not target.gone for target in self._targets)
        if channels:
            poll(channels, _RECONNECT_POLL_S if missing else _HEARTBEAT_S)
        elif missing:
            time.sleep(_RECONNECT_POLL_S)

    def _send_heartbeats(self) -> None:
        now = time.monotonic()
        if now - self._heartbeat_at >= _HEARTBEAT_S:
            self._heartbeat_at = now
            for core in self._cores:
                core.send_heartbeat()
            if self._alive_file is not None and any(target.joined for target in self._targets):
                with contextlib.suppress(OSError):  # a stale file is reported by its age
                    self._alive_file.touch()
            self._heap.trim_when_due()
