"""What operators are told of a request that has ended: one line in the log, and its trace where one is kept.

Times and counts only, never what was asked or answered.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ssd_serve.server.observability.stopwatch import Course

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that the engine worked on, whatever ended it."""

    path: str
    holder: str
    """Whose key it came with; empty: nobody's."""
    prompt_tokens: int
    choices: Sequence[Course]
    engine_requests: Sequence[int]
    """What the engine calls the choices, for lines of other processes."""

    @property
    def reasons(self) -> list[str]:
        """How the choices ended, each way once."""
        return list(dict.fromkeys(choice.reason for choice in self.choices))

    @property
    def output_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.output_tokens for choice in self.choices)


class RequestTrace(Protocol):
    """The trace of one request."""

    @property
    def identifier(self) -> str:
        """The id of the trace."""
        ...

    def finished(self, request: FinishedRequest) -> None:
        """The engine's part is over."""
        ...


def tell_finished(request: FinishedRequest, trace: RequestTrace | None) -> None:
    """Write the line, and complete the trace."""
    if trace is not None:
        trace.finished(request)
    known = {"key": request.holder, "trace": "" if trace is None else trace.identifier}
    fields = {name: value for name, value in known.items() if value} | _figures(request)
    logger.info("request finished", extra={"fields": {"path": request.path, **fields}})


def _figures(request: FinishedRequest) -> dict[str, object]:
    choices = request.choices
    begun, ended = min(each.begun for each in choices), max(each.ended for each in choices)
    firsts = [each.first for each in choices if each.first is not None]
    decoding_s = max(each.last for each in choices) - min(firsts) if firsts else 0.0
    figures = [each.figures for each in choices if each.figures is not None]
    rounds = sum(each.rounds for each in figures)
    told: dict[str, object] = {
        "reason": "+".join(request.reasons),
        "choices": len(choices),
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": sum(each.cached_prompt_tokens for each in figures),
        "output_tokens": request.output_tokens,
        "first_token_ms": round(1e3 * (min(firsts) - begun), 2) if firsts else None,
        "ms": round(1e3 * (ended - begun), 2),
        "tokens_per_s": round(request.output_tokens / decoding_s, 1) if decoding_s > 0 else None,
        "tokens_per_round": round(sum(each.tokens for each in figures) / rounds, 2) if rounds else None,
        "engine": "+".join(map(str, request.engine_requests)),
    }
    return {name: value for name, value in told.items() if value is not None}
