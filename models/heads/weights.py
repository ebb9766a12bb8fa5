"""The weights of an EAGLE-3 head: their names in each layout, and how they are read.

Knows names and shapes; not how matrices are stored or multiplied. Missing, misshapen and unexpected tensors
are a `CheckpointError`.
"""

from dataclasses import dataclass

import torch

from ssd_serve.errors import CheckpointError
from ssd_serve.kernels.rows.norm import RmsNorm
from ssd_serve.models.architectures.dense.weights import DecoderLayer, read_layer
from ssd_serve.models.heads.config import EagleConfig
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.linear import Linear, Linears, MatrixShare

_LAYERS = ("midlayer", "layers.0", "model.midlayer", "model.layers.0")
"""What the layer is called."""


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """Weights of a whole head. `embedding` None: the target's is used."""

    embedding: torch.Tensor | None  # [target's vocabulary, hidden]
    feature_norms: tuple[RmsNorm, ...]  # [fused * target_hidden], or [target_hidden] each, or none
    fuse: Linear  # fused * target_hidden -> hidden
    hidden_norm: RmsNorm  # [hidden]
    layer: DecoderLayer  # whose qkv reads 2 * hidden
    norm: RmsNorm  # [hidden]
    head: Linear  # hidden -> draft vocabulary
    proposed: torch.Tensor | None  # int64 [draft vocabulary], ids of the target; None: all


def read_eagle3(config: EagleConfig, checkpoint: Checkpoint, make: Linears) -> EagleWeights:
    """Read all weights; a head is never shared by ranks."""
    prefix = next((each for each in _LAYERS if f"{each}.self_attn.q_proj.weight" in checkpoint), _LAYERS[0])
    outside = "model." if prefix.startswith("model.") else ""
    c, names = config, checkpoint.names()

    def norm(name: str, width: int) -> RmsNorm:
        return RmsNorm(make.tensor(f"{name}.weight", (width,)), c.layer.norm_epsilon)

    embedding = None
    if (name := f"{outside}embed_tokens.weight") in names:
        embedding = make.embedding(name, (c.vocabulary, c.hidden))
    feature_norms: tuple[RmsNorm, ...] = ()
    if c.one_norm:
        feature_norms = (norm(f"{outside}input_norm", c.fused * c.target_hidden),)
    elif c.norm_each:
        feature_norms = tuple(norm(f"{outside}fc_norm.{index}", c.target_hidden) for index in range(c.fused))
    fuse = make.by_outputs(
        [MatrixShare(f"{outside}fc", c.hidden)], c.fused * c.target_hidden, bias=f"{outside}fc.bias" in names
    )
    head = make.by_outputs([MatrixShare("lm_head", c.draft_vocabulary)], c.hidden, bias=False)
    weights = EagleWeights(
        embedding=embedding,
        feature_norms=feature_norms,
        fuse=fuse,
        hidden_norm=norm(f"{prefix}.hidden_norm", c.hidden),
        layer=read_layer(c.layer, make, prefix, 2 * c.hidden),
        norm=norm(f"{outside}norm", c.hidden),
        head=head,
        proposed=_read_proposed(c, checkpoint),
    )
    checkpoint.finish()
    return weights


def _read_proposed(config: EagleConfig, checkpoint: Checkpoint) -> torch.Tensor | None:
    """The target's ids of the tokens that the head knows: id + d2t[id]."""
    count = config.draft_vocabulary
    checkpoint.ignore("t2d")  # says the same
    if "d2t" not in checkpoint:
        if count != config.vocabulary:
            raise CheckpointError(
                f"{checkpoint.folder} proposes {count} of {config.vocabulary} tokens, and no d2t tells which"
            )
        return None
    ids = checkpoint.read("d2t", (count,)).to(torch.int64) + torch.arange(count)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocabulary or len(set(ids.tolist())) < count:
        raise CheckpointError(
            f"{checkpoint.folder}: d2t names tokens that the target does not have, or one twice"
        )
    return ids
