"""Tests of hostile drafters: lossless output, valid drafters stay connected, memory is bounded."""

from functools import cache

import hypothesis.strategies as st
from hypothesis import example, given, settings

from ssd_serve.base.draft_messages import Heartbeat, Hello
from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.verifier.control.budget import CostBasedWait
from ssd_serve.verifier.engine import Engine
from tests.examples import examples
from tests.fakes import HELLO, Case, Output, make_core, make_engine, mixed_requests, run
from tests.verifier.malformed_messages import Heard, Speech, joining, sharing, speeches

CASE = Case(slots=1024, policy=CostBasedWait)
REQUESTS, TOKENS = 4, 16


@cache
def plain() -> dict[int, Output]:
    engine, _ = make_engine(Case(drafter="none", slots=1024))
    return run(engine, mixed_requests(REQUESTS, TOKENS))


class Honest:
    """Local drafter with a real core."""

    def __init__(self, engine: Engine) -> None:
        mine, self.its = memory_pair()
        self._core = make_core(CASE)
        self.its.send(HELLO)
        mine.on_wait = self.work
        engine.drafters.connect(mine)

    def work(self) -> None:
        for message in self.its.receive():
            if not isinstance(message, Hello | Heartbeat):
                for reply in self._core.handle(message):  # type: ignore[arg-type]
                    self.its.send(reply)
        for growth in self._core.step():
            self.its.send(growth)


class Hostile:
    """Drafter that sends generated messages, a few a step, and reconnects from a new address when disconnected."""

    def __init__(self, engine: Engine, speeches: list[Speech], shares: bool) -> None:
        self._engine = engine
        self._speeches = speeches
        self._shares = shares
        self._comings = 0
        self._its: MemoryChannel | None = None
        self._heard = Heard()

    def speak(self, things: int) -> None:
        if self._its is None or self._its.closed:
            mine, self._its = memory_pair(capacity=100_000)
            self._engine.drafters.admit(mine, f"10.0.0.{self._comings}", remote=True)
            self._comings += 1
            self._its.send_raw((sharing if self._shares else joining)(self._heard))
        for message in self._its.receive():
            self._heard.hear(message)
        for _ in range(min(things, len(self._speeches))):
            self._its.send_raw(self._speeches.pop()(self._heard))


def held(engine: Engine) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for request in engine._active.values():  # pyright: ignore[reportPrivateUsage]
        if request.replica is not None:
            orphans = request.replica._orphans.values()  # pyright: ignore[reportPrivateUsage]
            found.append(
                (len(request.replica.tree), sum(each.expansion.size for some in orphans for each in some))
            )
    return found


@given(st.lists(speeches, max_size=24), st.integers(1, 6), st.booleans())
@settings(max_examples=examples(60))
@example([lambda _heard: b"\xff" * 64] * 8, 1, True)
def test_output_is_lossless_with_malformed_drafter_messages(
    said: list[Speech], things: int, shares: bool
) -> None:
    engine, _ = make_engine(CASE)
    honest, hostile = Honest(engine), Hostile(engine, list(said), shares)
    limit = CASE.growth.nodes

    def each(_step: int) -> None:
        hostile.speak(things)
        honest.work()
        assert all(tree <= limit and orphans <= limit for tree, orphans in held(engine))
        assert not honest.its.closed

    outputs = run(engine, mixed_requests(REQUESTS, TOKENS), each)
    texts = {number: (output.tokens, output.reason) for number, output in outputs.items()}
    assert texts == {number: (output.tokens, output.reason) for number, output in plain().items()}
    engine.drain()
    assert HELLO.name in engine.drafters.num_requests
    assert len(engine.drafters.channels) <= 3
