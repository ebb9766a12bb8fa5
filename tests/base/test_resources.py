"""Garbage collection, the heap and the limit of descriptors."""

import platform
import resource
import subprocess
import sys

import pytest

from ssd_serve.base.resources import Heap, descriptor_limit, raise_descriptor_limit

_GARBAGE = """
import gc
from collections import deque
from ssd_serve.base.resources import settle_memory
kept = [[] for _ in range(4_000_000)]  # as after loading
settle_memory()
before = len(gc.get_objects())
most, living = 0, deque(maxlen=40_000)
for round in range(600):
    for _ in range(10_000):  # each lives for a while, and then is garbage that only a full collection finds
        cycle = []
        cycle.append(cycle)
        living.append(cycle)
    most = max(most, len(gc.get_objects()) - before)
print(most)
"""

_HOLES = """
import ctypes
import psutil
from ssd_serve.base.resources import Heap
now = [0.0]
heap = Heap(clock=lambda: now[0])
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = []
for _ in range(1000):
    blocks.append(malloc(60_000))
    ctypes.memset(blocks[-1], 1, 60_000)
    malloc(100)  # never freed: nothing after it can close the hole
for block in blocks:
    free(block)
memory = lambda: psutil.Process().memory_info().rss
full = memory()
heap.trim_when_due()
assert memory() > full - 2**20, "not yet due"
now[0] = 61.0
heap.trim_when_due()
print((full - memory()) >> 20)
"""


def _run(code: str) -> int:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
def test_garbage_is_collected_after_loading_many_objects() -> None:
    assert _run(_GARBAGE) < 900_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other heaps are left to themselves")
def test_heap_trim_returns_free_pages() -> None:
    assert _run(_HOLES) > 40


def test_heap_is_trimmed_once_a_minute() -> None:
    now, trims = [0.0], list[float]()
    heap = Heap(lambda: now[0], lambda: trims.append(now[0]))
    for now[0] in range(0, 200, 7):
        heap.trim_when_due()
    assert trims == [63, 126, 189]


def test_descriptor_limit_is_raised_to_the_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert descriptor_limit() == 256
        assert raise_descriptor_limit() == (256, hard)
        assert descriptor_limit() == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
