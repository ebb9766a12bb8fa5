"""What is sent to whom, and when: a session over servers that are not there."""

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.emulated import emulating
from ssd_serve.bench.journal import OutOfTimeError, TimeGiven
from ssd_serve.bench.load.client import Endpoint, LoadClient, LoadRequest
from ssd_serve.bench.load.kept import ChosenSets, KeptLoad
from ssd_serve.bench.load.plan import Findings, LoadPlan
from ssd_serve.bench.load.requests import Mix, RequestMaker
from ssd_serve.bench.load.run import run_load
from ssd_serve.bench.load.servers import Server
from ssd_serve.bench.load.session import LoadSession
from ssd_serve.bench.load.sets import Sets, candidate_sets
from ssd_serve.bench.load.statistics import GoodLimits
from ssd_serve.bench.load.trace import Arrival
from ssd_serve.bench.load.traffic import OpenLoop
from ssd_serve.bench.prompts import Prompt
from tests.bench.load.fakes import FakeApi

PLAN = LoadPlan(
    modes=("ar", "ssd", "auto"),
    concurrencies=(1, 3),
    pairs=5,
    launches=2,
    learning=0,
    fresh=False,
    busy_core=None,
    waves=2,
    mix=Mix(10, 10, 6),
    open_loop=OpenLoop(),
    temperature=1.0,
    limits=GoodLimits(1000.0, 1000.0),
    ballast=False,
    devices="same",
    resume=False,
    trace=None,
    time_scale=0.01,
    length_scale=1.0,
    trace_seconds=60.0,
)
EMULATED = emulating("mi300x-70b-1b")
POOL = [Prompt(f"file {index}", tuple(range(40 * index, 40 * index + 30)), index) for index in range(50)]
RESOLVED = {"ar": "ar", "ssd": "ssd", "auto": "ssd"}


def kept_in(folder: Path, given: TimeGiven | None = None) -> KeptLoad:
    return KeptLoad(folder, "code", given or TimeGiven(None))


class Measured:
    """A session, the fake API of each server, and what was found; `kept` in a folder of its own unless one is
    given."""

    def __init__(
        self,
        plan: LoadPlan = PLAN,
        arrivals: Sequence[Arrival] = (),
        kept: KeptLoad | None = None,
    ) -> None:
        self._own = tempfile.TemporaryDirectory()
        kept = kept or kept_in(Path(self._own.name))
        self.apis = {name: FakeApi() for name in plan.modes}
        self.found = Findings()
        self._servers = {name: Server(name, name, RESOLVED[name], 100, ()) for name in plan.modes}
        maker = RequestMaker(POOL)
        candidates = candidate_sets(plan, maker, arrivals, 100)
        sets = {name: [each(0) for each in some] for name, some in candidates.items()}
        self._session = LoadSession(
            plan, maker, sets, None, self._connect, kept, self.found, lambda _text: None, rest_s=0.0
        )

    def _connect(self, server: Server) -> LoadClient:
        return LoadClient(Endpoint("http://load", PLAN.temperature), self.apis[server.name].transport)

    def run(self, *launches: int) -> "Measured":
        for launch in launches:
            asyncio.run(self._session.run(launch, self._servers))
        return self


def test_launches_share_the_pairs_out_and_every_mode_gets_the_same_requests() -> None:
    measured = Measured().run(0, 1)
    bursts = measured.found.bursts
    assert [(each.launch, each.pair) for each in bursts if (each.mode, each.concurrency) == ("ar", 3)] == [
        (0, 0),
        (0, 2),
        (0, 4),
        (1, 1),
        (1, 3),
    ]
    bodies = [measured.apis[name].bodies for name in PLAN.modes]
    assert bodies[0] == bodies[1] == bodies[2]
    assert len({body["seed"] for body in bodies[0]}) == len(bodies[0])
    assert {len(body["prompt"]) for body in bodies[0]} == {PLAN.mix.longest}


def test_a_burst_has_two_waves_but_never_only_a_few_requests() -> None:
    bursts = Measured().run(0).found.bursts
    assert {(each.concurrency, len(each.answers)) for each in bursts} == {(1, 4), (3, 6)}
    assert not any(answer.error for each in bursts for answer in each.answers)


