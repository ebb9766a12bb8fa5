"""The thread pool of the compiled kernels: every piece is done once, and late threads delay nobody."""

import ctypes
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ssd_serve.kernels.native.library import SOURCES, NativeLibrary
from ssd_serve.kernels.native.packed import NativePackedLinear, StoredBlocks

_KERNELS = """
#include <unistd.h>
#include "pool.h"
typedef struct { long *out, value, late_us; } job;
static void write_slowly(const void *work, long from, long to, pool_place *place) {
  const job *j = work;
  if (place->thread && j->late_us) usleep(j->late_us);
  if (!pool_claim(place)) return;
  for (long i = from; i < to; i++) j->out[i] += j->value + i;
}
void again(long *out, long value, long late_us, long items, long size, int threads) {
  job j = {out, value, late_us};
  POOL_RUN_AGAIN(write_slowly, j, items, size, threads);
}
void once(long *out, long value, long late_us, long items, long size, int threads) {
  job j = {out, value, late_us};
  POOL_RUN(write_slowly, j, items, size, threads);
}
"""
_LATE_S = 0.2


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Two functions that add `value` + i to out[i]; helpers are late by `late_us`."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("pool")
    source, library = folder / "kernels.c", folder / "kernels.so"
    source.write_text(_KERNELS)
    words = [compiler, "-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", f"-I{SOURCES}", str(source)]
    subprocess.run([*words, str(SOURCES / "pool.c"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _run(pool: ctypes.CDLL, name: str, items: int, threads: int, *, late_s: float = 0.0) -> np.ndarray:
    out = np.zeros(items, np.int64)
    function = pool[name]
    function.argtypes = (ctypes.c_void_p, *[ctypes.c_long] * 4, ctypes.c_int)
    function(out.ctypes.data, 7, int(1e6 * late_s), items, 2, threads)
    return out


@pytest.mark.parametrize("name", ["again", "once"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_item_is_done_once(pool: ctypes.CDLL, name: str, threads: int) -> None:
    for items in [1, 2, 3, 64, 9001] * 40:
        assert np.array_equal(_run(pool, name, items, threads), 7 + np.arange(items))


def test_the_piece_of_a_late_thread_is_done_again(pool: ctypes.CDLL) -> None:
    _run(pool, "again", 64, 2)  # starts the thread
    out = np.zeros(64)
    for _ in range(3):
        began = time.monotonic()
        out = _run(pool, "again", 64, 2, late_s=_LATE_S)
        assert time.monotonic() - began < _LATE_S / 2
        assert np.array_equal(out, 7 + np.arange(64))
        assert np.array_equal(_run(pool, "once", 64, 2), 7 + np.arange(64))  # beside the late thread
    time.sleep(_LATE_S + 0.1)
    assert np.array_equal(out, 7 + np.arange(64))


def test_several_callers_do_not_share_the_pool(native: NativeLibrary) -> None:
    blocks = torch.randint(0, 60, (520, 160), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    linear = NativePackedLinear(native, [StoredBlocks("Q4_1", blocks.numpy())], 256)
    rows = torch.randn((9, 256), generator=torch.Generator().manual_seed(2)).bfloat16()
    right = linear(rows)

    def repeat(threads: int) -> bool:
        torch.set_num_threads(threads)
        return all(torch.equal(linear(rows), right) for _ in range(300))

    try:
        with ThreadPoolExecutor(3) as callers:
            assert all(callers.map(repeat, (2, 3, 4)))
    finally:
        torch.set_num_threads(1)
