"""Following docs/adding.md gives a request option that reaches the scheduler, in at most three files."""

import pytest

from tests.adding_clone import Clone

pytestmark = pytest.mark.slow

REACHES = """
import asyncio
from ssd_serve.base.messages import RequestOptions
from tests.server.fakes import say
from tests.server.running_server import post, running_server

BODIES = {
    "/v1/completions": {"prompt": "a", "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
}

async def main():
    async with running_server(lambda _: say("xy")) as server:
        for path, body in BODIES.items():
            await post(server, path, **body, deadline_ms=70)
        await post(server, "/v1/completions", prompt="a")
        answer = await server.http.post("/v1/completions", json={"prompt": "a", "deadline_ms": -1})
        assert answer.status_code == 400
        options = [each.options for each in server.engine.submits()]
    assert options == [RequestOptions(deadline_ms=70)] * 5 + [RequestOptions()], options

asyncio.run(main())
print("reaches")
"""
SCHEDULED = """
from ssd_serve.base.messages import RequestOptions
from tests.verifier.scheduler_factory import make_request, make_scheduler

scheduler = make_scheduler(max_waiting=9)
for number, deadline_ms in ((1, 90), (2, 10), (3, 50)):
    request = make_request(number, [1, 2], 4)
    request.options = RequestOptions(deadline_ms=deadline_ms)
    scheduler.submit(request)
print(*(each.number for each in scheduler.admit()))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone("A request option", tmp_path_factory.mktemp("clone"))


def test_request_option_reaches_the_engine_through_every_api_in_three_files(clone: Clone) -> None:
    assert len(clone.changed) == 3
    assert clone.run("-c", REACHES) == "reaches\n"


def test_request_option_is_read_by_the_scheduler(clone: Clone) -> None:
    assert clone.run("-c", SCHEDULED) == "2 3 1\n"
