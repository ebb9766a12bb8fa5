"""Tests of a whole model on a pretended GPU: every tensor is there, and the logits equal those of the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssd_serve.kernels import fp8
from ssd_serve.kernels.attention import backends
from ssd_serve.kernels.attention.backends import AttentionOptions
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.parallel import Group, Parallel
from tests.models import checkpoints
from tests.models.fp8_checkpoints import FORMS, write
from tests.pretended_device import DEVICE, pretended_device

SLOTS = 128


def batches() -> list[Batch]:
    """Return a prompt, a tree below it together with a second prompt, and a row without logits, in scattered slots."""
    slots = [3 * index % 101 for index in range(40)]
    prompt = RequestRows(range(20), range(20), slots[:20], np.empty(0, dtype=np.int32), [19])
    tree = RequestRows(
        [5, 6, 7, 8],
        [20, 21, 21, 22],
        slots[20:24],
        np.asarray(slots[:20], dtype=np.int32),
        [0, 1, 2, 3],
        [0b0001, 0b0011, 0b0101, 0b1011],
    )
    other = RequestRows(range(7, 17), range(10), slots[24:34], np.empty(0, dtype=np.int32), [])
    unwanted = RequestRows([9], [10], slots[34:35], np.asarray(slots[24:34], dtype=np.int32), [])
    return [build_batch([prompt]), build_batch([tree, other]), build_batch([unwanted])]


@pytest.fixture(autouse=True)
def _without_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test is slow in Triton's interpreter, and the logits are compared here."""
    monkeypatch.setattr(backends, "failure_of", lambda *_: "")


def load(folder: Path, device: str, backend: str) -> Model:
    options = AttentionOptions(backend)
    return load_model(
        folder,
        ModelOptions(
            device=device, dtype="fp32", slots=SLOTS, context=None, attention=options, features=(1,)
        ),
    )


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("qwen3-qk-norm", "sdpa"),
        pytest.param("llama-linear-biases", "sdpa", marks=pytest.mark.slow),
        pytest.param("mistral-window", "triton", marks=pytest.mark.slow),
    ],
)
def test_forward_stays_on_the_device_without_waiting(case: str, backend: str, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make(case), tmp_path)
    on_cpu = load(folder, "cpu", "sdpa")
    expected = [on_cpu.forward(batch) for batch in batches()]
    with pretended_device() as reads:
        model = load(folder, DEVICE, backend)
        assert (model.facts.device, model.facts.attention) == (DEVICE, backend)
        reads.clear()
        found = [model.forward(batch) for batch in batches()]
        assert reads == []
        for ours, theirs in zip(found, expected, strict=True):
            ours.completion.wait()
            for mine, right in ((ours.logits, theirs.logits), *both_features(ours, theirs)):
                assert mine.device == torch.device(DEVICE)
                torch.testing.assert_close(mine.cpu(), right, atol=1e-4, rtol=0)


class HalfAlone(Group):
    """Rank 0 of two; the other rank contributes zeros."""

    @property
    def parallel(self) -> Parallel:
        return Parallel(0, 2)

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def gather(self, share: torch.Tensor, whole: int) -> torch.Tensor:
        return torch.nn.functional.pad(share, (0, whole - share.shape[1]))


def test_rank_forward_stays_on_the_device_without_waiting(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("qwen3-qk-norm"), tmp_path)
    options: dict[str, Any] = {"dtype": "fp32", "slots": SLOTS, "context": None}
    on_cpu = load_model(
        folder, ModelOptions(device="cpu", attention=AttentionOptions("sdpa"), **options), group=HalfAlone()
    )
    expected = [on_cpu.forward(batch).logits for batch in batches()]
    with pretended_device() as reads:
        model = load_model(
            folder,
            ModelOptions(device=DEVICE, attention=AttentionOptions("sdpa"), **options),
            group=HalfAlone(),
        )
        reads.clear()
        found = [model.forward(batch).logits for batch in batches()]
        assert reads == []
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.device == torch.device(DEVICE)
            torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_checked_attention_compares_on_the_device(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("mistral-window"), tmp_path)
    differences: list[object] = []
    with pretended_device():
        options = AttentionOptions("triton", check="sdpa", report=differences.append)
        model = load_model(
            folder, ModelOptions(device=DEVICE, dtype="fp32", slots=SLOTS, context=None, attention=options)
        )
        for batch in batches():
            model.forward(batch)
    assert differences == []


def test_cpu_kernels_are_not_used_on_a_device(native: NativeLibrary, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("llama"), tmp_path)
    options = AttentionOptions("sdpa")  # timing the backends would take long here
    with pretended_device():
        model = load_model(
            folder,
            ModelOptions(
                device=DEVICE, dtype="fp32", slots=SLOTS, context=None, attention=options, native=native
            ),
        )
        assert model.facts.kernels == "torch"
        assert model.facts.attention != "native"
        model.forward(batches()[0]).completion.wait()


def both_features(ours: Any, theirs: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    assert ours.features.keys() == theirs.features.keys() == {"layer.1"}
    return [(ours.features[name], theirs.features[name]) for name in ours.features]


@pytest.mark.parametrize("native", [fp8.FORMATS[1], pytest.param(None, marks=pytest.mark.slow)])
def test_fp8_weights_and_products_are_on_the_device(
    native: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products use the device's fp8 format with rounded rows; without such a format weights are widened."""

    def product(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        if a.dtype is not native:
            raise RuntimeError("unsupported")
        scales: tuple[torch.Tensor, ...] = options["scale_a"], options["scale_b"]
        assert {each.device for each in (a, b, *scales)} == {torch.device(DEVICE)}
        return a.float() @ b.float() * scales[0] * scales[1]

    write(FORMS["compressed-tensor-static"], tmp_path)
    wide = load_model(tmp_path, ModelOptions(device="cpu", dtype="bf16", slots=SLOTS, context=None))
    expected = [wide.forward(batch).logits for batch in batches()[:2]]
    monkeypatch.setattr(torch.ops.aten, "_scaled_mm", product)
    with pretended_device() as reads:
        options = AttentionOptions("sdpa")
        model = load_model(
            tmp_path, ModelOptions(device=DEVICE, dtype="bf16", slots=SLOTS, context=None, attention=options)
        )
        assert model.facts.weight_bytes < (1.01 if native is None else 0.6) * wide.facts.weight_bytes
        reads.clear()
        found = [model.forward(batch).logits for batch in batches()[:2]]
        assert reads == []
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.cpu() - theirs).norm() < (0.05 if native is None else 0.2) * theirs.norm()
