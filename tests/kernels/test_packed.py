"""Packed products: those of the dequantised matrix with rows of 8 bits, to the same bits in every way and batch."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ssd_serve.kernels.native import packed
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.packed import TYPES, NativePackedLinear, StoredBlocks

WAYS = (1, 2, packed.FASTEST)


@pytest.fixture(scope="module")
def library(native: NativeLibrary) -> NativeLibrary:
    if not packed.has_packed_products(native):
        pytest.skip("this processor has neither AVX-512 VNNI nor AVX2")
    assert packed.can_multiply_packed(native)
    return native


def stored(kind: str, outputs: int, inputs: int, seed: int = 0) -> StoredBlocks:
    """Random codes, levels and, about zero, scales and minima."""
    random, (numbers, size) = np.random.default_rng(seed), GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (outputs, inputs // numbers, size), dtype=np.uint8)
    halves = (random.standard_normal((outputs, inputs // numbers, 2)) * 0.01).astype(np.float16)
    if kind == "Q6_K":
        blocks[..., -2:] = halves[..., :1].view(np.uint8)
    else:
        count = 2 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
        blocks[..., : 2 * count] = np.ascontiguousarray(halves[..., :count]).view(np.uint8)
    return StoredBlocks(kind, blocks.reshape(outputs, -1))


def weights(matrix: StoredBlocks) -> torch.Tensor:
    return torch.from_numpy(dequantize(matrix.blocks, GGMLQuantizationType[matrix.kind]))


def some(rows: int, inputs: int) -> torch.Tensor:
    """Rows of very different sizes."""
    sizes = 10.0 ** torch.linspace(-4, 3, rows).unsqueeze(1)
    return (torch.randn((rows, inputs), generator=torch.Generator().manual_seed(rows)) * sizes).bfloat16()


def of_8_bits(rows: torch.Tensor) -> torch.Tensor:
    """Rows as products see them: whole multiples of 1 / 127 of the largest number among 32."""
    blocks = rows.float().view(len(rows), -1, 32)
    top = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    factor = torch.full_like(top, 127) / top  # torch multiplies a number by reciprocals
    return ((blocks * factor).round().double() * (top / 127).double()).view(rows.shape)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (33, 768), (96, 512)])
def test_products_are_those_of_the_dequantised_matrix(
    library: NativeLibrary, kind: str, outputs: int, inputs: int
) -> None:
    matrix, rows = stored(kind, outputs, inputs), some(7, inputs)
    bias = torch.linspace(-1, 1, outputs).bfloat16()
    exact = of_8_bits(rows) @ weights(matrix).double().T + bias.double()
    found = NativePackedLinear(library, [matrix], inputs, bias)(rows)
    size = of_8_bits(rows).abs() @ weights(matrix).double().abs().T  # what rounding is relative to
    assert ((found.double() - exact).abs() <= exact.abs() / 256 + size * 2e-6).all()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(31, 256), (70, 768)])
def test_every_way_and_batch_gives_the_same_bits(
    library: NativeLibrary, kind: str, outputs: int, inputs: int
) -> None:
    matrix, rows = stored(kind, outputs, inputs), some(33, inputs)
    plain = NativePackedLinear(library, [matrix], inputs, way=0)(rows)
    for way in WAYS:
        linear = NativePackedLinear(library, [matrix], inputs, way=way)
        assert torch.equal(linear(rows), plain)
        for count in (1, 4, 17):
            assert torch.equal(linear(rows[:count]), plain[:count])
        assert torch.equal(linear(rows[32:]), plain[32:])


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q8_0"])
@pytest.mark.parametrize("inputs", [32, 96, 288])
def test_inputs_need_no_more_than_whole_blocks(library: NativeLibrary, kind: str, inputs: int) -> None:
    matrix, rows = stored(kind, 40, inputs), some(3, inputs)
    plain = NativePackedLinear(library, [matrix], inputs, way=0)(rows)
    assert all(
        torch.equal(NativePackedLinear(library, [matrix], inputs, way=way)(rows), plain) for way in WAYS
    )


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("byte", [0, 255])
def test_largest_codes_and_rows_do_not_overflow(library: NativeLibrary, kind: str, byte: int) -> None:
    matrix = stored(kind, 32, 256)
    scale = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    blocks = np.full_like(matrix.blocks, byte).reshape(
        32, -1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    )
    blocks[..., -2:] = scale if kind == "Q6_K" else blocks[..., -2:]
    blocks[..., :4] = np.tile(scale, 2) if kind not in ("Q6_K", "Q8_0") else blocks[..., :4]
    blocks[..., :2] = scale if kind != "Q6_K" else blocks[..., :2]
    matrix = StoredBlocks(kind, blocks.reshape(32, -1))
    rows = torch.tensor([[1000.0] * 256, [-1000.0] * 256, [1000.0, -1000.0] * 128]).bfloat16()
    exact = of_8_bits(rows) @ weights(matrix).double().T
    for way in (0, *WAYS):
        found = NativePackedLinear(library, [matrix], 256, way=way)(rows)
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1.0)


def test_matrices_of_several_types_are_one_layer(library: NativeLibrary) -> None:
    parts = [stored(kind, 40, 512, seed) for seed, kind in enumerate(("Q4_K", "Q4_K", "Q6_K", "Q8_0"))]
    rows, bias = some(5, 512), torch.randn(160).bfloat16()
    together = NativePackedLinear(library, parts, 512, bias)
    alone = [
        NativePackedLinear(library, [each], 512, bias[40 * n :][:40])(rows) for n, each in enumerate(parts)
    ]
    assert torch.equal(together(rows), torch.cat(alone, 1))
    assert together(rows.view(5, 1, 512)).shape == (5, 1, 160)
    assert together(rows[:0]).shape == (0, 160)  # a prefill without wanted rows
    assert together.nbytes < 1.05 * sum(64 / 40 * each.blocks.nbytes for each in parts)


def test_no_rows_give_no_rows(library: NativeLibrary) -> None:
    linear = NativePackedLinear(library, [stored("Q4_1", 196, 256)], 256)
    assert linear(some(9, 256)[:0]).shape == (0, 196)


def test_threads_do_not_change_results(library: NativeLibrary) -> None:
    linear, rows = NativePackedLinear(library, [stored("Q4_1", 196, 256)], 256), some(9, 256)
    one = linear(rows)
    torch.set_num_threads(3)
    try:
        assert torch.equal(linear(rows), one)
    finally:
        torch.set_num_threads(1)


def test_rows_that_are_no_numbers_stay_apart(library: NativeLibrary) -> None:
    linear, rows = NativePackedLinear(library, [stored("Q4_0", 64, 256)], 256), some(4, 256)
    found = linear(rows)
    rows[1, 70], rows[2, 3] = torch.nan, torch.inf
    spoilt = linear(rows)
    assert spoilt[1].isnan().all()
    assert not spoilt[2].isfinite().any()
    assert torch.equal(spoilt[0], found[0])
    assert torch.equal(spoilt[3], found[3])


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_the_matrix_are_read_from_it(library: NativeLibrary, kind: str) -> None:
    matrix = stored(kind, 70, 512)
    table, wanted = NativePackedLinear(library, [matrix], 512), torch.tensor([69, 0, 31, 32, 0])
    expected = weights(matrix)[wanted].bfloat16()
    torch.testing.assert_close(table.index_select(0, wanted), expected, rtol=2**-8, atol=0.0)
    assert table.index_select(0, wanted[:0]).shape == (0, 512)
    for outside in (-1, 70):
        with pytest.raises(IndexError, match="0 to 69"):
            table.index_select(0, torch.tensor([0, outside]))
