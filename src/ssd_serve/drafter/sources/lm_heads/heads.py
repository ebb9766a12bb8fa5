"""Medusa's and Hydra's heads: layers and an LM head for each of the next positions, on the target's last feature.

Head i guesses the token i + 2 places after the position of the feature. Medusa's (arXiv 2401.10774) read the feature
alone, Hydra's (arXiv 2402.05109) also the embeddings of the tokens since. Knows weights and their published names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

from ssd_serve.base.errors import CheckpointError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.config import Json, model_name
from ssd_serve.models.heads.kinds import HeadKind, head_kind
from ssd_serve.models.heads.load import read_checked, read_proposed, target_table
from ssd_serve.models.memory import available_memory, require_memory
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.sizes import PACKED, activation_dtype, model_dtype, torch_device
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.formats import read_config
from ssd_serve.models.weights.linear import Linear, LinearFactory, Linears, MatrixShare, Table


@dataclass(frozen=True, slots=True)
class LmHead:
    """The head of one position."""

    layers: tuple[tuple[Linear, Linear | None], ...]
    """A matrix and the matrix of the residual connection; None: the rows themselves are added."""
    output: Linear  # hidden -> proposed

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [rows, inputs] to logits, float32 [rows, proposed]."""
        for linear, residual in self.layers:
            added = functional.silu(linear(rows))
            rows = added + (rows if residual is None else residual(rows))
        return self.output(rows).float()


