"""Runs the choices of one HTTP request on the engine and gives their output piece by piece.

Whatever way the caller leaves (done, error, client gone), everything that still runs is aborted. Knows no
protocol of either side but the engine's reports.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

from ssd_serve.errors import EngineDeadError, OverloadedError, RequestError
from ssd_serve.messages import Committed, Figures, Finished, Refused, SamplingParameters, TokenLogprobs
from ssd_serve.server.engine.submitted import Interrupted, Report, Wanted
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.off_loop import Steps
from ssd_serve.server.observability.stopwatch import Course, Stopwatch
from ssd_serve.server.openai.prompts import token_units
from ssd_serve.server.service import Service
from ssd_serve.server.text.output import TextAssembler, TextRules

_LONGEST_END_S = 5.0
"""How long the figures of a choice that a stop string ended are waited for: about a round."""

_DECODED_AT_ONCE = 32
_READ_AT_ONCE = 16
_TOLD_AT_ONCE = 8
"""Reports of a choice that become one piece, where so many wait: writing a piece takes longer than reading a
report, so that this is how a server that has fallen behind catches up."""
MAX_UNREAD = 1 << 18
"""Numbers in reports that wait to be read, over all choices of a request: some ten megabytes."""


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice: what the engine is asked for, and what is done with its tokens."""

    prompt: tuple[int, ...]
    parameters: SamplingParameters
    seed: int
    rules: TextRules
    skip_special_tokens: bool
    generated: tuple[int, ...] = ()
    """Output that the client has from an earlier answer: this one goes on behind it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended. `cause` is the stop string or stop id."""

    reason: str
    cause: str | int | None
    figures: Figures
    complete: bool = True
    """False: the engine did not tell its figures in time, `figures` holds what could be counted here."""
    first_token_s: float | None = None
    decoding_s: float = 0.0
    """From the first tokens to the last."""


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """More output of one choice. `offsets` are where each token begins in the choice's text."""

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    offsets: tuple[int, ...]
    ending: Ending | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    before: str = ""
    """With the first piece: the text that the client has from an earlier answer."""
    rounds: tuple[int, ...] = ()
    """Tokens of each round."""


@dataclass(slots=True)
class ChoiceOutput:
    """Everything of one choice, added up."""

    texts: list[str] = field(default_factory=list[str])
    """Joined once: adding up strings would copy a long answer again with each piece."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    offsets: list[int] = field(default_factory=list[int])
    ending: Ending | None = None
    rounds: list[int] = field(default_factory=list[int])
    """Tokens of each round; the first one ended the prompt."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """Of the prompt's tokens from the second on, where they were asked for."""
    before: str = ""
    """What the client has from an earlier answer."""

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.texts)

    def add(self, piece: ChoicePiece) -> None:
        """Append one piece."""
        self.texts.append(piece.text)
        self.tokens.extend(piece.tokens)
        self.rounds += piece.rounds
        self.logprobs.extend(piece.logprobs)
        self.offsets.extend(piece.offsets)
        self.prompt_logprobs.extend(piece.prompt_logprobs)
        self.ending = piece.ending or self.ending
        self.before += piece.before


