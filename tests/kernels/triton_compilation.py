"""Compiles the Triton kernels for GPUs of other machines, and reads their use of registers and memory.

A kernel that spills registers or uses no matrix instructions gives right results, only slowly. This module
finds such kernels without the GPU.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ssd_serve.base.errors import SsdError
from ssd_serve.kernels.triton.kernel import attend_parts, merge_parts
from ssd_serve.kernels.triton.noise import BLOCKS, fill_noise
from ssd_serve.kernels.triton.shapes import SPLIT, STAGES, WARPS, block_n, merged, tiles_of

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_CACHE = "*{}"
_TYPES = {
    **dict.fromkeys(("queries", "keys", "values", "out"), _CACHE),
    **dict.fromkeys(("partial", "partial_lse", "lse"), "*fp32"),
    **dict.fromkeys(("positions", "tree_positions"), "*i32"),
    **dict.fromkeys(("tile_requests", "tile_rows", "tile_counts", "row_parts", "ancestry"), "*i32"),
    **dict.fromkeys(("prefix_slots", "prefix_offsets", "tree_slots", "tree_offsets"), "*i32"),
    **dict.fromkeys(("query_row_stride", "query_head_stride", "head_stride", "slot_stride"), "i32"),
    **dict.fromkeys(("first_tile", "first_row", "rows", "heads", "words", "window"), "i32"),
    "scale": "fp32",
    **{"table": "*fp32", "lines": "*i64", "counters": "*i32", "vocabulary": "i32"},
}
"""Triton's types of the kernels' arguments by name; {} is the type of cache, queries and results."""
_MULTIPLIES = ("attend_parts",)
"""Kernels that should use matrix instructions."""


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU.

    `matrix` is a pattern of its matrix instructions in assembly ({} is the type). `shared_bytes` is the shared
    memory of one program.
    """

    gpu: GPUTarget
    listing: str
    matrix: str
    shared_bytes: int

    @property
    def name(self) -> str:
        return f"sm{self.gpu.arch}" if self.gpu.backend == "cuda" else str(self.gpu.arch)


TARGETS = (
    Target(GPUTarget("hip", "gfx942", 64), "amdgcn", r"v_mfma_\w+_{}", 64 << 10),
    Target(GPUTarget("hip", "gfx950", 64), "amdgcn", r"v_mfma_\w+_{}", 160 << 10),
    Target(GPUTarget("cuda", 90, 32), "ptx", r"mma\S*\.{}", 227 << 10),
)


@dataclass(frozen=True, slots=True)
class Registers:
    used: int
    spilled: int
    """Vector registers that are spilled."""
    scalar_spilled: int
    """Scalar registers that are spilled to lanes of vector registers; 0 on NVIDIA GPUs."""
    memory_bytes: int
    """Bytes of spilled registers of a thread in memory."""


@dataclass(frozen=True, slots=True)
class Compiled:
    kernel: str
    target: str
    head_dim: int
    dtype: str
    tile: int
    registers: Registers
    shared_bytes: int
    matrix_instructions: int


def compile_attention(
    target: Target, head_dim: int, dtype: torch.dtype, tile: int, windowed: bool, group: int = 8
) -> Compiled:
    """Compile one configuration of `attend_parts`; Triton's errors are passed on."""
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": tile,
        "BLOCK_N": block_n(dtype, head_dim),
        "SPLIT": SPLIT,
        "WINDOWED": windowed,
        "WIDEN": False,
    }
    return _compile(target, attend_parts, constants, dtype, tile)


def compile_merge(target: Target, head_dim: int, dtype: torch.dtype) -> Compiled:
    """Compile `merge_parts` with results of `dtype`."""
    block_d = triton.next_power_of_2(head_dim)
    constants = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_P": merged(head_dim)}
    return _compile(target, merge_parts, constants, dtype, 1)


def compile_noise(target: Target) -> Compiled:
    """Compile `fill_noise`, which depends neither on heads nor on the cache's dtype."""
    return _compile(target, fill_noise, {"BLOCKS": BLOCKS}, torch.float32, 1)


def argument_types(names: Sequence[str], constants: Mapping[str, int], dtype: str) -> dict[str, str]:
    """Return Triton's types of a kernel's arguments, in their order.

    Raises `SsdError` for an argument without a known type, and for a constant that the kernel does not take.
    """
    unknown = [name for name in names if name not in _TYPES and name not in constants]
    unknown += [name for name in constants if name not in names]
    if unknown:
        raise SsdError(f"{', '.join(unknown)}: put the kernels' arguments into the table of types")
    return {name: "constexpr" if name in constants else _TYPES[name].format(dtype) for name in names}


