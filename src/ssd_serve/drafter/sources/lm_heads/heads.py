"""Medusa's and Hydra's heads: layers and an LM head for each of the next positions, on the target's last feature.

Head i guesses the token i + 2 places after the position of the feature. Medusa's (arXiv 2401.10774) read the feature
alone, Hydra's (arXiv 2402.05109) also the embeddings of the tokens since. Knows weights and their published names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from ssd_serve.base.errors import CheckpointError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.config import Json, model_name
from ssd_serve.models.heads.kinds import HeadKind, head_kind
from ssd_serve.models.heads.load import TensorCheck, target_table
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    if kind is not HeadKind.HYDRA:
        return
    form, grounded = raw.get("hydra_head_arch", "mlp"), raw.get("grounded_heads", True)
    if form != "mlp" or not grounded:
        raise CheckpointError(
            f"Hydra heads with hydra_head_arch {form!r} and grounded_heads {grounded} are not supported, only with "
            "'mlp' and True"
        )
    if raw.get("hidden_state_offset"):
        raise CheckpointError("Hydra heads on an inner hidden state (hidden_state_offset) are not supported")


def read_heads(
    folder: Path,
    target: Path,
    *,
    device: str,
    dtype: str,
    allow_pickle: bool = False,
    native: NativeLibrary | None = None,
) -> LmHeads:
    """Read the heads in a folder for a target. Raises `CheckpointError` and `MemoryShortError`."""
    kind, raw, theirs = head_kind(folder), read_config(folder), load_description(target).config
    check_heads(kind, raw)
    place = torch_device(device)
    native = native if place == "cpu" else None
    form = model_dtype(target, dtype, device, native)
    hidden, vocabulary = theirs.hidden, theirs.vocabulary
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        width = activation_dtype(form).itemsize
        numbers = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
        require_memory(model_name(folder), width * numbers, available_memory(place))
        read = _read_medusa if kind is HeadKind.MEDUSA else _read_hydra
        proposed = _read_proposed(checkpoint, raw, vocabulary)
        outputs = vocabulary if proposed is None else len(proposed)
        parallel = Parallel()
        survey = TensorCheck(checkpoint, parallel)
        read(checkpoint, survey, hidden, outputs)
        survey.finish()
        make = LinearFactory(
            checkpoint,
            parallel=parallel,
            device=place,
            dtype=activation_dtype(form),
            native=native,
            rounded=True,
        )
        heads = read(checkpoint, make, hidden, outputs)
        checkpoint.finish()
    embedding = None
    if kind is HeadKind.HYDRA:
        keeps = native if form == PACKED else None
        embedding = target_table(target, vocabulary, hidden, allow_pickle, keeps)
        if isinstance(embedding, torch.Tensor):
            embedding = embedding.to(place, activation_dtype(form))
    return LmHeads(
        heads=heads,
        embedding=embedding,
        proposed=proposed,
        hidden=hidden,
        vocabulary=vocabulary,
        device=place,
        dtype=activation_dtype(form),
    )


def _read_proposed(checkpoint: Checkpoint, raw: Json, vocabulary: int) -> torch.Tensor | None:
    """The target's ids of the tokens that the heads know: `token_map`, or id + d2t[id]."""
    count = int(raw.get("truncated_vocab_size") or raw.get("draft_vocab_size") or vocabulary)
    name = next((each for each in ("token_map", "d2t") if each in checkpoint), None)
    if name is None:
        if count != vocabulary:
            raise CheckpointError(
                f"{checkpoint.folder} proposes {count} of {vocabulary} tokens, and has neither token_map nor d2t"
            )
        return None
    ids = checkpoint.read(name, (count,)).to(torch.int64)
    ids = ids + torch.arange(count) if name == "d2t" else ids
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or len(set(ids.tolist())) < count:
        raise CheckpointError(
            f"{checkpoint.folder}: {name} names tokens that the target does not have, or one twice"
        )
    return ids


def _count(checkpoint: Checkpoint, name: str) -> int:
    """The number of consecutive indices with such a matrix, at least 1: a missing one is reported."""
    found = 0
    while f"{name.format(found)}.weight" in checkpoint:
        found += 1
    return max(1, found)


def _matrix(checkpoint: Checkpoint, make: Linears, name: str, outputs: int, inputs: int) -> Linear:
    return make.by_outputs([MatrixShare(name, outputs)], inputs, bias=f"{name}.bias" in checkpoint)


def _read_medusa(checkpoint: Checkpoint, make: Linears, hidden: int, outputs: int) -> tuple[LmHead, ...]:
    """The original layout, a list of layers for each head, or vLLM's. The file knows the number of heads: uploaded
    configurations often name fewer."""
    prefix = next(
        (each for each in ("medusa_heads.", "medusa_head.") if f"{each}0.0.linear.weight" in checkpoint), ""
    )
    original = f"{prefix}0.0.linear.weight" in checkpoint
    layer = f"{prefix}{{}}.{{}}.linear" if original else "blocks.{}.layers.{}"
    shared = "lm_head.weight" in checkpoint
    heads: list[LmHead] = []
    for head in range(_count(checkpoint, layer.format("{}", 0))):
        layers = _count(checkpoint, layer.format(head, "{}"))
        output = f"{prefix}{head}.{layers}" if original else "lm_head" if shared else f"lm_heads.{head}"
        names = [layer.format(head, index) for index in range(layers)]
        heads.append(
            LmHead(
                tuple((_matrix(checkpoint, make, name, hidden, hidden), None) for name in names),
                _matrix(checkpoint, make, output, outputs, hidden),
            )
        )
    return tuple(heads)


def _read_hydra(checkpoint: Checkpoint, make: Linears, hidden: int, outputs: int) -> tuple[LmHead, ...]:
    """Layers may have gaps in their numbers, of dropouts."""
    checkpoint.ignore("input_embed_fn.weight")  # the target's embedding
    heads: list[LmHead] = []
    starts = sorted(
        name.removesuffix(".linear.weight") for name in checkpoint.names() if name.endswith(".linear.weight")
    )
    for head in range(len({name.split(".")[1] for name in starts}) or 1):
        layers = [name for name in starts if name.startswith(f"hydra_mlp.{head}.")] or [f"hydra_mlp.{head}.0"]
        output = f"hydra_lm_head.{head}"
        output = f"{output}.1" if f"{output}.1.weight" in checkpoint else output
        read: list[tuple[Linear, Linear | None]] = []
        for index, name in enumerate(layers):
            inputs = hidden if index else (head + 2) * hidden
            linear = _matrix(checkpoint, make, f"{name}.linear", hidden, inputs)
            residual = None if index else _matrix(checkpoint, make, f"{name}.res_connection", hidden, inputs)
            read.append((linear, residual))
        heads.append(LmHead(tuple(read), _matrix(checkpoint, make, output, outputs, hidden)))
    return tuple(heads)
