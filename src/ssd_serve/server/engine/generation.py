"""Runs the choices of one HTTP request on the engine, and yields their output as it comes.

However the caller leaves (done, error, client gone), running choices are aborted. Knows no protocol but the
engine's reports.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType

import msgspec

from ssd_serve.base.errors import EngineDeadError, OverloadedError, RequestError
from ssd_serve.base.messages import Committed, Finished, Refused, RequestOptions, Submit
from ssd_serve.server.engine.choice import ChoiceOutput, ChoicePlan, RunningChoice
from ssd_serve.server.engine.inflight import InflightRequest, Interrupted, Report
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.observability.timing import ChoiceTiming
from ssd_serve.server.service import Service
from ssd_serve.server.text import token_units

_FIGURES_TIMEOUT_S = 5.0
"""Longest wait for the statistics of a choice that a stop string ended; a round is usually enough."""

_DECODED_AT_ONCE = 32
_YIELD_EVERY = 16
_REPORTS_PER_DELTA = 8
"""Most waiting reports that become one delta. Writing a delta takes longer than reading a report, so a
server that has fallen behind catches up."""
MAX_UNREAD = 1 << 18
"""Most numbers in unread reports of one HTTP request: some ten megabytes."""


class GenerationStream:
    """The choices of one HTTP request: `async with GenerationStream(...) as s: async for d in s.deltas()`."""

    def __init__(
        self, service: Service, plans: Sequence[ChoicePlan], options: RequestOptions = RequestOptions()
    ) -> None:
        self._service = service
        self._engine = service.engine
        self._plans = plans
        self._options = options
        self._choices: list[RunningChoice] = []
        self._reports: deque[tuple[RunningChoice, Report | None]] = deque()
        self._reported = asyncio.Event()
        self._unread = 0
        self._largest = 0
        self._too_slow = False
        """True once the client reads so slowly that more than `MAX_UNREAD` would be kept."""

    @property
    def courses(self) -> list[ChoiceTiming]:
        """Times and counts of the choices that have ended."""
        return [choice.course for choice in self._choices if choice.course is not None]

    @property
    def request_numbers(self) -> list[int]:
        """The engine's numbers of the choices."""
        return [choice.request for choice in self._choices]

    async def __aenter__(self) -> "GenerationStream":
        choices = [RunningChoice(self._service, index, plan) for index, plan in enumerate(self._plans)]
        generated = [len(plan.generated) for plan in self._plans]
        if any(generated):
            await self._service.worker_pool.steps(token_units(generated), self._resume(choices))
            self._service.require_room(len(choices))  # other requests may have come meanwhile
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

    def _resume(self, choices: Sequence[RunningChoice]) -> Steps[None]:
        for choice, plan in zip(choices, self._plans, strict=True):
            for start in range(0, len(plan.generated), _DECODED_AT_ONCE):
                choice.resume(plan.generated[start : start + _DECODED_AT_ONCE])
                yield

    def _submit(self, choices: Sequence[RunningChoice]) -> None:
        requests: list[InflightRequest] = []
        for choice, plan in zip(choices, self._plans, strict=True):
            if not choice.stopped:  # output of the earlier response may end with a stop string
                choice.request = self._engine.next_number()
                options = (
                    self._options
                    if choice.index == 0
                    else msgspec.structs.replace(self._options, trace=False, return_progress=False)
                )
                submit = Submit(
                    choice.request, plan.prompt, plan.parameters, plan.seed, plan.generated, 0, options
                )
                requests.append(InflightRequest(submit, partial(self._deliver, choice)))
        self._engine.submit(requests)
        for choice in choices:
            if choice.stopped:
                self._put(choice, None)
            choice.running = True
            self._choices.append(choice)

    def _deliver(self, choice: RunningChoice, report: Report) -> None:
        if self._too_slow:
            return
        weight = _weight(report)
        self._unread += weight
        self._largest = max(self._largest, weight)
        # One report alone, however large, is no backlog.
        if self._unread > MAX_UNREAD + self._largest:
            self._too_slow = True
            self._reports.clear()
            for each in self._choices:
                self._engine.abort(each.request)
        self._put(choice, report)

    def _put(self, choice: RunningChoice, report: Report | None) -> None:
        self._reports.append((choice, report))
        self._reported.set()

    def _abort(self, reason: str) -> None:
        for choice in self._choices:
            if choice.running:
                self._engine.abort(choice.request)
                choice.close(reason)

    async def deltas(self) -> AsyncIterator[ChoiceOutput]:
        """Yield output of all choices as it comes, until every choice has ended."""
        read = 0
        while any(choice.running for choice in self._choices):
            if not self._reports:
                self._reported.clear()
                await self._reported.wait()
            choice, report = self._reports.popleft()
            read += 1
            if read % _YIELD_EVERY == 0:
                await asyncio.sleep(0)  # a queue that never empties would block the event loop
            if self._too_slow:
                raise ApiError(
                    408, "the client reads too slowly: too much output waits for it", code="slow_reader"
                )
            self._unread -= 0 if report is None else _weight(report)
            if not choice.running:
                continue
            if isinstance(report, Committed):
                if not choice.stopped:
                    yield choice.receive([report, *self._more_reports(choice)])
                    self._finish_if_stopped(choice)
            elif isinstance(report, Interrupted):
                choice.interrupted = True
            elif isinstance(report, Finished) and report.reason != "error":
                yield choice.end(report)
            elif choice.stopped or report is None:
                self._engine.abort(choice.request)
                yield choice.end_without_report()
            else:
                raise _failure(report)

    def _more_reports(self, choice: RunningChoice) -> list[Committed]:
        """Take further reports of this choice that stand first in the queue."""
        found: list[Committed] = []
        while self._reports and len(found) < _REPORTS_PER_DELTA - 1 and self._reports[0][0] is choice:
            report = self._reports[0][1]
            if not isinstance(report, Committed):
                break
            self._unread -= _weight(report)
            found.append(report)
            self._reports.popleft()
        return found

    def _finish_if_stopped(self, choice: RunningChoice) -> None:
        """Ask the engine to end a choice at its stop string; the answer has the statistics."""
        if choice.stopped:
            self._engine.finish(choice.request)
            asyncio.get_running_loop().call_later(_FIGURES_TIMEOUT_S, self._put, choice, None)


def _weight(report: Report) -> int:
    """Estimate how many numbers a report holds."""
    if not isinstance(report, Committed):
        return 1
    scored = report.logprobs or report.prompt_logprobs
    alternatives = len(scored[0].top) if scored else 0
    nodes = 0 if report.trace is None else len(report.trace.nodes) + len(report.trace.growth)
    logprobs = (1 + alternatives) * (len(report.logprobs) + len(report.prompt_logprobs))
    return 1 + 6 * nodes + len(report.tokens) + logprobs


def _failure(report: Finished | Refused | EngineDeadError) -> Exception:
    if isinstance(report, EngineDeadError):
        return report
    if isinstance(report, Finished):
        message = f"the engine gave up on this request: {report.message}"
        return ApiError(500, message, kind="server_error", code="engine_error")
    if report.retry_after_s > 0:
        return OverloadedError(report.message, report.retry_after_s)
    return RequestError(report.message, report.field)
