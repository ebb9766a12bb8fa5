"""How a Python program reaches an engine: in its own process, or in processes that were started for it.

Both are spoken to in the same messages. Knows how they are started and ended; nothing of prompts and texts.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from ssd_serve.base.devices import Machine, parse_device, pin
from ssd_serve.base.draft_messages import Message
from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.base.errors import EngineDeadError
from ssd_serve.base.logs import Logger
from ssd_serve.base.messages import (
    Abort,
    Committed,
    Finish,
    Finished,
    Progress,
    Ready,
    Refused,
    SubmitChoices,
)
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.launch import RunningEngine, chosen_launcher, start_engine
from ssd_serve.cluster.placement import PinnedModels, place, resolve_config
from ssd_serve.transport.channel import Channel

_LOOK_EVERY_S = 0.2
_LONGEST_END_S = 60.0

Report = Committed | Finished | Refused


class EngineAccess(Protocol):
    """An engine that can generate."""

    @property
    def ready(self) -> Ready:
        """What the engine is."""
        ...

    def submit(self, message: SubmitChoices) -> None:
        """Ask for texts; refusals come as reports."""
        ...

    def finish(self, request: int) -> None:
        """A stop string has ended a text: `Finished` follows."""
        ...

    def abort(self, request: int) -> None:
        """Nobody wants a text any more; nothing follows."""
        ...

    def reports(self) -> list[Report]:
        """What has come of the requests; works or waits for it. Raises where the engine is dead."""
        ...


@contextmanager
def reach_engine(
    settings: Settings,
    machine: Machine,
    models: PinnedModels,
    log: Logger,
    say: Callable[[str], None],
) -> Generator[EngineAccess]:
    """Start an engine for the length of a `with` block: in this process where one process is enough."""
    placement = place(settings, machine)
    local = chosen_launcher(settings, machine) == "local"
    if local and placement.mode is not Mode.SSD and settings.tensor_parallel == 1:
        with _bound(resolve_config(settings, placement, models)) as own:
            yield EngineHere(own, log, say)
        return
    with start_engine(settings, log, machine, models) as engine:
        channel = engine.connect()
        yield EngineProcesses(engine, channel, say)
        engine.supervisor.expect_end()
        channel.close()


@contextmanager
def _bound(config: EngineConfig) -> Generator[EngineConfig]:
    """This process computes on the target's device, and is then as free as it was."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    import torch

    threads = torch.get_num_threads()
    device = parse_device(config.target_device)
    if device.kind == "cuda" or (cores is not None and device.indices and set(device.indices) != cores):
        pin(device)
    try:
        yield config
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


class EngineHere:
    """An engine in this process, which works when it is asked for reports."""

    def __init__(self, config: EngineConfig, log: Logger, say: Callable[[str], None]) -> None:
        from ssd_serve.verifier.assembly import assemble_verifier, ready_report

        self._verifier = assemble_verifier(config, say, log=log)
        self._verifier.engine.drain()
        self._ready = ready_report(config, self._verifier)
        self._answers: list[Report] = []

    @property
    def ready(self) -> Ready:
        return self._ready

    def submit(self, message: SubmitChoices) -> None:
        self._answers += self._verifier.engine.submit_all(message)

    def finish(self, request: int) -> None:
        finished = self._verifier.engine.finish(request)
        if finished is not None:
            self._answers.append(finished)

    def abort(self, request: int) -> None:
        self._verifier.engine.abort(request)

    def reports(self) -> list[Report]:
        answers, self._answers = self._answers, []
        if not answers and self._verifier.engine.busy:
            answers += [each for each in self._verifier.engine.step() if isinstance(each, Report)]
            if not self._verifier.engine.busy:
                self._verifier.remember()
        return answers


class EngineProcesses:
    """An engine in processes of its own, at the end of a channel."""

    def __init__(self, engine: RunningEngine, channel: Channel, say: Callable[[str], None]) -> None:
        self._engine, self._channel = engine, channel
        self._ready = await_ready(engine, channel, say)

    @property
    def ready(self) -> Ready:
        return self._ready

    def submit(self, message: SubmitChoices) -> None:
        self._channel.send(message)

    def finish(self, request: int) -> None:
        self._channel.send(Finish(request))

    def abort(self, request: int) -> None:
        self._channel.send(Abort(request))

    def reports(self) -> list[Report]:
        return [each for each in _receive(self._engine, self._channel) if isinstance(each, Report)]


def await_ready(engine: RunningEngine, channel: Channel, say: Callable[[str], None]) -> Ready:
    """Wait until the verifier can generate, telling what it does meanwhile."""
    while True:
        for message in _receive(engine, channel):
            if isinstance(message, Progress):
                say(message.text)
            elif isinstance(message, Ready):
                return message


def _receive(engine: RunningEngine, channel: Channel) -> list[Message]:
    """What the verifier says next; its death is an error."""
    channel.wait(_LOOK_EVERY_S)
    messages = channel.receive()
    if engine.supervisor.failure is not None:
        raise engine.supervisor.failure
    if channel.closed and not messages:
        reason = engine.supervisor.await_failure(_LONGEST_END_S)
        raise reason or EngineDeadError("the verifier process closed its channel")
    return messages
