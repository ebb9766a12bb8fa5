"""The modes on a stage whose truth is known: the right way wins, ties are not shown, loops end it."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from ssd_serve.base.errors import SsdError
from ssd_serve.base.messages import Figures
from ssd_serve.bench.modes import PLAIN, SSD, Entry, Share, neighbours, run_modes, shapes
from ssd_serve.bench.modes_result import ModesRow, modes_tables
from ssd_serve.bench.prompts import NEW_TOKENS, Chosen, Prompt
from ssd_serve.bench.rig import EngineWay
from ssd_serve.bench.statistics import Verdict
from ssd_serve.bench.timed_request import TimedRequest

PROMPTS = tuple(Prompt(f"file {number}", (number,), number) for number in range(72))
CHOSEN = Chosen(PROMPTS[8:], PROMPTS[:8], 0.1)
BEST_STEPS = {"sd-chain": 5, "sd-tree": 6, "ngram": 4}
SPEEDS = {"ar": 50.0, "ngram": 70.0, "sd-chain": 80.0, "sd-tree": 100.0, "ssd": 150.0}
LOOKUP = 1.1
"""How much faster a way is with lookup beside its draft."""


def worth(mode: str, steps: int) -> float:
    """What a shape gives of its way's speed."""
    if mode not in BEST_STEPS:
        return 1.0
    return 1 - 0.1 * abs(math.log(steps / BEST_STEPS[mode])) if steps else 0.8


class FakeStage:
    """A way gives its speed, less where its shape is not the best one; two cores give as much more as
    `wider`. Prompts are of different worth to all, the machine drifts, and each run has its noise."""

    setting, fan_out = "real", 16
    beside = Share("cpu:0", "cpu:1", 2)
    alone: Sequence[Share] = (Share("cpu:0", "", 1), Share("cpu:0-1", "", 2))

    def __init__(
        self, wider: float = 1.2, noise: float = 0.05, loops: str = "", after: Sequence[Prompt] = ()
    ) -> None:
        """`loops`: the mode whose texts do, after these prompts; after all where none is named."""
        self._wider, self._noise, self._loops, self._after = wider, noise, loops, after
        self._chance = random.Random(11)
        self._drift = 1.0
        self.runs: list[tuple[Entry, Prompt]] = []

    def run(self, entry: Entry, prompt: Prompt, temperature: float) -> TimedRequest:
        self.runs.append((entry, prompt))
        way = entry.way
        self._drift *= 0.9995
        speed = SPEEDS[way.mode] * self._drift * (1 + prompt.seed % 7 / 10)
        speed *= LOOKUP if way.lookup else 1.0
        speed *= math.exp(self._chance.gauss(0, self._noise))
        speed *= worth(way.mode, way.fan_out if way.mode == "ngram" else way.steps)
        if entry.share.target == "cpu:0-1":
            speed *= self._wider
        loops = way.mode == self._loops and (not self._after or prompt in self._after)
        tokens = [1] * NEW_TOKENS if loops else list(range(NEW_TOKENS))
        seconds = NEW_TOKENS / speed
        figures = Figures(tokens=NEW_TOKENS, rounds=16, drafted=64, accepted=32, hits=12, misses=4)
        return TimedRequest(
            tuple(tokens), NEW_TOKENS, seconds, 0.9 * seconds, 0.05 * seconds, 0.05 * seconds, figures
        )


def run(stage: FakeStage) -> list[ModesRow]:
    return run_modes(stage, {0.6: CHOSEN}, lambda _text: None)


def test_all_ways_on_all_shares_run_every_prompt_once_and_tuning_has_its_own() -> None:
    stage = FakeStage()
    rows = run(stage)
    modes = [("ar", False), ("ngram", False), ("sd-chain", False), ("sd-tree", False), ("sd-tree", True)]
    expected = [(target, *way) for target in ("cpu:0", "cpu:0-1") for way in modes]
    expected += [("cpu:0", "ssd", False), ("cpu:0", "ssd", True)]
    assert [(row.target, row.mode, "lookup" in row.shape) for row in rows] == expected
    assert {row.requests for row in rows} == {64}
    counted = Counter(stage.runs[-12 * 64 :])
    assert set(counted.values()) == {1}
    assert {prompt for _, prompt in counted} == set(CHOSEN.prompts)
    assert {prompt for _, prompt in stage.runs[: -12 * 64]} == set(CHOSEN.tuning)


