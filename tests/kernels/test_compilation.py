"""Tests of the Triton kernels, compiled for GPUs of other machines: register counts and complaints."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ssd_serve.base.errors import SsdError
from tests.kernels.triton_compilation import (
    TARGETS,
    Compiled,
    Registers,
    amd_registers,
    argument_types,
    complaint,
)

GOOD = Compiled("attend_parts", "gfx950", 128, "bf16", 64, Registers(164, 0, 0, 0), 64 << 10, 12)
LISTING = """
    .private_segment_fixed_size: {memory}
    .sgpr_count:     106
    .sgpr_spill_count: {scalar}
    .vgpr_count:     284
    .vgpr_spill_count: {vector}
"""


def told(compiled: Compiled) -> str:
    return complaint(compiled, 160 << 10)


def test_spills_to_memory_are_complaints_and_scalars_in_lanes_are_none() -> None:
    for vector, scalar, memory, words in (
        (0, 0, 0, ""),
        (0, 27, 0, ""),
        (3, 0, 12, "3 registers"),
        (0, 27, 108, "108 bytes"),
    ):
        registers = amd_registers(LISTING.format(vector=vector, scalar=scalar, memory=memory))
        assert registers == Registers(284, vector, scalar, memory)
        found = told(replace(GOOD, registers=registers))
        assert found.startswith(words) if words else not found


def test_a_kernel_that_needs_too_much_shared_memory_is_a_complaint() -> None:
    assert "shared memory" in told(replace(GOOD, shared_bytes=161 << 10))


def test_matrix_instructions_are_expected_of_attention_in_half_precision() -> None:
    missing = replace(GOOD, matrix_instructions=0)
    assert "matrix" in told(missing)
    assert not told(replace(missing, dtype="fp32"))
    assert not told(replace(missing, kernel="merge_parts"))


def test_an_argument_that_nothing_is_known_of_is_an_error() -> None:
    known = argument_types(("queries", "positions", "rows", "SPLIT"), {"SPLIT": 512}, "bf16")
    assert list(known.values()) == ["*bf16", "*i32", "i32", "constexpr"]
    for names, constants in (("queries renamed", {}), ("queries", {"SPLIT": 512})):
        with pytest.raises(SsdError, match="SPLIT" if constants else "renamed"):
            argument_types(names.split(), constants, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [target.name for target in TARGETS])
def test_every_configuration_compiles_for_every_gpu_without_spills(tmp_path: Path, gpu: str) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    del environment["TRITON_INTERPRET"]
    words = [sys.executable, "-m", "tests.kernels.triton_compilation", gpu]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout
    for kernel, least in (("attend_parts", 17), ("merge_parts", 10), ("fill_noise", 0)):
        assert done.stdout.count(kernel) > least
