"""Test double of an engine client: its engines crash on demand and give a few tokens a step."""

import asyncio
import queue
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ssd_serve.base.errors import EngineDeadError
from ssd_serve.base.messages import (
    Abort,
    Committed,
    Figures,
    Finish,
    Finished,
    SamplingParameters,
    Submit,
    SubmitChoices,
    TokenLogprobs,
)
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.engine.inflight import Report
from ssd_serve.transport.channel import Channel, SocketChannel
from tests.server.fakes import READY, channel_pair, submit


def token_at(seed: int, position: int) -> int:
    return random.Random(seed * 100_003 + position).randrange(1000)


class Engine:
    def __init__(self, channel: SocketChannel, source: random.Random) -> None:
        self.channel = channel
        self.source = source
        self.requests: dict[int, tuple[Submit, list[int], int]] = {}
        self.served: set[int] = set()

    def take(self) -> None:
        for message in self.channel.receive():
            if isinstance(message, Submit | SubmitChoices):
                for each in message.each() if isinstance(message, SubmitChoices) else [message]:
                    self.requests[each.request] = (each, list(each.output), each.scored)
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


class FakeSupervisor:
    def __init__(self) -> None:
        self.ready = 0
        self.explained = 0
        self.silences: list[float] = []

    def target_is_ready(self) -> None:
        self.ready += 1

    def suspect_verifier(self, silent_s: float) -> None:
        self.silences.append(silent_s)

    def deaths_are_explained(self) -> None:
        self.explained += 1

    def expect_end(self) -> None:
        pass


@dataclass
class FakeLauncher:
    connecting: Callable[[float], Channel]
    supervisor: FakeSupervisor = field(default_factory=FakeSupervisor)

    def connect(self, timeout_s: float) -> Channel:
        return self.connecting(timeout_s)


@dataclass
class CrashingEngine:
    source: random.Random = field(default_factory=lambda: random.Random(0))
    channels: "queue.Queue[Channel | None]" = field(default_factory=lambda: queue.Queue())

    def __post_init__(self) -> None:
        ours, theirs = channel_pair()
        self.engine = Engine(theirs, self.source)
        self.launcher = FakeLauncher(self.connect)
        self.client = EngineClient(ours, self.launcher)
        self.client.start()
        theirs.send(READY)

    def connect(self, timeout_s: float) -> Channel:
        del timeout_s
        try:
            channel = self.channels.get(timeout=20)
        except queue.Empty:
            raise EngineDeadError("the test has ended") from None
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
        self.client.stop()
        self.channels.put(None)  # unblocks a waiting reconnect
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


@dataclass
class Heard:
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


async def begun(crashing: CrashingEngine, most: int = 1000) -> tuple[int, Heard]:
    heard = Heard()
    await crashing.until(lambda: crashing.client.ready is not None)
    request = submit(crashing.client, (1, 2), SamplingParameters(max_tokens=most), 5, heard.reports.append)
    await some(crashing, heard)
    return request, heard


async def some(crashing: CrashingEngine, heard: Heard) -> None:
    before = len(heard.tokens)
    while len(heard.tokens) == before:
        crashing.engine.step()
        await asyncio.sleep(0.002)
