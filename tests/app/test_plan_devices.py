"""Shapes of known models and step times of known devices.

Published figures stand in for a machine that is not here; everything else is arithmetic on synthetic numbers.
"""

from dataclasses import replace

import pytest
import torch

from ssd_serve.app.plan.device_tables import device_sheet
from ssd_serve.app.plan.devices import Forward, MeasuredRoofs, Sheets, cost_table, never_slower
from ssd_serve.app.plan.known_models import Computing, known_model, planned_model, sized
from ssd_serve.app.plan.plan import Plan, PlanOptions
from ssd_serve.base.cost import Reading
from ssd_serve.base.errors import CheckpointError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.packed import can_multiply_packed
from ssd_serve.models.roof import Effort, Roof, measure_roof
from tests.app.plan_parts import PLAIN_SHEET, known, small_model

KINDS = (("bfloat16", 1e-10), ("packed", 2e-10))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-405b", 405.9),
        ("llama-3.1-70b", 70.6),
        ("llama-3.1-8b", 8.03),
        ("llama-3.2-3b", 3.21),
        ("llama-3.2-1b", 1.24),
        ("llama-2-7b", 6.74),
        ("qwen2.5-72b", 72.7),
        ("qwen2.5-0.5b", 0.49),
        ("qwen3-32b", 32.8),
        ("qwen3-1.7b", 1.72),
        ("qwen3-0.6b", 0.60),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert known(name).resident_bytes / 2e9 == pytest.approx(billions, rel=0.01)


def test_kv_bytes_of_a_token_and_a_tied_head_on_cpus() -> None:
    assert known("llama-3.1-70b").kv_bytes_per_token == 2 * 80 * 8 * 128 * 2
    config = known_model("llama-3.2-1b")
    assert config is not None
    on_cpu, on_gpu = (sized("x", config, Computing(place, torch.bfloat16)) for place in ("cpu", "cuda:0"))
    assert on_cpu.resident_bytes - on_gpu.resident_bytes == 128256 * 2048 * 2
    assert on_cpu.matrix_bytes == on_gpu.matrix_bytes == on_gpu.resident_bytes


def test_models_are_found_by_name_or_refused() -> None:
    computing = Computing("cpu", torch.float32)
    target = planned_model("embedded", "target", computing, None)
    draft = planned_model("embedded", "draft", computing, None)
    assert target.name == "embedded-target"
    assert target.vocabulary == draft.vocabulary == 4096
    assert target.matrix_bytes > draft.matrix_bytes > 0
    with pytest.raises(CheckpointError, match=r"llama-3.1-70b, .*qwen3-0.6b"):
        planned_model("llama-9", "target", computing, None)


@pytest.mark.parametrize(
    ("device", "model", "devices", "published", "error"),
    [
        # AMD's figures for bf16, one request, tensor parallel over 1, 2 and 4 devices.
        ("mi300x", "llama-3.1-70b", 1, 21.41, 0.005),
        ("mi300x", "llama-3.1-70b", 2, 32.87, 0.005),
        ("mi300x", "llama-3.1-70b", 4, 52.32, 0.005),
        ("H100", "llama-3.1-70b", 4, 54.7, 0.04),
        ("H100", "qwen3-32b", 4, 88.8, 0.04),
    ],
)
def test_data_sheets_meet_published_plain_speeds(
    device: str, model: str, devices: int, published: float, error: float
) -> None:
    step_s = Sheets(device_sheet(device), devices).step_s(known(model), devices, Forward.of_one(1, 384))
    assert 1 / step_s == pytest.approx(published, rel=error)


@pytest.mark.parametrize(
    ("name", "growth_ms"), [("llama-3.1-8b", {8: 0.44, 64: 0.81}), ("llama-3.2-1b", {8: 0.14, 64: 0.36})]
)
def test_rows_cost_as_measured_on_one_h100(name: str, growth_ms: dict[int, float]) -> None:
    """Milliseconds more than a single row, after 128 tokens: means of two backends."""
    platform = Sheets(device_sheet("H100"), 1)
    parts = {rows: platform.parts(known(name), 1, Forward.of_one(rows, 128)) for rows in (1, *growth_ms)}
    took_ms = {rows: 1e3 * (each.matmul_s + each.layers_s) for rows, each in parts.items()}
    for rows, measured in growth_ms.items():
        assert took_ms[rows] - took_ms[1] == pytest.approx(measured, abs=0.08)


