"""Tests of stored step times and gains: they are checked before use, and measured again if they are wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from ssd_serve.base.cost import Reading, Timing
from ssd_serve.base.devices import Device
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.logs import get_logger
from ssd_serve.drafter.sources.loading import SourceConfig, draft_times
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult, ModelFacts
from ssd_serve.models.roof import Roof, store_roof
from ssd_serve.models.sizes import DTYPES
from ssd_serve.verifier.control.timing import StepTimes, TimingFiles

MEASURED = [Timing(1, 128, 0.010), Timing(16, 128, 0.020), Timing(1, 1024, 0.012)]


class Model:
    """Counts how often it is measured and probed; `slower` multiplies what its forwards take."""

    def __init__(self, slower: float = 1.0) -> None:
        self.measured = 0
        self.probed = 0
        self.slower = slower

    def measure(self) -> list[Timing]:
        self.measured += 1
        return self._times(self.slower)

    def probe(self) -> list[Timing]:
        self.probed += 1
        return self._times(self.slower)[:2]

    def _times(self, slower: float) -> list[Timing]:
        return [Timing(each.rows, each.context, each.seconds * slower) for each in MEASURED]

    def timings(self, folder: Path, **identity: object) -> list[Timing]:
        return list(TimingFiles(folder, get_logger("test")).timings(identity, self.measure, self.probe))


def test_stored_timings_are_not_measured_again(tmp_path: Path) -> None:
    first, second = Model(), Model()
    assert first.timings(tmp_path, model="a") == second.timings(tmp_path, model="a") == MEASURED
    assert (first.measured, second.measured, second.probed) == (1, 0, 1)


class Disturbed(Model):
    """Other work makes the first of its measurements many times longer."""

    def __init__(self, disturbed: int) -> None:
        super().__init__()
        self._disturbed = disturbed

    def measure(self) -> list[Timing]:
        self.measured += 1
        return self._times(20.0 if self.measured <= self._disturbed else 1.0)


def test_unconfirmed_measurement_is_made_again(tmp_path: Path) -> None:
    model = Disturbed(1)
    assert model.timings(tmp_path, model="a") == MEASURED
    assert (model.measured, model.probed) == (2, 2)
    assert Model().timings(tmp_path, model="a") == MEASURED


def test_disturbed_timings_use_the_least_and_are_not_stored(tmp_path: Path) -> None:
    model = Disturbed(9)
    assert model.timings(tmp_path, model="a") == [*MEASURED[:2], Timing(1, 1024, 0.012 * 20)]
    assert not list(tmp_path.iterdir())


def test_other_device_or_changed_times_are_measured(tmp_path: Path) -> None:
    Model().timings(tmp_path, device="cpu:0")
    other = Model()
    other.timings(tmp_path, device="cpu:0-1")
    assert other.measured == 1
    for slower, otherwise in ((1.0, False), (2.0, True), (1.0, True)):
        model, files = Model(slower), TimingFiles(tmp_path, get_logger("test"))
        files.timings({"device": "cpu:0"}, model.measure, model.probe)
        assert model.measured == int(otherwise)


@pytest.mark.parametrize(
    "content",
    [b"", b'{"format": 9, "timings": []}', b'{"format": 1, "timings": [[0, 1, 2.0]]}'],
)
def test_broken_timings_are_measured_again(tmp_path: Path, content: bytes) -> None:
    Model().timings(tmp_path, model="a")
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    model = Model()
    assert model.timings(tmp_path, model="a") == MEASURED
    assert model.measured == 1
    assert Model().timings(tmp_path, model="a") == MEASURED


def test_unwritable_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for _ in range(2):
        model = Model()
        assert model.timings(tmp_path / "file", model="a") == MEASURED
        assert model.measured == 1


@dataclass
class Loaded:
    """A loaded model, none of whose forwards may run."""

    facts: ModelFacts = field(
        default_factory=lambda: ModelFacts("m", 100, 512, 4, 8, (), 10**9, 10**3, "cpu", "bf16")
    )
    slots: int = 512

    def forward(self, batch: Batch) -> ForwardResult:
        raise AssertionError("nothing is measured at start")

    def release(self, spans: Sequence[range]) -> None:
        raise AssertionError("nothing is released at start")


CORES = Device("cpu", (0, 1))


def step_times(folder: Path, dtype: str = "bf16") -> StepTimes:
    model = Loaded()
    model.facts = replace(model.facts, dtype=dtype)
    return StepTimes(model, TimingFiles(folder, get_logger("test")), folder)


@pytest.mark.parametrize("dtype", [*DTYPES, "packed"])
def test_no_forward_runs_at_start_on_cpus(tmp_path: Path, dtype: str) -> None:
    times = step_times(tmp_path, dtype)
    table = times.table(CORES)
    assert times.guessed
    assert 0.01 < table.seconds(1) < 1.0, "a gigabyte of weights"
    assert table.seconds(1, Reading(10**5, 10**5)) > table.seconds(1)


def test_live_rounds_are_the_times_of_the_next_start(tmp_path: Path) -> None:
    first = step_times(tmp_path)
    table = first.table(CORES)
    for _ in range(15):
        table.observe(1, 0.5)
    first.store()
    early = step_times(tmp_path)
    early.table(CORES)
    assert early.guessed, "too few rounds"
    table.observe(1, 0.5)
    first.store()
    later = step_times(tmp_path)
    again = later.table(CORES)
    assert not later.guessed
    assert again.seconds(1) == pytest.approx(0.5, rel=0.05)
    later.table(Device("cpu", (0,)))
    assert later.guessed, "other cores"


def test_stored_times_take_their_level_from_the_first_rounds(tmp_path: Path) -> None:
    """An earlier session was disturbed: its times are four times too long on all cores."""
    first = step_times(tmp_path)
    for _ in range(16):
        first.table(CORES).observe(1, 0.4)
    tables = [first.table(device) for device in (CORES, Device("cpu", (0,)))]
    before = [table.seconds(8) for table in tables]
    for _ in range(8):
        tables[0].observe(1, tables[0].seconds(1) / 4 if not tables[0].rounds else tables[0].seconds(1))
    assert [table.seconds(8) for table in tables] == pytest.approx([each / 4 for each in before], rel=0.05)


def test_expected_times_follow_a_stored_roof(tmp_path: Path) -> None:
    per_byte = {1: 1e-9, 64: 4e-9}
    store_roof(tmp_path, Roof(2, "bfloat16", per_byte, 1e12))
    table = step_times(tmp_path).table(CORES)
    assert table.seconds(1) == pytest.approx(1.0, rel=0.01)
    assert table.seconds(64) == pytest.approx(4.0, rel=0.01)


def test_drafts_on_cpus_are_not_measured_either(tmp_path: Path) -> None:
    """Their step times follow from the same stored roof: no forward runs."""
    store_roof(tmp_path, Roof(torch.get_num_threads(), "bfloat16", {1: 1e-9, 64: 4e-9}, 1e12, {1: 0.0}))
    config = EngineConfig(cache_dir=tmp_path)
    order = SourceConfig(
        config=config, folder=None, device="cpu", native=None, log=get_logger("d0"), widths=[4, 64]
    )
    seconds, prefill_s = draft_times(Loaded(), order)
    assert seconds[64] == pytest.approx(4.0)
    assert 1.0 < seconds[4] < 1.2
    assert prefill_s == pytest.approx(4.0 / 64)
