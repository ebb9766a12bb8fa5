"""Which requests are measured: none whose text nearly loops, and as long ones in their place."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.bench.completions import Speculation
from ssd_serve.bench.load.client import Answer, Endpoint, LoadClient, LoadRequest
from ssd_serve.bench.load.requests import Mix, RequestMaker
from ssd_serve.bench.load.sets import Sets, candidate_sets, choose
from ssd_serve.bench.load.trace import Arrival
from ssd_serve.bench.load.traffic import OpenLoop
from tests.bench.load.test_session import PLAN, POOL

FINE, LOOP = tuple(range(48)), (1, 2, 3) * 16
MAKER = RequestMaker(POOL)


class Continuing(LoadClient):
    """Answers in no time; texts of odd seeds loop."""

    def __init__(self, error: str = "", loops: bool = False) -> None:
        super().__init__(Endpoint("http://nowhere"))
        self._error, self._loops = error, loops
        self.asked = 0

    async def closed_loop(self, wanted: Sequence[LoadRequest], concurrency: int) -> list[Answer]:
        assert concurrency == 8
        self.asked += len(wanted)
        texts = (LOOP if self._loops or each.seed % 2 else FINE for each in wanted)
        return [Answer(0.0, 0.0, 1.0, (), Speculation(), self._error, text) for text in texts]


def chosen(client: Continuing, count: int) -> Sets:
    return asyncio.run(choose(client, {"a": MAKER.candidates("a", count, Mix(10, 40, 48))}, 8))


def test_what_loops_is_replaced_by_another_request_of_its_length() -> None:
    client, first = Continuing(), MAKER.burst("a", 40, Mix(10, 40, 48))
    found = chosen(client, 40)
    assert all(each.seed % 2 == 0 for each in found.requests["a"])
    assert [len(each.prompt) for each in found.requests["a"]] == [len(each.prompt) for each in first]
    kept = [each for each in found.requests["a"] if each in first]
    assert kept == [each for each in first if each.seed % 2 == 0]
    assert found.left_out == pytest.approx(1 - 40 / client.asked)


def test_where_everything_loops_it_is_said() -> None:
    with pytest.raises(UserError, match=r"3 of 3 requests have no prompt among 64 .* with 48 new tokens"):
        chosen(Continuing(loops=True), 3)


def test_a_server_that_fails_chooses_nothing() -> None:
    with pytest.raises(SsdError, match="continues all prompts failed: status 500"):
        chosen(Continuing("status 500"), 3)


def test_all_that_counts_is_chosen() -> None:
    plan = replace(PLAN, open_loop=OpenLoop((0.5,), requests=7, runs=2), resume=True, waves=2)
    found = candidate_sets(plan, MAKER, [Arrival(0.0, 20, 4)], 100)
    closed = {f"{crowd}:{pair}": max(4, 2 * crowd) for crowd in (1, 3) for pair in range(5)}
    others = {"capacity": 6, "open:0.5:0": 7, "open:0.5:1": 7, "resume:0": 1, "resume:1": 1, "trace": 1}
    assert {name: len(some) for name, some in found.items()} == closed | others


def test_requests_that_do_not_fit_the_context_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(UserError, match="must not exceed the context of 15"):
        candidate_sets(PLAN, MAKER, (), 15)
