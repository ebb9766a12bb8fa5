"""Tests of out-of-memory handling: smaller rounds, the same output, no lost slots."""

from typing import Any

import pytest
import torch

from ssd_serve.base.errors import DeviceMemoryError
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult
from ssd_serve.models.memory import within_memory
from ssd_serve.sampling import choice as sampling
from ssd_serve.verifier import engine as engine_module
from ssd_serve.verifier import round as round_module
from ssd_serve.verifier.control.wait import FixedSteps
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.scheduler import OomBackoff
from tests.fakes import Case, FakeModel, Output, make_engine, mixed_requests, run
from tests.verifier.drafter_factory import connect_inline

CHUNK = 32


class LimitedModel(FakeModel):
    """Model that runs out of memory in batches of more than `max_rows` rows."""

    max_rows = 1_000_000

    def forward(self, batch: Batch) -> ForwardResult:
        if batch.rows > self.max_rows:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {batch.rows} rows")
        return super().forward(batch)


def harness(monkeypatch: pytest.MonkeyPatch, max_rows: int = 1_000_000) -> Engine:
    with monkeypatch.context() as patch:
        patch.setattr("tests.fakes.FakeModel", LimitedModel)
        engine, model = make_engine(Case(prefill_chunk=CHUNK, slots=1024, policy=lambda: FixedSteps(3)))
    assert isinstance(model, LimitedModel)
    model.max_rows = max_rows
    connect_inline(engine, Case())
    return engine


def tokens(outputs: dict[int, Output]) -> dict[int, tuple[int, ...]]:
    return {number: output.tokens for number, output in outputs.items()}


def test_round_without_memory_is_run_again_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bool] = []
    monkeypatch.setattr(engine_module, "release_memory", lambda: released.append(True))
    submits = mixed_requests(8)
    expected = tokens(run(harness(monkeypatch), submits))
    engine = harness(monkeypatch, max_rows=24)
    assert tokens(run(engine, submits)) == expected
    assert engine.oom_backoff.count == len(released) > 0
    assert "rows" in engine.oom_backoff.reason
    assert engine.scheduler.prefix is not None
    assert engine.scheduler.pool.used == engine.scheduler.prefix.size, "no slot is lost"
    with pytest.raises(DeviceMemoryError, match="CUDA out of memory"):
        run(harness(monkeypatch, max_rows=0), mixed_requests(1))


@pytest.mark.slow
def test_oom_during_sampling_is_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    submits = mixed_requests(6)
    expected = tokens(run(harness(monkeypatch), submits))
    engine, sample, calls = harness(monkeypatch), sampling.sample, 0

    def scarce(logits: torch.Tensor, *more: Any, **named: Any) -> object:
        nonlocal calls
        calls += 1
        if calls % 10 == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample(logits, *more, **named)

    monkeypatch.setattr(round_module, "sample", scarce)
    assert tokens(run(engine, submits)) == expected
    assert engine.oom_backoff.count > 3


def test_backoff_halves_limits_and_restores_them() -> None:
    oom_backoff = OomBackoff(CHUNK)
    assert (oom_backoff.chunk, oom_backoff.nodes) == (CHUNK, None)
    oom_backoff.on_oom(30, "too little")
    assert (oom_backoff.chunk, oom_backoff.nodes) == (15, 0)
    oom_backoff.on_oom(0, "too little")  # a round without prefill rows
    assert (oom_backoff.chunk, oom_backoff.nodes) == (7, 0)
    seen: list[tuple[int, int | None]] = []
    for _ in range(1000):
        oom_backoff.on_success()
        if (oom_backoff.chunk, oom_backoff.nodes) not in seen:
            seen.append((oom_backoff.chunk, oom_backoff.nodes))
    assert seen[:4] == [(7, 0), (14, 8), (28, 16), (CHUNK, 32)]
    assert seen[-1] == (CHUNK, None)
    assert oom_backoff.count == 2
    for _ in range(9):
        oom_backoff.on_oom(50, "out of memory")
    assert oom_backoff.chunk == 1


def test_memory_of_a_failed_computation_is_freed() -> None:
    freed: list[int] = []

    class Activation:
        def __del__(self) -> None:
            freed.append(1)

    def compute() -> None:
        activation = Activation()
        assert activation is not None
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(DeviceMemoryError, match="CUDA out of memory") as caught:
        within_memory(compute)
    assert freed == [1]
    assert caught.value.__context__ is None
