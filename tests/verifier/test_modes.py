"""Tests of modes that change while requests run, and of the cores on which each computes."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_serve.base.cost import CostTable, HostCost, Timing
from ssd_serve.base.devices import Device
from ssd_serve.base.draft_messages import Open
from ssd_serve.base.engine_config import Mode
from ssd_serve.base.settings import Settings
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.drafter.assembly import AssembledDrafter, assemble_drafter
from ssd_serve.verifier import assembly
from ssd_serve.verifier.control.mode_controller import ModeController, RunningTexts
from ssd_serve.verifier.control.planner import Cores, ModeConfig
from ssd_serve.verifier.control.wait import FixedSteps
from ssd_serve.verifier.drafters.pool import SpeculationMode
from ssd_serve.verifier.engine import Engine
from tests.end_to_end.tiny_pair import write_pair
from tests.fakes import HELLO, Case, StillCores, make_core, make_engine, mixed_requests, plan_by, run
from tests.verifier.drafter_factory import CoreDrafter, connect_inline

MODES = (SpeculationMode.ASYNC, SpeculationMode.SYNC, SpeculationMode.PLAIN)
SLOW, FAST = (CostTable([Timing(1, 0, seconds), Timing(64, 0, 64 * seconds)]) for seconds in (2.0, 1.0))
COSTS = {mode: SLOW if mode is SpeculationMode.ASYNC else FAST for mode in MODES}
"""Plain forwards are twice as fast on all cores."""


class RandomController(ModeController):
    """Controller that changes the mode every few rounds."""

    def __init__(self, seed: int) -> None:
        super().__init__(COSTS, HostCost())
        self._random = random.Random(seed)
        self._mode = MODES[0]
        self.changes = 0

    def choose(self, requests: tuple[int, ...], texts: Callable[[], RunningTexts]) -> SpeculationMode:
        if self._random.random() < 0.6:
            mode = self._random.choice(MODES)
            self.changes += mode is not self._mode
            self._mode = mode
        return self._mode


class OneMode(ModeController):
    def choose(self, requests: tuple[int, ...], texts: Callable[[], RunningTexts]) -> SpeculationMode:
        return MODES[0]


def planned_by(engine: Engine, controller: ModeController) -> StillCores:
    """Let the controller choose modes; return the cores."""
    cores = StillCores()
    mode_config = ModeConfig(
        controller,
        cores,
        {mode: FixedSteps(0 if mode is SpeculationMode.PLAIN else 2) for mode in MODES},
    )
    plan_by(engine, mode_config)
    return cores


@pytest.mark.parametrize("seed", range(3))
def test_output_is_lossless_while_modes_change(seed: int) -> None:
    expected = run(make_engine(Case(drafter="none", slots=4096))[0], mixed_requests(6))
    case = Case(policy=lambda: FixedSteps(2), slots=4096)
    engine, _ = make_engine(case)
    connect_inline(engine, case)
    CoreDrafter(engine, make_core(case))
    controller = RandomController(seed)
    cores = planned_by(engine, controller)
    outputs = run(engine, mixed_requests(6))
    assert {number: output.tokens for number, output in outputs.items()} == {
        number: output.tokens for number, output in expected.items()
    }
    assert controller.changes > 3
    assert cores.entered[0] == SpeculationMode.PLAIN  # the first prompt is prefilled on all cores
    assert sum(output.figures.accepted for output in outputs.values()) > 0
    assert engine.scheduler.prefix is not None
    assert engine.scheduler.pool.used == engine.scheduler.prefix.size


def test_drafter_pauses_during_prefill_on_all_cores() -> None:
    engine, _ = make_engine(Case(drafter="none", slots=4096))
    mine, its = memory_pair()
    its.send(HELLO)
    engine.drafters.connect(mine)
    engine.drain()
    planned_by(engine, OneMode(COSTS, HostCost()))
    engine.submit(mixed_requests(1)[0])
    opened = list[tuple[bool, bool]]()
    for _ in range(20):
        engine.step()
        received = its.receive()
        prefilling = engine.planner.prefilling_alone
        opened.append((prefilling, any(isinstance(message, Open) for message in received)))
    rounds = [prefilling for prefilling, _ in opened].count(True)
    assert rounds >= 1
    assert opened[:rounds] == [(True, False)] * rounds
    assert opened[rounds] == (False, True)


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


@pytest.mark.parametrize("alone", [None, "cpu:0,1"])
def test_modes_and_inline_drafts_of_an_assembled_verifier(
    alone: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inline drafts exist only where the target has exclusive cores, and are timed on those."""
    write_pair(tmp_path)
    entered: list[SpeculationMode] = []
    loaded_in: list[SpeculationMode] = []

    def enter(_cores: Cores, mode: SpeculationMode) -> None:
        entered.append(mode)

    def recording(*arguments: Any) -> AssembledDrafter:
        loaded_in.append(entered[-1])
        return assemble_drafter(*arguments)

    monkeypatch.setattr(Cores, "enter", enter)
    monkeypatch.setattr(assembly, "assemble_drafter", recording)
    settings = Settings(
        target=str(tmp_path / "target"),
        draft=str(tmp_path / "draft"),
        mode=Mode.SSD,
        target_device="cpu:0",
        target_device_alone=alone,
        cache_dir=tmp_path / "cache",
        max_running=4,
        native_kernels=False,
    )
    engine = assembly.assemble_verifier(settings.engine_config(), lambda _: None).engine
    modes = {SpeculationMode.ASYNC, SpeculationMode.PLAIN} if alone is None else set(MODES)
    mode_config = engine.planner.mode_config
    assert mode_config is not None
    assert set(mode_config.controller.costs) == modes
    assert len(set(map(id, mode_config.controller.costs.values()))) == (1 if alone is None else 2)
    assert len(engine.drafters.channels) == len(loaded_in) == (SpeculationMode.SYNC in modes)
    assert loaded_in == [SpeculationMode.SYNC] * len(loaded_in)
    assert entered[-1] is SpeculationMode.ASYNC
