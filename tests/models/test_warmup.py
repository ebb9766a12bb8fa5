"""Step times are measured often where steps are short, and a start does not wait for many long ones."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd_serve.kernels.batch import Batch
from ssd_serve.models import warmup
from ssd_serve.models.interface import ForwardResult


@dataclass
class Steps:
    """A model, the ends of its forwards, and the clock: a step takes `step_s` of it, the first three times
    that."""

    step_s: float
    slots: int = 2048
    now: float = 0.0
    forwards: int = 0
    batches: list[Batch] = field(default_factory=list[Batch])
    facts: Any = field(default_factory=lambda: SimpleNamespace(context=2048))

    def forward(self, batch: Batch) -> ForwardResult:
        self.batches.append(batch)
        return ForwardResult(torch.empty(0), completion=self)

    def ready(self) -> bool:
        return True

    def wait(self) -> float:
        self.forwards += 1
        self.now += self.step_s * (3 if self.forwards == 1 else 1)
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("step_s", "repeats"),
    [
        (0.0001, 32),
        (0.01, 14),
        (0.03, 4),
        (0.1, 3),
        (1.0, 1),
        (60.0, 1),
    ],
)
def test_short_steps_are_repeated_and_long_ones_are_not(
    step_s: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(step_s)
    monkeypatch.setattr(warmup, "time", steps)
    found = warmup.measure_steps(steps, (1, 8), repeats=4, least_s=0.31, most_s=0.99)
    assert {key: len(seconds) for key, seconds in found.items()} == {(1, 128): repeats, (8, 128): repeats}
    assert {round(second / step_s, 6) for seconds in found.values() for second in seconds} == {1.0}
    assert steps.forwards == 2 * (1 + repeats)


@pytest.mark.parametrize(("row_s", "slots", "rows"), [(1e-5, 2048, 256), (1e-3, 2048, 100), (1e-5, 64, 64)])
def test_a_token_of_a_text_is_timed_among_many_of_which_only_the_last_gives_logits(
    row_s: float, slots: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(0.01, slots=slots)
    monkeypatch.setattr(warmup, "time", steps)
    assert warmup.measure_reading(steps, row_s) == pytest.approx(0.01 / rows)
    assert {(batch.rows, len(batch.rows_wanted)) for batch in steps.batches} == {(rows, 1)}