def test_the_best_shape_is_found_beyond_where_the_tuning_began() -> None:
    for row in run(FakeStage(noise=0.01)):
        best = BEST_STEPS.get(row.mode)
        if best is not None:
            shape = row.shape.removesuffix(" + lookup")
            assert abs(math.log(int(shape.split()[-1]) / best)) < 0.25
            assert (shape in row.tuned) == (shape == row.shape)


def test_ratios_are_true_whatever_prompts_drift_and_noise_do() -> None:
    for row in run(FakeStage()):
        shape = row.shape.removesuffix(" + lookup")
        found = shape.split()[-1]
        theirs = SPEEDS[row.mode] * worth(row.mode, int(found) if found.isdigit() else 0)
        theirs *= LOOKUP if row.shape != shape else 1
        if row.ssd is None:
            assert row.shape == "ssd + lookup"
            continue
        truth = LOOKUP * SPEEDS["ssd"] / theirs / (1.2 if row.target == "cpu:0-1" else 1)
        assert row.ssd.low * 0.98 < truth < row.ssd.high * 1.02
        assert row.ssd.verdict is Verdict.BETTER


def test_a_tie_is_as_good_and_with_much_noise_it_is_not_shown() -> None:
    def against_the_wide_tree(stage: FakeStage) -> Verdict:
        (row,) = (row for row in run(stage) if row.shape.endswith("+ lookup") and row.target == "cpu:0-1")
        assert row.ssd is not None
        return row.ssd.verdict

    assert against_the_wide_tree(FakeStage(wider=1.5, noise=0.03)) in (Verdict.AS_GOOD, Verdict.BETTER)
    assert against_the_wide_tree(FakeStage(wider=1.5, noise=0.8)) is Verdict.NOT_SHOWN
    assert against_the_wide_tree(FakeStage(wider=2.0)) is Verdict.WORSE


def test_texts_that_loop_are_an_error() -> None:
    with pytest.raises(SsdError, match=r"ssd on cpu:0 and cpu:1: the text after .* is a loop"):
        run(FakeStage(loops="ssd"))


def test_beside_a_gpu_synchronous_drafts_are_made_on_cores_too() -> None:
    stage = FakeStage(noise=0.01)
    stage.beside = Share("cuda:0", "cpu:2", 2)
    stage.alone = (Share("cuda:0", "", 1), stage.beside)
    rows = run(stage)
    assert [(row.mode, row.devices) for row in rows if row.draft] == [
        *(("sd-chain", 2), ("sd-tree", 2), ("sd-tree", 2)),
        *(("ssd", 2), ("ssd", 2)),
    ]
    assert {row.shape for row in rows if row.mode == "sd-chain"} == {"sd-chain 5"}
    assert "with 2 devices each" in modes_tables(
        {
            "results": msgspec.to_builtins(rows),
            "pairs": {"real": "a pair"},
            "prompts": "made up",
            "notes": {},
            "hardware": {},
            "versions": {},
        }
    )


def test_where_one_way_loops_no_way_is_counted() -> None:
    """On a GPU a way may write another text than the one by which its prompt was chosen."""
    said: list[str] = []
    stage = FakeStage(loops="sd-chain", after=CHOSEN.prompts[3:4])
    rows = run_modes(stage, {0.6: CHOSEN}, said.append)
    assert {row.requests for row in rows} == {len(CHOSEN.prompts) - 1}
    assert any(f"{len(CHOSEN.prompts) - 1} prompts are counted" in line for line in said)
    with pytest.raises(SsdError, match="is a loop"):
        run(FakeStage(loops="sd-chain", after=CHOSEN.prompts[: len(CHOSEN.prompts) // 10 + 2]))


@pytest.mark.parametrize("mode", ["ngram", "sd-chain", "sd-tree"])
def test_shapes_have_neighbours_in_every_direction(mode: str) -> None:
    for way in shapes(mode, 16):
        around = list(neighbours(way))
        assert way not in around
        assert {each.mode for each in around} == {mode}
        assert bool({each.steps for each in around} - {way.steps}) == bool(way.steps)
    assert list(neighbours(EngineWay("sd-chain", 1))) == [EngineWay("sd-chain", 2)]
    assert list(neighbours(PLAIN)) == list(neighbours(SSD)) == []
