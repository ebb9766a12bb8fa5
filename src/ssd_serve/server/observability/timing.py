"""Timing of a request's choices, and the log line of a finished request. Holds no prompts and no outputs."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssd_serve.base.messages import Figures
from ssd_serve.server.observability.metrics import ServerMetrics

if TYPE_CHECKING:
    from ssd_serve.server.observability.traces import RequestSpans

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChoiceTiming:
    """Times, counts and end of one choice. Times are those of `time.monotonic`, in seconds."""

    reason: str
    """`stop`, `length`, `abort` or `error`."""
    prompt_tokens: int
    output_tokens: int
    started_at: float
    first_token_at: float | None
    last_token_at: float
    ended_at: float
    figures: Figures | None
    """None if the engine sent no statistics."""

    @property
    def prefill_at(self) -> float | None:
        """Time at which the prefill began; None if unknown."""
        if self.first_token_at is None or self.figures is None or self.figures.prompt_s <= 0:
            return None
        return max(self.started_at, self.first_token_at - self.figures.prompt_s)


class ChoiceTimer:
    """Times one choice from now on, and observes its metrics."""

    def __init__(self, metrics: ServerMetrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._started_at = time.monotonic()
        self._first_token_at: float | None = None
        self._last_token_at = self._started_at
        self._figures: Figures | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token; None before it."""
        return None if self._first_token_at is None else self._first_token_at - self._started_at

    @property
    def decoding_s(self) -> float:
        """Seconds from the first token to the last."""
        return 0.0 if self._first_token_at is None else self._last_token_at - self._first_token_at

    def tokens(self, count: int) -> None:
        """Call when `count` tokens arrive together."""
        now = time.monotonic()
        if count > 0 and self._first_token_at is None:
            self._first_token_at = now
            self._metrics.first_token.observe(now - self._started_at)
        elif count > 0:
            for _ in range(count):
                self._metrics.inter_token.observe((now - self._last_token_at) / count)
        self._last_token_at = now

    def figures(self, figures: Figures) -> None:
        """Call with the engine's statistics of the choice."""
        self._figures = figures
        if self.first_token_s is not None:
            self._metrics.observe_prefill(self.first_token_s, figures.prompt_s)
        if figures.rounds:
            self._metrics.round_tokens.observe(figures.tokens / figures.rounds)
            self._metrics.round_nodes.observe(figures.drafted / figures.rounds)

    def end(self, reason: str, tokens: int) -> ChoiceTiming:
        """Call when the choice ends with `stop`, `length`, `abort` or `error`."""
        now = time.monotonic()
        self._metrics.ended.labels(reason).inc()
        self._metrics.whole.observe(now - self._started_at)
        if self._first_token_at is not None:
            self._metrics.decode.observe(now - self._first_token_at)
        self._metrics.prompt_tokens.observe(self._prompt_tokens)
        self._metrics.output_tokens.observe(tokens)
        return ChoiceTiming(
            reason,
            self._prompt_tokens,
            tokens,
            self._started_at,
            self._first_token_at,
            self._last_token_at,
            now,
            self._figures,
        )


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that the engine has worked on."""

    path: str
    key_name: str
    """Name of the key's holder; empty without keys."""
    prompt_tokens: int
    choices: Sequence[ChoiceTiming]
    engine_requests: Sequence[int]
    """The engine's numbers of the choices, as in log lines of other processes."""

    @property
    def reasons(self) -> list[str]:
        """Distinct finish reasons of the choices."""
        return list(dict.fromkeys(choice.reason for choice in self.choices))

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)


def log_finished(request: FinishedRequest, trace: "RequestSpans | None") -> None:
    """Log one line for the request, and complete its trace."""
    if trace is not None:
        trace.finished(request)
    known = {"key": request.key_name, "trace": "" if trace is None else trace.identifier}
    fields = {name: value for name, value in known.items() if value} | _fields(request)
    logger.info("request finished", extra={"fields": {"path": request.path, **fields}})


def _fields(request: FinishedRequest) -> dict[str, object]:
    choices = request.choices
    started_at, ended_at = min(each.started_at for each in choices), max(each.ended_at for each in choices)
    firsts = [each.first_token_at for each in choices if each.first_token_at is not None]
    decoding_s = max(each.last_token_at for each in choices) - min(firsts) if firsts else 0.0
    figures = [each.figures for each in choices if each.figures is not None]
    rounds = sum(each.rounds for each in figures)
    fields: dict[str, object] = {
        "reason": "+".join(request.reasons),
        "choices": len(choices),
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": sum(each.cached_prompt_tokens for each in figures),
        "output_tokens": request.output_tokens,
        "first_token_ms": round(1e3 * (min(firsts) - started_at), 2) if firsts else None,
        "ms": round(1e3 * (ended_at - started_at), 2),
        "tokens_per_s": round(request.output_tokens / decoding_s, 1) if decoding_s > 0 else None,
        "tokens_per_round": round(sum(each.tokens for each in figures) / rounds, 2) if rounds else None,
        "engine": "+".join(map(str, request.engine_requests)),
    }
    return {name: value for name, value in fields.items() if value is not None}
