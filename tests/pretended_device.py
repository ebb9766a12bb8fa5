# pyright: reportPrivateUsage=false
"""Simulated GPU: tensors that report the device `cuda:0`, and errors where tensors of two devices meet.

Each of them holds an ordinary tensor that computes, so code runs as on a GPU, including the values that it
reads back. The simulation does not cover the dtypes, rounding and speed of a real GPU's operators.
Only this file imports private modules of torch.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import GridExecutor

DEVICE = "cuda:0"
_HOST = torch.device("cpu")
_ACROSS = frozenset({"copy_", "_to_copy"})
"""Operators that copy between devices."""
_INDEXING = frozenset({"index", "index_put_", "__getitem__", "__setitem__"})
"""Operators on device tensors that also accept indices on the CPU."""
_NUMBERS = frozenset({"item", "__bool__", "__float__", "__int__", "__index__"})
_EARLY = frozenset({"copy_", "contiguous", "nonzero", "__getitem__", "__invert__", "__setitem__"}) | _NUMBERS
_READING = frozenset({"_local_scalar_dense", "nonzero", "masked_select"}) | _NUMBERS
"""Operators that make the host wait for values of the device."""


class MixedDevicesError(Exception):
    """An operator received tensors of two devices."""


class StreamOrderError(Exception):
    """A stream used data that another stream had written, without waiting for that stream."""


class Stream:
    """Test double of torch.cuda.Stream that counts its operators and those of other streams that it waited for."""

    def __init__(self) -> None:
        self.work = 0
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: "Stream") -> None:
        for each, work in (*other.seen.items(), (other, other.work)):
            self.seen[each] = max(work, self.seen.get(each, 0))


class Streams:
    """Streams of the simulated device: operators run immediately, and only their order is checked."""

    def __init__(self) -> None:
        self.current = Stream()
        self._all = [self.current]
        self._writers: dict[int, tuple[Stream, int]] = {}  # the last write to each storage

    def make(self) -> Stream:
        self._all.append(Stream())
        return self._all[-1]

    def synchronize(self, *_: object) -> None:
        for stream, other in product(self._all, self._all):
            stream.wait_stream(other)

    def select(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def using(self, stream: Stream) -> Generator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, _graph: object, *, stream: Stream, **_: object) -> Generator[None]:
        """Synchronize all streams first, as torch.cuda.graph does."""
        self.synchronize()
        with self.using(stream):
            yield

    def run(self, name: str, given: Sequence["DeviceTensor"]) -> None:
        """Count an operator on the current stream; raise if it reads unsynchronized data of another stream."""
        self.current.work += 1
        for each in given:
            writer, work = self._writers.get(each.held.untyped_storage().data_ptr(), (self.current, 0))
            if writer is not self.current and self.current.seen.get(writer, 0) < work:
                raise StreamOrderError(f"{name} uses what another stream may not have written yet")

    def wrote(self, tensors: Sequence["DeviceTensor"]) -> None:
        for each in tensors:
            self._writers[each.held.untyped_storage().data_ptr()] = (self.current, self.current.work)


class Graph:
    """Test double of torch.cuda.CUDAGraph without replay."""

    def pool(self) -> None:
        pass

    def replay(self) -> None:
        raise NotImplementedError("the pretended device replays no graphs")


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device; `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls: type["DeviceTensor"], held: torch.Tensor) -> "DeviceTensor":
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(DEVICE),
        )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"on {DEVICE}: {self.held}"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "tolist":  # torch refuses it for subclasses
            return args[0].cpu().tolist()
        if name in _EARLY:
            return torch._C._get_dispatch_mode(_Device._mode_key).run(func, name, args, options)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise RuntimeError(f"{func} of a tensor of the pretended device, which is gone")


class _Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs operators of device tensors and records those that the host reads back."""

    # In the mode of fake tensors torch does not look for a GPU.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[str] = []
        self.streams = Streams()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        with self:  # in inference mode operators arrive before decomposition
            parts = func.decompose(*args, **options)
        if parts is not NotImplemented:
            return parts
        return self.run(func, str(func.overloadpacket.__name__), args, options)

    def run(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run an operator on the held tensors, and place its result on the device of the real operator."""
        tensors = _tensors((args, options))
        on_device = any(isinstance(each, DeviceTensor) for each in tensors)
        if on_device:
            _check(func, name, args, tensors)
            self.streams.run(name, [each for each in tensors if isinstance(each, DeviceTensor)])
        if options.get("pin_memory"):
            options["pin_memory"] = False  # no copy needs pinned memory here
        wanted = None if options.get("device") is None else torch.device(options["device"])
        if on_device and (name in _READING or wanted == _HOST):
            self.reads.append(name)
        if wanted is not None:
            on_device = wanted.type != "cpu"
            options["device"] = _HOST
        result = func(*held(tuple(args)), **held(options))
        same = {id(held(each)): each for each in tensors}  # in-place operators return their arguments

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return same.get(id(tensor), DeviceTensor(tensor) if on_device else tensor)

        placed = tree_map_only(torch.Tensor, place, result)
        self.streams.wrote([each for each in _tensors(placed) if isinstance(each, DeviceTensor)])
        return placed


class Event:
    """Test double of torch.cuda.Event; simulated work is complete at once."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def _launch(launch: Callable[..., None], executor: Any, arguments: Any, constants: Any) -> None:
    """Run a Triton kernel in Triton's interpreter; raise if a tensor argument is not on the device."""
    tensors = _tensors((arguments, constants))
    if not all(isinstance(each, DeviceTensor) for each in tensors):
        raise MixedDevicesError(f"a kernel was given tensors on {[str(each.device) for each in tensors]}")
    with _disable_current_modes():
        launch(executor, *held(arguments), **held(constants))


@contextmanager
def pretended_device(memory: int = 8 << 30) -> Generator[list[str]]:
    """Provide a simulated `cuda:0` with `memory` bytes of free memory.

    Yields the list of operators that the host has waited for, except for masks as indices.
    """
    lifting = torch._C._only_lift_cpu_tensors()
    with pytest.MonkeyPatch.context() as patch, _Device() as device:
        interpreted = GridExecutor.__call__
        patch.setattr(
            GridExecutor, "__call__", lambda self, *given, **more: _launch(interpreted, self, given, more)
        )
        patch.setattr(torch.cuda, "Event", Event)
        streams = device.streams
        for name, double in {
            "Stream": streams.make,
            "stream": streams.using,
            "current_stream": lambda: streams.current,
            "set_stream": streams.select,
            "synchronize": streams.synchronize,
            "device": nullcontext,
            "CUDAGraph": Graph,
            "graph": streams.graph,
            "memory_reserved": lambda: 0,
        }.items():
            patch.setattr(torch.cuda, name, double)
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (memory, memory))
        patch.setattr(torch.cuda, "get_device_name", lambda: "pretended")
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is a copy from the CPU
        try:
            yield device.reads
        finally:
            torch._C._set_only_lift_cpu_tensors(lifting)


@contextmanager
def checked_device() -> Generator[None]:
    """Use fake tensors, which have no values, so that operators check only torch's requirements for GPUs."""
    with FakeTensorMode():
        yield


def held(values: Any) -> Any:
    """Replace each device tensor in `values` by the ordinary tensor that it holds."""
    return tree_map_only(DeviceTensor, lambda tensor: tensor.held, values)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _check(func: Any, name: str, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
    if name in _ACROSS:
        return
    if name in _INDEXING and isinstance(args[0], DeviceTensor):
        # Without index tensors the operator is a view or a copy.
        tensors = _tensors(args[2:]) if _tensors(args[1]) else []
    pointwise = torch.Tag.pointwise in getattr(func, "tags", ()) or name in _INDEXING
    for each in tensors:
        if not isinstance(each, DeviceTensor) and not (pointwise and each.ndim == 0):
            shapes = ", ".join(f"{each.device} {tuple(each.shape)}" for each in tensors)
            raise MixedDevicesError(f"{name} of tensors on {shapes}")
