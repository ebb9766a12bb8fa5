"""Compiles the attention kernels for GPUs that are not here, and reads what the code would use.

A kernel that spills registers or misses the matrix units still gives right results, only slowly: this is how
that is noticed without the card. Knows targets and assembly, not what the kernels compute.
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

from ssd_serve.kernels.triton.attention import BLOCK_N, SPLIT, WARPS, tiles_of
from ssd_serve.kernels.triton.kernel import attend_parts

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU, what its matrix instructions look like in assembly ({} is the type), and its shared memory for
    one program."""

    gpu: GPUTarget
    listing: str
    matrix: str
    shared_bytes: int

    @property
    def name(self) -> str:
        """As its makers call it."""
        return f"sm{self.gpu.arch}" if self.gpu.backend == "cuda" else str(self.gpu.arch)


TARGETS = (
    Target(GPUTarget("hip", "gfx942", 64), "amdgcn", r"v_mfma_\w+_{}", 64 << 10),
    Target(GPUTarget("hip", "gfx950", 64), "amdgcn", r"v_mfma_\w+_{}", 160 << 10),
    Target(GPUTarget("cuda", 90, 32), "ptx", r"mma\S*\.{}", 227 << 10),
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one configuration would use on one GPU. `spills`: registers that live in memory."""

    target: str
    head_dim: int
    dtype: str
    tile: int
    registers: int
    spills: int
    shared_bytes: int
    matrix_instructions: int


def compile_attention(
    target: Target, head_dim: int, dtype: torch.dtype, tile: int, group: int = 8
) -> Compiled:
    """Compile one configuration of `attend_parts`, without a window. Raises what Triton raises."""
    kind = DTYPES[dtype]
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": tile,
        "BLOCK_N": BLOCK_N,
        "SPLIT": SPLIT,
        "WIDEN": False,
    }
    pointers = dict.fromkeys(("queries", "keys", "values"), f"*{kind}")
    pointers |= dict.fromkeys(("partial", "partial_lse"), "*fp32")
    pointers |= dict.fromkeys(("positions", "tree_positions"), "*i64")
    indices = ("tile_requests", "tile_rows", "tile_counts", "ancestry")
    slots = ("prefix_slots", "prefix_offsets", "tree_slots", "tree_offsets")
    types = pointers | dict.fromkeys((*indices, *slots), "*i32") | {"scale": "fp32"}
    names = attend_parts.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    # What the launcher finds out about real pointers and strides: they are multiples of 16.
    aligned = (
        *pointers,
        *indices,
        *slots,
        "query_row_stride",
        "query_head_stride",
        "head_stride",
        "slot_stride",
    )
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(attend_parts, signature, places, attributes)
    found = triton.compile(source, target=target.gpu, options={"num_warps": WARPS})
    registers, spills = _registers(target, found.asm)
    kinds = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}
    matrix = len(re.findall(target.matrix.format(kinds[kind]), found.asm[target.listing]))
    return Compiled(target.name, head_dim, kind, tile, registers, spills, int(found.metadata.shared), matrix)


def compile_all(targets: Sequence[Target] = TARGETS) -> Iterator[tuple[Compiled, str]]:
    """Every configuration that may run, and what is wrong with it; empty when nothing is."""
    for target, head_dim, dtype in product(targets, HEAD_DIMS, DTYPES):
        for tile in tiles_of(dtype):
            compiled = compile_attention(target, head_dim, dtype, tile)
            yield compiled, _complaint(target, compiled)


def _complaint(target: Target, compiled: Compiled) -> str:
    if compiled.spills:
        return f"{compiled.spills} registers are spilled"
    if compiled.shared_bytes > target.shared_bytes:
        return f"{compiled.shared_bytes} bytes of shared memory, there are {target.shared_bytes}"
    if compiled.dtype != "fp32" and not compiled.matrix_instructions:
        return f"no matrix instruction in {compiled.dtype}"
    return ""


def _registers(target: Target, code: Mapping[str, Any]) -> tuple[int, int]:
    """Registers a thread uses, and how many of them are spilled."""
    if target.gpu.backend == "hip":
        listing: str = code["amdgcn"]
        count = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", listing)}
        # Scalar registers are spilled into lanes of vector registers, not into memory.
        return count["vgpr_count"], count["vgpr_spill_count"]
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code["cubin"])
        file.flush()
        words = [str(reader), "-res-usage", file.name]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return used["REG"], (used["STACK"] + used["LOCAL"]) // 4


def main() -> int:
    """Print a table of all configurations; 1 when any must not be used."""
    print("| GPU | head size | dtype | rows | registers | spilled | shared KiB | matrix instructions |  |")
    print("|" + "---|" * 9)
    wrong = 0
    for found, complaint in compile_all():
        wrong += bool(complaint)
        shared = f"{found.shared_bytes / 1024:.0f}"
        cells = (found.target, found.head_dim, found.dtype, found.tile, found.registers, found.spills, shared)
        print("|", " | ".join(map(str, (*cells, found.matrix_instructions, complaint))), "|", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
