"""Devices as the host sees them: end of work, time, graph capture (CUDA and HIP graphs), names of dtypes.

A captured graph repeats the same kernels on the same addresses: captured work reads and writes fixed memory
and does not branch on values. Knows a device's queue and memory, not what is computed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, cast

import torch

from ssd_serve.base.errors import CaptureError, DeviceHangError, in_a_line

T = TypeVar("T")

Clock = Callable[[], float]
"""Seconds of the performance counter, read after the device has finished all its work."""
MAX_CAPTURED_ROWS = 256
"""Forwards of more rows are busy enough to hide the cost of launching their kernels."""
FORWARD_TIMEOUT_S = 30.0
"""No forward takes a GPU this long: its kernels were compiled before."""
_POLL_S = 2e-5
_WARM_UPS = 2
"""Runs before a capture: compiling a kernel and choosing one of a library cannot be captured."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name that torch has as an attribute: `bfloat16`, `float8_e4m3fn`."""
    return str(dtype).removeprefix("torch.")


def layout_order(device: str) -> Literal["heads", "slots"]:
    """Return the order of a KV cache that this device reads best, and that its backends expect."""
    return "heads" if device == "cpu" else "slots"


class ForwardEnd(Protocol):
    """The end of a forward that the device may still be computing."""

    def ready(self) -> bool: ...

    def wait(self) -> float:
        """Wait for the end; return its time in seconds of `time.perf_counter`. Raises `DeviceHangError`."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """A forward that was over when it returned."""

    at: float = field(default_factory=time.perf_counter)

    def ready(self) -> bool:
        return True

    def wait(self) -> float:
        return self.at


class DeviceEvent:
    """An event recorded in the current stream of a GPU (CUDA and ROCm)."""

    def __init__(self) -> None:
        self._event = cast(Any, torch.cuda).Event()  # torch does not type its events
        self._event.record()

    def ready(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> float:
        return wait_until(self.ready)


def wait_until(ready: Callable[[], bool], timeout_s: float = FORWARD_TIMEOUT_S) -> float:
    """Poll until `ready`; return the time then. Raises `DeviceHangError` after `timeout_s`.

    The driver's own wait has no timeout and keeps a core busy: a GPU that hangs would look like
    one that works.
    """
    deadline = time.perf_counter() + timeout_s
    while not ready():
        if time.perf_counter() > deadline:
            raise DeviceHangError(
                f"a GPU has not finished a forward within {timeout_s:.0f} s: it seems to hang"
            )
        time.sleep(_POLL_S)
    return time.perf_counter()


def completion(device: torch.device) -> ForwardEnd:
    """Return the end of all work started on `device` so far; CPUs compute before they return."""
    return DeviceEvent() if device.type == "cuda" else Done()


def device_clock(device: torch.device) -> Clock:
    """Return a clock that synchronises with `device` before it is read."""

    def now() -> float:
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Work that can be replayed, and the bytes of memory that it holds."""

    replay: Callable[[], None]
    bytes: int


class GraphCapture(Protocol):
    """Captures work that is started on one device."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run `work` eagerly until nothing more is compiled or chosen. Raises the errors of `work`."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[CapturedGraph, T]:
        """Capture `work`, which was warmed up; each replay overwrites its result.

        Raises `CaptureError` where something in it cannot be captured.
        """
        ...


class DeviceGraphCapture:
    """`GraphCapture` by CUDA graphs; they are HIP graphs on ROCm, where this has not run yet.

    All graphs share one memory pool: they never run at the same time, and a result is read before the next
    replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = cast(Any, torch.cuda)  # torch does not type its graphs
        self._pool: Any = None
        # One for all graphs: memory of a pool is used again only on the stream that had it.
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
    """Return the row count of the graph that serves a forward of `rows` rows; None: it is not captured.

    1, 2, 4 and multiples of 8, further apart as they grow: above 32 at most a fifth of the rows is padding.
    """
    if rows > MAX_CAPTURED_ROWS:
        return None
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = max(8, (1 << (rows - 1).bit_length()) // 8)
    return -(-rows // step) * step
