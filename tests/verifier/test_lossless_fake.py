"""Losslessness on a model that depends on every token that a row attends to: the same text in every mode."""

from collections.abc import Callable

import pytest

from ssd_serve.base.draft_messages import (
    Growth,
    Heartbeat,
    Hello,
    Message,
    Open,
    Outcome,
)
from ssd_serve.bench.memory_channel import FaultRates, Schedule, faultless, memory_pair, seeded
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.verifier.control.budget import CostBasedWait, FixedSteps, NoWait, WaitPolicy
from ssd_serve.verifier.engine import Engine
from tests.fakes import HELLO, VOCABULARY, Case, Output, make_core, make_engine, mixed_requests, run


def plain(count: int) -> dict[int, Output]:
    engine, _ = make_engine(Case(drafter="none", slots=4096))
    return run(engine, mixed_requests(count))


def same(left: dict[int, Output], right: dict[int, Output]) -> bool:
    return {n: (o.tokens, o.reason) for n, o in left.items()} == {
        n: (o.tokens, o.reason) for n, o in right.items()
    }


@pytest.mark.parametrize("budget", [0, 1, 4, 32, None])
@pytest.mark.parametrize("policy", [NoWait, CostBasedWait, lambda: FixedSteps(3)])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_inline_speculation_gives_the_plain_text(
    budget: int | None, policy: Callable[[], WaitPolicy], count: int
) -> None:
    case = Case(budget=budget, policy=policy, slots=4096)
    engine, _ = make_engine(case)
    engine.drafters.connect(InlineChannel(make_core(case), HELLO), synchronous=True)
    outputs = run(engine, mixed_requests(count))
    expected = plain(count)
    assert same(outputs, expected)
    accepted = sum(output.figures.accepted for output in outputs.values())
    if policy is not CostBasedWait:  # whether waiting pays is a matter of this machine's speed
        assert (accepted > 0) == (budget != 0 and policy is not NoWait)
    assert engine.scheduler.prefix is not None
    assert engine.scheduler.pool.used == engine.scheduler.prefix.size


def test_chain_drafts_are_chains() -> None:
    case = Case(growth=GrowthLimits(width=1, fan_out=1, depth=8, nodes=64), policy=lambda: FixedSteps(4))
    engine, _ = make_engine(case)
    engine.drafters.connect(InlineChannel(make_core(case), HELLO), synchronous=True)
    outputs = run(engine, mixed_requests(1))
    assert same(outputs, plain(1))
    assert outputs[0].figures.drafted <= 4 * outputs[0].figures.rounds


def test_a_good_draft_is_accepted_often() -> None:
    case = Case(blur=0.0, policy=lambda: FixedSteps(4))
    engine, _ = make_engine(case)
    engine.drafters.connect(InlineChannel(make_core(case), HELLO), synchronous=True)
    outputs = run(engine, mixed_requests(3))
    figures = outputs[2].figures
    assert figures.tokens / figures.rounds > 3


@pytest.mark.parametrize("slots", [90, 120, 200])
def test_short_memory_preempts_and_loses_nothing(slots: int) -> None:
    case = Case(slots=slots)
    engine, _ = make_engine(case)
    engine.drafters.connect(InlineChannel(make_core(case), HELLO), synchronous=True)
    outputs = run(engine, mixed_requests(12))
    assert same(outputs, plain(12))
    if slots < 200:
        assert engine.scheduler.preemptions > 0


def test_a_drafter_short_of_memory_only_drafts_less() -> None:
    case = Case(draft_slots=100, slots=4096)
    engine, _ = make_engine(case)
    engine.drafters.connect(InlineChannel(make_core(case), HELLO), synchronous=True)
    assert same(run(engine, mixed_requests(12)), plain(12))


class Remote:
    """A drafter at the other end of a memory channel, stepped by hand."""

    def __init__(self, engine: Engine, case: Case, faults: FaultRates | Schedule | None, seed: int) -> None:
        schedules = [
            seeded(each, faults) if isinstance(faults, FaultRates) else faults for each in (seed, seed + 1)
        ]
        self.mine, self.its = memory_pair(*(each or faultless for each in schedules))
        self.core: DrafterCore | None = make_core(case)
        self.its.send(HELLO)
        self.mine.on_wait = self.work
        engine.drafters.connect(self.mine)

    def work(self) -> None:
        if self.core is None:
            return
        for message in self.its.receive():
            if not isinstance(message, Hello | Heartbeat):
                for reply in self.core.handle(message):  # type: ignore[arg-type]
                    self.its.send(reply)
        for growth in self.core.step():
            self.its.send(growth)