@dataclass(frozen=True, slots=True)
class LmHeads:
    """All heads of a draft."""

    heads: tuple[LmHead, ...]
    embedding: Table | None
    """The target's, for heads that read tokens (Hydra)."""
    proposed: torch.Tensor | None  # int64 [proposed], ids of the target; None: all
    hidden: int
    vocabulary: int
    device: str
    dtype: torch.dtype

    @torch.inference_mode()
    def logits(self, index: int, vectors: torch.Tensor, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return one head's logits, float32 [rows, proposed].

        `vectors` [rows, hidden] are the target's features, `tokens` the `index` + 1 tokens after each of them.
        """
        rows = vectors.to(self.device, self.dtype)
        if self.embedding is not None:
            ids = torch.tensor(tokens, device=self.device)
            embedded = self.embedding.index_select(0, ids.flatten())
            rows = torch.cat((rows, embedded.view(len(rows), -1).to(rows)), dim=1)
        return self.heads[index](rows)

    @torch.inference_mode()
    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the target's vocabulary: -inf for tokens never proposed."""
        if self.proposed is None:
            return logits
        whole = torch.full((len(logits), self.vocabulary), -torch.inf, device=self.device)
        return whole.index_copy_(1, self.proposed.to(self.device), logits)


def check_heads(kind: HeadKind | None, raw: Json) -> None:
    """Raise `CheckpointError` for heads with a computation that is not supported."""
    form, grounded = raw.get("hydra_head_arch", "mlp"), raw.get("grounded_heads", True)
    if kind is HeadKind.HYDRA and (form != "mlp" or not grounded):
        raise CheckpointError(
            f"Hydra heads with hydra_head_arch {form!r} and grounded_heads {grounded} are not supported, only with "
            "'mlp' and True"
        )
    if kind is HeadKind.HYDRA and raw.get("hidden_state_offset"):
        raise CheckpointError("Hydra heads on an inner hidden state (hidden_state_offset) are not supported")


def read_heads(
    folder: Path, target: Path, *, device: str, dtype: str, allow_pickle: bool, native: NativeLibrary | None
) -> LmHeads:
    """Read the heads in a folder for a target. Raises `CheckpointError` and `MemoryShortError`."""
    kind, raw, theirs = head_kind(folder), read_config(folder), load_description(target).config
    check_heads(kind, raw)
    place, hidden, vocabulary = torch_device(device), theirs.hidden, theirs.vocabulary
    native = native if place == "cpu" else None
    form = model_dtype(target, dtype, device, native)
    kept = activation_dtype(form)
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        numbers = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
        require_memory(model_name(folder), kept.itemsize * numbers, available_memory(place))
        count = int(raw.get("truncated_vocab_size") or raw.get("draft_vocab_size") or vocabulary)
        proposed = read_proposed(vocabulary, count, checkpoint, "token_map")
        names = (_medusa_names if kind is HeadKind.MEDUSA else _hydra_names)(checkpoint)
        parallel = Parallel()
        make = LinearFactory(
            checkpoint, parallel=parallel, device=place, dtype=kept, native=native, rounded=True
        )
        heads = read_checked(checkpoint, make, lambda make: _read(names, checkpoint, make, hidden, count))
    embedding: Table | None = None
    if kind is HeadKind.HYDRA:
        keeps = native if form == PACKED else None
        embedding = target_table(target, vocabulary, hidden, allow_pickle, keeps)
        embedding = embedding.to(place, kept) if isinstance(embedding, torch.Tensor) else embedding
    return LmHeads(heads, embedding, proposed, hidden, vocabulary, place, kept)


class _Names(NamedTuple):
    """The names of one head's matrices."""

    layers: list[tuple[str, str | None]]
    """Each layer's matrix, and that of its residual connection."""
    output: str


def _read(
    names: Sequence[_Names], checkpoint: Checkpoint, make: Linears, hidden: int, outputs: int
) -> tuple[LmHead, ...]:
    def matrix(name: str, rows: int, inputs: int) -> Linear:
        return make.by_outputs([MatrixShare(name, rows)], inputs, bias=f"{name}.bias" in checkpoint)

    heads: list[LmHead] = []
    for index, (layers, output) in enumerate(names):
        read: list[tuple[Linear, Linear | None]] = []
        for name, residual in layers:
            width = hidden if residual is None else (index + 2) * hidden
            added = None if residual is None else matrix(residual, hidden, width)
            read.append((matrix(name, hidden, width), added))
        heads.append(LmHead(tuple(read), matrix(output, outputs, hidden)))
    return tuple(heads)


def _count(checkpoint: Checkpoint, name: str) -> int:
    """The number of consecutive indices with such a matrix, at least 1: a missing one is reported."""
    found = 0
    while f"{name.format(found)}.weight" in checkpoint:
        found += 1
    return max(1, found)


def _medusa_names(checkpoint: Checkpoint) -> list[_Names]:
    """The original layout, a list of layers for each head, or vLLM's. The file knows the number of heads: uploaded
    configurations often name fewer."""
    original, shared = "0.0.linear.weight" in checkpoint, "lm_head.weight" in checkpoint
    layer = "{}.{}.linear" if original else "blocks.{}.layers.{}"
    found: list[_Names] = []
    for head in range(_count(checkpoint, layer.format("{}", 0))):
        layers = _count(checkpoint, layer.format(head, "{}"))
        output = f"{head}.{layers}" if original else "lm_head" if shared else f"lm_heads.{head}"
        found.append(_Names([(layer.format(head, index), None) for index in range(layers)], output))
    return found


def _hydra_names(checkpoint: Checkpoint) -> list[_Names]:
    """The first layer reads all inputs. Layers may have gaps in their numbers, of dropouts."""
    checkpoint.ignore("input_embed_fn.weight")  # the target's embedding
    suffix, found = ".linear.weight", list[_Names]()
    matrices = sorted(name.removesuffix(suffix) for name in checkpoint.names() if name.endswith(suffix))
    for head in range(len({name.split(".")[1] for name in matrices}) or 1):
        layers = [name for name in matrices if name.startswith(f"hydra_mlp.{head}.")]
        first, *rest = layers or [f"hydra_mlp.{head}.0"]
        output = f"hydra_lm_head.{head}"
        output = f"{output}.1" if f"{output}.1.weight" in checkpoint else output
        read: list[tuple[str, str | None]] = [(f"{name}.linear", None) for name in rest]
        found.append(_Names([(f"{first}.linear", f"{first}.res_connection"), *read], output))
    return found
