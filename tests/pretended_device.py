# pyright: reportPrivateUsage=false
"""A pretended GPU: tensors that say they lie on `cuda:0`, and errors where tensors of two devices meet.

Each of them holds an ordinary tensor, which computes, so that code runs as on a GPU down to the numbers that
it reads back. What it cannot show: whether a GPU has an operator for a dtype, how it rounds, and how fast it
is. Private modules of torch are imported here alone.
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
"""Operators that go from device to device."""
_INDEXING = frozenset({"index", "index_put_", "__getitem__", "__setitem__"})
"""Operators of a device whose indices may also lie on the CPU."""
_NUMBERS = frozenset({"item", "__bool__", "__float__", "__int__", "__index__"})
_EARLY = frozenset({"copy_", "contiguous", "nonzero", "__getitem__", "__invert__", "__setitem__"}) | _NUMBERS
_READING = frozenset({"_local_scalar_dense", "nonzero", "masked_select"}) | _NUMBERS
"""Operators for which the host waits, since it wants numbers of the device."""


class MixedDevicesError(Exception):
    """An operator was given tensors of two devices."""


class StreamOrderError(Exception):
    """A stream used what another stream had written, without waiting for that stream."""


class Stream:
    """Stands in for torch.cuda.Stream: counts its work, and what it has waited for in others."""

    def __init__(self) -> None:
        self.work = 0
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: "Stream") -> None:
        for each, work in (*other.seen.items(), (other, other.work)):
            self.seen[each] = max(work, self.seen.get(each, 0))


class Streams:
    """The streams of the pretended device; they run at once, and only their order is checked."""

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
        """Enter as torch.cuda.graph does: after everything that was started."""
        self.synchronize()
        with self.using(stream):
            yield

    def run(self, name: str, given: Sequence["DeviceTensor"]) -> None:
        """Check one operator on the current stream."""
        self.current.work += 1
        for each in given:
            writer, work = self._writers.get(each.held.untyped_storage().data_ptr(), (self.current, 0))
            if writer is not self.current and self.current.seen.get(writer, 0) < work:
                raise StreamOrderError(f"{name} uses what another stream may not have written yet")

    def wrote(self, tensors: Sequence["DeviceTensor"]) -> None:
        for each in tensors:
            self._writers[each.held.untyped_storage().data_ptr()] = (self.current, self.current.work)


class Graph:
    """Stands in for torch.cuda.CUDAGraph: holds nothing, and cannot be replayed."""

    def pool(self) -> None:
        pass

    def replay(self) -> None:
        raise NotImplementedError("the pretended device replays no graphs")


class DeviceTensor(torch.Tensor):
    """A tensor on the pretended device; `held` has its numbers."""

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
    """Makes tensors on the device, runs operators on them, and notes what the host reads back."""

    # Where fake tensors are made torch does not look for a GPU.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[str] = []
        self.streams = Streams()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        with self:  # under inference mode operators come before they are taken apart
            parts = func.decompose(*args, **options)
        if parts is not NotImplemented:
            return parts
        return self.run(func, str(func.overloadpacket.__name__), args, options)

    def run(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run an operator on the held tensors; the result lies where it would lie."""
        tensors = _tensors((args, options))
        on_device = any(isinstance(each, DeviceTensor) for each in tensors)
        if on_device:
            _check(func, name, args, tensors)
            self.streams.run(name, [each for each in tensors if isinstance(each, DeviceTensor)])
        if options.get("pin_memory"):
            options["pin_memory"] = False  # there is nothing to copy from it
        wanted = None if options.get("device") is None else torch.device(options["device"])
        if on_device and (name in _READING or wanted == _HOST):
            self.reads.append(name)
        if wanted is not None:
            on_device = wanted.type != "cpu"
            options["device"] = _HOST
        result = func(*held(tuple(args)), **held(options))
        same = {id(held(each)): each for each in tensors}  # operators in place return what they were given

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return same.get(id(tensor), DeviceTensor(tensor) if on_device else tensor)

        placed = tree_map_only(torch.Tensor, place, result)
        self.streams.wrote([each for each in _tensors(placed) if isinstance(each, DeviceTensor)])
        return placed


class Event:
    """Stands in for torch.cuda.Event: what is pretended is done at once."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def _launch(launch: Callable[..., None], executor: Any, arguments: Any, constants: Any) -> None:
    """A Triton kernel on the device, by Triton's interpreter: every tensor it is given must lie there."""
    tensors = _tensors((arguments, constants))
    if not all(isinstance(each, DeviceTensor) for each in tensors):
        raise MixedDevicesError(f"a kernel was given tensors on {[str(each.device) for each in tensors]}")
    with _disable_current_modes():
        launch(executor, *held(arguments), **held(constants))


@contextmanager
def pretended_device(memory: int = 8 << 30) -> Generator[list[str]]:
    """Meanwhile `cuda:0` is there, with this much free memory.

    Yields the operators that the host has waited for, but for masks as indices.
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
    """Meanwhile tensors have no numbers, and operators check what torch knows of a GPU's demands."""
    with FakeTensorMode():
        yield


def held(values: Any) -> Any:
    """The same with the tensors of the device as ordinary ones."""
    return tree_map_only(DeviceTensor, lambda tensor: tensor.held, values)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _check(func: Any, name: str, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
    if name in _ACROSS:
        return
    if name in _INDEXING and isinstance(args[0], DeviceTensor):
        # Without tensors as indices it is a view, or a copy.
        tensors = _tensors(args[2:]) if _tensors(args[1]) else []
    pointwise = torch.Tag.pointwise in getattr(func, "tags", ()) or name in _INDEXING
    for each in tensors:
        if not isinstance(each, DeviceTensor) and not (pointwise and each.ndim == 0):
            shapes = ", ".join(f"{each.device} {tuple(each.shape)}" for each in tensors)
            raise MixedDevicesError(f"{name} of tensors on {shapes}")
