"""What a rank of a dense decoder holds, and how many ranks can share one. Knows shapes, no tensors."""

from dataclasses import replace

from ssd_serve.base.errors import UserError
from ssd_serve.cache.kv import LayerKV
from ssd_serve.models.architectures.contract import Matrices, RowShapes, Sizes
from ssd_serve.models.architectures.dense.config import DecoderConfig
from ssd_serve.models.ranks.parallel import MAX_RANKS, Parallel


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
    """What one rank computes: the same layers with its share of heads, feed-forward part and vocabulary.

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
    """How many ranks can share a model."""
    return tuple(size for size in range(1, MAX_RANKS + 1) if _fits(config, size))


def _fits(config: DecoderConfig, size: int) -> bool:
    kv_heads = config.kv_heads
    return (
        config.heads % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
        and config.intermediate % size == 0
        and config.vocabulary >= size
    )
