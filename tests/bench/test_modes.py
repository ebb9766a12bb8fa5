"""Tests of `ssd bench modes` with known speeds: the fastest mode wins, ties, and texts that loop."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ssd_serve.base.errors import SsdError
from ssd_serve.base.messages import Committed, Figures, Finished, Submit
from ssd_serve.bench import runner
from ssd_serve.bench.modes import COLUMNS, PLAIN, initial_shapes, neighbours, run_modes
from ssd_serve.bench.prompts import NEW_TOKENS, ChosenPrompts, Prompt
from ssd_serve.bench.report import Report, report_text
from ssd_serve.bench.rig import EngineMode
from ssd_serve.bench.runner import ASYNC_MODES, DeviceShare, Entry, TimedRequest, token_hash
from ssd_serve.bench.statistics import ratio_interval

PROMPTS = tuple(Prompt(f"file {number}", (number,), number) for number in range(72))
CHOSEN = ChosenPrompts(PROMPTS[8:], PROMPTS[:8], 0.1)
BEST_STEPS = {"sd-chain": 5, "sd-tree": 6, "ngram": 4}
SPEEDS = {"ar": 50.0, "ngram": 70.0, "sd-chain": 80.0, "sd-tree": 100.0, "ssd": 150.0}
LOOKUP = 1.1
"""Speed-up of a mode with lookup."""


def worth(mode: str, steps: int) -> float:
    """Return the share of a mode's speed that a shape reaches."""
    if mode not in BEST_STEPS:
        return 1.0
    return 1 - 0.1 * abs(math.log(steps / BEST_STEPS[mode])) if steps else 0.8


class FakeStage:
    """Test double of a stage with a known speed for each mode.

    A shape other than the best one is slower; two cores are faster by the factor `wider`. The speed also
    depends on the prompt, a drift of the machine, and noise in each run.
    """

    setting, fan_out = "real", 16
    async_share = DeviceShare("cpu:0", "cpu:1", 2)
    baseline_shares: Sequence[DeviceShare] = (DeviceShare("cpu:0", "", 1), DeviceShare("cpu:0-1", "", 2))

    def __init__(
        self, wider: float = 1.2, noise: float = 0.05, loops: str = "", after: Sequence[Prompt] = ()
    ) -> None:
        """`loops` is the mode that repeats tokens after the prompts in `after`, or after all if it is empty."""
        self._wider, self._noise, self._loops, self._after = wider, noise, loops, after
        self._chance = random.Random(11)
        self._drift = 1.0
        self.runs: list[tuple[Entry, Prompt]] = []

    def run(self, entry: Entry, prompt: Prompt, temperature: float) -> TimedRequest:
        self.runs.append((entry, prompt))
        mode = entry.mode
        self._drift *= 0.9995
        speed = SPEEDS[mode.mode] * self._drift * (1 + prompt.seed % 7 / 10)
        speed *= LOOKUP if mode.lookup else 1.0
        speed *= math.exp(self._chance.gauss(0, self._noise))
        speed *= worth(mode.mode, mode.fan_out if mode.mode == "ngram" else mode.steps)
        if entry.share.target == "cpu:0-1":
            speed *= self._wider
        loops = mode.mode == self._loops and (not self._after or prompt in self._after)
        tokens = [1] * NEW_TOKENS if loops else list(range(NEW_TOKENS))
        seconds = NEW_TOKENS / speed
        figures = Figures(tokens=NEW_TOKENS, rounds=16, drafted=64, accepted=32, hits=12, misses=4)
        return TimedRequest(
            tuple(tokens), NEW_TOKENS, seconds, 0.9 * seconds, 0.05 * seconds, 0.05 * seconds, figures
        )


def run(stage: FakeStage) -> list[SimpleNamespace]:
    found = run_modes(stage, {0.6: CHOSEN}, lambda _text: None)
    return [SimpleNamespace(**row) for row in found.results]


def test_every_mode_and_share_runs_every_prompt_once() -> None:
    stage = FakeStage()
    rows = run(stage)
    modes = [("ar", False), ("ngram", False), ("sd-chain", False), ("sd-tree", False), ("sd-tree", True)]
    expected = [(target, *mode) for target in ("cpu:0", "cpu:0-1") for mode in modes]
    expected += [("cpu:0", "ssd", False), ("cpu:0", "ssd", True)]
    assert [(row.target, row.mode, "lookup" in row.shape) for row in rows] == expected
    assert {row.requests for row in rows} == {64}
    counted = Counter(stage.runs[-12 * 64 :])
    assert set(counted.values()) == {1}
    assert {prompt for _, prompt in counted} == set(CHOSEN.prompts)
    assert {prompt for _, prompt in stage.runs[: -12 * 64]} == set(CHOSEN.tuning)


def test_tuning_finds_the_best_shape_beyond_its_start() -> None:
    for row in run(FakeStage(noise=0.01)):
        best = BEST_STEPS.get(row.mode)
        if best is not None:
            shape = row.shape.removesuffix(" + lookup")
            assert abs(math.log(int(shape.split()[-1]) / best)) < 0.25
            assert (shape in row.tuned) == (shape == row.shape)


def test_ratios_hold_with_drift_and_noise() -> None:
    for row in run(FakeStage()):
        shape = row.shape.removesuffix(" + lookup")
        found = shape.split()[-1]
        theirs = SPEEDS[row.mode] * worth(row.mode, int(found) if found.isdigit() else 0)
        theirs *= LOOKUP if row.shape != shape else 1
        if row.ssd is None:
            assert row.shape == "ssd + lookup"
            continue
        truth = LOOKUP * SPEEDS["ssd"] / theirs / (1.2 if row.target == "cpu:0-1" else 1)
        assert row.ssd["low"] * 0.98 < truth < row.ssd["high"] * 1.02
        assert row.verdict == "better"


