"""Traces are read, scaled and clipped as told."""

from pathlib import Path

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.bench.load.trace import Arrival, fit, read_trace

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_arrivals_count_from_the_first_and_are_in_order(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:05.0000000,30,3\n2023-11-16 18:17:03.9799600,4808,10\n"
    found = read_trace(trace(tmp_path, HEAD + rows))
    assert [(one.context_tokens, one.generated_tokens) for one in found] == [(4808, 10), (30, 3)]
    assert [one.at_s for one in found] == pytest.approx([0.0, 1.02004], abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("100", "101.5"),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01.509930+00:00"),
        ("2024-05-10T01:00:00+01:00", "2024-05-10T00:00:01.5+00:00"),
    ],
)
def test_times_in_seconds_or_iso_8601(tmp_path: Path, first: str, second: str) -> None:
    found = read_trace(trace(tmp_path, f"{HEAD}{first},1,1\n{second},1,1\n"))
    assert found[1].at_s == pytest.approx(1.5, abs=1e-6)


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    found = read_trace(trace(tmp_path, "GeneratedTokens,more,TIMESTAMP,ContextTokens\n7,x,0,5\n"))
    assert found == [Arrival(0.0, 5, 7)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column TIMESTAMP is missing"),
        ("TIMESTAMP,ContextTokens\n", "column GeneratedTokens is missing"),
        (HEAD, "has no arrivals"),
        (HEAD + "0,1,1\nyesterday,1,1\n", "line 3"),
        (HEAD + "0,many,1\n", "line 2"),
        (HEAD + "0,-1,1\n", "line 2: a length is negative"),
        (HEAD + "0,1\n", "line 2"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_trace(trace(tmp_path, text))


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the trace"):
        read_trace(tmp_path / "nothing.csv")


def test_times_are_scaled_before_the_end_cuts() -> None:
    arrivals = [Arrival(float(at), 10, 5) for at in range(6)]
    replay = fit(arrivals, time_scale=2.0, seconds=6.0, context=100)
    assert [one.at_s for one in replay.arrivals] == [0.0, 2.0, 4.0, 6.0]
    assert replay.left_out == 2
    assert (replay.clipped_prompts, replay.clipped_outputs) == (0, 0)
    assert (replay.prompt_tokens_lost_share, replay.output_tokens_lost_share) == (0.0, 0.0)


def test_lengths_are_scaled_before_the_context_cuts() -> None:
    replay = fit([Arrival(0.0, 300, 20)], time_scale=1.0, length_scale=0.25, seconds=1.0, context=100)
    assert replay.arrivals == (Arrival(0.0, 75, 5),)
    assert (replay.clipped_prompts, replay.prompt_tokens_lost_share) == (0, 0.0)


def test_lengths_are_clipped_to_the_context_and_the_loss_is_told() -> None:
    arrivals = [Arrival(0.0, 150, 20), Arrival(0.0, 10, 90), Arrival(0.0, 40, 10)]
    replay = fit(arrivals, time_scale=1.0, seconds=1.0, context=100)
    lengths = [(one.context_tokens, one.generated_tokens) for one in replay.arrivals]
    assert lengths == [(80, 20), (10, 50), (40, 10)]
    assert all(sum(pair) <= 100 for pair in lengths)
    assert (replay.clipped_prompts, replay.clipped_outputs) == (1, 1)
    assert replay.prompt_tokens_lost_share == pytest.approx(70 / 200)
    assert replay.output_tokens_lost_share == pytest.approx(40 / 120, abs=1e-4)


def test_every_request_has_a_prompt_and_an_output() -> None:
    replay = fit([Arrival(0.0, 0, 0)], time_scale=1.0, seconds=1.0, context=100)
    assert replay.arrivals == (Arrival(0.0, 1, 1),)
