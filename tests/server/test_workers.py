"""Several processes answer HTTP: each gets what a server alone would get of the engine, and no more."""

import asyncio
import os
from pathlib import Path

import pytest

from ssd_serve.base.errors import EngineDeadError, SettingsError
from ssd_serve.base.messages import Abort, Finish, Refused
from ssd_serve.server.access.tenants import Tenants
from ssd_serve.server.workers.process import apply_for_work
from ssd_serve.base.settings import Settings
from tests.server.fakes import STATUS, Script, say
from tests.server.worker_crew import Crewed, open_crew, worker_ends

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
ASK: dict[str, object] = {"prompt": "a", "max_tokens": 64, "temperature": 0.0}


async def texts(crewed: Crewed, **body: object) -> list[str]:
    """The answer of the server process and of each worker."""
    houses = [crewed.http, *(hand.http for hand in crewed.hands)]
    answers = await asyncio.gather(*(http.post(COMPLETIONS, json={**ASK, **body}) for http in houses))
    assert [answer.status_code for answer in answers] == [200] * len(houses), [each.text for each in answers]
    return [answer.json()["choices"][0]["text"] for answer in answers]


async def until(condition: object) -> None:
    assert callable(condition)
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def test_every_process_gives_the_same_answers_under_numbers_of_its_own() -> None:
    async with open_crew(lambda _: say("as it is")) as crewed:
        assert await texts(crewed) == ["as it is"] * 3
        assert await texts(crewed, n=3) == ["as it is"] * 3
        numbers = [submit.request for submit in crewed.engine.submits()]
        assert len(set(numbers)) == 3 + 9


async def test_a_stop_string_ends_a_request_with_its_figures() -> None:
    async with open_crew(lambda _: say("as it is", hold_after=2)) as crewed:
        answer = await crewed.hands[0].http.post(COMPLETIONS, json={**ASK, "stop": "it"})
        assert answer.json()["choices"][0]["text"] == "as "
        assert answer.json()["usage"]["completion_tokens"] > 0
        assert len(crewed.engine.sent(Finish)) == 1
        assert crewed.client.active == 0


async def test_what_the_engine_refuses_is_refused_by_the_worker() -> None:
    refused = Script((), refused=Refused(0, "the queue is full", retry_after_s=3.0))
    async with open_crew(lambda _: refused) as crewed:
        answer = await crewed.hands[1].http.post(COMPLETIONS, json=ASK)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert crewed.client.active == 0


async def test_the_end_of_a_worker_ends_its_requests_alone() -> None:
    async with open_crew(lambda _: say("as it is", hold_after=1)) as crewed:
        first, second = crewed.hands
        lost = asyncio.create_task(first.http.post(COMPLETIONS, json=ASK))
        kept = asyncio.create_task(second.http.post(COMPLETIONS, json=ASK))
        await until(lambda: len(crewed.engine.submits()) == 2)
        of_first = [each.request for each in crewed.engine.submits() if each.request < 2_000_000_000]
        first.channel.close()
        await until(lambda: crewed.engine.sent(Abort))
        assert [each.request for each in crewed.engine.sent(Abort) if isinstance(each, Abort)] == of_first
        crewed.engine.released.set()
        assert (await kept).json()["choices"][0]["text"] == "as it is"
        lost.cancel()


async def test_the_engines_death_is_told_to_the_clients_of_workers() -> None:
    async with open_crew(lambda _: say("as it is", hold_after=1)) as crewed:
        asked = asyncio.create_task(crewed.hands[0].http.post(COMPLETIONS, json=ASK))
        await until(lambda: crewed.client.active)
        crewed.engine.die()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        await until(lambda: crewed.hands[1].engine.dead)
        health = await crewed.hands[1].http.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")


async def test_one_page_has_the_figures_of_all_and_the_engines_once() -> None:
    async with open_crew(lambda _: say("as it is")) as crewed:
        await texts(crewed)
        await texts(crewed)
        crewed.engine.tell(STATUS)
        await until(lambda: crewed.client.status is not None)
        pages = [(await http.get("/metrics")).text for http in (crewed.http, crewed.hands[0].http)]
        for page in pages:
            ended = [line for line in page.splitlines() if line.startswith("ssd_request_success_total{")]
            assert sorted(line.split('api_worker="')[1].split('"')[0] for line in ended) == [
                "0",
                "api-1",
                "api-2",
            ]
            assert {line.split()[-1] for line in ended} == {"2.0"}
            assert page.count("ssd_generation_tokens_total{") == 1
        await until(lambda: not crewed.hands[1].engine.active)  # it is told of the others now and then
        assert (await crewed.hands[1].http.get("/load")).json()["server_load"] == 0


