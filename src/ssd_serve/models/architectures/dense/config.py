"""The configuration of a dense decoder, and what all architectures of the family read alike.

Knows key names and defaults; no tensors, and none of the family's members. What cannot be computed exactly is
refused with a `CheckpointError`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ssd_serve.base.errors import CheckpointError, UserError
from ssd_serve.cache.kv import LayerKV
from ssd_serve.models.architectures.contract import Matrices, RowShapes, Sizes
from ssd_serve.models.config import Json, eos_ids, positive_size
from ssd_serve.models.parallel import MAX_RANKS, Parallel
from ssd_serve.models.rope import RopeConfig, parse_rope, rope_parameters
from ssd_serve.models.weights.quantization import Fp8Scheme, parse_quantization


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Configuration that decides the computation of a dense decoder."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_epsilon: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Each layer's sliding window in tokens, the row's own included; None: attends to everything."""
    tied: bool
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fp8: Fp8Scheme | None = None


def parse_dense(
    raw: Json,
    generation: Json,
    *,
    activations: Sequence[str] = ("silu", "swish"),
    head_dim: int | None = None,
) -> DecoderConfig:
    """The configuration that `config.json` gives, without biases, norms of heads and windows: those are the
    architecture's. `activations` are those that it computes, `head_dim` is the usual one."""
    # Exports of compressed-tensors before its version 0.6 use the second name.
    fp8 = parse_quantization(raw.get("quantization_config") or raw.get("compression_config"))
    if (activation := raw.get("hidden_act", activations[0])) not in activations:
        raise CheckpointError(f"activation {activation!r} is not supported; only {activations[0]!r} is")
    hidden, heads, layers = (
        positive_size(raw, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    rope = parse_rope(raw)
    context = int(raw.get("max_position_embeddings", 2048))
    parameters, kind = rope_parameters(raw)
    if kind == "dynamic":
        # Dynamic scaling changes earlier keys beyond the original context; up to there it is plain rope.
        context = min(context, int(parameters.get("original_max_position_embeddings") or context))
    return DecoderConfig(
        vocabulary=positive_size(raw, "vocab_size"),
        hidden=hidden,
        intermediate=positive_size(raw, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(raw.get("head_dim") or head_dim or hidden // heads),
        context=context,
        norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        windows=(None,) * layers,
        tied=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=eos_ids(raw, generation),
        fp8=fp8,
    )


def dense_sizes(config: DecoderConfig, parallel: Parallel) -> Sizes:
    """The sizes of one rank's share of the whole model that `config` describes."""
    c = rank_config(config, parallel)
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return Sizes(
        matrices=(
            Matrices((queries, keys, keys), c.hidden, c.layers),
            Matrices((c.hidden,), queries, c.layers),
            Matrices((c.intermediate, c.intermediate), c.hidden, c.layers),
            Matrices((c.hidden,), c.intermediate, c.layers),
        ),
        head=Matrices((c.vocabulary,), c.hidden),
        embedding=c.vocabulary * c.hidden,
        tied=c.tied,
        kv=tuple(LayerKV(c.kv_heads, c.head_dim, window) for window in c.windows),
        rows=RowShapes(c.hidden, c.heads, c.kv_heads, c.head_dim, c.intermediate, c.qk_norm),
        ranks=possible_ranks(config),
    )


def rank_config(config: DecoderConfig, parallel: Parallel) -> DecoderConfig:
    """Return one rank's configuration: its share of heads, feed-forward columns and vocabulary.

    Raises `UserError` where that many ranks cannot share the model.
    """
    if not _fits(config, parallel.size):
        possible = map(str, possible_ranks(config))
        raise UserError(
            f"{parallel.size} ranks cannot share {config.heads} attention heads, {config.kv_heads} key-value "
            f"heads and {config.intermediate} feed-forward columns evenly; "
            f"set SSD_TENSOR_PARALLEL to {' or '.join(possible)} for this target"
        )
    vocabulary, kv_heads = parallel.nearly_even(config.vocabulary), parallel.kv_heads(config.kv_heads)
    return replace(
        config,
        heads=config.heads // parallel.size,
        kv_heads=kv_heads.stop - kv_heads.start,
        intermediate=config.intermediate // parallel.size,
        vocabulary=vocabulary.stop - vocabulary.start,
    )


def possible_ranks(config: DecoderConfig) -> tuple[int, ...]:
    """Return the numbers of ranks that can share a model."""
    return tuple(size for size in range(1, MAX_RANKS + 1) if _fits(config, size))


def _fits(config: DecoderConfig, size: int) -> bool:
    kv_heads = config.kv_heads
    return (
        config.heads % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
        and config.intermediate % size == 0
        and config.vocabulary >= size
    )
