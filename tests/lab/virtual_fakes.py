"""A fake pair for the benchmarks in virtual time, and prompts for it."""

from lab.virtual.rig import DRAFT_SLOTS, Pair
from ssd_serve.bench.emulated import DeviceTable
from ssd_serve.bench.prompts import Prompt
from tests.fakes import FakeModel

TABLE = DeviceTable(target_s=0.020, draft_s=0.002, flat_rows=64)


def fake_pair(blur: float = 0.5) -> Pair:
    """A target, and a draft that guesses well but not always."""
    return Pair(FakeModel(1024), FakeModel(DRAFT_SLOTS, blur), TABLE)


def fake_prompts(count: int) -> list[Prompt]:
    """Short prompts with different seeds."""
    return [Prompt("fake", (5 + number, 6, 7), 100 + number) for number in range(count)]
