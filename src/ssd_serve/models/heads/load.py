"""Loads EAGLE heads. Weights that a head shares with its target are read from the target's folder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import CheckpointError
from ssd_serve.base.logs import Logger
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.contract import Architecture, Description, Matrices, Sizes
from ssd_serve.models.architectures.dense.config import dense_sizes
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.heads.config import PARSERS, EagleConfig, check_features, usual_features
from ssd_serve.models.heads.eagle import EagleHead
from ssd_serve.models.heads.kinds import HeadKind, head_kind
from ssd_serve.models.heads.weights import EagleWeights, read_head
from ssd_serve.models.load import ModelOptions, load_sized
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.sizes import ModelSizes, sizes_of
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.formats import read_config
from ssd_serve.models.weights.linear import Linears
from ssd_serve.models.weights.matrices import ScaledMatrix


def head_config(folder: Path, target: Path, features: Sequence[int] | None = None) -> EagleConfig:
    """A head for a target; an EAGLE-3 head reads the layers among `features`, if there are any, instead of
    those that it names. Raises `CheckpointError` where the two do not fit each other."""
    if (kind := head_kind(folder)) is None:
        raise CheckpointError(f"{folder} is no head")
    theirs = load_description(target)
    layers = len(theirs.sizes(Parallel()).kv)
    config = PARSERS[kind](read_config(folder), {})
    if kind is not HeadKind.EAGLE1:
        named = tuple(each for each in features or () if each != FINAL)
        wanted = named or config.features or usual_features(layers)
        config = replace(config, features=check_features(wanted, layers))
    if (config.target_hidden, config.vocabulary) != (theirs.config.hidden, theirs.config.vocabulary):
        raise CheckpointError(
            f"{folder} is a head for targets of width {config.target_hidden} with {config.vocabulary} "
            f"tokens; {target} has width {theirs.config.hidden} and {theirs.config.vocabulary} tokens"
        )
    return replace(config, layer=replace(config.layer, eos_token_ids=theirs.config.eos_token_ids))


def head_sizes(
    folder: Path,
    target: Path,
    *,
    device: str,
    dtype: str,
    features: Sequence[int] | None = None,
    allow_pickle: bool = False,
    native: NativeLibrary | None = None,
) -> ModelSizes:
    """Sizes of such a head."""
    config = head_config(folder, target, features)
    description = Description(_architecture(config, target, allow_pickle), config)
    return sizes_of(description, folder, device=device, dtype=dtype, allow_pickle=allow_pickle, native=native)


def load_head(folder: Path, options: ModelOptions, sizes: ModelSizes, log: Logger | None = None) -> EagleHead:
    """Load it with its KV cache. Raises `CheckpointError` and `MemoryShortError`."""
    head = load_sized(folder, options, sizes, log=log)
    if not isinstance(head, EagleHead):
        raise CheckpointError(f"{folder} is no head")
    return head


def _architecture(
    config: EagleConfig, target: Path, allow_pickle: bool
) -> Architecture[EagleConfig, EagleWeights]:
    def read(config: EagleConfig, checkpoint: Checkpoint, make: Linears) -> EagleWeights:
        weights = read_head(config, checkpoint, make)
        sizes = config.vocabulary, config.hidden
        if weights.embedding is None:
            if config.hidden != config.target_hidden:
                raise CheckpointError(
                    f"the head has no embedding, and is {config.hidden} wide, its target's "
                    f"{config.target_hidden}"
                )
            embedding = target_embedding(target, *sizes, allow_pickle=allow_pickle)
            weights = replace(weights, embedding=embedding)
        if weights.head is None:
            weights = replace(weights, head=make.wrap(target_head(target, *sizes, allow_pickle=allow_pickle)))
        return weights

    return Architecture(
        models=config.kind, parse=PARSERS[config.kind], sizes=_sizes, read_weights=read, build=EagleHead
    )


def target_embedding(
    target: Path, vocabulary: int, hidden: int, *, allow_pickle: bool = False
) -> torch.Tensor:
    """The embedding [vocabulary, hidden] of a whole model, as it lies in its folder."""
    with Checkpoint(target, partly=True, allow_pickle=allow_pickle) as checkpoint:
        return checkpoint.read("model.embed_tokens.weight", (vocabulary, hidden))


def target_head(target: Path, vocabulary: int, hidden: int, *, allow_pickle: bool = False) -> torch.Tensor:
    """The head [vocabulary, hidden] of a whole model, the embedding where that is both."""
    theirs = load_description(target)
    if theirs.sizes(Parallel()).tied:
        return target_embedding(target, vocabulary, hidden, allow_pickle=allow_pickle)
    with Checkpoint(target, partly=True, allow_pickle=allow_pickle) as checkpoint:
        stored = checkpoint.format.matrices(checkpoint, theirs.config.fp8).read(
            "lm_head", (vocabulary, hidden)
        )
        if isinstance(stored, ScaledMatrix) and stored.scales is None:
            return stored.numbers
        weight = torch.empty((vocabulary, hidden))
        stored.write(weight)
        return weight


def _sizes(config: EagleConfig, parallel: Parallel) -> Sizes:
    usual = dense_sizes(config.layer, parallel)
    qkv, *rest = usual.matrices
    return replace(
        usual,
        matrices=(
            qkv if config.joins else replace(qkv, inputs=2 * config.hidden),
            *rest,
            Matrices((config.hidden,), config.fuse_inputs),
        ),
        head=Matrices((config.draft_vocabulary,), config.hidden),
        ranks=(1,),
    )
