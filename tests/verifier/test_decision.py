"""Tests of speculation decisions: a scenario for each reason, and decisions that equal the launched rounds."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ssd_serve.base.cost import CostTable, Reading, Timing
from ssd_serve.base.devices import Device
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.messages import (
    DecisionMessage,
    DecisionReason,
    FixedShape,
    RequestOptions,
    SamplingParameters,
    Submit,
)
from ssd_serve.bench.lossless.rig import FixedHost
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.verifier.assembly import EngineParts, build_engine
from ssd_serve.verifier.control.mode_controller import ModeController, RunningTexts
from ssd_serve.verifier.control.planner import Cores, ModeConfig, Round
from ssd_serve.verifier.control.wait import FixedSteps, WaitPolicy
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.engine import Engine
from tests.examples import examples
from tests.fakes import HELLO, Case, FakeModel, make_engine, mixed_requests, plan_by
from tests.verifier.drafter_factory import connect_inline

MODES: tuple[SpeculationMode, ...] = (SpeculationMode.SYNC, SpeculationMode.PLAIN)
SPECULATING = {DecisionReason.PAYS, DecisionReason.TRYING, DecisionReason.FIXED}


class ExpensiveRows(CostTable):
    """Cost table that adds about 16 ms for each row and ignores measurements."""

    def __init__(self) -> None:
        super().__init__([Timing(1, 0, 0.010), Timing(64, 0, 1.0)])

    def observe(self, rows: int, seconds: float, reading: Reading | None = None) -> None:
        pass


class ScriptedController(ModeController):
    """Controller that repeats a sequence of modes, as trials if `exploring` is set."""

    def __init__(self, modes: list[SpeculationMode], exploring: bool = False) -> None:
        super().__init__(dict.fromkeys(MODES, CostTable()), FixedHost())
        self._script, self._is_trial = modes, exploring
        self.chosen: list[SpeculationMode] = []

    def choose(self, requests: tuple[int, ...], texts: Callable[[], RunningTexts]) -> SpeculationMode:
        super().choose(requests, texts)
        self.exploring = self._is_trial
        self.chosen.append(self._script[len(self.chosen) % len(self._script)])
        return self.chosen[-1]


class SlowDrafts(ModeController):
    """Controller for which drafting has given half of plain decoding."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(MODES, CostTable()), FixedHost())

    def choose(self, requests: tuple[int, ...], texts: Callable[[], RunningTexts]) -> SpeculationMode:
        super().choose(requests, texts)
        self._running, self.exploring = SpeculationMode.PLAIN, False
        self.gains = {1: {SpeculationMode.SYNC: 0.5, SpeculationMode.PLAIN: 1.0}}
        return SpeculationMode.PLAIN


def inline(engine: Engine) -> Engine:
    connect_inline(engine, Case(blur=0.0))
    return engine


def silent(engine: Engine) -> Engine:
    mine, its = memory_pair()
    its.send(HELLO)
    engine.drafters.connect(mine)
    return engine


def engine_of(
    policy: Callable[[], WaitPolicy] = lambda: FixedSteps(3),
    slots: int = 4096,
    budget: int | None = None,
    prefill_chunk: int = 32,
) -> Engine:
    return make_engine(Case(slots=slots, budget=budget, prefill_chunk=prefill_chunk, policy=policy))[0]


def governed(engine: Engine, controller: ModeController) -> Engine:
    policies: dict[SpeculationMode, WaitPolicy] = {MODES[0]: FixedSteps(2), MODES[1]: WaitPolicy()}
    config = ModeConfig(controller, Cores(Device("cpu"), None), policies)
    plan_by(engine, config)
    return inline(engine)


def expensive(tpot_target_ms: float | None = None, rate: float = 0.0) -> Engine:
    config = EngineConfig(max_running=16, max_waiting=99, prefill_chunk=32, tpot_target_ms=tpot_target_ms)
    parts = EngineParts(
        model=FakeModel(4096),
        drafters=DrafterPool(HELLO, clock=lambda: 0.0),
        cost=ExpensiveRows(),
        slots=4096,
        config=config,
        policy=FixedSteps(2),
        host=FixedHost(),
        clock=lambda: 0.0,  # the rate is not observed
    )
    engine = inline(build_engine(parts))
    if rate:
        engine.planner.observe(Round(1, 0, 0, 1, Reading(), 1, 0, 0.01, 0.0, 1 / rate))
    return engine


