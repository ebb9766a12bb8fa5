"""When a device has finished what was put into its queue. Knows devices, not what they compute."""

import time
from typing import Any, cast

import torch

from ssd_serve.models.interface import Completion, Done


class QueueMark:
    """A mark in the current queue of a GPU (CUDA and ROCm)."""

    def __init__(self) -> None:
        self._event = cast(Any, torch.cuda).Event()  # torch does not type its events
        self._event.record()

    def ready(self) -> bool:
        """Whether the GPU has passed the mark."""
        return bool(self._event.query())

    def wait(self) -> float:
        """Sleep until it has."""
        self._event.synchronize()
        return time.perf_counter()


def completion(device: torch.device) -> Completion:
    """The end of everything that was started on `device` so far; CPUs compute before they return."""
    return QueueMark() if device.type == "cuda" else Done()