def _compile(
    target: Target, kernel: Any, constants: Mapping[str, int], dtype: torch.dtype, tile: int
) -> Compiled:
    kind = DTYPES[dtype]
    names: list[str] = kernel.arg_names
    signature = argument_types(names, constants, kind)
    places = {(names.index(name),): value for name, value in constants.items()}
    # The launcher finds that real pointers and strides are multiples of 16.
    aligned = [name for name in names if signature[name].startswith("*") or name.endswith("_stride")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, places, attributes)
    stages = {"num_stages": STAGES} if kernel is attend_parts else {}
    found = triton.compile(source, target=target.gpu, options={"num_warps": WARPS, **stages})
    kinds = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}
    matrix = len(re.findall(target.matrix.format(kinds[kind]), found.asm[target.listing]))
    head_dim, shared = constants.get("HEAD_DIM", 0), int(found.metadata.shared)
    registers = _registers(target, found.asm)
    return Compiled(kernel.__name__, target.name, head_dim, kind, tile, registers, shared, matrix)


def compile_all(
    targets: Sequence[Target], head_dims: Sequence[int], dtypes: Sequence[torch.dtype], every: bool = True
) -> Iterator[tuple[Compiled, str]]:
    """Yield every configuration that may run, or the largest, with its complaint or an empty string."""
    for target, head_dim, dtype in product(targets, head_dims, dtypes):
        for tile, windowed in product(tiles_of(dtype), (False, True)) if every else _largest(dtype):
            compiled = compile_attention(target, head_dim, dtype, tile, windowed)
            yield compiled, complaint(compiled, target.shared_bytes)
        compiled = compile_merge(target, head_dim, dtype)
        yield compiled, complaint(compiled, target.shared_bytes)
    for target in targets:
        yield (compiled := compile_noise(target)), complaint(compiled, target.shared_bytes)


def _largest(dtype: torch.dtype) -> list[tuple[int, bool]]:
    """A window needs more registers than none, and bfloat16 more than float16: tiles, and whether windowed."""
    *smaller, largest = tiles_of(dtype)
    tiles = smaller if dtype is not torch.float16 else []
    return [*((tile, True) for tile in tiles), (largest, False), (largest, True)]


def complaint(compiled: Compiled, shared_bytes: int) -> str:
    """Return the reason against use on a GPU with `shared_bytes` for a program; empty if there is none.

    Scalar registers in lanes of vector registers cost little, so they are no reason.
    """
    registers = compiled.registers
    if registers.spilled:
        return f"{registers.spilled} registers are spilled"
    if registers.memory_bytes:
        return f"{registers.memory_bytes} bytes of each thread are in memory"
    if compiled.shared_bytes > shared_bytes:
        return f"{compiled.shared_bytes} bytes of shared memory, there are {shared_bytes}"
    if compiled.kernel in _MULTIPLIES and compiled.dtype != "fp32" and not compiled.matrix_instructions:
        return f"no matrix instruction in {compiled.dtype}"
    return ""


def amd_registers(listing: str) -> Registers:
    names = r"(?:vgpr|vgpr_spill|sgpr_spill)_count|private_segment_fixed_size"
    count = {name: int(value) for name, value in re.findall(rf"\.({names}):\s+(\d+)", listing)}
    return Registers(
        count["vgpr_count"],
        count["vgpr_spill_count"],
        count["sgpr_spill_count"],
        count["private_segment_fixed_size"],
    )


def _registers(target: Target, code: Mapping[str, Any]) -> Registers:
    if target.gpu.backend == "hip":
        return amd_registers(code["amdgcn"])
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code["cubin"])
        file.flush()
        words = [str(reader), "-res-usage", file.name]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    memory = used["STACK"] + used["LOCAL"]
    return Registers(used["REG"], memory // 4, 0, memory)


def main(names: Sequence[str]) -> int:
    """Print a table of all configurations for the named GPUs, head sizes and dtypes, or all of them.

    `largest`: only those that need most registers. Returns 1 if there is a complaint.
    """
    targets = [target for target in TARGETS if target.name in names] or TARGETS
    head_dims = [int(name) for name in names if name.isdecimal()] or HEAD_DIMS
    dtypes = [dtype for dtype, name in DTYPES.items() if name in names] or list(DTYPES)
    head = "kernel | GPU | head size | dtype | rows | registers | spilled | scalar ones | bytes in memory"
    print(f"| {head} | shared KiB | matrix instructions |  |")
    print("|" + "---|" * 12)
    wrong = 0
    for found, why in compile_all(targets, head_dims, dtypes, "largest" not in names):
        wrong += bool(why)
        cells = (found.kernel, found.target, found.head_dim, found.dtype, found.tile)
        each = found.registers
        used = (each.used, each.spilled, each.scalar_spilled, each.memory_bytes)
        shared = f"{found.shared_bytes / 1024:.0f}"
        print(
            "|",
            " | ".join(map(str, (*cells, *used, shared, found.matrix_instructions, why))),
            "|",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