def submit(number: int, prompt: int, max_tokens: int) -> Submit:
    parameters = SamplingParameters(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Submit(number, tuple(1 + index % 30 for index in range(prompt)), parameters, number)


def decisions(engine: Engine, *submits: Submit) -> Iterator[DecisionMessage]:
    for each in submits or (submit(1, 3, 30),):
        assert engine.submit(each) is None
    while engine.busy:
        engine.step()
        assert engine.decision is not None
        yield engine.decision


def slower() -> Iterator[DecisionMessage]:
    return decisions(governed(engine_of(), SlowDrafts()))


def fixed() -> Iterator[DecisionMessage]:
    options = RequestOptions(shape=FixedShape(2))
    return decisions(inline(engine_of()), replace(submit(1, 3, 30), options=options))


def after_oom() -> Iterator[DecisionMessage]:
    engine = inline(engine_of())
    engine.oom_backoff.on_oom(0, "out of memory")
    return decisions(engine)


def during_long_prefill() -> Iterator[DecisionMessage]:
    engine = inline(engine_of(prefill_chunk=2048, slots=8192))
    first = decisions(engine)
    for _ in range(4):
        yield next(first)
    yield from decisions(engine, submit(2, 1500, 4))


def trying(mode: SpeculationMode) -> Iterator[DecisionMessage]:
    return decisions(governed(engine_of(), ScriptedController([mode], exploring=True)))


SCENARIOS: dict[DecisionReason, Callable[[], Iterator[DecisionMessage]]] = {
    DecisionReason.PAYS: lambda: decisions(inline(engine_of())),
    DecisionReason.TRYING: lambda: trying(SpeculationMode.PLAIN),
    DecisionReason.FIXED: fixed,
    DecisionReason.OFF: lambda: decisions(inline(engine_of(budget=0))),
    DecisionReason.NO_DRAFTER: lambda: decisions(engine_of()),
    DecisionReason.SLOWER: slower,
    DecisionReason.PROMPTS: lambda: decisions(inline(engine_of()), submit(1, 100, 2)),
    DecisionReason.ENDING: lambda: decisions(inline(engine_of()), submit(1, 3, 2)),
    DecisionReason.NOTHING_DRAFTED: lambda: decisions(silent(engine_of(WaitPolicy))),
    DecisionReason.FULL: during_long_prefill,
    DecisionReason.LATE: lambda: decisions(expensive(tpot_target_ms=10.5, rate=0.1)),
    DecisionReason.NOT_WORTH: lambda: decisions(expensive()),
    DecisionReason.MEMORY: after_oom,
    DecisionReason.SLOTS: lambda: decisions(
        inline(engine_of(slots=40)), *(submit(n, 8, 10) for n in range(3))
    ),
}
LAYOUTS = {DecisionReason.PAYS: "sync", DecisionReason.NOTHING_DRAFTED: "async", DecisionReason.SLOWER: "off"}


@pytest.mark.parametrize("why", DecisionReason)
def test_every_reason_has_its_scenario(why: DecisionReason) -> None:
    seen = list(SCENARIOS[why]())
    found = [each for each in seen if each.why is why]
    assert found
    assert all(bool(each.nodes) <= (why in SPECULATING) for each in found)
    assert {each.layout for each in seen} <= {LAYOUTS.get(why, each.layout) for each in seen}
    if why in (DecisionReason.OFF, DecisionReason.NO_DRAFTER, DecisionReason.MEMORY):  # these last
        assert {each.why for each in seen} <= {why, DecisionReason.PROMPTS, DecisionReason.ENDING}


def test_mode_on_trial_may_draft() -> None:
    assert {each.why for each in trying(SpeculationMode.SYNC) if each.nodes} == {DecisionReason.TRYING}


def test_silent_drafter_is_reported_as_no_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = silent(engine_of())
    monkeypatch.setattr(engine.drafters, "worth_waiting", lambda: False)
    assert DecisionReason.NO_DRAFTER in {each.why for each in decisions(engine)}


def test_decision_compares_its_estimate_with_the_alternative() -> None:
    better = False
    for each in SCENARIOS[DecisionReason.PAYS]():
        if each.nodes and each.chosen and each.other:  # with no nodes
            assert each.chosen.nodes == each.nodes
            assert (each.other.nodes, each.other.tokens) == (0, 1.0)
            better = better or each.chosen.rate > each.other.rate
    assert better
    each = next(
        each for each in SCENARIOS[DecisionReason.NOT_WORTH]() if each.why is DecisionReason.NOT_WORTH
    )
    assert each.chosen is not None  # with one node
    assert each.other is not None
    assert (each.chosen.nodes, each.chosen.tokens, each.other.nodes) == (0, 1.0, 1)
    assert each.chosen.seconds == pytest.approx(0.010, abs=0.001)
    assert each.other.rate < each.chosen.rate
    each = list(slower())[5]
    assert each.chosen is not None  # with drafting, as measured
    assert each.other is not None
    assert (each.chosen.nodes, each.other.nodes) == (0, None)
    assert each.other.rate == pytest.approx(each.chosen.rate / 2)


@settings(max_examples=examples(20), deadline=None)
@given(
    modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=5),
    budget=st.sampled_from([None, 0, 3]),
    slots=st.sampled_from([60, 4096]),
    shortages=st.sets(st.integers(0, 40), max_size=2),
)
def test_decision_equals_the_launched_round(
    modes: list[SpeculationMode], budget: int | None, slots: int, shortages: set[int]
) -> None:
    engine, model = make_engine(Case(slots=slots, budget=budget, policy=lambda: FixedSteps(2), blur=0.3))
    controller = ScriptedController(modes)
    governed(engine, controller)
    for each in mixed_requests(3, max_tokens=20):
        engine.submit(each)
    step = 0
    while engine.busy:
        drafted, waited_s = engine.totals.figures.drafted, engine.times.wait_s
        if step in shortages:
            engine.oom_backoff.on_oom(0, "out of memory")
        step += 1
        engine.step()
        decision = engine.decision
        assert decision is not None
        assert decision.nodes == engine.totals.figures.drafted - drafted
        assert decision.layout == controller.chosen[-1].value
        assert decision.waited_s == pytest.approx(engine.times.wait_s - waited_s)
        assert bool(decision.nodes) == (decision.why in SPECULATING and decision.layout != "off")
        assert decision.chosen is None or decision.nodes <= (decision.chosen.nodes or 0)
    assert model.forwards == engine.times.rounds