class _Choice:
    """One choice while it runs."""

    def __init__(self, service: Service, index: int, plan: ChoicePlan) -> None:
        detokenizer = service.tokenizer.detokenizer(plan.prompt, plan.skip_special_tokens)
        self.index = index
        self.request = 0
        self.assembler = TextAssembler(detokenizer, plan.rules)
        self.watch = Stopwatch(service.metrics, len(plan.prompt))
        self.shown = 0
        """Characters that the client has from an earlier answer."""
        self._had: list[str] = []
        self._before = 0
        """Tokens of it that this answer does not count."""
        self.running = False
        self.interrupted = False
        """More than one engine works on it: none of them knows all its figures."""
        self.course: Course | None = None
        """How it went, once it has ended."""
        self._reports = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text; the engine's word on it may still be missing."""
        return self.assembler.stopped_by is not None

    @property
    def _tokens(self) -> int:
        return self.assembler.tokens - self._before

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Take more of what the client has from an earlier answer."""
        had = [self.assembler.push(token) for token in tokens]
        self.shown += sum(map(len, had))
        self._had += had
        self._before = self.assembler.tokens

    def absorb(self, reports: Iterable[Committed]) -> ChoicePiece:
        """Take tokens one by one, up to the one that completes a stop string."""
        text = ""
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        offsets: list[int] = []
        prompt_logprobs: list[TokenLogprobs] = []
        rounds: list[int] = []
        for report in reports:
            if self.stopped:
                break
            self._reports += bool(report.tokens)  # the others only tell of the prompt
            prompt_logprobs += report.prompt_logprobs
            more, found = self._read(report.tokens)
            text += more
            offsets += found
            tokens += report.tokens[: len(found)]
            logprobs += report.logprobs[: len(found)]
            rounds += [len(found)] * bool(found)
            self.watch.tokens(len(found))
        return ChoicePiece(
            choice=self.index,
            text=text,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            offsets=tuple(offsets),
            ending=None,
            prompt_logprobs=tuple(prompt_logprobs),
            before=self._before_it(),
            rounds=tuple(rounds),
        )

    def _read(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """The text that they make certain, and where each that counts begins."""
        assembler, text, offsets = self.assembler, "", list[int]()
        for token in tokens:
            before, offset = assembler.tokens, assembler.length - self.shown
            text += assembler.push(token)
            if assembler.tokens > before:
                offsets.append(offset)
            if self.stopped:
                break
        return text, offsets

    def _before_it(self) -> str:
        """What the client has from an earlier answer; the first time only."""
        had, self._had = "".join(self._had), []
        return had

    def end(self, report: Finished) -> ChoicePiece:
        """The engine ended the choice; held back text may still complete a stop string."""
        text = self.assembler.finish(report.stop_token if report.reason == "stop" else None)
        reason = "stop" if self.stopped else report.reason
        cause = self.assembler.stopped_by if self.stopped else report.stop_token
        figures = self._seen() if self.interrupted else report.figures
        self.watch.figures(figures)
        self.close(reason)
        ending = self._ending(reason, cause, figures, not self.interrupted)
        return ChoicePiece(self.index, text, (), (), (), ending, before=self._before_it())

    def close(self, reason: str) -> None:
        """Count the end, once."""
        if self.running:
            self.running = False
            self.course = self.watch.end(reason, self._tokens)

    def end_alone(self) -> ChoicePiece:
        """The text is complete but the engine did not say so: only what was seen here is known."""
        self.close("stop")
        ending = self._ending("stop", self.assembler.stopped_by, self._seen(), False)
        return ChoicePiece(self.index, "", (), (), (), ending, before=self._before_it())

    def _ending(self, reason: str, cause: str | int | None, figures: Figures, complete: bool) -> Ending:
        return Ending(reason, cause, figures, complete, self.watch.first_token_s, self.watch.decoding_s)

    def _seen(self) -> Figures:
        """Usage as far as the pieces here tell it."""
        tokens = self._tokens
        # The first report ends the prompt; each later one is a round, whose last token is the bonus.
        return Figures(rounds=max(0, self._reports - 1), tokens=tokens, accepted=tokens - self._reports)


class Run:
    """The choices of one HTTP request: `async with Run(...) as run: async for piece in run.pieces()`."""

    def __init__(
        self,
        service: Service,
        plans: Sequence[ChoicePlan],
        salt: bytes = b"",
        priority: int = 0,
        max_nodes: int | None = None,
    ) -> None:
        self._service = service
        self._plans = plans
        self._salt, self._priority, self._max_nodes = salt, priority, max_nodes
        self._choices: list[_Choice] = []
        self._reports: deque[tuple[_Choice, Report | None]] = deque()
        self._reported = asyncio.Event()
        self._unread = 0
        self._largest = 0
        self._behind = False
        """Whoever reads takes less than comes, and more would have to be kept than may be."""

    @property
    def courses(self) -> list[Course]:
        """How the choices went that have ended."""
        return [choice.course for choice in self._choices if choice.course is not None]

    @property
    def engine_requests(self) -> list[int]:
        """What the engine calls them."""
        return [choice.request for choice in self._choices]

    async def __aenter__(self) -> "Run":
        choices = [_Choice(self._service, index, plan) for index, plan in enumerate(self._plans)]
        had = [len(plan.generated) for plan in self._plans]
        if any(had):
            await self._service.off_loop.steps(token_units(had), self._catch_up(choices))
            self._service.require_room(len(choices))  # others may have come meanwhile
        try:
            self._submit(choices)
        except BaseException:
            self._abort("error")
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort("error" if isinstance(error, Exception) else "abort")

    def _catch_up(self, choices: Sequence[_Choice]) -> Steps[None]:
        """Decode what the client has already."""
        for choice, plan in zip(choices, self._plans, strict=True):
            for place in range(0, len(plan.generated), _DECODED_AT_ONCE):
                choice.catch_up(plan.generated[place : place + _DECODED_AT_ONCE])
                yield

    def _submit(self, choices: Sequence[_Choice]) -> None:
        """All at once; of those that what the client has stopped there is nothing to ask for."""
        asked = [
            (
                choice,
                Wanted(
                    plan.prompt, plan.parameters, plan.seed, partial(self._deliver, choice), plan.generated
                ),
            )
            for choice, plan in zip(choices, self._plans, strict=True)
            if not choice.stopped
        ]
        wanted = [each for _, each in asked]
        numbers = self._service.engine.submit_all(wanted, self._salt, self._priority, self._max_nodes)
        for (choice, _), number in zip(asked, numbers, strict=True):
            choice.request = number
        for choice in choices:
            if choice.stopped:
                self._put(choice, None)
            choice.running = True
            self._choices.append(choice)

    def _deliver(self, choice: _Choice, report: Report) -> None:
        """Keep a report until it is read; of those that nobody reads only so much."""
        if self._behind:
            return
        weight = _weight(report)
        self._unread += weight
        self._largest = max(self._largest, weight)
        # One report alone, however large, is no backlog.
        if self._unread > MAX_UNREAD + self._largest:
            self._behind = True
            self._reports.clear()
            for each in self._choices:
                self._service.engine.abort(each.request)
        self._put(choice, report)

    def _put(self, choice: _Choice, report: Report | None) -> None:
        self._reports.append((choice, report))
        self._reported.set()

    def _abort(self, reason: str) -> None:
        for choice in self._choices:
            if choice.running:
                self._service.engine.abort(choice.request)
                choice.close(reason)

    async def pieces(self) -> AsyncIterator[ChoicePiece]:
        """Pieces of all choices as they come; ends when every choice has ended."""
        read = 0
        while any(choice.running for choice in self._choices):
            if not self._reports:
                self._reported.clear()
                await self._reported.wait()
            choice, report = self._reports.popleft()
            read += 1
            if read % _READ_AT_ONCE == 0:
                await asyncio.sleep(0)  # a queue that is not empty keeps nobody waiting
            if self._behind:
                raise ApiError(
                    408, "the client reads too slowly: too much output waits for it", code="slow_reader"
                )
            self._unread -= 0 if report is None else _weight(report)
            if not choice.running:
                continue
            if isinstance(report, Committed):
                if not choice.stopped:
                    yield choice.absorb([report, *self._waiting(choice)])
                    self._finish_if_stopped(choice)
            elif isinstance(report, Interrupted):
                choice.interrupted = True
            elif isinstance(report, Finished) and report.reason != "error":
                yield choice.end(report)
            elif choice.stopped or report is None:
                self._service.engine.abort(choice.request)
                yield choice.end_alone()
            else:
                raise _failure(report)

    def _waiting(self, choice: _Choice) -> list[Committed]:
        """What else has come of it, and of nobody before that."""
        found: list[Committed] = []
        while self._reports and len(found) < _TOLD_AT_ONCE - 1 and self._reports[0][0] is choice:
            report = self._reports[0][1]
            if not isinstance(report, Committed):
                break
            self._unread -= _weight(report)
            found.append(report)
            self._reports.popleft()
        return found

    def _finish_if_stopped(self, choice: _Choice) -> None:
        """Ask the engine to end a choice whose stop string was found; it answers with its figures."""
        if choice.stopped:
            self._service.engine.finish(choice.request)
            loop = asyncio.get_running_loop()
            loop.call_later(_LONGEST_END_S, self._put, choice, None)


def _weight(report: Report) -> int:
    """About how many numbers a report holds."""
    if not isinstance(report, Committed):
        return 1
    scored = report.logprobs or report.prompt_logprobs
    alternatives = len(scored[0].top) if scored else 0
    return 1 + len(report.tokens) + (1 + alternatives) * (len(report.logprobs) + len(report.prompt_logprobs))


def _failure(report: Finished | Refused | EngineDeadError) -> Exception:
    """What a report that is not output means for the whole HTTP request."""
    if isinstance(report, EngineDeadError):
        return report
    if isinstance(report, Finished):
        message = f"the engine gave up on this request: {report.message}"
        return ApiError(500, message, kind="server_error", code="engine_error")
    if report.retry_after_s > 0:
        return OverloadedError(report.message, report.retry_after_s)
    return RequestError(report.message, report.field)