def test_warm_ups_are_sent_but_not_counted() -> None:
    measured = Measured().run(0)
    counted = sum(len(each.answers) for each in measured.found.bursts if each.mode == "ar")
    assert len(measured.apis["ar"].bodies) == counted + 1 + 3


def test_what_learns_is_warmed_up_longer_but_measured_alike() -> None:
    learning, plain = Measured(replace(PLAN, learning=2)).run(0), Measured().run(0)
    sent = {name: len(api.bodies) - len(plain.apis[name].bodies) for name, api in learning.apis.items()}
    assert sent == {"ar": 0, "ssd": 0, "auto": 2 * 4 + 2 * 6}
    assert len(learning.found.bursts) == len(plain.found.bursts)


def test_no_mode_always_comes_first_or_after_the_same_other() -> None:
    orders: dict[int, list[str]] = {}
    for each in sorted(Measured().run(0, 1).found.bursts, key=lambda each: each.order):
        if each.concurrency == 3:
            orders.setdefault(each.pair, []).append(each.mode)
    assert {order[0] for order in orders.values()} == set(PLAN.modes)
    before_auto = {order[order.index("auto") - 1] for order in orders.values() if order[0] != "auto"}
    assert before_auto == {"ar", "ssd"}


def test_resumption_is_checked_where_drafts_can_be_made() -> None:
    found = Measured(replace(PLAN, resume=True)).run(0, 1).found
    assert [(each["mode"], each["launch"]) for each in found.resumes] == [
        ("auto", 0),
        ("ssd", 0),
        ("auto", 1),
        ("ssd", 1),
    ]
    assert {each["concurrency"] for each in found.resumes} == {3}


def test_the_trace_is_replayed_once_to_every_server() -> None:
    measured = Measured(replace(PLAN, concurrencies=()), [Arrival(0.0, 20, 4), Arrival(0.01, 96, 4)]).run(
        0, 1
    )
    assert [each["mode"] for each in measured.found.replays] == ["ar", "auto", "ssd"]
    assert {each["requests"] for each in measured.found.replays} == {2}
    assert measured.found.bursts == []
    lengths = [(len(body["prompt"]), body["max_tokens"]) for body in measured.apis["ssd"].bodies]
    assert lengths == [(20, 4), (96, 4)]


def test_open_loops_offer_shares_of_what_the_best_server_can_do() -> None:
    plan = replace(PLAN, concurrencies=(), open_loop=OpenLoop((0.5, 1.0), requests=8, runs=3))
    measured = Measured(plan)
    for api in measured.apis.values():
        api.pause_s = 0.005
    found = measured.run(0, 1).found
    assert set(found.capacities) == set(PLAN.modes)
    assert [(one.offered, one.launch, one.pair) for one in found.bursts if one.mode == "ar"] == [
        (0.5, 0, 0),
        (0.5, 0, 2),
        (1.0, 0, 0),
        (1.0, 0, 2),
        (0.5, 1, 1),
        (1.0, 1, 1),
    ]
    capacity = max(found.capacities.values())
    for burst in found.bursts:
        last = max(answer.due_s for answer in burst.answers) - min(answer.due_s for answer in burst.answers)
        assert last <= len(burst.answers) / (burst.offered * capacity)
        assert len(burst.answers) == 8
    bodies = [[body["seed"] for body in measured.apis[name].bodies] for name in PLAN.modes]
    assert sorted(bodies[0]) == sorted(bodies[1]) == sorted(bodies[2])


def test_a_server_that_fails_everything_ends_the_benchmark() -> None:
    measured = Measured()
    measured.apis["ssd"].status = 500
    with pytest.raises(SsdError, match="the server 'ssd' failed every request: status 500"):
        measured.run(0)


def test_a_text_that_loops_ends_the_benchmark_and_its_prompt_is_named() -> None:
    looping = Measured(replace(PLAN, mix=Mix(10, 10, 20)))
    with pytest.raises(SsdError, match=r"(ar|auto|ssd): the text after file \d+ is a loop"):
        looping.run(0)


