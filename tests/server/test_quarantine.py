"""Requests that engines die of are found and given up; who only waited beside them is not."""

import asyncio

import pytest

from ssd_serve.base.errors import EngineDeadError
from ssd_serve.base.messages import Finished, SamplingParameters
from ssd_serve.server.engine.submitted import Interrupted
from tests.server.dying_engines import Heard, House, begun, some
from tests.server.fakes import channel_pair

pytestmark = pytest.mark.anyio


async def test_a_request_that_kills_every_engine_is_given_up_and_the_others_go_on(house: House) -> None:
    _, guilty = await begun(house)
    for death in range(4):
        house.die()
        await house.until(lambda: house.client.lost_s is not None)
        house.live()
        await house.until(lambda: house.client.lost_s is None)
        assert guilty.ended == (death == 3)
    assert "3 engines in a row died" in str(guilty.reports[-1])
    _, innocent = await begun(house, most=30)
    while not innocent.ended:
        house.engine.step()
        await asyncio.sleep(0.001)
    assert len(innocent.tokens) == 30


async def until_all_ended(house: House, heard: list[Heard], poison: set[int], spared: int = 0) -> int:
    """The engine dies when it has a request of `poison`; for the first `spared` times after a step.."""
    deaths = 0
    while not all(each.ended for each in heard):
        house.engine.take()
        if poison & house.engine.requests.keys():
            if deaths < spared:
                house.engine.step()
            house.die()
            await house.until(lambda: house.client.lost_s is not None)
            house.live()
            await house.until(lambda: house.client.lost_s is None)
            deaths += 1
        else:
            house.engine.step()
        await asyncio.sleep(0.001)
    return deaths


def submit(house: House, seed: int) -> Heard:
    heard = Heard()
    house.client.submit((1,), SamplingParameters(max_tokens=5), seed, heard.reports.append)
    return heard


async def test_who_only_waits_beside_a_request_that_kills_every_engine_gets_its_text(house: House) -> None:
    await house.until(lambda: house.client.ready is not None)
    heard = [submit(house, seed) for seed in range(4)]
    assert await until_all_ended(house, heard, {3}) <= 4
    assert isinstance(heard[2].reports[-1], EngineDeadError)
    assert [len(each.tokens) for each in heard] == [5, 5, 0, 5]


async def test_who_was_there_at_a_death_before_is_not_blamed_for_another_request(house: House) -> None:
    await house.until(lambda: house.client.ready is not None)
    innocent = submit(house, 1)
    house.engine.take()
    house.die()  # of something else
    await house.until(lambda: house.client.lost_s is not None)
    guilty = submit(house, 2)
    house.live()
    await house.until(lambda: house.client.lost_s is None)
    assert await until_all_ended(house, [innocent, guilty], {2}) <= 4
    assert (len(innocent.tokens), guilty.tokens) == (5, [])
    assert isinstance(guilty.reports[-1], EngineDeadError)


async def test_many_guilty_ones_are_found_one_after_the_other(house: House) -> None:
    await house.until(lambda: house.client.ready is not None)
    heard = [submit(house, seed) for seed in range(9)]
    assert await until_all_ended(house, heard, {2, 3, 4, 6, 7, 9}, spared=1) <= 16
    assert [len(each.tokens) for each in heard if isinstance(each.reports[-1], Finished)] == [5, 5, 5]
    assert house.explained == 6


async def test_a_death_while_loading_blames_no_request(house: House) -> None:
    _, heard = await begun(house)
    house.die()
    for _ in range(5):
        ours, theirs = channel_pair()
        house.channels.put(ours)
        await house.until(house.channels.empty)
        theirs.close()
    house.live()
    await house.until(lambda: house.client.lost_s is None)
    await some(house, heard)
    assert heard.reports.count(Interrupted()) == 1
