"""Texts under way on one engine: asked for in order, never more at once than it takes, and told apart again.

Knows the engine's messages and text rules; neither where the engine is nor who asked.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ssd_serve.app.llm.engine_access import EngineAccess, Report
from ssd_serve.app.llm.outputs import Continuation, TextPlace
from ssd_serve.app.llm.sampling_params import SamplingParams
from ssd_serve.base.errors import EngineDeadError, RequestError
from ssd_serve.base.messages import (
    Choice,
    Committed,
    Finished,
    SamplingParameters,
    SubmitChoices,
)
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.server.text.output import TextAssembler, TextRules
from ssd_serve.server.text.stops import StopStrings


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
    """All that is asked of an engine, which takes `most` texts at once. Several callers may take turns."""

    def __init__(self, access: EngineAccess, tokenizer: Tokenizer, most: int) -> None:
        self._access = access
        self._tokenizer = tokenizer
        self._most = most
        self._numbers = itertools.count(1)
        self._waiting: deque[tuple[Asked, list[Continuation]]] = deque()
        self._running: dict[int, Continuation] = {}

    def ask(self, asked: Iterable[Asked]) -> list[Continuation]:
        """Texts that will come, turn by turn."""
        begun: list[Continuation] = []
        for each in asked:
            texts = self._texts(each)
            self._waiting.append((each, texts))
            begun += texts
        return begun

    def turn(self) -> None:
        """Ask for what the engine may have, and take what it says."""
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
        """Nobody wants these any more; the engine stops where they are not over."""
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
