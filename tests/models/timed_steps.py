"""Test double of a model and a clock: each forward advances the clock by a fixed time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult


@dataclass
class Steps:
    """Model, completion and clock: a forward takes `step_s` seconds, and the first one three times that."""

    step_s: float
    slots: int = 2048
    now: float = 0.0
    forwards: int = 0
    batches: list[Batch] = field(default_factory=list[Batch])
    facts: Any = field(default_factory=lambda: SimpleNamespace(context=2048))

    def forward(self, batch: Batch) -> ForwardResult:
        self.batches.append(batch)
        return ForwardResult(torch.empty(0), completion=self)

    def release(self, spans: Sequence[range]) -> None:
        pass

    def ready(self) -> bool:
        return True

    def wait(self) -> float:
        self.forwards += 1
        self.now += self.step_s * (3 if self.forwards == 1 else 1)
        return self.now

    def perf_counter(self) -> float:
        return self.now
