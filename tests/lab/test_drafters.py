"""More drafters in virtual time: the same texts, more growth, and a table that says whether it is enough."""

from lab.drafters.crowd import CrowdPlan
from lab.drafters.experiment import run_drafters
from lab.drafters.report import drafters_table
from lab.virtual.rig import DRAFT_SLOTS
from ssd_serve.draft_messages import Close
from ssd_serve.plan.virtual_time import MESSAGE_S, Clock, await_first
from tests.fakes import FakeModel
from tests.lab.virtual_fakes import fake_pair, fake_prompts
from tests.test_virtual_time import drafter

ROW = {
    "candidates_per_s": 10.0,
    "expansions_per_s": 1.0,
    "tokens_per_s": 5.0,
    "tokens_per_round": 2.0,
    "hit_rate": 0.5,
    "rows_per_round": 9.0,
    "moves": 0,
    "host_us_per_round": 400.0,
    "drafters_host_us_per_round": 100.0,
}


def test_more_drafters_bring_more_and_change_nothing() -> None:
    plan = CrowdPlan(drafters=(1, 2), requests=4, prompt=3, tokens=40, width=2, candidates=3, depth=6)
    result = run_drafters(
        fake_pair(), lambda: FakeModel(DRAFT_SLOTS, 0.5), fake_prompts(4), plan, "fake", lambda text: None
    )
    rows = result["rows"]
    assert isinstance(rows, list)
    one, two = rows
    assert one["scaling"] == 1.0
    assert two["scaling"] > 1.3
    assert two["moves"] == 0
    assert 0 < two["drafters_host_us_per_round"] < two["host_us_per_round"]
    assert two["tokens_per_round"] > 1.0
    assert "| 2 |" in drafters_table(result)


def test_the_table_says_what_is_missed() -> None:
    rows = [
        {"drafters": count, "scaling": scaling, **ROW} for count, scaling in ((1, 1.0), (2, 1.9), (4, 2.5))
    ]
    table = drafters_table({"rows": rows})
    assert "2 drafters: 1.90x, wanted 1.8x: reached." in table
    assert "4 drafters: 2.50x, wanted 3x: missed." in table
    real = {key: ROW[key] for key in ("expansions_per_s", "tokens_per_s", "host_us_per_round")}
    real_rows = [{"drafters": count, "overrun_share": 0.25, **real} for count in (1, 2)]
    table = drafters_table({"rows": rows, "real": real_rows, "real_table": "slow"})
    assert "stretched to `slow`" in table
    assert "| 2 | 1 | 1.00 | 5 | 400 | 0.25 |" in table


def test_waiting_for_several_ends_with_the_first_and_none_works_ahead_of_it() -> None:
    clock = Clock()
    busy_core, busy = drafter(clock, left=100)
    idle_core, idle = drafter(clock, left=0)
    assert await_first(clock, [busy, idle], 0.1)
    assert clock.now == 0.002 + MESSAGE_S
    assert busy_core.left == 99
    idle.send(Close(1, 1))
    busy.receive()
    assert await_first(clock, [busy, idle], 0.1)
    assert idle_core.heard == [Close(1, 1)]
    assert clock.now < 0.005