@pytest.mark.parametrize("settings", [Settings(target="elsewhere"), Settings(model_wrapper=EMULATED)])
def test_ballast_is_for_the_embedded_pair(settings: Settings) -> None:
    with pytest.raises(UserError, match="leave out --target"):
        run_load(settings, replace(PLAN, ballast=True), lambda _text: None)


def test_a_trace_is_read_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the trace"):
        run_load(Settings(), replace(PLAN, trace=tmp_path / "none.csv"), lambda _text: None)


def test_a_fresh_launch_has_no_warm_up() -> None:
    warm, fresh = Measured(), Measured(replace(PLAN, fresh=True))
    for measured in (warm, fresh):
        measured.run(0)
    asked = {measured: sum(len(api.bodies) for api in measured.apis.values()) for measured in (warm, fresh)}
    warm_ups = sum(PLAN.concurrencies) * len(PLAN.modes)
    assert asked[warm] - asked[fresh] == warm_ups


WHOLE = replace(PLAN, resume=True, open_loop=OpenLoop((0.5,), requests=8, runs=2))
ARRIVALS = [Arrival(0.0, 20, 4), Arrival(0.01, 96, 4)]


class Ending(TimeGiven):
    """Time for so many measurements."""

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self._left = count

    def require(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise OutOfTimeError


@pytest.mark.parametrize("count", [0, 1, 4, 8, 10, 12, 13, 15])
def test_a_sitting_that_ends_is_gone_on_with_by_the_next(tmp_path: Path, count: int) -> None:
    with pytest.raises(OutOfTimeError):
        Measured(WHOLE, ARRIVALS, kept_in(tmp_path, Ending(count))).run(0, 1)
    found = Measured(WHOLE, ARRIVALS, kept_in(tmp_path)).run(0, 1).found
    whole = Measured(WHOLE, ARRIVALS).run(0, 1).found
    assert [(each.mode, each.load, each.launch, each.pair) for each in found.bursts] == [
        (each.mode, each.load, each.launch, each.pair) for each in whole.bursts
    ]
    assert [each["mode"] for each in found.resumes] == [each["mode"] for each in whole.resumes]
    assert [each["mode"] for each in found.replays] == [each["mode"] for each in whole.replays]


def test_what_is_known_is_neither_measured_again_nor_warmed_up_for(tmp_path: Path) -> None:
    first = Measured(WHOLE, ARRIVALS, kept_in(tmp_path)).run(0, 1)
    again = Measured(WHOLE, ARRIVALS, kept_in(tmp_path, Ending(0))).run(0, 1)
    assert not any(api.bodies for api in again.apis.values())
    assert again.found.bursts == first.found.bursts
    assert again.found.capacities == first.found.capacities


def test_servers_that_only_open_loops_are_left_for_are_warmed_up_before(tmp_path: Path) -> None:
    plan = replace(PLAN, launches=1, open_loop=OpenLoop((0.5,), requests=8, runs=2))
    with pytest.raises(OutOfTimeError):
        Measured(plan, (), kept_in(tmp_path, Ending(2 * plan.pairs + 1))).run(0)
    measured = Measured(plan, (), kept_in(tmp_path)).run(0)
    assert len(measured.apis["ar"].bodies) == 3 + 2 * 8


def test_the_requests_are_those_of_the_first_sitting(tmp_path: Path) -> None:
    chosen = ChosenSets(Sets({"1:0": [LoadRequest((1, 2), 6, 7)]}, 0.25), {"arrivals": 3})
    assert kept_in(tmp_path).sets(lambda: chosen) == chosen
    assert kept_in(tmp_path).sets(lambda: pytest.fail("chosen again")) == chosen
    with pytest.raises(UserError, match="give another --work"):
        KeptLoad(tmp_path, "other code", TimeGiven(None))


def test_sittings_that_measured_something_are_counted(tmp_path: Path) -> None:
    counts: list[int] = []
    for given in (Ending(0), Ending(1), Ending(7), TimeGiven(None), TimeGiven(None)):
        kept = kept_in(tmp_path, given)
        with contextlib.suppress(OutOfTimeError):
            Measured(WHOLE, ARRIVALS, kept=kept).run(0, 1)
        counts.append(kept.sittings)
    assert counts == [0, 1, 2, 3, 3]
