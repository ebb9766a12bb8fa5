"""The log line of a finished request."""

import asyncio
import io
import json
import logging
from collections.abc import Generator

import pytest

from ssd_serve.base.logs import Bridge, Logger
from ssd_serve.base.settings import Settings
from ssd_serve.server.http.middleware import request_log_fields
from tests.server.fakes import say
from tests.server.running_server import running_server
from tests.waiting import until

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"


@pytest.fixture
def written() -> Generator[io.StringIO, None, None]:
    """The server's log, as JSON."""
    stream, ours = io.StringIO(), logging.getLogger("ssd_serve")
    bridge = Bridge(Logger("server", "debug", "json", stream=stream), request_log_fields)
    level = ours.level
    ours.addHandler(bridge)
    ours.setLevel(logging.INFO)
    yield stream
    ours.removeHandler(bridge)
    ours.setLevel(level)


def finished(written: io.StringIO) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    return [line for line in lines if line["event"] == "request finished"]


@pytest.mark.parametrize("stream", [False, True])
async def test_finished_request_has_one_log_line(written: io.StringIO, stream: bool) -> None:
    async with running_server(lambda _: say("four")) as server:
        body = {"prompt": "ab", "stream": stream, "n": 2}
        await server.http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "mine"})
    (line,) = finished(written)
    told = {"request": "mine", "path": COMPLETIONS, "choices": 2, "prompt_tokens": 3, "output_tokens": 8}
    assert line.items() >= {**told, "reason": "length", "engine": "1+2"}.items()
    assert "key" not in line
    assert "trace" not in line


async def test_finished_request_log_has_no_texts(written: io.StringIO) -> None:
    async with running_server(lambda _: say("fig")) as server:
        await server.http.post(COMPLETIONS, json={"prompt": "apple", "user": "Eve"})
    assert len(finished(written)) == 1
    assert not any(word in written.getvalue() for word in ("apple", "fig", "Eve"))


async def test_finished_request_log_has_the_key_name(written: io.StringIO) -> None:
    async with running_server(lambda _: say("x"), Settings(api_key="sesame-sesame")) as server:
        headers = {"Authorization": "Bearer sesame-sesame"}
        await server.http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
    (line,) = finished(written)
    assert line["key"]
    assert "sesame" not in written.getvalue()


async def test_finished_request_log_after_disconnect(written: io.StringIO) -> None:
    async with running_server(lambda _: say("xy", hold_after=0)) as server:
        asking = server.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "gone"})
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asking, 0.2)
        until(lambda: len(finished(written)) == 1)
    (line,) = finished(written)
    assert line.items() >= {"request": "gone", "reason": "abort", "output_tokens": 0}.items()


async def test_request_id_of_the_body_is_in_log_lines(written: io.StringIO) -> None:
    async with running_server(lambda _: say("x")) as server:
        await server.http.post(COMPLETIONS, json={"prompt": "a", "request_id": "named-in-body"})
    assert [line["request"] for line in finished(written)] == ["named-in-body"]