async def test_the_same_salt_names_the_same_part_of_the_cache_everywhere() -> None:
    async with open_crew(lambda _: say("as it is")) as crewed:
        await texts(crewed, cache_salt="mine")
        salts = {submit.salt for submit in crewed.engine.submits()}
        assert len(salts) == 1
        assert salts != {b""}


async def test_workers_take_no_more_requests_when_the_server_ends() -> None:
    async with open_crew(lambda _: say("as it is", hold_after=1)) as crewed:
        told: list[str] = []
        for hand in crewed.hands:
            hand.engine.on_closing = lambda: told.append("closing")
        running = asyncio.create_task(crewed.hands[0].http.post(COMPLETIONS, json=ASK))
        await until(lambda: crewed.client.active)
        crewed.hub.close()
        await until(lambda: len(told) == 2)
        crewed.engine.released.set()
        assert (await running).json()["choices"][0]["text"] == "as it is"
        await until(lambda: not crewed.client.active)


async def test_a_worker_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients get nothing either; everybody else goes on."""
    monkeypatch.setattr("ssd_serve.server.workers.hub.MAX_UNSENT", 5_000)
    async with open_crew(lambda submit: say("x" * (submit.parameters.max_tokens), group=1)) as crewed:
        stuck, other = crewed.hands
        loop = asyncio.get_running_loop()
        submit = {**ASK, "max_tokens": 400, "logprobs": 5, "n": 64}
        asked = asyncio.create_task(stuck.http.post(COMPLETIONS, json=submit))
        await until(lambda: crewed.client.active)
        loop.remove_reader(stuck.channel.fileno())
        await until(lambda: not crewed.client.active)
        await until(lambda: len(crewed.engine.sent(Abort)) == 64)
        assert crewed.killed == [os.getpid()]
        answer = await other.http.post(COMPLETIONS, json=ASK)
        assert answer.json()["choices"][0]["text"] == "x" * 64
        asked.cancel()


async def test_a_worker_that_was_let_go_ends() -> None:
    """Else it would go on to take connections, to say that the engine is dead."""
    async with open_crew(lambda _: say("as it is")) as crewed:
        hand = crewed.hands[0]
        ended = asyncio.Event()
        hand.engine.on_closing = ended.set
        crewed.hub._let_go(crewed.hub._seats[0])  # pyright: ignore[reportPrivateUsage]
        await asyncio.wait_for(ended.wait(), 10.0)
        assert (await hand.http.get("/metrics")).status_code == 200
        assert 'api_worker="api-1"' not in (await crewed.http.get("/metrics")).text


async def test_who_was_not_started_to_be_a_worker_is_told_nothing() -> None:
    """Such as a drafter that somebody has taken over."""
    async with open_crew(lambda _: say("as it is")) as crewed:
        for name in ("api-9", "drafter-0"):
            here, there = worker_ends()
            crewed.entrance.waiting.append(here)
            with pytest.raises(EngineDeadError, match="the server has no work for this process"):
                await asyncio.to_thread(apply_for_work, there, name)
            there.close()
        assert crewed.hub.workers == 2


@pytest.mark.parametrize(
    "settings",
    [Settings(api_workers=2, key_requests_per_minute=5), Settings(api_workers=2, key_tokens_per_minute=5)],
)
def test_limits_a_minute_are_counted_by_one_process(settings: Settings) -> None:
    with pytest.raises(
        SettingsError, match="are counted by one process: take them away, or set SSD_API_WORKERS=1"
    ):
        Tenants(settings)


def test_limits_of_the_file_are_counted_by_one_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start they are refused; later the keys of before stay in force."""
    file, now = tmp_path / "keys", [0.0]
    file.write_text("anna 0123456789abcdef requests_per_minute=5\n")
    settings = Settings(api_workers=2, api_keys_file=file)
    with pytest.raises(SettingsError, match="the limits of anna are counted by one process"):
        Tenants(settings)
    file.write_text("anna 0123456789abcdef\n")
    tenants = Tenants(settings, lambda: now[0])
    file.write_text("anna 0123456789abcdef requests_per_minute=5\nben fedcba9876543210\n")
    now[0] = 10.0
    assert [tenant.name for tenant in tenants.all()] == ["anna"]
    assert "the limits of anna are counted by one process" in caplog.text
