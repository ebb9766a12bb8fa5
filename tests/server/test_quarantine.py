"""Tests of poison requests: requests that crash engines are found and aborted, others go on."""

import asyncio

import pytest

from ssd_serve.base.errors import EngineDeadError
from ssd_serve.base.messages import Finished, SamplingParameters
from ssd_serve.server.engine.inflight import Interrupted
from tests.server.crashing_engine import CrashingEngine, Heard, begun, some
from tests.server.fakes import channel_pair, submit

pytestmark = pytest.mark.anyio


async def test_poison_request_is_aborted_after_three_crashes(crashing: CrashingEngine) -> None:
    _, guilty = await begun(crashing)
    for death in range(4):
        crashing.die()
        await crashing.until(lambda: crashing.client.lost_s is not None)
        crashing.live()
        await crashing.until(lambda: crashing.client.lost_s is None)
        assert guilty.ended == (death == 3)
    assert "3 engines in a row died" in str(guilty.reports[-1])
    _, innocent = await begun(crashing, most=30)
    while not innocent.ended:
        crashing.engine.step()
        await asyncio.sleep(0.001)
    assert len(innocent.tokens) == 30


async def until_all_ended(
    crashing: CrashingEngine, heard: list[Heard], poison: set[int], spared: int = 0
) -> int:
    deaths = 0
    while not all(each.ended for each in heard):
        crashing.engine.take()
        if poison & crashing.engine.requests.keys():
            if deaths < spared:
                crashing.engine.step()
            crashing.die()
            await crashing.until(lambda: crashing.client.lost_s is not None)
            crashing.live()
            await crashing.until(lambda: crashing.client.lost_s is None)
            deaths += 1
        else:
            crashing.engine.step()
        await asyncio.sleep(0.001)
    return deaths


def submit_short(crashing: CrashingEngine, seed: int) -> Heard:
    heard = Heard()
    submit(crashing.client, (1,), SamplingParameters(max_tokens=5), seed, heard.reports.append)
    return heard


async def test_earlier_crash_does_not_blame_innocent_request(crashing: CrashingEngine) -> None:
    await crashing.until(lambda: crashing.client.ready is not None)
    innocent = submit_short(crashing, 1)
    crashing.engine.take()
    crashing.die()  # for an unrelated reason
    await crashing.until(lambda: crashing.client.lost_s is not None)
    guilty = submit_short(crashing, 2)
    crashing.live()
    await crashing.until(lambda: crashing.client.lost_s is None)
    assert await until_all_ended(crashing, [innocent, guilty], {2}) <= 4
    assert (len(innocent.tokens), guilty.tokens) == (5, [])
    assert isinstance(guilty.reports[-1], EngineDeadError)


async def test_several_poison_requests_are_found(crashing: CrashingEngine) -> None:
    await crashing.until(lambda: crashing.client.ready is not None)
    heard = [submit_short(crashing, seed) for seed in range(9)]
    assert await until_all_ended(crashing, heard, {2, 3, 4, 6, 7, 9}, spared=1) <= 16
    assert [len(each.tokens) for each in heard if isinstance(each.reports[-1], Finished)] == [5, 5, 5]
    assert crashing.launcher.supervisor.explained == 6


async def test_crash_while_loading_blames_no_request(crashing: CrashingEngine) -> None:
    _, heard = await begun(crashing)
    crashing.die()
    for _ in range(5):
        ours, theirs = channel_pair()
        crashing.channels.put(ours)
        await crashing.until(crashing.channels.empty)
        theirs.close()
    crashing.live()
    await crashing.until(lambda: crashing.client.lost_s is None)
    await some(crashing, heard)
    assert heard.reports.count(Interrupted()) == 1