FAULTS = {
    "none": None,
    "late": FaultRates(delay=0.5, spare=(Hello,)),
    "lost": FaultRates(drop=0.2, spare=(Hello,)),
    "twice": FaultRates(duplicate=0.5, delay=0.3, spare=(Hello,)),
    "all": FaultRates(drop=0.1, duplicate=0.2, delay=0.4, spare=(Hello,)),
}


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_message_faults_change_nothing(faults: str, seed: int) -> None:
    case = Case(slots=4096, policy=lambda: FixedSteps(3))
    engine, _ = make_engine(case)
    remote = Remote(engine, case, FAULTS[faults], seed)
    outputs = run(engine, mixed_requests(8), lambda step: remote.work())
    assert same(outputs, plain(8))
    assert sum(output.figures.accepted for output in outputs.values()) > 0


def test_speculation_is_well_again_when_messages_arrive_again() -> None:
    during, afterwards = accepted_a_round(FaultRates(drop=0.8, delay=0.2, spare=(Hello,)))
    _, undisturbed = accepted_a_round(FaultRates())
    assert during < 0.5 * undisturbed
    assert afterwards > 0.8 * undisturbed > 0.5


def accepted_a_round(rates: FaultRates) -> tuple[float, float]:
    """Nodes accepted a round of a request, while these faults happen and afterwards."""
    case = Case(slots=4096, policy=lambda: FixedSteps(3), blur=0.0)
    engine, _ = make_engine(case)
    lossy, figures = seeded(3, rates), engine.totals.figures
    counts: list[tuple[int, int]] = []
    ends = 5

    def schedule(index: int, message: Message) -> tuple[int, ...]:
        return lossy(index, message) if len(counts) < ends else (0,)

    remote = Remote(engine, case, schedule, 0)

    def each(_step: int) -> None:
        counts.append((figures.accepted, figures.rounds))
        remote.work()

    assert same(run(engine, mixed_requests(8), each), plain(8))
    counts.append((figures.accepted, figures.rounds))
    spans = ((counts[0], counts[ends]), (counts[ends + 1], counts[-1]))
    return tuple((late[0] - early[0]) / (late[1] - early[1]) for early, late in spans)  # type: ignore[return-value]


def test_a_drafter_that_dies_is_done_without_and_a_new_one_rejoins() -> None:
    case = Case(slots=4096)
    engine, _ = make_engine(case)
    remote = Remote(engine, case, None, 0)
    rejoined: list[Remote] = []

    def each(step: int) -> None:
        if step == 6:
            remote.core = None
            remote.its.close()
        if step == 12:
            rejoined.append(Remote(engine, case, None, 0))
        (rejoined[0] if rejoined else remote).work()

    outputs = run(engine, mixed_requests(6), each)
    assert same(outputs, plain(6))
    assert engine.drafters.rejoins == 1


class Garbage:
    def __init__(self, engine: Engine, rude: bool) -> None:
        self.rude = rude
        self.mine, self.its = memory_pair(faultless, faultless)
        self.its.send(HELLO)
        self.mine.on_wait = self.work
        engine.drafters.connect(self.mine)

    def work(self) -> None:
        """Nonsense about every root."""
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
            if not self.rude:
                continue
            self.its.send(pack(message.request, epoch, 2, infinite, "garbage", snapshot=False))
            self.its.send(Growth(message.request, epoch, 99, b"123", b"1", b"", b"xyz", b""))


@pytest.mark.parametrize("rude", [False, True])
def test_garbage_is_harmless(rude: bool) -> None:
    engine, _ = make_engine(Case(slots=4096))
    garbage = Garbage(engine, rude)
    outputs = run(engine, mixed_requests(6), lambda step: garbage.work())
    assert same(outputs, plain(6))
    assert (engine.drafters.num_joined == 0) is rude
    if not rude:
        assert sum(output.figures.drafted for output in outputs.values()) > 0
