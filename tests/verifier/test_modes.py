"""Layouts change while requests run, and the text does not."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_serve.base.cost import CostTable, Timing
from ssd_serve.base.devices import Device
from ssd_serve.base.draft_messages import (
    Close,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.base.engine_config import Mode
from ssd_serve.base.settings import Settings
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.drafter.assembly import AssembledDrafter, assemble_drafter
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.verifier import assembly
from ssd_serve.verifier.control.budget import FixedSteps
from ssd_serve.verifier.control.decision import SpeculationMode
from ssd_serve.verifier.control.execution import Cores, ExecutionPlanner, ModeConfig
from ssd_serve.verifier.control.mode_controller import ModeController
from ssd_serve.verifier.engine import Engine
from tests.end_to_end.tiny_pair import write_pair
from tests.fakes import HELLO, Case, StillCores, make_core, make_engine, mixed_requests, run

WAYS = (SpeculationMode.ASYNC, SpeculationMode.SYNC, SpeculationMode.PLAIN)


class Restless(ModeController[SpeculationMode]):
    """Changes its mind every few rounds."""

    def __init__(self, seed: int) -> None:
        super().__init__(WAYS)
        self._random = random.Random(seed)
        self._mode = WAYS[0]
        self.changes = 0

    def choose(self, requests: int, decoding: bool = True) -> SpeculationMode:
        if self._random.random() < 0.6:
            mode = self._random.choice(WAYS)
            self.changes += mode is not self._mode
            self._mode = mode
        return self._mode


def restless(seed: int) -> tuple[Engine, Restless, StillCores]:
    case = Case(policy=lambda: FixedSteps(2), slots=4096)
    engine, _ = make_engine(case)
    engine.drafters.connect(InlineChannel(make_core(case), HELLO), synchronous=True)
    mine, its = memory_pair()
    core = make_core(case)

    def work() -> None:
        for message in its.receive():
            if isinstance(message, Open | Outcome | Close | Resync | Pause):
                for reply in core.handle(message):
                    its.send(reply)
        for growth in core.step():
            its.send(growth)

    its.send(HELLO)
    mine.on_wait = work
    engine.drafters.connect(mine)
    controller = Restless(seed)
    places = StillCores()
    slow, fast = (CostTable([Timing(1, 0, seconds), Timing(64, 0, 64 * seconds)]) for seconds in (2.0, 1.0))
    mode_config = ModeConfig(
        controller,
        places,
        {way: slow if way is SpeculationMode.ASYNC else fast for way in WAYS},
        {way: FixedSteps(0 if way is SpeculationMode.PLAIN else 2) for way in WAYS},
        slow,
    )
    engine.planner.execution = ExecutionPlanner(
        engine.drafters, slow, FixedSteps(2), mode_config, lambda: 0.0
    )
    return engine, controller, places


@pytest.mark.parametrize("seed", range(4))
def test_output_is_lossless_while_modes_change(seed: int) -> None:
    expected = run(make_engine(Case(drafter="none", slots=4096))[0], mixed_requests(6))
    engine, controller, places = restless(seed)
    outputs = run(engine, mixed_requests(6))
    assert {number: output.tokens for number, output in outputs.items()} == {
        number: output.tokens for number, output in expected.items()
    }
    assert controller.changes > 3
    assert places.entered[0] == (SpeculationMode.PLAIN, True)  # a first prompt is read on all cores
    assert sum(output.figures.accepted for output in outputs.values()) > 0
    assert engine.scheduler.prefix is not None
    assert engine.scheduler.pool.used == engine.scheduler.prefix.size


def test_drafter_pauses_during_prefill_on_all_cores() -> None:
    engine, _ = make_engine(Case(drafter="none", slots=4096))
    mine, its = memory_pair()
    its.send(HELLO)
    engine.drafters.connect(mine)
    engine.drain()
    slow, fast = (CostTable([Timing(1, 0, seconds), Timing(64, 0, 64 * seconds)]) for seconds in (2.0, 1.0))
    ways = (SpeculationMode.ASYNC, SpeculationMode.PLAIN)
    controller = ModeController[SpeculationMode](ways)
    controller.load_prior({1: {SpeculationMode.ASYNC: 2.0, SpeculationMode.PLAIN: 1.0}})
    costs = {SpeculationMode.ASYNC: slow, SpeculationMode.PLAIN: fast}
    mode_config = ModeConfig(controller, StillCores(), costs, dict.fromkeys(ways, FixedSteps(0)), slow)
    engine.planner.execution = execution = ExecutionPlanner(
        engine.drafters, slow, FixedSteps(0), mode_config, lambda: 0.0
    )
    for submit in mixed_requests(1):
        engine.submit(submit)
    opened = list[tuple[bool, bool]]()
    for _ in range(20):
        engine.step()
        heard = its.receive()
        opened.append((execution.prefilling_alone, any(isinstance(message, Open) for message in heard)))
    reads = [reading for reading, _ in opened].count(True)
    assert reads >= 1
    assert opened[:reads] == [(True, False)] * reads
    assert opened[reads] == (False, True)


def test_threads_follow_the_cores_of_the_mode() -> None:
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    first, *others = sorted(allowed)
    cores = Cores(Device("cpu", (first,)), Device("cpu", (first, *others[:1])))
    try:
        cores.enter(SpeculationMode.PLAIN)
        assert os.sched_getaffinity(0) == {first, *others[:1]}
        assert torch.get_num_threads() == 1 + len(others[:1])
        cores.enter(SpeculationMode.ASYNC)
        assert os.sched_getaffinity(0) == {first}
        assert torch.get_num_threads() == 1
        Cores(Device("cuda", (0,)), None).enter(SpeculationMode.PLAIN)  # a GPU has no cores to lend
        assert torch.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


def test_an_inline_draft_is_timed_on_the_cores_where_it_will_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path)
    entered: list[SpeculationMode] = []
    loaded_in: list[SpeculationMode] = []

    def enter(_cores: Cores, mode: SpeculationMode, all_cores: bool = True) -> None:
        entered.append(mode)

    def listening(*arguments: Any) -> AssembledDrafter:
        loaded_in.append(entered[-1])
        return assemble_drafter(*arguments)

    monkeypatch.setattr(Cores, "enter", enter)
    monkeypatch.setattr(assembly, "assemble_drafter", listening)
    settings = Settings(
        target=str(tmp_path / "target"),
        draft=str(tmp_path / "draft"),
        mode=Mode.SSD,
        target_device="cpu:0",
        target_device_alone="cpu:0,1",
        cache_dir=tmp_path / "cache",
        max_running=4,
    )
    assembly.assemble_verifier(settings.engine_config(), lambda _: None)
    assert loaded_in == [SpeculationMode.SYNC]
    assert entered[-1] is SpeculationMode.ASYNC, "it begins beside its drafter"


def test_where_the_target_has_exclusive_drafts_are_made_inline_too(tmp_path: Path) -> None:
    write_pair(tmp_path)
    settings = Settings(
        target=str(tmp_path / "target"),
        draft=str(tmp_path / "draft"),
        mode=Mode.SSD,
        target_device="cpu:0",
        cache_dir=tmp_path / "cache",
        max_running=4,
    )
    for alone, modes in (
        (None, {SpeculationMode.ASYNC, SpeculationMode.PLAIN}),
        ("cpu:0", set(SpeculationMode)),
    ):
        own = settings.model_copy(update={"target_device_alone": alone})
        engine = assembly.assemble_verifier(own.engine_config(), lambda _: None).engine
        mode_config = engine.planner.execution.mode_config
        assert mode_config is not None
        assert set(mode_config.costs) == modes
        assert len(set(map(id, mode_config.costs.values()))) == 1
        assert bool(engine.drafters.channels) is (SpeculationMode.SYNC in modes)
