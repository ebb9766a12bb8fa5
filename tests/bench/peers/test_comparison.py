"""The comparison on engines whose truth is known: shapes are found, everybody is asked in turn, and a run
that was cut off goes on where it ended."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ssd_serve.bench.journal import Journal, TimeGiven
from ssd_serve.bench.peers.client import Ask, Sample
from ssd_serve.bench.peers.comparison import measure, told
from ssd_serve.bench.peers.duration import minutes
from ssd_serve.bench.peers.fleet import Fleet
from ssd_serve.bench.peers.report import markdown
from ssd_serve.bench.peers.result import Plan, Result, read
from ssd_serve.bench.peers.session import Session
from ssd_serve.bench.peers.ways import LLAMA, OUR_MODES, OURS, TRANSFORMERS, Peers
from ssd_serve.bench.prompts import Chosen, Prompt
from tests.bench.peers.fake_engines import Machine

PLAN = Plan(
    temperatures=[0.0, 0.6], prompts=24, tuning_prompts=8, tokens=48, launches=2, cores=2, dtypes=["bf16"]
)
PEERS = Peers(llama_server=Path("llama-server"), transformers_python=Path("python"))
PROMPTS = tuple(Prompt(f"file {number}", (number,), 2 * number) for number in range(32))
CHOSEN = Chosen(PROMPTS[8:], PROMPTS[:8], 0.1)
MACHINE = {"hardware": {"cpu": "A processor"}}


def run(
    folder: Path,
    machine: Machine,
    at_once: int = 12,
    after: float | None = None,
    plan: Plan = PLAN,
    free_memory: Callable[[], int] = lambda: 64 << 30,
    chosen: Chosen = CHOSEN,
) -> tuple[Result, Session]:
    warm_ups = {when: Ask((99,), 48, when, 1) for when in plan.temperatures}
    journal = Journal(folder / "answers.jsonl", "code", Sample)
    session = Session(
        Fleet(machine.launch, at_once, free_memory),
        journal,
        lambda text: [*text.encode()],
        warm_ups,
        lambda _: None,
        TimeGiven(after),
    )
    found = measure(session, plan, PEERS, dict.fromkeys(plan.temperatures, chosen))
    assert not machine.running
    return read({**told(session, plan, PEERS, found), **MACHINE}), session


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Machine]:
    machine = Machine()
    return run(tmp_path_factory.mktemp("work"), machine)[0], machine


def test_the_best_shape_of_each_mode_is_found_within_what_was_tried(whole: tuple[Result, Machine]) -> None:
    drafts = [one for one in whole[0].tuning if one.name == f"{LLAMA} draft"]
    assert len(drafts) == 2
    for one in drafts:
        length, threshold, threads = one.best.split(", ")
        assert 4 <= int(length) <= 6
        assert 0.5 <= float(threshold.removeprefix("p >= ")) <= 0.7
        assert threads.startswith("threads 2+")
    assert all(one.best.endswith("threads 2") for one in whole[0].tuning if "plain" in one.name)


def test_everybody_answers_every_prompt_in_every_launch(whole: tuple[Result, Machine]) -> None:
    result, _ = whole
    assert result.missing == 0
    assert result.failures == []
    assert {row.answers for row in result.results} == {48}
    assert {len(row.launches) for row in result.results} == {2}
    assert len(result.results) == 2 * (len(OUR_MODES) + 6)


def test_prompts_are_asked_of_all_before_the_next_and_none_is_tuned_with(
    whole: tuple[Result, Machine],
) -> None:
    asked = [(way, ask) for way, ask in whole[1].asked if ask.prompt[0] in range(8, 32)]
    ways = len(OUR_MODES) + 6
    for start in range(0, len(asked), ways):
        assert len({ask.prompt for _, ask in asked[start : start + ways]}) == 1
        assert len({way for way, _ in asked[start : start + ways]}) == ways
    tuned = {ask.prompt[0] for way, ask in whole[1].asked if way.engine == OURS}
    assert not tuned & set(range(8)), "ours is not tuned"


def test_each_launch_starts_everybody_anew(whole: tuple[Result, Machine]) -> None:
    started = Counter(way.label for way in whole[1].started)
    assert started[f"{OURS} auto"] == PLAN.launches
    assert started[f"{TRANSFORMERS} plain"] > PLAN.launches, "for tuning too"
    assert whole[1].most <= 12


def test_the_truth_is_told(whole: tuple[Result, Machine]) -> None:
    judged = {(one.ours, one.temperature): one for one in whole[0].ratios if "plain" not in one.theirs}
    for temperature in PLAN.temperatures:
        auto = judged[f"{OURS} auto", temperature]
        assert auto.whole is not None
        assert auto.decoding is not None
        assert auto.first_token is not None
        # The same first token, 47 tokens at 5 ms against 8 ms.
        assert auto.whole.mean == pytest.approx((0.1 + 47 * 0.008) / (0.1 + 47 * 0.005), rel=0.05)
        assert auto.decoding.low < 1.6 < auto.decoding.high * 1.03
        assert auto.first_token.low < 1.02
        assert auto.reached
        plain = judged[f"{OURS} ar", temperature]
        assert plain.whole is not None
        assert str(plain.whole.verdict) == "worse"


def test_a_run_that_is_cut_off_goes_on_and_asks_nobody_twice(
    tmp_path: Path, whole: tuple[Result, Machine]
) -> None:
    first, again = Machine(), Machine()
    result, session = run(tmp_path, first, after=-1.0)
    assert (result.results, session.asked) == ([], 0), "no time at all"
    plan = msgspec.structs.replace(PLAN, temperatures=[0.0])
    run(tmp_path, first, plan=plan)
    result, session = run(tmp_path, again)
    assert result.missing == 0
    cold = {ask.temperature for _, ask in again.asked}
    assert cold == {0.6}, "what was known is not asked"
    _, session = run(tmp_path, Machine(absent=""))
    assert session.asked == 0


def test_the_result_of_an_unfinished_run_says_so(tmp_path: Path) -> None:
    result, _ = run(tmp_path, Machine(), after=-1.0)
    assert result.missing == PLAN.launches * 24 * 2 * 10
    assert "- not complete: 960 answers are missing" in markdown(msgspec.to_builtins(result))


def test_an_engine_that_breaks_is_named_and_ends_nothing_else(tmp_path: Path) -> None:
    result, _ = run(tmp_path, Machine(broken=f"{OURS} ssd"))
    assert {one.way for one in result.failures} == {f"{OURS} ssd"}
    assert len(result.failures) == 2 * PLAN.launches, "nobody is asked for ever"
    assert result.missing == 48 * 2
    assert {row.name for row in result.results if row.engine == OURS} == {
        f"{OURS} {m}" for m in OUR_MODES
    } - {f"{OURS} ssd"}


def test_a_peer_that_does_not_start_is_left_out(tmp_path: Path) -> None:
    result, _ = run(tmp_path, Machine(absent=LLAMA))
    assert {row.engine for row in result.results} == {OURS, TRANSFORMERS}
    assert all("no such program" in one.reason for one in result.failures)
    assert {one.theirs.split()[0] for one in result.ratios} == {TRANSFORMERS}


def test_a_text_that_loops_is_sampled_anew_and_a_greedy_one_is_an_error(tmp_path: Path) -> None:
    machine = Machine(looping=f"{OURS} sd")
    result, _ = run(tmp_path, machine)
    loops = [one for one in result.failures if "loop" in one.reason]
    assert {one.way for one in loops} == {f"{OURS} sd"}
    assert len(loops) == 24 * PLAN.launches, "all greedy ones, and no other"
    (row,) = [row for row in result.results if row.mode == "sd"]
    assert (row.temperature, row.answers) == (0.6, 48)


def test_a_greedy_text_that_loops_does_not_keep_a_peer_from_being_tuned(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(PLAN, temperatures=[0.0], launches=1)
    others = [replace(prompt, seed=prompt.seed + 1) for prompt in PROMPTS[1:]]
    chosen = Chosen(tuple(others[7:]), (PROMPTS[0], *others[:7]), 0.1)
    result, _ = run(tmp_path, Machine(looping=LLAMA), plan=plan, chosen=chosen)
    (draft,) = [one for one in result.tuning if one.name == f"{LLAMA} draft"]
    assert all(speed > 0 for speed in draft.tried.values())
    assert 4 <= int(draft.best.split(", ")[0]) <= 6
    assert {row.mode for row in result.results if row.engine == LLAMA} == {"plain", "draft", "n-gram"}


def test_no_more_engines_run_at_once_than_are_needed(tmp_path: Path) -> None:
    machine = Machine()
    run(tmp_path, machine, at_once=1)
    assert machine.most == len(OUR_MODES) + 4, "one of transformers answers in three ways"


def test_idle_engines_end_where_memory_has_no_room_for_one_more(tmp_path: Path) -> None:
    machine = Machine()
    result, _ = run(tmp_path, machine, free_memory=lambda: (24 - 3 * len(machine.running)) << 29)
    assert not result.failures
    assert machine.most <= len(OUR_MODES) + 4, "12 were allowed"


def test_an_engine_for_which_there_is_no_memory_is_a_failure_that_says_so(tmp_path: Path) -> None:
    machine = Machine()
    result, _ = run(tmp_path, machine, free_memory=lambda: (15 - 2 * len(machine.running)) << 29)
    assert any("memory" in one.reason and one.when == "launch 1" for one in result.failures)
    assert machine.most == 7


def test_it_tells_how_long_it_takes() -> None:
    more = msgspec.structs.replace(PLAN, launches=6)
    assert 1 < minutes(PLAN, Peers()) < minutes(PLAN, PEERS) < minutes(more, PEERS)
