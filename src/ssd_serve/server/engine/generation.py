"""Runs the choices of one HTTP request on the engine and gives their output piece by piece.

Whatever way the caller leaves (done, error, client gone), everything that still runs is aborted. Knows no
protocol of either side but the engine's reports.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType

from ssd_serve.base.errors import EngineDeadError, OverloadedError, RequestError
from ssd_serve.base.messages import Committed, Finished, Refused, RequestOptions
from ssd_serve.server.engine.choices import ChoicePiece, ChoicePlan, RunningChoice
from ssd_serve.server.engine.submitted import Interrupted, Report, Wanted
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.off_loop import Steps
from ssd_serve.server.observability.stopwatch import Course
from ssd_serve.server.openai.prompts import token_units
from ssd_serve.server.service import Service

_LONGEST_END_S = 5.0
"""How long the figures of a choice that a stop string ended are waited for: about a round."""

_DECODED_AT_ONCE = 32
_READ_AT_ONCE = 16
_TOLD_AT_ONCE = 8
"""Reports of a choice that become one piece, where so many wait: writing a piece takes longer than reading a
report, so that this is how a server that has fallen behind catches up."""
MAX_UNREAD = 1 << 18
"""Numbers in reports that wait to be read, over all choices of a request: some ten megabytes."""


class Run:
    """The choices of one HTTP request: `async with Run(...) as run: async for piece in run.pieces()`."""

    def __init__(
        self,
        service: Service,
        plans: Sequence[ChoicePlan],
        options: RequestOptions = RequestOptions(),
    ) -> None:
        self._service = service
        self._plans = plans
        self._options = options
        self._choices: list[RunningChoice] = []
        self._reports: deque[tuple[RunningChoice, Report | None]] = deque()
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
        choices = [RunningChoice(self._service, index, plan) for index, plan in enumerate(self._plans)]
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

    def _catch_up(self, choices: Sequence[RunningChoice]) -> Steps[None]:
        """Decode what the client has already."""
        for choice, plan in zip(choices, self._plans, strict=True):
            for place in range(0, len(plan.generated), _DECODED_AT_ONCE):
                choice.catch_up(plan.generated[place : place + _DECODED_AT_ONCE])
                yield

    def _submit(self, choices: Sequence[RunningChoice]) -> None:
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
        numbers = self._service.engine.submit_all(wanted, self._options)
        for (choice, _), number in zip(asked, numbers, strict=True):
            choice.request = number
        for choice in choices:
            if choice.stopped:
                self._put(choice, None)
            choice.running = True
            self._choices.append(choice)

    def _deliver(self, choice: RunningChoice, report: Report) -> None:
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

    def _put(self, choice: RunningChoice, report: Report | None) -> None:
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

    def _waiting(self, choice: RunningChoice) -> list[Committed]:
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

    def _finish_if_stopped(self, choice: RunningChoice) -> None:
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
