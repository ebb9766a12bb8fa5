"""One model on several ranks: rank 0 tells the others every batch, and all of them run the same forwards.

Knows batches and models; not how messages travel, and not which processes there are.
"""

from collections.abc import Callable

from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.batch_bytes import pack, unpack
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel


class LeadingModel(WrappedModel):
    """The whole model as rank 0 has it: `model` is its own share, `tell` sends a message to all others."""

    def __init__(self, model: Model, tell: Callable[[bytes], None]) -> None:
        super().__init__(model)
        self._tell = tell

    def forward(self, batch: Batch) -> ForwardResult:
        self._tell(pack(batch))
        return self._model.forward(batch)


def follow(model: Model, hear: Callable[[], bytearray | None]) -> None:
    """Run the forwards of rank 0 with another rank's share, until `hear` says that there will be none.

    Each is waited for: who only listened would not notice that its GPU has failed.
    """
    while (message := hear()) is not None:
        model.forward(unpack(message)).completion.wait()
