"""From a folder to a running EAGLE-3 head. What it leaves to its target is read from the target's folder."""

from dataclasses import replace
from pathlib import Path

import torch

from ssd_serve.errors import CheckpointError
from ssd_serve.logs import Logger
from ssd_serve.models.architectures.contract import Architecture, Description, Matrices, Sizes
from ssd_serve.models.architectures.dense.sizes import dense_sizes
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.config import read_raw
from ssd_serve.models.heads.config import EagleConfig, check_features, parse_eagle3, usual_features
from ssd_serve.models.heads.eagle import EagleHead
from ssd_serve.models.heads.weights import EagleWeights, read_eagle3
from ssd_serve.models.load import ModelWish, load_sized
from ssd_serve.models.ranks.parallel import Parallel
from ssd_serve.models.sizes import ModelSizes, sizes_of
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.linear import Linears


def head_config(folder: Path, target: Path, features: tuple[int, ...] | None = None) -> EagleConfig:
    """A head for a target; `features` are outputs of the target's layers, instead of those that the head
    names. Raises `CheckpointError` where the two do not fit each other."""
    theirs = load_description(target)
    layers = len(theirs.sizes(Parallel()).kv)
    config = parse_eagle3(read_raw(folder), {})
    wanted = features or config.features or usual_features(layers)
    config = replace(config, features=check_features(wanted, layers))
    if (config.target_hidden, config.vocabulary) != (theirs.config.hidden, theirs.config.vocabulary):
        raise CheckpointError(
            f"{folder} is a head for targets of width {config.target_hidden} with {config.vocabulary} "
            f"tokens; {target} has width {theirs.config.hidden} and {theirs.config.vocabulary} tokens"
        )
    return replace(config, layer=replace(config.layer, eos_token_ids=theirs.config.eos_token_ids))


def head_sizes(
    folder: Path, target: Path, *, device: str, dtype: str, features: tuple[int, ...] | None = None
) -> ModelSizes:
    """Sizes of such a head."""
    description = Description(_architecture(target), head_config(folder, target, features))
    return sizes_of(description, folder, device=device, dtype=dtype)


def load_head(folder: Path, wish: ModelWish, sizes: ModelSizes, log: Logger | None = None) -> EagleHead:
    """Load it with its KV cache. Raises `CheckpointError` and `MemoryShortError`."""
    head = load_sized(folder, wish, sizes, log=log)
    if not isinstance(head, EagleHead):
        raise CheckpointError(f"{folder} is no head")
    return head


def _architecture(target: Path) -> Architecture[EagleConfig, EagleWeights]:
    def read(config: EagleConfig, checkpoint: Checkpoint, make: Linears) -> EagleWeights:
        weights = read_eagle3(config, checkpoint, make)
        return (
            weights if weights.embedding is not None else replace(weights, embedding=_theirs(config, target))
        )

    return Architecture(
        models="EAGLE-3", parse=parse_eagle3, sizes=_sizes, read_weights=read, build=EagleHead
    )


def _theirs(config: EagleConfig, target: Path) -> torch.Tensor:
    """The target's embedding, which a head without one of its own reads."""
    if config.hidden != config.target_hidden:
        raise CheckpointError(
            f"the head has no embedding, and is {config.hidden} wide, its target's {config.target_hidden}"
        )
    return target_embedding(target, config.vocabulary, config.hidden)


def target_embedding(target: Path, vocabulary: int, hidden: int) -> torch.Tensor:
    """The embedding [vocabulary, hidden] of a whole model, as it lies in its folder."""
    with Checkpoint(target, partly=True) as checkpoint:
        return checkpoint.read("model.embed_tokens.weight", (vocabulary, hidden))


def _sizes(config: EagleConfig, parallel: Parallel) -> Sizes:
    """Those of its layer, whose first product reads twice as much, and of what fuses the features."""
    usual = dense_sizes(config.layer, parallel)
    qkv, *rest = usual.matrices
    return replace(
        usual,
        matrices=(
            replace(qkv, inputs=2 * config.hidden),
            *rest,
            Matrices((config.hidden,), config.fused * config.target_hidden),
        ),
        head=Matrices((config.draft_vocabulary,), config.hidden),
        ranks=(1,),
    )
