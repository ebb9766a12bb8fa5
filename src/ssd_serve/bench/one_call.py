"""Several draft steps in one call: a baseline of which no Python between its steps is measured.

Between them the verifier plans nothing, and on a device that works while the host is free each forward is
queued behind the one before, as captured graphs are. Knows a channel and a model, not what they draft.
"""

from dataclasses import replace

from ssd_serve.base.draft_messages import Growth, Hello
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.device import Done, ForwardEnd
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel


class QueuedModel(WrappedModel):
    """A model whose results are taken for ready at once, though its device may not be done."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._last: ForwardEnd = Done()

    def forward(self, batch: Batch) -> ForwardResult:
        """Queue one more forward."""
        result = self._model.forward(batch)
        self._last = result.completion
        return replace(result, completion=Done())

    def wait(self) -> None:
        """Until the last forward is over."""
        self._last.wait()


class OneCallChannel(InlineChannel):
    """`steps` draft steps a call, by the `queued` model."""

    def __init__(self, core: DrafterCore, hello: Hello, steps: int, queued: QueuedModel) -> None:
        super().__init__(core, hello)
        self._steps_a_call = steps
        self._queued = queued

    def draft(self) -> list[Growth]:
        growth: list[Growth] = []
        for _ in range(self._steps_a_call):
            growth += super().draft()
        self._queued.wait()
        return growth
