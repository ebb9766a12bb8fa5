"""Tests of losslessness with a fake model: the output is that of plain decoding with any drafts and faults."""

from collections.abc import Callable
from functools import cache

import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Growth,
    Hello,
    Message,
    Open,
    Outcome,
)
from ssd_serve.base.messages import FixedShape, RequestOptions
from ssd_serve.bench.memory_channel import Schedule, faultless, memory_pair
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.verifier.control.wait import CostBasedWait, FixedSteps, WaitPolicy
from ssd_serve.verifier.engine import Engine
from tests.fakes import HELLO, VOCABULARY, Case, Output, make_core, make_engine, mixed_requests, run
from tests.message_faults import FaultRates, seeded
from tests.verifier.drafter_factory import CoreDrafter, connect_inline


@cache
def plain(count: int) -> dict[int, Output]:
    engine, _ = make_engine(Case(drafter="none", slots=4096))
    return run(engine, mixed_requests(count))


def same(left: dict[int, Output], right: dict[int, Output]) -> bool:
    return {n: (o.tokens, o.reason) for n, o in left.items()} == {
        n: (o.tokens, o.reason) for n, o in right.items()
    }


@pytest.mark.parametrize("budget", [0, 3, None])
@pytest.mark.parametrize("policy", [WaitPolicy, CostBasedWait, lambda: FixedSteps(3)])
@pytest.mark.parametrize("count", [1, 8])
def test_synchronous_speculation_is_lossless(
    budget: int | None, policy: Callable[[], WaitPolicy], count: int
) -> None:
    case = Case(budget=budget, policy=policy, slots=4096)
    engine, _ = make_engine(case)
    connect_inline(engine, case)
    outputs = run(engine, mixed_requests(count))
    expected = plain(count)
    assert same(outputs, expected)
    accepted = sum(output.figures.accepted for output in outputs.values())
    if policy is not CostBasedWait:  # whether waiting pays is a matter of this machine's speed
        assert (accepted > 0) == (budget != 0 and policy is not WaitPolicy)
    assert engine.scheduler.prefix is not None
    assert engine.scheduler.pool.used == engine.scheduler.prefix.size


@pytest.mark.parametrize("slots", [90, 200])
def test_preemption_is_lossless(slots: int) -> None:
    case = Case(slots=slots)
    engine, _ = make_engine(case)
    connect_inline(engine, case)
    outputs = run(engine, mixed_requests(12))
    assert same(outputs, plain(12))
    if slots < 200:
        assert engine.scheduler.preemptions > 0


def test_chain_of_a_good_draft_is_accepted() -> None:
    chain = GrowthLimits(width=1, fan_out=1, depth=8, nodes=64)
    case = Case(blur=0.0, growth=chain, policy=lambda: FixedSteps(4))
    engine, _ = make_engine(case)
    connect_inline(engine, case)
    outputs = run(engine, mixed_requests(1))
    assert same(outputs, plain(1))
    figures = outputs[0].figures
    assert figures.drafted <= 4 * figures.rounds
    assert figures.tokens / figures.rounds > 3


@pytest.mark.parametrize("shape", [FixedShape(3), FixedShape(6, chain=False)])
@pytest.mark.parametrize("inline", [True, False])
def test_fixed_shape_is_verified_in_each_round_and_lossless(shape: FixedShape, inline: bool) -> None:
    case = Case(slots=4096, policy=WaitPolicy)
    engine, _ = make_engine(case)
    if inline:
        connect_inline(engine, case)
    else:
        CoreDrafter(engine, make_core(case))
    options = RequestOptions(shape=shape)
    outputs = run(engine, [replace(each, options=options) for each in mixed_requests(4)])
    assert same(outputs, plain(4))
    figures = engine.totals.figures
    assert shape.nodes * (figures.rounds - 4 * shape.nodes) <= figures.drafted <= shape.nodes * figures.rounds


@pytest.mark.parametrize("inline", [True, False])
def test_rounds_do_not_wait_for_a_fixed_shape_of_which_nothing_grows(inline: bool) -> None:
    case = Case(slots=4096, policy=WaitPolicy, growth=GrowthLimits(4, 4, 8, 64, min_reach=0.9))
    engine, _ = make_engine(case)
    connect_inline(engine, case) if inline else CoreDrafter(engine, make_core(case))
    options = RequestOptions(shape=FixedShape(6))
    waited: list[float] = []

    def note(_step: int) -> None:
        waited.append(engine.decision.waited_s if engine.decision is not None else 0.0)

    outputs = run(engine, [replace(each, options=options) for each in mixed_requests(1)], note)
    assert same(outputs, plain(1))
    assert max(waited) < 0.5  # a round waits for a second while more may come


def test_drafter_with_little_memory_is_lossless() -> None:
    case = Case(draft_slots=100, slots=4096)
    engine, _ = make_engine(case)
    connect_inline(engine, case)
    assert same(run(engine, mixed_requests(12)), plain(12))