def test_mi355x_computes_faster_than_the_mi350x_and_reads_as_fast() -> None:
    slower, faster = (Sheets(device_sheet(name), 1) for name in ("mi350x", "mi355x"))
    model = known("llama-3.1-8b")
    read, computed = Forward(1, 1), Forward(4096, 4096)
    assert faster.step_s(model, 1, read) == slower.step_s(model, 1, read)
    assert faster.step_s(model, 1, computed) < slower.step_s(model, 1, computed)


def test_prompt_reads_until_it_computes_longer() -> None:
    """1 GB at 1 TB/s is 1 ms; a row is 1 GFLOP, so that 100 TFLOPS take 1 ms for 100 rows."""
    platform = Sheets(PLAIN_SHEET, 2)
    model = small_model()
    seconds = [platform.step_s(model, 1, Forward(rows, rows)) for rows in (1, 100, 200)]
    assert seconds == pytest.approx([1e-3, 1e-3, 2e-3])
    assert platform.step_s(model, 2, Forward(1, 1)) == pytest.approx(0.5e-3)
    assert platform.step_s(model, 1, Forward(1, 1, 1_000_000)) == pytest.approx(2e-3)  # 1 GB of KV cache


def test_decoding_rows_add_matmul_and_layer_time() -> None:
    model = replace(small_model(), vocabulary=0)
    sheet = replace(PLAIN_SHEET, row_s=1e-5)
    parts = [Sheets(sheet, 1).parts(model, 1, Forward.of_one(rows, 0)) for rows in (1, 100)]
    assert [each.matmul_s for each in parts] == pytest.approx([1e-5, 1e-3])
    assert [each.layers_s for each in parts] == pytest.approx([1e-4, 1e-2])  # of ten layers
    assert parts[1].seconds == pytest.approx(1e-3 + 1e-3 + 1e-2)


def test_ranks_exchange_twice_a_layer() -> None:
    """A row of 1,000 numbers is 2 kB; of two ranks each sends it once, of four one and a half times."""
    model = replace(small_model(), hidden=1000)
    sheet = replace(PLAIN_SHEET, exchange_s=1e-5, peer_gb_s=1.0, links_gb_s=2.0)

    def exchange_s(ranks: int, rows: int) -> float:
        return Sheets(sheet, 8).parts(model, ranks, Forward.of_one(rows, 0)).exchange_s

    assert exchange_s(1, 8) == 0
    assert exchange_s(2, 0) == pytest.approx(20 * 1e-5)
    assert exchange_s(2, 8) - exchange_s(2, 0) == pytest.approx(20 * 8 * 2e3 / 1e9)
    assert exchange_s(4, 8) - exchange_s(4, 0) == pytest.approx(20 * 8 * 3e3 / 2e9)


def test_tree_rows_read_the_context_once_and_attend_each() -> None:
    model = replace(small_model(), attention_flops=1e5)
    tree = Sheets(PLAIN_SHEET, 1).parts(model, 1, Forward.of_one(8, 1_000_000))
    several = Sheets(PLAIN_SHEET, 1).parts(model, 1, Forward(8, 0, 8_000_000, 8_000_000))
    assert tree.attention_s == pytest.approx(1e-3 + 8e-3)  # 1 GB, and 0.8 TFLOP
    assert several.attention_s == pytest.approx(8e-3 + 8e-3)


def test_models_are_split_over_ranks_and_kv_heads_are_copied() -> None:
    """Each of 8 devices holds one of two KV heads: half of the cache, not an eighth."""
    many = Sheets(PLAIN_SHEET, 16)
    assert [many.group(small_model(), most) for most in (1, 3, 5, 7, 16)] == [1, 2, 4, 4, 8]
    assert many.group(known("qwen2.5-0.5b"), 8) == 2  # of 14 heads and 2 key-value heads
    model, options = small_model(kv_heads=2), PlanOptions(context=4000)
    (whole, split) = (Plan(Sheets(PLAIN_SHEET, n), model, None, options).plain.shares[0] for n in (1, 8))
    assert (split.kv, split.weights) == (whole.kv / 2, whole.weights / 8)
    platform = Sheets(PLAIN_SHEET, 8)
    reading = platform.step_s(model, 8, Forward(1, 0, 1_000_000)) - platform.step_s(model, 8, Forward(1))
    assert reading == pytest.approx(0.5e-3)  # half of the 1 GB of a million tokens


