"""`python -m lab.explain`: what synthetic cost tables make the engine decide, and what the page says."""

import json
from dataclasses import replace

import pytest

from lab.explain.__main__ import main
from lab.explain.experiment import LayoutChoice, Situation, explain, govern
from lab.explain.measurement import MeasuredPair, measure_pair
from lab.explain.page import as_json, page
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.engine_settings import Mode
from ssd_serve.errors import SettingsError
from ssd_serve.settings import Settings
from ssd_serve.verifier.planning.cost import CostTable, HostCost, Timing
from ssd_serve.verifier.planning.layout import Layout

pytestmark = pytest.mark.slow

LAYOUTS = (Layout.ASYNC, Layout.SYNC, Layout.OFF)
NAMES = {Layout.ASYNC: "beside", Layout.SYNC: "inline", Layout.OFF: "plain"}
ROWS = (1, 2, 4, 8, 16, 32, 64)


def table(first_s: float, row_s: float) -> CostTable:
    return CostTable([Timing(rows, 128, first_s + row_s * (rows - 1)) for rows in ROWS])


def pair(row_s: float, draft_s: float = 2e-3) -> MeasuredPair:
    """A target of 20 ms; beside a drafter it has fewer cores and takes 25 ms."""
    alone, beside = table(20e-3, row_s), table(25e-3, row_s)
    forwards = {Layout.SYNC: {4: draft_s, 16: draft_s}, Layout.ASYNC: {4: draft_s, 16: draft_s}}
    return MeasuredPair(
        target="large",
        draft="small",
        cores={Layout.OFF: "cpu:0-1", Layout.SYNC: "cpu:0-1", Layout.ASYNC: "cpu:0 and cpu:1"},
        costs={Layout.OFF: alone, Layout.SYNC: alone, Layout.ASYNC: beside},
        draft_forwards_s=forwards,
        draft_host_s=0.5e-3,
        host=HostCost(),
        limits=GrowthLimits(16, 8, 16, 4096),
    )


CHEAP = pair(row_s=0.1e-3)


def decide(measured: MeasuredPair, acceptance: float, requests: int = 1) -> LayoutChoice:
    (found,) = explain(measured, Situation((acceptance,), (requests,), 128))
    return found


def test_a_governor_keeps_the_layout_that_gives_most() -> None:
    """In 10 ms, plain rounds give one token, inline ones two, those beside three and a half."""
    rounds = {layout: [(tokens, 0.010)] for layout, tokens in zip(LAYOUTS, (3, 2, 1), strict=True)}
    assert govern(LAYOUTS, rounds, 1, plain_s=0.010)[0] is Layout.ASYNC
    rounds[Layout.ASYNC] = [(1, 0.020)]
    taken, share = govern(LAYOUTS, rounds, 1, plain_s=0.010)
    assert taken is Layout.SYNC
    assert share > 0.8


def test_good_and_quick_drafts_are_drafted_and_useless_ones_are_not() -> None:
    good = decide(CHEAP, 0.9)
    assert good.taken is not Layout.OFF
    assert good.gains[good.taken] > 3
    assert good.gains[Layout.OFF] == pytest.approx(1.0, abs=0.05)
    slow = decide(pair(row_s=20e-3, draft_s=15e-3), 0.3)
    assert slow.taken is not Layout.ASYNC
    assert slow.expected[slow.taken].nodes_per_round < 0.1  # inline without drafts is plain decoding


def test_dearer_rows_raise_the_price_of_a_node_and_fewer_are_verified() -> None:
    cheap, dear = (decide(each, 0.76).expected[Layout.ASYNC] for each in (CHEAP, pair(row_s=3e-3)))
    assert dear.node_price > 3 * cheap.node_price
    assert dear.nodes_per_round < cheap.nodes_per_round / 2


def test_under_load_each_request_gets_fewer_nodes() -> None:
    measured = pair(row_s=1e-3)
    one, sixteen = (decide(measured, 0.76, requests).expected[Layout.ASYNC] for requests in (1, 16))
    assert sixteen.nodes_per_round / 16 < one.nodes_per_round / 2
    assert sixteen.tokens_per_s > one.tokens_per_s


def test_growth_is_not_awaited_where_a_step_is_dear() -> None:
    quick, slow = (decide(each, 0.76).expected[Layout.SYNC] for each in (CHEAP, pair(1e-4, draft_s=40e-3)))
    assert quick.waited_steps > 2
    assert slow.waited_steps < 0.2


def test_the_page_names_the_layout_that_is_taken_and_every_price() -> None:
    question = Situation((0.9,), (1, 4), 128)
    found = explain(CHEAP, question)
    text = page(CHEAP, question, found, {"hardware": {"cpu": "A processor", "cores": 2}})
    assert "Measured on A processor, 2 cores." in text
    assert "| beside | cpu:0 and cpu:1 | 128 | 25.00 |" in text
    assert "| inline, plain | cpu:0-1 | 128 | 20.00 |" in text
    for decision in found:
        taken, name = decision.expected[decision.taken], NAMES[decision.taken]
        assert f"| 0.9 | {decision.requests} | **{name}** | {taken.nodes_per_round:.1f}" in text
        assert f"{decision.requests} request(s): the governor takes {name}" in text


def test_the_json_holds_what_the_page_says() -> None:
    question = Situation((0.9,), (1,), 128)
    found = explain(CHEAP, question)
    read = json.loads(json.dumps(as_json(CHEAP, question, found)))
    assert read["target_s"]["async"]["1@128"] == pytest.approx(25e-3)
    assert read["decisions"][0]["takes"] == found[0].taken.value
    assert set(read["decisions"][0]["layouts"]) == {"async", "sync", "off"}


def test_an_inline_set_up_has_two_layouts() -> None:
    costs = {layout: CHEAP.costs[layout] for layout in (Layout.SYNC, Layout.OFF)}
    measured = replace(CHEAP, costs=costs)
    assert measured.layouts == (Layout.SYNC, Layout.OFF)
    assert set(decide(measured, 0.9).expected) == {Layout.SYNC, Layout.OFF}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--acceptance", "1.5"], "--acceptance must be"),
        (["--requests", "0"], "--requests must be"),
        (["--at-context", "0"], "--at-context must be"),
    ],
)
def test_mistakes(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (Settings(target="/somewhere"), "no draft model"),
        (Settings(mode=Mode.AR), "mode ar decides nothing"),
    ],
)
def test_set_ups_without_decisions_are_refused(settings: Settings, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        measure_pair(settings, lambda text: None)
