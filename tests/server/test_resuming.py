"""The engine dies and another one comes: texts go on where they were, whenever it happens."""

import asyncio
import queue
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import pytest

from ssd_serve.cluster.channel import SocketChannel
from ssd_serve.errors import EngineDeadError
from ssd_serve.messages import (
    Abort,
    Committed,
    Figures,
    Finish,
    Finished,
    SamplingParameters,
    Submit,
    TokenLogprobs,
)
from ssd_serve.server.engine_client import EngineClient
from ssd_serve.server.line import MessageChannel
from ssd_serve.server.submitted import Interrupted, Report
from tests.server.fakes import READY, channel_pair

pytestmark = pytest.mark.anyio


def token_at(seed: int, position: int) -> int:
    """Shared noise in one line: the token is a function of the seed and the position."""
    return random.Random(seed * 100_003 + position).randrange(1000)


class Engine:
    """Gives a few tokens at a time to a few of its requests."""

    def __init__(self, channel: SocketChannel, source: random.Random) -> None:
        self.channel = channel
        self.source = source
        self.requests: dict[int, tuple[Submit, list[int], int]] = {}
        self.served: set[int] = set()

    def take(self) -> None:
        for message in self.channel.receive():
            if isinstance(message, Submit):
                self.requests[message.request] = (message, list(message.output), message.scored)
            elif isinstance(message, Abort):
                self.requests.pop(message.request, None)
            elif isinstance(message, Finish) and message.request in self.requests:
                del self.requests[message.request]
                self.channel.send(Finished(message.request, "stop", Figures()))

    def step(self) -> None:
        self.take()
        for number in list(self.requests):
            if self.source.random() < 0.5:
                self._commit(number)

    def _commit(self, number: int) -> None:
        submit, output, scored = self.requests[number]
        unscored = range(scored, len(submit.prompt) - 1)[: self.source.randint(1, 3)]
        told = tuple(TokenLogprobs(-float(place), ()) for place in unscored)
        new: list[int] = []
        if scored + len(told) == len(submit.prompt) - 1:
            left = submit.parameters.max_tokens - len(output)
            for _ in range(min(left, self.source.randint(1, 4))):
                new.append(token_at(submit.seed, len(submit.prompt) + len(output) + len(new)))
        self.channel.send(Committed(number, tuple(new), prompt_logprobs=told))
        self.served.add(number)
        self.requests[number] = (submit, [*output, *new], scored + len(told))
        if len(output) + len(new) == submit.parameters.max_tokens:
            self.channel.send(Finished(number, "length", Figures()))
            del self.requests[number]


@dataclass
class House:
    """A client whose engines die when the test says so."""

    source: random.Random = field(default_factory=lambda: random.Random(0))
    channels: "queue.Queue[MessageChannel | None]" = field(default_factory=lambda: queue.Queue())

    def __post_init__(self) -> None:
        ours, theirs = channel_pair()
        self.engine = Engine(theirs, self.source)
        self.explained = 0
        self.client = EngineClient(ours, self.reconnect, on_explained=self.explain)
        self.client.start()
        theirs.send(READY)

    def explain(self) -> None:
        self.explained += 1

    def reconnect(self) -> MessageChannel:
        channel = self.channels.get(timeout=20)
        if channel is None:
            raise EngineDeadError("it died too often")
        return channel

    def die(self) -> None:
        self.engine.channel.close()

    def live(self) -> None:
        ours, theirs = channel_pair()
        self.engine = Engine(theirs, self.source)
        self.channels.put(ours)
        theirs.send(READY)

    def close(self) -> None:
        """Nobody waits any more, and nothing stays open."""
        self.client.stop()
        self.channels.put(None)  # a thread may wait
        self.engine.channel.close()
        while not self.channels.empty():
            channel = self.channels.get()
            if channel is not None:
                channel.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.002)
        raise AssertionError("did not happen")


@pytest.fixture
async def house() -> AsyncGenerator[House, None]:
    found = House()
    yield found
    found.close()


@dataclass
class Heard:
    """Everything that one request was told."""

    reports: list[Report] = field(default_factory=list[Report])

    @property
    def tokens(self) -> list[int]:
        return [token for one in self.reports if isinstance(one, Committed) for token in one.tokens]

    @property
    def scores(self) -> list[float]:
        return [
            each.chosen for one in self.reports if isinstance(one, Committed) for each in one.prompt_logprobs
        ]

    @property
    def ended(self) -> bool:
        return bool(self.reports) and isinstance(self.reports[-1], Finished | EngineDeadError)


@pytest.mark.parametrize("seed", range(12))
async def test_no_token_is_lost_or_repeated_whenever_engines_die(house: House, seed: int) -> None:
    source, requests = house.source, list[tuple[int, int, int, Heard]]()
    source.seed(seed)
    await house.until(lambda: house.client.ready is not None)
    deaths = 0
    while len(requests) < 8 or not all(heard.ended for *_, heard in requests):
        if len(requests) < 8 and source.random() < 0.3:
            length, most, heard = source.randint(1, 8), source.randint(1, 25), Heard()
            parameters = SamplingParameters(max_tokens=most, prompt_logprobs=0)
            house.client.submit((7,) * length, parameters, len(requests), heard.reports.append)
            requests.append((length, most, len(requests), heard))
        house.engine.step()
        # Two engines in a row may give somebody nothing, no third one: that would be given up.
        everybody = {number + 1 for *_, number, heard in requests if not heard.ended} <= house.engine.served
        if deaths < 20 and source.random() < 0.15 and (everybody or deaths % 3 < 2):
            house.die()
            deaths += 1
            if source.random() < 0.5:
                await asyncio.sleep(0.005)  # it is noticed before the next one is there
            house.live()
        await asyncio.sleep(0.001 * source.randint(0, 1))
    for length, most, number, heard in requests:
        assert heard.tokens == [token_at(number, length + place) for place in range(most)]
        assert heard.scores == [-float(place) for place in range(length - 1)]
        assert isinstance(heard.reports[-1], Finished)
    assert deaths >= 2
    assert 0 < house.client.restarts <= deaths


