"""Arrivals of the load benchmark from a file.

A trace is a CSV file with the columns TIMESTAMP (ISO 8601, or seconds), ContextTokens and GeneratedTokens:
the format of the Azure LLM inference traces. Knows lengths and times, not servers.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ssd_serve.base.errors import UserError

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; `at_s` counts from the first one."""

    at_s: float
    context_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class FittedTrace:
    """The part of a trace that is replayed, and what had to be changed to fit the model.

    `left_out` arrivals came after the end. Shares are of the tokens that the trace asks for.
    """

    arrivals: tuple[Arrival, ...]
    left_out: int
    clipped_prompts: int
    clipped_outputs: int
    prompt_tokens_lost_share: float
    output_tokens_lost_share: float


def read_trace(path: Path) -> list[Arrival]:
    """The arrivals of a file in order of time. Raises `UserError` for anything that is no trace."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise UserError(f"{path} is no trace: the column {missing[0]} is missing")
            found = [_arrival(path, rows.line_num, row) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read the trace {path}: {error}") from error
    if not found:
        raise UserError(f"the trace {path} has no arrivals")
    found.sort(key=lambda arrival: arrival.at_s)
    first = found[0].at_s
    return [Arrival(one.at_s - first, one.context_tokens, one.generated_tokens) for one in found]


def _arrival(path: Path, line: int, row: dict[str, str | None]) -> Arrival:
    when, context, generated = (row[name] or "" for name in _COLUMNS)
    try:
        lengths = int(context), int(generated)
        if min(lengths) < 0:
            raise ValueError("a length is negative")
        return Arrival(_seconds(when), *lengths)
    except ValueError as error:
        raise UserError(f"{path}, line {line}: {error}") from error


def _seconds(text: str) -> float:
    """Plain seconds, or a date and time; seconds may have any number of decimals."""
    try:
        return float(text)
    except ValueError:
        pass
    whole, _, decimals = text.partition(".")
    digits = decimals[: len(decimals) - len(decimals.lstrip("0123456789"))]
    when = datetime.fromisoformat(whole + decimals[len(digits) :])
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return when.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def fit(
    trace: Sequence[Arrival],
    *,
    time_scale: float,
    seconds: float,
    context: int,
    length_scale: float = 1.0,
) -> FittedTrace:
    """The arrivals within `seconds` after times were multiplied by `time_scale` and lengths by
    `length_scale`, clipped to the context.

    What is lost counts after the multiplication. An output keeps at most half of the context, a prompt what
    the output leaves; both have at least one token.
    """
    scaled = [(arrival.at_s * time_scale, _scaled(arrival, length_scale)) for arrival in trace]
    kept = [(at, arrival) for at, arrival in scaled if at <= seconds]
    fitted: list[Arrival] = []
    for at, arrival in kept:
        output = max(1, min(arrival.generated_tokens, context // 2))
        fitted.append(Arrival(at, max(1, min(arrival.context_tokens, context - output)), output))
    pairs = [(was, now) for (_, was), now in zip(kept, fitted, strict=True)]
    return FittedTrace(
        arrivals=tuple(fitted),
        left_out=len(trace) - len(kept),
        clipped_prompts=sum(now.context_tokens < was.context_tokens for was, now in pairs),
        clipped_outputs=sum(now.generated_tokens < was.generated_tokens for was, now in pairs),
        prompt_tokens_lost_share=_lost([(was.context_tokens, now.context_tokens) for was, now in pairs]),
        output_tokens_lost_share=_lost([(was.generated_tokens, now.generated_tokens) for was, now in pairs]),
    )


def _scaled(arrival: Arrival, factor: float) -> Arrival:
    return Arrival(
        arrival.at_s, round(factor * arrival.context_tokens), round(factor * arrival.generated_tokens)
    )


def _lost(lengths: Sequence[tuple[int, int]]) -> float:
    lost = sum(max(0, was - now) for was, now in lengths)
    return round(lost / max(1, sum(was for was, _ in lengths)), 4)
