"""Tests of `ssd bench kernels`: times of every usable backend, and the bytes that a batch reads."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from ssd_serve.app.cli.main import build_parser, main
from ssd_serve.base.errors import SettingsError, UserError
from ssd_serve.bench import conformance, kernel_times
from ssd_serve.bench.conformance import ConformanceRow, check_conformance
from ssd_serve.bench.kernel_times import KernelPlan, layers_for, run_kernels
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.backends import Candidate
from ssd_serve.kernels.attention.contract import AttentionBackend, Maker
from ssd_serve.kernels.attention.sdpa import SdpaAttention, SdpaPlan
from ssd_serve.kernels.attention.self_test import Heads, RequestShape, Trial, largest_error, random_batch
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.roof import Roof


def refuses(cache: KVCache, heads: int) -> AttentionBackend[Any]:
    """Backend that supports neither float32 nor heads of 96."""
    if cache.layout.dtype is torch.float32 or cache.layout.layers[0].head_dim == 96:
        raise UserError("choose another dtype")
    return SdpaAttention(cache, heads)


def raises(cache: KVCache, heads: int) -> AttentionBackend[Any]:
    """Raise, as a compiler does that does not know the device."""
    raise RuntimeError("no kernel image\nand much more")


def small_suite(make: Maker, device: str, dtypes: Sequence[torch.dtype]) -> Iterator[ConformanceRow]:
    """A batch with heads of 64, 96 and 128."""
    for dtype in dtypes:
        for head_dim in (64, 96, 128):
            heads = Heads(4, 2, head_dim, dtype)
            yield ConformanceRow("a", Trial(heads, largest_error(make, heads, (RequestShape(5, 3),), device)))


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(conformance, "conformance", small_suite)
    return monkeypatch


def use(patch: pytest.MonkeyPatch, *found: Candidate) -> None:
    for module in (kernel_times, conformance):
        patch.setattr(module, "candidates", lambda *_: list(found))


@pytest.mark.slow
def test_a_backend_that_raises_does_not_end_the_suite(suite: pytest.MonkeyPatch) -> None:
    use(suite, Candidate("broken", "", raises), Candidate("sdpa", "", SdpaAttention))
    result = check_conformance("cpu", lambda text: None)
    assert result["right"] is False
    rows: Any = result["results"]
    assert [row for row in rows if row["backend"] == "broken"] == [
        {"backend": "broken", "dtype": dtype, "raised": "RuntimeError: no kernel image", "right": False}
        for dtype in ("float32", "bfloat16", "float16")
    ]
    assert [row["right"] for row in rows if row["backend"] == "sdpa"] == [True] * 9
    json.dumps(result)


def test_what_a_backend_refuses_is_unsupported_and_the_rest_is_tried(suite: pytest.MonkeyPatch) -> None:
    use(suite, Candidate("picky", "", refuses))
    result = check_conformance("cpu", lambda text: None)
    rows: Any = result["results"]
    assert [row for row in rows if row["dtype"] == "float32"] == [
        {"backend": "picky", "dtype": "float32", "unsupported": "choose another dtype"}
    ]
    half = [row.get("heads", "unsupported") for row in rows if row["dtype"] == "float16"]
    assert half == ["4/2 heads of 64 in float16", "4/2 heads of 128 in float16", "unsupported"]
    assert result["right"] is True


def test_nothing_is_right_where_nothing_was_tried(suite: pytest.MonkeyPatch) -> None:
    use(suite, Candidate("absent", "it needs a GPU", raises))
    assert check_conformance("cpu", lambda text: None)["right"] is False
    use(suite, Candidate("picky", "", refuses))
    assert check_conformance("cpu", lambda text: None, quick=True)["right"] is False


class Breaks(SdpaAttention):
    """Passes its self-test, and fails at a batch of more than 200 rows."""

    def plan(self, batch: Batch) -> SdpaPlan:
        if batch.rows > 200:
            raise RuntimeError("out of registers")
        return super().plan(batch)


def test_a_backend_that_raises_is_not_timed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    roof = Roof(1, "float32", {1: 1e-10}, 1e11)
    monkeypatch.setattr(kernel_times, "measure_roof", lambda *_, **__: roof)
    monkeypatch.setattr(kernel_times, "SHAPES", {"a": (RequestShape(0, 201, depth=0),)})
    use(
        monkeypatch,
        Candidate("broken", "", raises),
        Candidate("breaks", "", Breaks),
        Candidate("sdpa", "", SdpaAttention),
    )
    lines: list[str] = []
    result = run_kernels(KernelPlan(heads=4, kv_heads=2, head_dim=64, repeats=2), None, lines.append)
    rows: Any = result["results"]
    assert [row["backend"] for row in rows] == ["sdpa"]
    assert result["skipped"] == [
        {"shape": "a", "backend": "broken", "reason": "RuntimeError: no kernel image"},
        {"shape": "a", "backend": "breaks", "reason": "RuntimeError: out of registers"},
    ]
    assert "a: breaks is skipped: RuntimeError: out of registers" in lines


def test_layers_are_more_than_a_gpu_caches() -> None:
    assert layers_for("cuda:0", 4 * 2**20) == 128
    assert layers_for("cuda:0", 2**30) == 8
    assert layers_for("cuda:0", 1000) == 256
    assert layers_for("cpu", 1000) == 8


def test_quartiles_need_two_values() -> None:
    parser = build_parser()
    assert parser.parse_args(["bench", "kernels", "--repeats", "2"]).repeats == 2
    with pytest.raises(SettingsError, match="must be at least 1"):
        parser.parse_args(["bench", "kernels", "--repeats", "0"])


def test_every_backend_and_shape_has_a_line(native: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    roof = Roof(1, "float32", {1: 1e-10}, 1e11)
    monkeypatch.setattr(kernel_times, "measure_roof", lambda *_, **__: roof)
    monkeypatch.setattr(
        kernel_times,
        "SHAPES",
        {"a": (RequestShape(20, 5),), "b": (RequestShape(3, 1), RequestShape(0, 9, depth=0))},
    )
    result = run_kernels(KernelPlan(heads=4, kv_heads=2, head_dim=64, repeats=3), native, lambda text: None)
    rows: Any = result["results"]
    assert [(row["shape"], row["backend"]) for row in rows] == [
        ("a", "native"),
        ("a", "sdpa"),
        ("b", "native"),
        ("b", "sdpa"),
    ]
    assert result["heads"] == [4, 2, 64]


def test_the_roof_is_reading_once_or_computing() -> None:
    plan = KernelPlan(heads=32, kv_heads=8, head_dim=128)
    reading = Roof(1, "float32", {1: 1e-9}, 1e15)
    asked = (RequestShape(100, 4, depth=0), RequestShape(28, 4, depth=0))
    batch = random_batch(random.Random(0), 200, asked)
    size = 136 * 2 * 8 * 128 * 4
    assert kernel_times.min_seconds(plan, torch.float32, asked, batch, reading) == pytest.approx(size * 1e-9)
    computing = Roof(1, "float32", {1: 1e-15}, 1e9)
    products = 4 * 100 + 4 * 28 + 2 * (1 + 2 + 3 + 4)
    expected = 4 * products * 32 * 128 / 1e9
    assert kernel_times.min_seconds(plan, torch.float32, asked, batch, computing) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["kernels", "--device", "cuda:9"], "--device is cuda:9, but this machine has"),
        (["kernels", "--conformance", "--device", "cuda:9"], "--device is cuda:9, but this machine has"),
        (["kernels", "--heads", "7", "3", "64"], "must be a multiple of KV heads"),
        (["kernels", "--repeats", "1"], "quartiles need at least 2"),
    ],
)
def test_what_cannot_be_measured_is_a_clear_error(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert word in capsys.readouterr().err