async def begun(house: House, most: int = 1000) -> tuple[int, Heard]:
    """A request that has some tokens."""
    heard = Heard()
    await house.until(lambda: house.client.ready is not None)
    request = house.client.submit((1, 2), SamplingParameters(max_tokens=most), 5, heard.reports.append)
    await some(house, heard)
    return request, heard


async def some(house: House, heard: Heard) -> None:
    before = len(heard.tokens)
    while len(heard.tokens) == before:
        house.engine.step()
        await asyncio.sleep(0.002)


async def test_who_comes_while_there_is_no_engine_waits_and_who_leaves_is_forgotten(house: House) -> None:
    request, _ = await begun(house)
    _, stays = await begun(house)
    house.die()
    await house.until(lambda: house.client.lost_s is not None)
    heard = Heard()
    house.client.submit((3,), SamplingParameters(max_tokens=9), 8, heard.reports.append)
    house.client.abort(request)
    house.live()
    await house.until(lambda: house.client.lost_s is None)
    house.engine.take()
    assert sorted(house.engine.requests) == [2, 3]
    assert stays.reports[-1] == Interrupted()
    await some(house, heard)
    assert Interrupted() not in heard.reports
    assert (house.client.restarts, house.client.resumed) == (1, 1)


async def test_a_text_that_had_its_end_does_not_wait_for_another_engine(house: House) -> None:
    before, first = await begun(house)
    during, second = await begun(house)
    house.client.finish(before)
    house.die()
    await house.until(lambda: house.client.lost_s is not None)
    house.client.finish(during)
    for heard in (first, second):
        assert isinstance(heard.reports[-1], EngineDeadError)
        assert "figures" in str(heard.reports[-1])
    assert house.client.active == 0


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


async def test_long_texts_go_on_although_the_next_engine_reads_nothing_while_it_loads(house: House) -> None:
    parameters = SamplingParameters(max_tokens=9)
    await house.until(lambda: house.client.ready is not None)
    house.die()
    await house.until(lambda: house.client.lost_s is not None)
    for seed in range(2):
        house.client.submit((70_000,) * 1_000_000, parameters, seed, Heard().reports.append)
    house.live()
    await house.until(lambda: house.client.lost_s is None)

    def all_there() -> bool:
        house.engine.take()
        return sorted(house.engine.requests) == [1, 2]

    await house.until(all_there)


async def test_a_text_that_ends_while_the_next_engine_loads_is_not_continued_there(house: House) -> None:
    request, heard = await begun(house)
    house.die()
    await house.until(lambda: house.client.lost_s is not None)
    ours, theirs = channel_pair()
    house.engine = Engine(theirs, house.source)
    house.channels.put(ours)

    def submitted() -> bool:
        house.engine.take()
        return request in house.engine.requests

    await house.until(submitted)
    house.client.finish(request)
    assert isinstance(heard.reports[-1], EngineDeadError)
    await house.until(lambda: not submitted())


async def test_whatever_goes_wrong_with_the_next_engine_everybody_is_told() -> None:
    def reconnect() -> MessageChannel:
        raise RuntimeError("the launcher is broken")

    ours, theirs = channel_pair()
    theirs.send(READY)
    client, heard = EngineClient(ours, reconnect), Heard()
    client.start()
    client.submit((1,), SamplingParameters(), 1, heard.reports.append)
    theirs.close()
    for _ in range(400):
        await asyncio.sleep(0.005)
        if heard.ended:
            break
    assert "RuntimeError: the launcher is broken" in str(heard.reports[-1])


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


async def test_when_no_engine_will_come_everybody_is_told_why(house: House) -> None:
    _, heard = await begun(house)
    house.die()
    house.channels.put(None)
    await house.until(lambda: heard.ended)
    assert str(heard.reports[-1]) == house.client.dead == "it died too often"
    with pytest.raises(EngineDeadError, match="too often"):
        house.client.submit((1,), SamplingParameters(), 1, heard.reports.append)


async def test_an_engine_that_was_never_ready_is_not_waited_for() -> None:
    ours, theirs = channel_pair()
    client = EngineClient(ours, lambda: pytest.fail("nobody may be awaited"))
    client.start()
    theirs.close()
    for _ in range(200):
        await asyncio.sleep(0.005)
        if client.dead is not None:
            break
    assert client.dead == "the engine process ended"


async def test_a_stop_while_an_engine_is_awaited_ends_everything(house: House) -> None:
    _, heard = await begun(house)
    house.die()
    await house.until(lambda: house.client.lost_s is not None)
    house.client.stop()
    assert "shutting down" in str(heard.reports[-1])
    ours, theirs = channel_pair()
    house.channels.put(ours)
    await house.until(lambda: theirs.receive() == [] and theirs.closed)
    theirs.close()


async def test_an_engine_that_works_and_falls_silent_is_reported_until_it_speaks() -> None:
    ours, theirs = channel_pair()
    silences: list[float] = []
    client = EngineClient(ours, on_silence=silences.append, longest_silence_s=0.5)
    client.start()
    await asyncio.sleep(1.2)
    assert silences == [], "one that loads says little"
    theirs.send(READY)
    await asyncio.sleep(2.2)
    assert len(silences) == 2
    assert all(0.5 < silent_s < 3 for silent_s in silences)
    client.stop()
    theirs.close()
