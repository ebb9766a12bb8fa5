"""The engine dies and another one comes: texts go on where they were, whenever it happens."""

import asyncio
import errno
import threading

import pytest

from ssd_serve.base.errors import EngineDeadError
from ssd_serve.base.messages import Finished, SamplingParameters
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.engine.inflight import Interrupted
from ssd_serve.transport.channel import Channel
from tests.server.crashing_engine import CrashingEngine, Engine, FakeLauncher, Heard, begun, some, token_at
from tests.server.fakes import READY, channel_pair, submit

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("seed", range(4))
async def test_no_token_is_lost_or_repeated_after_engine_crashes(crashing: CrashingEngine, seed: int) -> None:
    source, requests = crashing.source, list[tuple[int, int, int, Heard]]()
    source.seed(seed)
    await crashing.until(lambda: crashing.client.ready is not None)
    deaths = 0
    while len(requests) < 8 or not all(heard.ended for *_, heard in requests):
        if len(requests) < 8 and source.random() < 0.3:
            length, most, choices = source.randint(1, 8), source.randint(1, 25), source.randint(1, 3)
            parameters, prompt = SamplingParameters(max_tokens=most, prompt_logprobs=0), (7,) * length
            new = [(length, most, len(requests) + choice, Heard()) for choice in range(choices)]
            for *_, number, heard in new:
                submit(crashing.client, prompt, parameters, number, heard.reports.append)
            requests += new
        crashing.engine.step()
        # Two engines in a row may give somebody nothing, no third one: that would be given up.
        everybody = {
            number + 1 for *_, number, heard in requests if not heard.ended
        } <= crashing.engine.served
        likely = 0.15 if deaths >= 2 else 0.5  # a slow machine takes few turns
        if deaths < 20 and source.random() < likely and (everybody or deaths % 3 < 2):
            crashing.die()
            deaths += 1
            if source.random() < 0.5:
                await asyncio.sleep(0.005)  # it is noticed before the next one is there
            crashing.live()
        await asyncio.sleep(0.001 * source.randint(0, 1))
    for length, most, number, heard in requests:
        assert heard.tokens == [token_at(number, length + place) for place in range(most)]
        assert heard.scores == [-float(place) for place in range(length - 1)]
        assert isinstance(heard.reports[-1], Finished)
    assert deaths >= 2
    assert 0 < crashing.client.restarts <= deaths


async def test_requests_wait_for_reconnect_and_aborted_ones_are_dropped(crashing: CrashingEngine) -> None:
    request, _ = await begun(crashing)
    _, stays = await begun(crashing)
    crashing.die()
    await crashing.until(lambda: crashing.client.lost_s is not None)
    heard = Heard()
    submit(crashing.client, (3,), SamplingParameters(max_tokens=9), 8, heard.reports.append)
    crashing.client.abort(request)
    crashing.live()
    await crashing.until(lambda: crashing.client.lost_s is None)
    crashing.engine.take()
    assert sorted(crashing.engine.requests) == [2, 3]
    assert stays.reports[-1] == Interrupted()
    await some(crashing, heard)
    assert Interrupted() not in heard.reports
    assert (crashing.client.restarts, crashing.client.resumed) == (1, 1)


async def test_finished_request_does_not_wait_for_next_engine(crashing: CrashingEngine) -> None:
    before, first = await begun(crashing)
    during, second = await begun(crashing)
    crashing.client.finish(before)
    crashing.die()
    await crashing.until(lambda: crashing.client.lost_s is not None)
    crashing.client.finish(during)
    for heard in (first, second):
        assert isinstance(heard.reports[-1], EngineDeadError)
        assert "statistics" in str(heard.reports[-1])
    assert crashing.client.active == 0


async def test_large_requests_are_resubmitted_while_next_engine_loads(crashing: CrashingEngine) -> None:
    parameters = SamplingParameters(max_tokens=9)
    await crashing.until(lambda: crashing.client.ready is not None)
    crashing.die()
    await crashing.until(lambda: crashing.client.lost_s is not None)
    for seed in range(2):
        submit(crashing.client, (70_000,) * 600_000, parameters, seed, Heard().reports.append)
    crashing.live()
    await crashing.until(lambda: crashing.client.lost_s is None)

    def all_there() -> bool:
        crashing.engine.take()
        return sorted(crashing.engine.requests) == [1, 2]

    await crashing.until(all_there)