def test_verdicts_of_ties_noise_and_losses() -> None:
    def against_the_wide_tree(stage: FakeStage) -> str:
        (row,) = (row for row in run(stage) if row.shape.endswith("+ lookup") and row.target == "cpu:0-1")
        verdict: str = row.verdict
        return verdict

    assert against_the_wide_tree(FakeStage(wider=1.5, noise=0.03)) in ("as good", "better")
    assert against_the_wide_tree(FakeStage(wider=1.5, noise=0.8)) == "not shown"
    assert against_the_wide_tree(FakeStage(wider=2.0)) == "worse"


def test_mode_with_looping_texts_is_an_error() -> None:
    with pytest.raises(SsdError, match=r"ssd .*on cpu:0 and cpu:1: the text after .* is a loop"):
        run(FakeStage(loops="ssd"))


def test_gpu_target_has_synchronous_drafts_on_cores() -> None:
    stage = FakeStage(noise=0.01)
    stage.async_share = DeviceShare("cuda:0", "cpu:2", 2)
    stage.baseline_shares = (DeviceShare("cuda:0", "", 1), stage.async_share)
    rows = run(stage)
    assert [(row.mode, row.devices) for row in rows if row.draft] == [
        *(("sd-chain", 2), ("sd-tree", 2), ("sd-tree", 2)),
        *(("ssd", 2), ("ssd", 2)),
    ]
    assert {row.shape for row in rows if row.mode == "sd-chain"} == {"sd-chain 5"}


def test_intervals_follow_from_the_single_answers() -> None:
    found = run_modes(FakeStage(), {0.6: CHOSEN}, lambda _text: None)
    assert len(found.answers) == 12 * 64
    assert {answer["order"] for answer in found.answers} == set(range(12))
    assert {answer["tokens"] for answer in found.answers} == {token_hash(range(NEW_TOKENS))}

    def speeds(shape: object, target: object) -> dict[Any, float]:
        return {
            answer["prompt"]: float(answer["decoded"]) / float(answer["seconds"])  # type: ignore[arg-type]
            for answer in found.answers
            if (answer["shape"], answer["target"]) == (shape, target)
        }

    ours = speeds("ssd + lookup", "cpu:0")
    for row in found.results[:-1]:
        theirs = speeds(row["shape"], row["target"])
        interval = ratio_interval([ours[prompt] / theirs[prompt] for prompt in ours])
        assert interval is not None
        assert row["ssd"]["mean"] == pytest.approx(interval.mean, rel=1e-3)  # type: ignore[index]

    lines = report_text(Report({"results": found.results}, {"results": COLUMNS}, ["a note"])).splitlines()
    assert lines[0].split()[:3] == ["setting", "shape", "temperature"]
    assert len([line for line in lines if line.startswith("real")]) == 12
    assert lines[-1] == "a note"


def test_prompt_with_one_looping_text_is_not_counted() -> None:
    lines: list[str] = []
    stage = FakeStage(loops="sd-chain", after=CHOSEN.prompts[3:4])
    rows = run_modes(stage, {0.6: CHOSEN}, lines.append).results
    assert {row["requests"] for row in rows} == {len(CHOSEN.prompts) - 1}
    assert any(f"{len(CHOSEN.prompts) - 1} prompts are counted" in line for line in lines)
    with pytest.raises(SsdError, match="is a loop"):
        run(FakeStage(loops="sd-chain", after=CHOSEN.prompts[: len(CHOSEN.prompts) // 10 + 2]))


@pytest.mark.parametrize("mode", ["ngram", "sd-chain", "sd-tree"])
def test_neighbours_of_shapes(mode: str) -> None:
    for shape in initial_shapes(mode, 16):
        around = list(neighbours(shape))
        assert shape not in around
        assert {each.mode for each in around} == {mode}
        assert bool({each.steps for each in around} - {shape.steps}) == bool(shape.steps)
    assert list(neighbours(EngineMode("sd-chain", 1))) == [EngineMode("sd-chain", 2)]
    assert list(neighbours(PLAIN)) == list(neighbours(ASYNC_MODES[0])) == []


class TimedEngine:
    """Test double of an engine: a second of prefill, then a token, and two more after 0.1 s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.times = SimpleNamespace(forward_s=0.0, wait_s=0.0, host_s=0.0)
        self._steps = [(0.5, 0), (0.5, 1), (0.1, 2)]

    def submit(self, submit: Submit) -> None:
        self.request = submit.request

    def step(self) -> list[Committed | Finished]:
        seconds, tokens = self._steps.pop(0)
        self.now += seconds
        self.times.forward_s += seconds
        reports: list[Committed | Finished] = (
            [Committed(self.request, tuple(range(tokens)))] if tokens else []
        )
        return reports if self._steps else [*reports, Finished(self.request, "length", Figures())]


def test_decoding_speed_excludes_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = TimedEngine()
    monkeypatch.setattr("ssd_serve.bench.runner.time.perf_counter", lambda: engine.now)
    found = runner.Runner(3).run(engine, PROMPTS[0], 0.0)
    assert (found.tokens, found.decoded) == ((0, 0, 1), 2)
    assert found.seconds == pytest.approx(0.1)
    assert found.forward_s == pytest.approx(0.1)
    assert found.tokens_per_s == pytest.approx(20.0)
