"""Test double of graph capture, for machines without a GPU.

A replay runs the operators and kernels of the capture on the same tensors, and no Python code between them.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from ssd_serve.base.errors import CaptureError
from ssd_serve.kernels.device import CapturedGraph

T = TypeVar("T")
Step = Callable[[], object]


def _is_view(operator: Any) -> bool:
    returned = operator._schema.returns  # there is no public way to ask
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returned)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records every operator as a step, which repeats it on the same tensors."""

    def __init__(self, note: Callable[[Step], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))

        def step() -> None:
            again = func(*args, **(kwargs or {}))
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)

        if not _is_view(func):
            self._note(step)
        return made


@dataclass
class Tape:
    """`GraphCapture` on the CPU; `runs` counts captures, and `replays` counts replays of any graph."""

    refuses: str = ""
    runs: int = 0
    replays: int = 0
    _steps: list[Step] | None = field(default=None, repr=False)

    @property
    def capturing(self) -> bool:
        return self._steps is not None

    def warm_up(self, work: Callable[[], object]) -> None:
        work()

    def capture(self, work: Callable[[], T]) -> tuple[CapturedGraph, T]:
        if self.refuses:
            raise CaptureError(self.refuses)
        self.runs += 1
        steps: list[Step] = []
        self._steps = steps
        try:
            with _Operators(self._note):
                result = work()
        finally:
            self._steps = None

        def replay() -> None:
            self.replays += 1
            for step in steps:
                step()

        return CapturedGraph(replay, len(steps)), result

    def launch(self, kernel: Step) -> None:
        """Run a kernel, and record it as one step without its operators."""
        steps, self._steps = self._steps, None
        try:
            kernel()
        finally:
            self._steps = steps
        self._note(kernel)

    def _note(self, step: Step) -> None:
        if self._steps is not None:
            self._steps.append(step)


@contextmanager
def recording_kernels(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Record launches under Triton's interpreter too."""
    launch = GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        tape.launch(lambda: launch(self, *args, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", noted)
        yield
