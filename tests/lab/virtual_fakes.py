"""A fake pair for the benchmarks in virtual time, and prompts for it."""

from lab.virtual.rig import DRAFT_SLOTS, TimedPair
from ssd_serve.bench.device_tables import DeviceTable, Flat
from ssd_serve.bench.prompts import Prompt
from tests.fakes import FakeModel

TARGET_S, DRAFT_S = 0.020, 0.002
TABLE = DeviceTable("fake", Flat(TARGET_S), Flat(DRAFT_S))


def fake_pair(blur: float = 0.5) -> TimedPair:
    """A target, and a draft that guesses well but not always."""
    return TimedPair(FakeModel(1024), FakeModel(DRAFT_SLOTS, blur), TABLE)


def fake_prompts(count: int) -> list[Prompt]:
    """Short prompts with different seeds."""
    return [Prompt("fake", (5 + number, 6, 7), 100 + number) for number in range(count)]
