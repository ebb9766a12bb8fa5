"""Tests of engines with several drafters: the output is the same if drafters differ, die or reconnect."""

from functools import cache

from msgspec.structs import replace

from ssd_serve.base.draft_messages import Hello
from ssd_serve.base.logs import get_logger
from ssd_serve.base.messages import Committed
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.drafter.process import DrafterLoop, DrafterRunner
from ssd_serve.drafter.verifier_connection import VerifierConnection
from ssd_serve.verifier.control.wait import FixedSteps
from ssd_serve.verifier.engine import Engine
from tests.fakes import HELLO, Case, Output, make_core, make_engine, mixed_requests, run

QUIET = get_logger("drafter", level="error")
REQUESTS = 8


def case(blur: float = 0.6) -> Case:
    return Case(slots=4096, blur=blur, policy=lambda: FixedSteps(2))


@cache
def plain() -> dict[int, tuple[int, ...]]:
    engine, _ = make_engine(Case(drafter="none", slots=4096))
    return texts(run(engine, mixed_requests(REQUESTS)))


def texts(outputs: dict[int, Output]) -> dict[int, tuple[int, ...]]:
    return {number: output.tokens for number, output in outputs.items()}


class Drafter:
    def __init__(self, hello: Hello, *engines: Engine, blur: float = 0.6) -> None:
        core = make_core(case(blur))
        self.ends = [memory_pair() for _ in engines]
        targets: list[VerifierConnection] = []
        for place, (mine, its) in enumerate(self.ends):
            mine.on_wait = self.work
            engines[place].drafters.connect(mine)
            targets.append(VerifierConnection(core, hello, QUIET, (place, len(engines)), channel=its))
        self._loop = DrafterLoop([DrafterRunner(core, targets, 0.001)])

    def work(self) -> None:
        if not any(its.closed for _, its in self.ends):
            self._loop.turn()

    def die(self) -> None:
        for _, its in self.ends:
            its.close()


def named(name: str, source: str = "") -> Hello:
    return replace(HELLO, name=name, source=source)


def test_output_is_lossless_with_several_drafters() -> None:
    count = 4
    engine, _ = make_engine(case())
    drafters = [Drafter(named(f"d{number}"), engine) for number in range(count)]
    shares: list[list[int]] = []

    def each(_step: int) -> None:
        for drafter in drafters:
            drafter.work()
        if engine.scheduler.decoding == REQUESTS:
            shares.append(sorted(engine.drafters.num_requests.values()))

    assert texts(run(engine, mixed_requests(REQUESTS), each)) == plain()
    assert [REQUESTS // count] * count in shares
    assert engine.totals.figures.accepted > 0


def test_output_is_lossless_if_a_drafter_dies_and_reconnects() -> None:
    engine, _ = make_engine(case())
    drafters = [Drafter(named("d0"), engine), Drafter(named("d1"), engine)]
    seen: dict[int, dict[str, int]] = {}

    def each(step: int) -> None:
        if step == 4:
            drafters[1].die()
        if step == 6:
            drafters[1] = Drafter(named("d1"), engine)
        for drafter in drafters:
            drafter.work()
        seen[step] = engine.drafters.num_requests

    assert texts(run(engine, mixed_requests(REQUESTS), each)) == plain()
    assert seen[3] == {"d0": 4, "d1": 4}
    assert seen[5]["d0"] >= REQUESTS - 1
    assert "d1" not in seen[5]
    assert max(shares.get("d1", 0) for step, shares in seen.items() if step > 6) > 1
    assert engine.drafters.moves >= 6
    assert engine.drafters.rejoins == 1


def test_drafters_of_different_models_merge_their_trees() -> None:
    def accepted(*blurs: float) -> int:
        engine, _ = make_engine(case())
        drafters = [
            Drafter(named(f"d{number}", f"model {number}"), engine, blur=blur)
            for number, blur in enumerate(blurs)
        ]

        def each(_step: int) -> None:
            for drafter in drafters:
                drafter.work()
            assert len(set(engine.drafters.num_requests.values())) <= 1  # each drafter has all requests

        assert texts(run(engine, mixed_requests(REQUESTS), each)) == plain()
        return engine.totals.figures.accepted

    weak, strong, both = accepted(2.5), accepted(0.6), accepted(2.5, 0.6)
    assert both > weak
    assert both >= 0.95 * strong  # a weak second drafter costs little


def test_one_drafter_serves_two_verifiers() -> None:
    engines = [make_engine(case())[0] for _ in range(2)]
    drafter = Drafter(named("d0"), *engines)
    for engine in engines:  # both engines have open requests at the same time
        for submit in mixed_requests(REQUESTS):
            assert engine.submit(submit) is None
    outputs: list[dict[int, tuple[int, ...]]] = [{}, {}]
    while any(engine.busy for engine in engines):
        for engine, found in zip(engines, outputs, strict=True):
            for report in engine.step() if engine.busy else ():
                if isinstance(report, Committed):
                    found[report.request] = found.get(report.request, ()) + report.tokens
        drafter.work()
    assert outputs == [plain(), plain()]
    assert all(engine.totals.figures.accepted > 0 for engine in engines)
