"""Engines of a Python program, in its own process or in others, and the texts that they generate for it."""

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ssd_serve.app.llm.sampling_params import SamplingParams
from ssd_serve.base.devices import Machine, parse_device, pin, spin_defaults
from ssd_serve.base.draft_messages import Message
from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.base.errors import EngineDeadError, RequestError, SsdError
from ssd_serve.base.logs import Logger
from ssd_serve.base.messages import (
    Abort,
    Choice,
    Committed,
    Figures,
    Finish,
    Finished,
    Progress,
    PromptProgress,
    Ready,
    Refused,
    RequestOptions,
    SamplingParameters,
    SubmitChoices,
    TokenLogprobs,
)
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.launch import RunningEngine, chosen_launcher, start_engine
from ssd_serve.cluster.placement import PinnedModels, place, resolve_config
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.server.text import Detokenizer, StopStrings, TextAssembler, TextRules
from ssd_serve.transport.channel import Channel

_LOOK_EVERY_S = 0.2
_LONGEST_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Output:
    """A generated text. `prompt` is the index of its prompt, `choice` its index among the n texts of that
    prompt."""

    prompt: int
    choice: int
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """stop: an end token or a stop string; length: as many tokens as may be."""
    stop_reason: str | int | None
    """The stop string or the token that ended the text."""
    seed: int
    logprobs: tuple[TokenLogprobs, ...] | None
    """Log-probabilities of each token, if requested."""
    figures: Figures
    """Statistics of speculation."""
    first_tokens: int
    """Tokens that came first, with the end of the prompt."""
    first_token_s: float
    seconds: float
    """Seconds from the submission to the first tokens, and to the last."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first ones; None: nothing came after them."""
        tokens, seconds = len(self.token_ids) - self.first_tokens, self.seconds - self.first_token_s
        return tokens / seconds if tokens and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Piece:
    """More of a text. The last one has the whole `output`; text may be held back until then."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    output: Output | None = None
    progress: PromptProgress | None = None
    """Progress of the prompt, where requested; then the piece has no text."""


@dataclass(frozen=True, slots=True)
class TextPlace:
    """Identity of a text within a call, with its seed."""

    prompt: int
    choice: int
    prompt_token_ids: tuple[int, ...]
    seed: int


class Continuation:
    """A text that is being generated: it takes the engine's reports and returns pieces. `scored`: with
    log-probabilities."""

    def __init__(self, place: TextPlace, detokenizer: Detokenizer, rules: TextRules, scored: bool) -> None:
        self.place = place
        self.pieces = deque[Piece]()
        """Pieces that the caller has not taken yet."""
        self.output: Output | None = None
        self.failure: SsdError | None = None
        """Reason why there is no output."""
        self._rules = rules
        self._assembler = TextAssembler(detokenizer, rules)
        self._scored = scored
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._began = self._first_s = self._last_s = 0.0
        self._first_tokens = 0

    @property
    def over(self) -> bool:
        """True if the text is finished."""
        return self.output is not None or self.failure is not None

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the text, which must be reported to the engine."""
        return self._assembler.stopped_by is not None

    def begin(self, now: float) -> None:
        """Record the time of submission; times are in seconds of any clock."""
        self._began = now

    def take(self, report: Committed, now: float) -> None:
        """Add tokens, up to the one that completes a stop string."""
        if report.progress is not None:
            self.pieces.append(Piece("", progress=report.progress))
        if self.stopped or not report.tokens:
            return
        text, before = "", self._assembler.tokens
        for token in report.tokens:
            text += self._assembler.push(token)
            if self.stopped:
                break
        counted = self._assembler.tokens - before
        self._last_s = now - self._began
        if not self._tokens:
            self._first_s, self._first_tokens = self._last_s, counted
        self._text.append(text)
        self._tokens.extend(report.tokens[:counted])
        self._logprobs.extend(report.logprobs[:counted])
        self.pieces.append(Piece(text, report.tokens[:counted], report.logprobs[:counted]))

    def end(self, report: Finished) -> None:
        """End the text as the engine reports."""
        report = self._rules.end(report)
        text = self._assembler.finish(report.stop_token if report.reason == "stop" else None)
        self._text.append(text)
        cause, place = self._assembler.stopped_by, self.place
        self.output = Output(
            place.prompt,
            place.choice,
            place.prompt_token_ids,
            "".join(self._text),
            tuple(self._tokens),
            "stop" if cause is not None else report.reason,
            report.stop_token if cause is None else cause,
            place.seed,
            tuple(self._logprobs) if self._scored else None,
            report.figures,
            self._first_tokens,
            self._first_s,
            self._last_s,
        )
        self.pieces.append(Piece(text, output=self.output))


Report = Committed | Finished | Refused


class EngineBackend(ABC):
    """An engine that can generate. `ready` describes it."""

    ready: Ready

    @abstractmethod
    def submit(self, message: SubmitChoices) -> None:
        """Submit a request; refusals come as reports."""

    @abstractmethod
    def finish(self, request: int) -> None:
        """Report that a stop string has ended a text: `Finished` follows."""

    @abstractmethod
    def abort(self, request: int) -> None:
        """Stop a text; nothing follows."""

    @abstractmethod
    def reports(self) -> list[Report]:
        """Reports since the last call; computes or waits for them. Raises if the engine is dead."""


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
    os.environ.update(spin_defaults(os.environ))  # without effect if the caller has imported torch
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


class InProcessEngine(EngineBackend):
    """An engine in this process, which computes when `reports` is called."""

    def __init__(self, config: EngineConfig, log: Logger, say: Callable[[str], None]) -> None:
        from ssd_serve.verifier.assembly import assemble_verifier, ready_report

        self._verifier = assemble_verifier(config, say, log=log)
        self._verifier.engine.drain()
        self.ready = ready_report(config, self._verifier)
        self._answers: list[Report] = []

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
                self._verifier.times.store()
        return answers


class RemoteEngine(EngineBackend):
    """An engine in separate processes, reached by a channel."""

    def __init__(self, engine: RunningEngine, channel: Channel, say: Callable[[str], None]) -> None:
        self._engine, self._channel = engine, channel
        self.ready = await_ready(engine, channel, say)

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
    progress: bool = False
    """Its text has pieces with the progress of the prompt."""


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
            empty=params.max_tokens == 0,
        )
        return [
            Continuation(
                TextPlace(asked.place, choice, asked.prompt, seed),
                self._tokenizer.stream(asked.prompt, params.skip_special_tokens),
                rules,
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
        options = RequestOptions(return_progress=asked.progress)
        self._access.submit(SubmitChoices(asked.prompt, asked.parameters, tuple(choices), options))

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
