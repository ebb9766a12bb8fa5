"""Sizes before loading, dtypes, devices, and the memory check."""

from pathlib import Path

import pytest
import torch

from ssd_serve.base.errors import MemoryShortError, UserError
from ssd_serve.kernels import cpu_products
from ssd_serve.kernels.attention.backends import AttentionOptions
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models import load, memory, sizes
from ssd_serve.models.architectures.dense.decoder import DenseDecoder
from tests.models import checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tied model."""
    return checkpoints.save(checkpoints.make("llama3-gqa-tied"), tmp_path_factory.mktemp("tied"))


def test_dtype(monkeypatch: pytest.MonkeyPatch, native: NativeLibrary) -> None:
    for hardware, compiled, expected in (
        (True, False, "bf16"),
        (False, True, "bf16"),
        (False, False, "fp32"),
    ):
        monkeypatch.setattr(sizes, "cpu_has_fast_bf16", lambda hardware=hardware: hardware)
        monkeypatch.setattr(sizes, "can_multiply_bf16", lambda _, compiled=compiled: compiled)
        assert sizes.resolve_dtype("auto", "cpu:0-1", native) == expected
    assert sizes.resolve_dtype("auto", "cpu", None) == "fp32"
    assert sizes.resolve_dtype("auto", "cuda:0") == "bf16"
    assert sizes.resolve_dtype("fp16", "cpu") == "fp16"
    with pytest.raises(UserError, match="'fp8' is unknown"):
        sizes.resolve_dtype("fp8", "cpu")


def test_devices() -> None:
    assert [sizes.torch_device(name) for name in ("cpu", "cpu:3", "cpu:0-1", "cuda:1")] == [
        "cpu", "cpu", "cpu", "cuda:1",
    ]  # fmt: skip
    assert isinstance(cpu_products.cpu_has_fast_bf16(), bool)


def test_sizes_from_the_configuration_alone(folder: Path) -> None:
    before = sizes.model_sizes(folder, device="cpu", dtype="bf16")
    model = load.load_model(
        folder,
        load.ModelOptions(device="cpu:0", dtype="bf16", slots=16, context=64),
    )
    facts = model.facts
    assert before.kv_bytes_per_slot == facts.kv_bytes_per_slot
    assert before.resident_bytes == facts.weight_bytes + 199 * 64 * 2
    on_gpu = sizes.model_sizes(folder, device="cuda:0", dtype="bf16")
    assert on_gpu.resident_bytes == facts.weight_bytes  # tied: one matrix is embedding and head
    assert (facts.device, facts.dtype, facts.context, model.slots) == ("cpu", "bf16", 64, 16)


def test_memory_is_checked_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "available_memory", lambda device: 300 << 20)
    load.load_model(folder, load.ModelOptions(device="cpu", dtype="fp32", slots=16, context=64))
    with pytest.raises(MemoryShortError, match="GiB are free"):
        load.load_model(folder, load.ModelOptions(device="cpu", dtype="fp32", slots=1 << 20, context=64))


def test_container_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    free = memory.available_memory("cpu")
    assert free > 1 << 20
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert memory.available_memory("cpu") == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory("cpu") > 1 << 20


def test_loading_keeps_the_number_of_threads(folder: Path) -> None:
    before = torch.get_num_threads()
    load.load_model(folder, load.ModelOptions(device="cpu", dtype="fp32", slots=16, context=64))
    assert torch.get_num_threads() == before


def test_requested_tree_attention_is_used(folder: Path, native: NativeLibrary) -> None:
    def kernels(backend: str, library: NativeLibrary | None) -> str:
        model = load.load_model(
            folder,
            load.ModelOptions(
                device="cpu",
                dtype="fp32",
                slots=16,
                context=64,
                native=library,
                attention=AttentionOptions(backend),
            ),
        )
        assert isinstance(model, DenseDecoder)
        return type(model.attention).__name__

    assert [kernels(backend, native) for backend in ("auto", "native", "sdpa")] == [
        "NativeAttention",
        "NativeAttention",
        "SdpaAttention",
    ]
    assert kernels("auto", None) == "SdpaAttention"
    with pytest.raises(UserError, match="C compiler"):
        kernels("native", None)