async def test_request_finished_during_reload_is_not_resumed(crashing: CrashingEngine) -> None:
    request, heard = await begun(crashing)
    crashing.die()
    await crashing.until(lambda: crashing.client.lost_s is not None)
    ours, theirs = channel_pair()
    crashing.engine = Engine(theirs, crashing.source)
    crashing.channels.put(ours)

    def submitted() -> bool:
        crashing.engine.take()
        return request in crashing.engine.requests

    await crashing.until(submitted)
    crashing.client.finish(request)
    assert isinstance(heard.reports[-1], EngineDeadError)
    await crashing.until(lambda: not submitted())


async def test_failed_reconnect_ends_all_requests() -> None:
    def connect(_timeout_s: float) -> Channel:
        raise RuntimeError("the launcher is broken")

    ours, theirs = channel_pair()
    theirs.send(READY)
    client, heard = EngineClient(ours, FakeLauncher(connect)), Heard()
    client.start()
    submit(client, (1,), SamplingParameters(), 1, heard.reports.append)
    theirs.close()
    for _ in range(400):
        await asyncio.sleep(0.005)
        if heard.ended:
            break
    assert "RuntimeError: the launcher is broken" in str(heard.reports[-1])


async def test_no_next_engine_ends_all_requests_with_reason(crashing: CrashingEngine) -> None:
    _, heard = await begun(crashing)
    crashing.die()
    crashing.channels.put(None)
    await crashing.until(lambda: heard.ended)
    assert str(heard.reports[-1]) == crashing.client.dead == "it died too often"
    with pytest.raises(EngineDeadError, match="too often"):
        submit(crashing.client, (1,), SamplingParameters(), 1, heard.reports.append)


async def test_crash_before_ready_is_final() -> None:
    ours, theirs = channel_pair()
    client = EngineClient(ours, FakeLauncher(lambda _: pytest.fail("there is no next engine")))
    client.start()
    theirs.close()
    for _ in range(200):
        await asyncio.sleep(0.005)
        if client.dead is not None:
            break
    assert client.dead == "the engine process ended"


async def test_shutdown_during_reconnect_ends_all_requests(crashing: CrashingEngine) -> None:
    _, heard = await begun(crashing)
    crashing.die()
    await crashing.until(lambda: crashing.client.lost_s is not None)
    crashing.client.stop()
    assert "shutting down" in str(heard.reports[-1])
    ours, theirs = channel_pair()
    crashing.channels.put(ours)
    await crashing.until(lambda: theirs.receive() == [] and theirs.closed)
    theirs.close()


async def test_silent_engine_is_reported_repeatedly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ssd_serve.server.engine.client._CHECK_INTERVAL_S", 0.05)
    ours, theirs = channel_pair()
    launcher = FakeLauncher(lambda _: pytest.fail("the engine lives"))
    silences = launcher.supervisor.silences
    client = EngineClient(ours, launcher, silence_limit_s=0.1)
    client.start()
    await asyncio.sleep(0.3)
    assert silences == [], "while it loads"
    theirs.send(READY)
    while len(silences) < 2:
        await asyncio.sleep(0.01)
    assert silences == sorted(silences)
    assert all(silent_s > 0.1 for silent_s in silences)
    client.stop()
    theirs.close()


async def test_reconnect_retries_when_no_thread_can_start(
    crashing: CrashingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, heard = await begun(crashing)
    monkeypatch.setattr("ssd_serve.server.engine.client._CHECK_INTERVAL_S", 0.01)
    refusals: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        refusals.append(thread.name)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        crashing.die()
        await crashing.until(lambda: refusals.count("reconnect") >= 3)
    crashing.live()
    await crashing.until(lambda: crashing.client.lost_s is None)
    await some(crashing, heard)
    assert crashing.client.dead is None


async def test_reconnect_retries_after_resource_shortage(
    crashing: CrashingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_serve.server.engine.client._CHECK_INTERVAL_S", 0.01)
    shortages: list[Exception] = [OSError(errno.EMFILE, "Too many open files"), MemoryError()]

    def connect(timeout_s: float) -> Channel:
        if shortages:
            raise shortages.pop()
        return crashing.connect(timeout_s)

    crashing.launcher.connecting = connect
    _, heard = await begun(crashing)
    crashing.die()
    crashing.live()
    await crashing.until(lambda: crashing.client.restarts == 1)
    await some(crashing, heard)
    assert not shortages
