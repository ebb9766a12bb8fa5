"""Contract of a model: sizes, and one forward.

The verifier, the drafter and the benchmarks see models only through this module; it knows no architecture,
no checkpoint format and no request.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.device import Done, ForwardEnd


def feature_name(layer: int) -> str:
    """Return the name of the output of a layer, or of `FINAL`, among a forward's features."""
    return "final" if layer == FINAL else f"layer.{layer}"


def listed(layers: Iterable[int]) -> str:
    """Layers for people, e.g. [1, 2, final]."""
    return f"[{', '.join('final' if layer == FINAL else str(layer) for layer in layers)}]"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes and names of a model."""

    name: str
    vocabulary: int
    context: int
    layers: int
    hidden: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    """Bytes read by one forward of one row (all matrices; the embedding only if it is also the head)."""
    kv_bytes_per_slot: int
    device: str
    dtype: str
    kernels: str = "torch"
    """Kernels in use: torch, or the name of the compiled library."""
    attention: str = ""
    """The tree attention backend."""
    batch_invariant: bool = False
    """True if a row's result is the same to the bit in any batch, tree or chunk."""
    ranks: int = 1
    """Number of ranks; weights and KV are counted for each of them."""


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Logits of the wanted rows, on the model's device, and named hidden states when they were asked for.

    They belong to the device's own queue of work: the host may read them, and time them, after
    `completion.wait()`.
    """

    logits: torch.Tensor  # [wanted, vocabulary], float32
    features: Mapping[str, torch.Tensor] = field(default_factory=dict)
    completion: ForwardEnd = field(default_factory=Done)
    includes_capture: bool = False
    """True if the forward was captured in this call: its time is not representative of later ones."""


class Model(Protocol):
    """A model with its weights and its KV cache on one device (or one group of ranks)."""

    @property
    def facts(self) -> ModelFacts:
        """Sizes and names."""
        ...

    @property
    def slots(self) -> int:
        """Number of KV slots that the cache holds."""
        ...

    def forward(self, batch: Batch) -> ForwardResult:
        """Run, or start, one ragged batch: write K/V of every row, attend, return logits of the wanted rows.

        Must be called from one thread. Reads and writes only slots named in the batch.
        """
        ...

    def release(self, spans: Sequence[range]) -> None:
        """Give the memory of these slots, which hold nothing, back to the machine where it can be."""
        ...


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows of a forward, on the device."""

    tokens: torch.Tensor  # [rows], int64
    positions: torch.Tensor  # [rows], int64
    plan: Any
    """Plan of the attention backend."""
    wanted: torch.Tensor | None = None
    """int64, the rows to return logits for; None: all."""
    vectors: torch.Tensor | None = None  # [rows, hidden], where rows are more than tokens


class CapturableModel(Model, Protocol):
    """A model with a forward in two parts: preparation of a batch on the host, and `run`."""

    def run(self, inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits of the wanted rows, float32 [wanted, vocabulary], and features, from what is on the device.

        Nothing in it depends on values: with a capturable attention it can be captured and replayed.
        """
        ...
