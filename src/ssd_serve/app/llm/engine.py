"""Engines of a Python program: in its own process, or in processes that were started for it."""

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ssd_serve.app.llm.outputs import Continuation, TextPlace
from ssd_serve.app.llm.sampling_params import SamplingParams
from ssd_serve.base.devices import Machine, parse_device, pin
from ssd_serve.base.draft_messages import Message
from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.base.errors import EngineDeadError, RequestError
from ssd_serve.base.logs import Logger
from ssd_serve.base.messages import (
    Abort,
    Choice,
    Committed,
    Finish,
    Finished,
    Progress,
    Ready,
    Refused,
    SamplingParameters,
    SubmitChoices,
)
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.launch import RunningEngine, chosen_launcher, start_engine
from ssd_serve.cluster.placement import PinnedModels, place, resolve_config
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.server.text import StopStrings, TextAssembler, TextRules
from ssd_serve.transport.channel import Channel

_LOOK_EVERY_S = 0.2
_LONGEST_END_S = 60.0

Report = Committed | Finished | Refused


class EngineBackend(Protocol):
    """An engine that can generate."""

    @property
    def ready(self) -> Ready:
        """Description of the engine."""
        ...

    def submit(self, message: SubmitChoices) -> None:
        """Submit a request; refusals come as reports."""
        ...

    def finish(self, request: int) -> None:
        """Report that a stop string has ended a text: `Finished` follows."""
        ...

    def abort(self, request: int) -> None:
        """Stop a text; nothing follows."""
        ...

    def reports(self) -> list[Report]:
        """Reports since the last call; computes or waits for them. Raises if the engine is dead."""
        ...


@contextmanager
def reach_engine(
    settings: Settings,
    machine: Machine,
    models: PinnedModels,
    log: Logger,
    say: Callable[[str], None],
) -> Generator[EngineBackend]:
    """Start an engine for the length of a `with` block: in this process if one process suffices."""
    placement = place(settings, machine)
    local = chosen_launcher(settings, machine) == "local"
    if local and placement.mode is not Mode.SSD and settings.tensor_parallel == 1:
        with _bound(resolve_config(settings, placement, models)) as own:
            yield InProcessEngine(own, log, say)
        return
    with start_engine(settings, log, machine, models) as engine:
        channel = engine.connect()
        yield RemoteEngine(engine, channel, say)
        engine.supervisor.expect_end()
        channel.close()


@contextmanager
def _bound(config: EngineConfig) -> Generator[EngineConfig]:
    """Bind this process to the target's device, and restore its cores at the end."""
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


class InProcessEngine:
    """An engine in this process, which computes when `reports` is called."""

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


class RemoteEngine:
    """An engine in separate processes, reached by a channel."""

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
    """Wait until the verifier can generate, and report its progress."""
    while True:
        for message in _receive(engine, channel):
            if isinstance(message, Progress):
                say(message.text)
            elif isinstance(message, Ready):
                return message


def _receive(engine: RunningEngine, channel: Channel) -> list[Message]:
    """Next messages of the verifier. Raises if it has died."""
    channel.wait(_LOOK_EVERY_S)
    messages = channel.receive()
    if engine.supervisor.failure is not None:
        raise engine.supervisor.failure
    if channel.closed and not messages:
        reason = engine.supervisor.await_failure(_LONGEST_END_S)
        raise reason or EngineDeadError("the verifier process closed its channel")
    return messages


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and the seeds of its texts."""

    place: int
    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    params: SamplingParams
    parameters: SamplingParameters
    ending: frozenset[int]
    """Ids that end a text."""


class Conversation:
    """The requests of a program at one engine, which takes `most` texts at once. Several callers may
    alternate."""

    def __init__(self, access: EngineBackend, tokenizer: Tokenizer, most: int) -> None:
        self._access = access
        self._tokenizer = tokenizer
        self._most = most
        self._numbers = itertools.count(1)
        self._waiting: deque[tuple[Asked, list[Continuation]]] = deque()
        self._running: dict[int, Continuation] = {}

    def ask(self, asked: Iterable[Asked]) -> list[Continuation]:
        """Queue prompts and return their texts, which `turn` advances."""
        begun: list[Continuation] = []
        for each in asked:
            texts = self._texts(each)
            self._waiting.append((each, texts))
            begun += texts
        return begun

    def turn(self) -> None:
        """Submit as many waiting requests as the engine may run, and process its reports."""
        while self._waiting and (
            not self._running or len(self._running) + len(self._waiting[0][1]) <= self._most
        ):
            self._send(*self._waiting.popleft())
        reports, now = self._access.reports(), time.perf_counter()
        for report in reports:
            text = self._running.get(report.request)
            if text is not None:
                self._hear(text, report, now)

    def drop(self, texts: Sequence[Continuation]) -> None:
        """Abort these texts unless they are finished."""
        unwanted = {id(text) for text in texts if not text.over}
        if not unwanted:
            return
        self._waiting = deque(each for each in self._waiting if id(each[1][0]) not in unwanted)
        for number in [number for number, text in self._running.items() if id(text) in unwanted]:
            del self._running[number]
            self._access.abort(number)

    def _texts(self, asked: Asked) -> list[Continuation]:
        params = asked.params
        rules = TextRules(
            StopStrings(params.stop_strings),
            params.include_stop_str_in_output,
            params.min_tokens,
            asked.ending,
        )
        return [
            Continuation(
                TextPlace(asked.place, choice, asked.prompt, seed),
                TextAssembler(self._tokenizer.stream(asked.prompt, params.skip_special_tokens), rules),
                params.logprobs is not None,
            )
            for choice, seed in enumerate(asked.seeds)
        ]

    def _send(self, asked: Asked, texts: Sequence[Continuation]) -> None:
        numbers = [next(self._numbers) for _ in texts]
        choices = [Choice(number, seed) for number, seed in zip(numbers, asked.seeds, strict=True)]
        self._running |= zip(numbers, texts, strict=True)
        for text in texts:
            text.begin(time.perf_counter())
        self._access.submit(SubmitChoices(asked.prompt, asked.parameters, tuple(choices)))

    def _hear(self, text: Continuation, report: Report, now: float) -> None:
        if isinstance(report, Committed):
            stopped = text.stopped
            text.take(report, now)
            if text.stopped and not stopped:
                self._access.finish(report.request)
            return
        del self._running[report.request]
        if isinstance(report, Finished) and report.reason != "error":
            text.end(report)
        elif isinstance(report, Finished):
            text.failure = EngineDeadError(f"the engine gave up: {report.message}")
        else:
            where = f"{report.field}: " if report.field else ""
            text.failure = RequestError(where + report.message, report.field)
