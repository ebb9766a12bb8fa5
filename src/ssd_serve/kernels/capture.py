"""Capturing a GPU's work once and replaying it with one call: CUDA and HIP graphs, and for which row counts.

A captured graph repeats the same kernels on the same addresses. Whoever captures therefore reads and writes
fixed memory, and decides nothing from values that change. Knows the device's queue and memory; not what is
captured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from ssd_serve.base.errors import CaptureError, in_a_line

T = TypeVar("T")

MAX_CAPTURED_ROWS = 256
"""Forwards of more rows are busy enough to hide what launching their kernels costs."""
_WARM_UPS = 2
"""Runs before the capture: kernels are compiled and libraries choose theirs, which cannot be captured."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Work that can be repeated, and the memory that it holds."""

    replay: Callable[[], None]
    bytes: int


class GraphCapture(Protocol):
    """Captures what is started on one device."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run `work` as it is, as often as it takes until nothing more is compiled or chosen. Raises what it
        raises."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[CapturedGraph, T]:
        """Capture `work`, which was warmed up; its result is good after every replay, until the next.

        Raises `CaptureError` where something in it cannot be captured.
        """
        ...


class DeviceGraphCapture:
    """`GraphCapture` by CUDA graphs, which are HIP graphs on ROCm, where it has not run yet.

    All share one pool of memory: they never run at the same time, and what one leaves is read before the next
    one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = cast(Any, torch.cuda)  # torch does not type its graphs
        self._pool: Any = None
        # One for all: memory of a pool is used again only on the stream that had it.
        self._stream: Any = None

    def warm_up(self, work: Callable[[], object]) -> None:
        cuda = self._cuda
        with cuda.device(self._device):
            self._stream = self._stream or cuda.Stream()
            self._stream.wait_stream(cuda.current_stream())
            with cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    work()
            cuda.current_stream().wait_stream(self._stream)

    def capture(self, work: Callable[[], T]) -> tuple[CapturedGraph, T]:
        cuda = self._cuda
        with cuda.device(self._device):
            current, before = cuda.current_stream(), cuda.memory_reserved()
            graph = cuda.CUDAGraph()
            try:
                with cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    result = work()
            except Exception as error:
                # A capture that failed leaves its stream current.
                cuda.set_stream(current)
                raise CaptureError(in_a_line(error)) from error
            self._pool = graph.pool()
            return CapturedGraph(graph.replay, max(0, cuda.memory_reserved() - before)), result


def captured_rows(rows: int) -> int | None:
    """The row count whose graph serves a forward of `rows` rows; None: it is not captured.

    1, 2, 4 and multiples of 8, further apart as they grow: above 32 at most a fifth of the rows is padding.
    """
    if rows > MAX_CAPTURED_ROWS:
        return None
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = max(8, (1 << (rows - 1).bit_length()) // 8)
    return -(-rows // step) * step
