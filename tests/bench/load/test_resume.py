"""When speculation came back, read off the chunks of a request."""

import asyncio

import pytest

from ssd_serve.bench.load.client import Endpoint, LoadClient, LoadRequest
from ssd_serve.bench.load.resume import ChunkSteps, ResumePlan, check_resume, steps_after
from tests.bench.load.fakes import FakeApi

ARRIVALS = [(1.0, 1), (2.0, 3), (3.0, 1), (3.5, 1), (5.5, 4), (6.0, 1)]


def test_only_what_comes_after_the_moment_counts() -> None:
    assert steps_after(ARRIVALS, 2.5) == ChunkSteps(0.5, 3.0, 2.0, 7 / 4)


def test_the_wait_for_the_first_chunk_is_a_gap_too() -> None:
    assert steps_after([(10.0, 2), (10.1, 1)], 4.0).longest_gap_s == 6.0


def test_nothing_after_the_moment() -> None:
    assert steps_after(ARRIVALS, 6.0) == ChunkSteps(None, None, None, None)


def test_single_tokens_are_no_speculation() -> None:
    assert steps_after([(1.0, 1), (2.0, 1)], 0.5).speculated_s is None


def check(api: FakeApi, survivor_tokens: int) -> dict[str, object]:
    plan = ResumePlan(
        single=LoadRequest((1,), 12, seed=1),
        survivor=LoadRequest((2,), survivor_tokens, seed=2),
        burst=[LoadRequest((3,), 8, seed=10 + index) for index in range(3)],
        concurrency=3,
        alone_s=0.05,
    )

    async def run() -> dict[str, object]:
        async with LoadClient(Endpoint("http://load", 1.0), api.transport) as client:
            return await check_resume(client, plan)

    return asyncio.run(run())


def test_the_long_request_runs_through_the_burst_and_is_hung_up_on() -> None:
    api = FakeApi(chunks=(1, 3), pause_s=0.004)
    found = check(api, survivor_tokens=100_000)
    assert [body["seed"] for body in api.bodies] == [1, 2, 10, 11, 12, 1]
    assert api.max_running == 4
    assert api.running == 0
    assert found["concurrency"] == 4
    assert found["outlived_the_burst"] is True
    assert found["failed"] == 0
    for name in ("survivor_after_burst", "single_before_burst", "single_after_burst"):
        steps = found[name]
        assert isinstance(steps, dict)
        assert steps["tokens_per_chunk"] > 1.0
        assert 0 <= steps["first_chunk_ms"] <= steps["speculated_ms"]
        assert steps.get("nodes_per_round") == (None if name == "survivor_after_burst" else 10.0)


def test_a_long_request_that_was_too_short_is_told() -> None:
    found = check(FakeApi(chunks=(8,), pause_s=0.004), survivor_tokens=1)
    assert found["outlived_the_burst"] is False
    assert found["survivor_after_burst"] == dict.fromkeys(
        ("first_chunk_ms", "speculated_ms", "longest_gap_ms", "tokens_per_chunk")
    )
    assert found["tokens_per_chunk_under_load"] == pytest.approx(1.0)
