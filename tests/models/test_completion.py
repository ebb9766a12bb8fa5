"""Waiting for a GPU: it ends when the GPU is ready, and when that hangs."""

import time

import pytest

from ssd_serve.base.errors import DeviceHangError
from ssd_serve.kernels.device import wait_until


def test_wait_ends_when_ready_and_uses_little_cpu() -> None:
    begun, computed = time.perf_counter(), time.thread_time()
    ended = wait_until(lambda: time.perf_counter() > begun + 0.3)
    assert 0.3 < ended - begun < 5.0
    assert time.thread_time() - computed < 0.2


def test_hanging_device_raises() -> None:
    with pytest.raises(DeviceHangError, match=r"not finished a forward within 0 s: it seems to hang"):
        wait_until(lambda: False, timeout_s=0.05)
