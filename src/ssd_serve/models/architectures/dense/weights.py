"""The weights of a dense decoder: their names in a checkpoint, and one rank's share of them.

Knows names and shapes; not how matrices are stored or multiplied.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ssd_serve.kernels.rows import RmsNorm
from ssd_serve.models.architectures.dense.config import DecoderConfig, rank_config
from ssd_serve.models.rope import interleave
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.linear import Linear, Linears, MatrixShare, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBlocks:
    """Weights of the attention and the MLP of one layer."""

    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim
    qk_norm: RmsNorm | None  # [heads + kv_heads, head_dim]
    output: Linear  # heads * head_dim -> hidden
    mlp_norm: RmsNorm  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one layer."""

    input_norm: RmsNorm  # [hidden]
    blocks: LayerBlocks


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a whole decoder."""

    embedding: Table  # [vocabulary, hidden], of this rank's tokens
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm  # [hidden]
    head: Linear  # hidden -> vocabulary, this rank's tokens


def tensor_names(config: DecoderConfig) -> Iterator[str]:
    """The names of all tensors in a checkpoint."""
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    if not config.tied:
        yield "lm_head.weight"
    biased = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.output_bias}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        yield from (f"{prefix}{norm}_layernorm.weight" for norm in ("input", "post_attention"))
        for name, bias in biased.items():
            yield f"{prefix}self_attn.{name}_proj.weight"
            if bias:
                yield f"{prefix}self_attn.{name}_proj.bias"
        for name in ("gate", "up", "down"):
            yield f"{prefix}mlp.{name}_proj.weight"
            if config.mlp_bias:
                yield f"{prefix}mlp.{name}_proj.bias"
        if config.qk_norm:
            yield from (f"{prefix}self_attn.{name}_norm.weight" for name in ("q", "k"))


def read_dense(config: DecoderConfig, checkpoint: Checkpoint, make: Linears) -> DecoderWeights:
    """Read one rank's share of all weights; missing, misshapen and unexpected tensors are a
    `CheckpointError`.

    `config` is the whole model's.
    """
    checkpoint.require(list(tensor_names(config)))
    embedding = make.embedding("model.embed_tokens.weight", (config.vocabulary, config.hidden))
    tokens = make.parallel.nearly_even(config.vocabulary)
    differs = config.tied and checkpoint.differs("lm_head.weight", "model.embed_tokens.weight", tokens)
    if differs:
        checkpoint.comment(
            "config.json ties the head to the embedding, and lm_head.weight differs from it: lm_head.weight is used"
        )
    if config.tied and not differs:
        head = make.wrap(embedding)
    else:
        head = make.by_outputs(
            [MatrixShare("lm_head", config.vocabulary, own=tokens)], config.hidden, bias=False
        )
    layers = tuple(_read_layer(config, make, f"model.layers.{index}") for index in range(config.layers))
    norm = RmsNorm(make.tensor("model.norm.weight", (config.hidden,)), config.norm_epsilon)
    checkpoint.finish()
    return DecoderWeights(embedding, layers, norm, head)


def _read_layer(config: DecoderConfig, make: Linears, prefix: str) -> DecoderLayer:
    norm = make.tensor(f"{prefix}.input_layernorm.weight", (config.hidden,))
    blocks = read_blocks(config, make, prefix, config.hidden)
    return DecoderLayer(input_norm=RmsNorm(norm, config.norm_epsilon), blocks=blocks)


def read_blocks(config: DecoderConfig, make: Linears, prefix: str, inputs: int) -> LayerBlocks:
    """Read attention and MLP of a layer; `inputs` is the input size of the query, key and value projections."""
    c, attention, mlp = config, f"{prefix}.self_attn", f"{prefix}.mlp"
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    own, kv_heads = rank_config(c, make.parallel), make.parallel.kv_heads(c.kv_heads)
    own_keys = slice(kv_heads.start * c.head_dim, kv_heads.stop * c.head_dim)
    qkv = [
        MatrixShare(f"{attention}.q_proj", queries, interleave(c.head_dim, own.heads)),
        MatrixShare(f"{attention}.k_proj", keys, interleave(c.head_dim, own.kv_heads), own_keys),
        MatrixShare(f"{attention}.v_proj", keys, own=own_keys),
    ]
    gate_up = [MatrixShare(f"{mlp}.gate_proj", c.intermediate), MatrixShare(f"{mlp}.up_proj", c.intermediate)]
    mlp_norm = make.tensor(f"{prefix}.post_attention_layernorm.weight", (c.hidden,))
    return LayerBlocks(
        qkv=make.by_outputs(qkv, inputs, bias=c.qkv_bias),
        qk_norm=_read_qk_norm(own, make, attention) if c.qk_norm else None,
        output=make.by_inputs(MatrixShare(f"{attention}.o_proj", c.hidden), queries, bias=c.output_bias),
        mlp_norm=RmsNorm(mlp_norm, c.norm_epsilon),
        gate_up=make.by_outputs(gate_up, c.hidden, bias=c.mlp_bias),
        down=make.by_inputs(MatrixShare(f"{mlp}.down_proj", c.hidden), c.intermediate, bias=c.mlp_bias),
    )


def _read_qk_norm(config: DecoderConfig, make: Linears, prefix: str) -> RmsNorm:
    """The norm of query and key heads, one weight row a head: [heads + kv_heads, head_dim]."""
    order = interleave(config.head_dim, 1)
    query, key = (
        make.tensor(f"{prefix}.{name}_norm.weight", (config.head_dim,))[order] for name in ("q", "k")
    )
    weight = torch.cat((query.expand(config.heads, -1), key.expand(config.kv_heads, -1)))
    return RmsNorm(weight, config.norm_epsilon)
