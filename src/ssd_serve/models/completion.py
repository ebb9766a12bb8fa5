"""When a device has finished what was put into its queue. Knows devices, not what they compute."""

import time
from collections.abc import Callable
from typing import Any, cast

import torch

from ssd_serve.base.errors import DeviceHangError
from ssd_serve.models.interface import Done, ForwardEnd

_LOOK_S = 2e-5
PATIENCE_S = 30.0
"""No forward takes a GPU so long: what was compiled for it was compiled before."""


class QueueMark:
    """A mark in the current queue of a GPU (CUDA and ROCm)."""

    def __init__(self) -> None:
        self._event = cast(Any, torch.cuda).Event()  # torch does not type its events
        self._event.record()

    def ready(self) -> bool:
        """Whether the GPU has passed the mark."""
        return bool(self._event.query())

    def wait(self) -> float:
        """Sleep until it has; the time then. Raises `DeviceHangError`."""
        return wait_until(self.ready)


def wait_until(ready: Callable[[], bool], patience_s: float = PATIENCE_S) -> float:
    """Look until it is `ready`; the time then, in seconds of the performance counter.

    The driver's own wait has no end, and keeps a core busy: a GPU that hangs would look like one that works.
    Raises `DeviceHangError`.
    """
    deadline = time.perf_counter() + patience_s
    while not ready():
        if time.perf_counter() > deadline:
            raise DeviceHangError(
                f"a GPU has not ended a forward within {patience_s:.0f} s: it seems to hang"
            )
        time.sleep(_LOOK_S)
    return time.perf_counter()


def completion(device: torch.device) -> ForwardEnd:
    """The end of everything that was started on `device` so far; CPUs compute before they return."""
    return QueueMark() if device.type == "cuda" else Done()