def remote(engine: Engine, case: Case, faults: FaultRates | Schedule | None, seed: int = 0) -> CoreDrafter:
    schedules = [
        seeded(each, faults) if isinstance(faults, FaultRates) else faults or faultless
        for each in (seed, seed + 1)
    ]
    return CoreDrafter(engine, make_core(case), *schedules)


FAULTS = {
    "late": FaultRates(delay=0.5, spare=(Hello,)),
    "lost": FaultRates(drop=0.2, spare=(Hello,)),
    "twice": FaultRates(duplicate=0.5, delay=0.3, spare=(Hello,)),
    "all": FaultRates(drop=0.1, duplicate=0.2, delay=0.4, spare=(Hello,)),
}


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("seed", range(2))
def test_message_faults_are_lossless(faults: str, seed: int) -> None:
    case = Case(slots=4096, policy=lambda: FixedSteps(3))
    engine, _ = make_engine(case)
    drafter = remote(engine, case, FAULTS[faults], seed)
    outputs = run(engine, mixed_requests(8), lambda step: drafter.work())
    assert same(outputs, plain(8))
    assert sum(output.figures.accepted for output in outputs.values()) > 0


def test_speculation_recovers_after_message_faults() -> None:
    during, afterwards = accepted_a_round(FaultRates(drop=0.8, delay=0.2, spare=(Hello,)))
    _, undisturbed = accepted_a_round(FaultRates())
    assert during < 0.5 * undisturbed
    assert afterwards > 0.8 * undisturbed > 0.5


def accepted_a_round(rates: FaultRates) -> tuple[float, float]:
    """Return accepted nodes a round during these faults and afterwards."""
    case = Case(slots=4096, policy=lambda: FixedSteps(3), blur=0.0)
    engine, _ = make_engine(case)
    lossy, figures = seeded(3, rates), engine.totals.figures
    counts: list[tuple[int, int]] = []
    ends = 5

    def schedule(index: int, message: Message) -> tuple[int, ...]:
        return lossy(index, message) if len(counts) < ends else (0,)

    drafter = remote(engine, case, schedule)

    def each(_step: int) -> None:
        counts.append((figures.accepted, figures.rounds))
        drafter.work()

    assert same(run(engine, mixed_requests(8), each), plain(8))
    counts.append((figures.accepted, figures.rounds))
    spans = ((counts[0], counts[ends]), (counts[ends + 1], counts[-1]))
    return tuple((late[0] - early[0]) / (late[1] - early[1]) for early, late in spans)  # type: ignore[return-value]


def test_death_and_return_of_a_drafter_are_lossless() -> None:
    case = Case(slots=4096)
    engine, _ = make_engine(case)
    drafters = [remote(engine, case, None)]

    def each(step: int) -> None:
        if step == 6:
            drafters[0].its.close()
        if step == 12:
            drafters.append(remote(engine, case, None))
        drafters[-1].work()

    outputs = run(engine, mixed_requests(6), each)
    assert same(outputs, plain(6))
    assert engine.drafters.rejoins == 1


class RandomDrafter:
    def __init__(self, engine: Engine, malformed: bool) -> None:
        self.malformed = malformed
        self.mine, self.its = memory_pair(faultless, faultless)
        self.its.send(HELLO)
        self.mine.on_wait = self.work
        engine.drafters.connect(self.mine)

    def work(self) -> None:
        for message in self.its.receive():
            if not isinstance(message, Outcome | Open):
                continue
            root, epoch = message.root, message.epoch
            wild = [
                Expansion(
                    root, ROOT_STEP, list(range(1, 39, 3)), [1e9 if t % 2 else -1.0 for t in range(1, 39, 3)]
                ),
                Expansion(root, 4, [2, 2, 5], [0.0, -3e38, 3.0]),
                Expansion(root ^ 5, 3, [1], [0.0]),
            ]
            infinite = [Expansion(root, ROOT_STEP, [2, 3], [float("-inf"), float("nan")])]
            impossible = [Expansion(root, ROOT_STEP, [-2, VOCABULARY], [0.0, 0.0])]
            self.its.send(pack(message.request, epoch, 0, wild, "garbage", snapshot=False))
            self.its.send(pack(message.request, epoch, 1, impossible, "garbage", snapshot=False))
            if not self.malformed:
                continue
            self.its.send(pack(message.request, epoch, 2, infinite, "garbage", snapshot=False))
            self.its.send(Growth(message.request, epoch, 99, b"123", b"1", b"", b"xyz", b""))


@pytest.mark.parametrize("malformed", [False, True])
def test_wrong_and_malformed_growth_is_lossless(malformed: bool) -> None:
    engine, _ = make_engine(Case(slots=4096))
    garbage = RandomDrafter(engine, malformed)
    outputs = run(engine, mixed_requests(6), lambda step: garbage.work())
    assert same(outputs, plain(6))
    assert (engine.drafters.num_joined == 0) is malformed
    if not malformed:
        assert sum(output.figures.drafted for output in outputs.values()) > 0