def test_measured_roofs_interpolate_between_rows_and_grow_beyond() -> None:
    roof = Roof(1, "bfloat16", {1: 1e-10, 4: 2.5e-10}, 1e15, {1: 0.0})
    platform = MeasuredRoofs("CPU core", 1, {1: roof}, 1e10, True, 0)
    seconds = [platform.step_s(small_model(), 1, Forward(rows)) for rows in (1, 2, 4, 8)]
    assert seconds == pytest.approx([0.1, 0.15, 0.25, 0.5])
    narrow = replace(small_model(), matrix_bytes=500_000_000)  # fp8: reading takes half, computing as long
    assert [platform.step_s(narrow, 1, Forward(rows)) for rows in (1, 4)] == pytest.approx([0.05, 0.2])


def test_packed_weights_have_a_roof_of_their_own() -> None:
    """Their bytes take the packed roof's time, and layers what was measured, not a share of the wide roof."""
    wide, packed = (Roof(1, name, {1: speed}, 1e15, {1: 1e-3, 4: 2e-3}) for name, speed in KINDS)
    platform = MeasuredRoofs("CPU core", 1, {1: wide}, 1e10, True, 0, packed={1: packed})
    model = replace(small_model(), matrix_bytes=300_000_000, served_dtype="packed")
    assert platform.step_s(model, 1, Forward(1)) == pytest.approx(0.06 + 0.01)
    assert platform.step_s(model, 1, Forward(4)) == pytest.approx(0.24 + 0.02)
    assert platform.step_s(replace(model, served_dtype="bf16"), 1, Forward(1)) == pytest.approx(0.03 + 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["packed", "bfloat16"])
def test_roof_is_measured_with_the_kernels_of_serving(native: NativeLibrary, dtype: str) -> None:
    if not can_multiply_packed(native):
        pytest.skip("this processor has neither AVX-512 VNNI nor AVX2")
    effort = Effort((1, 4), 1, 0.02, 1 << 20)
    found = measure_roof("cpu", dtype, (), effort, native)
    assert found.dtype == dtype
    assert 1e8 < found.bandwidth < 1e12
    assert all(0 <= each < 0.1 for each in found.layer_s.values())
    assert found.layer_s.keys() == ({1, 4} if dtype == "packed" else {1})


def test_drafter_slows_the_target_unless_it_fits_the_cache() -> None:
    roofs = {count: Roof(count, "bfloat16", {1: 1 / speed}, 1e12) for count, speed in ((1, 30e9), (2, 40e9))}
    platform = MeasuredRoofs("CPU core", 2, roofs, 1e10, True, cache_bytes=32 << 20)
    assert platform.disturbance(1, small_model(1e9)) == pytest.approx(1.5)
    assert platform.disturbance(1, small_model(1e6)) == 1.0


def test_more_cores_are_never_slower() -> None:
    one = Roof(1, "bfloat16", {1: 3.0, 4: 5.0}, 200.0)
    busy = Roof(2, "bfloat16", {1: 9.0, 4: 4.0}, 100.0)
    assert never_slower([one, busy]) == [one, Roof(2, "bfloat16", {1: 3.0, 4: 4.0}, 200.0)]


def test_cost_table_has_the_step_times_of_the_device() -> None:
    platform, model = Sheets(device_sheet("mi300x"), 1), known("llama-3.1-8b")
    table = cost_table(platform, model, 1, 2048)
    for rows in (1, 16, 64):
        expected = platform.step_s(model, 1, Forward.of_one(rows, 2048))
        assert table.seconds(rows, Reading(2048, 2048 * rows)) == pytest.approx(expected, rel=0.02)
