"""The decoder family: Llama, Mistral, Qwen 2 and Qwen 3, in one lean forward.

The same code runs a target of many layers and a drafter of two, so a layer is as few torch operators as
possible: query, key and value are one product, gate and up another, a rotation is one complex product, and
keys and values are stored together. Knows batches, weights and attention backends; knows no request, no
file format and no page size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ssd_serve.cache.kv import KVLayout, LayerKV
from ssd_serve.kernels.attention.contract import AttentionBackend
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.rows.norm import RmsNorm
from ssd_serve.kernels.rows.operations import RowOperations
from ssd_serve.models.completion import completion
from ssd_serve.models.config import DecoderConfig
from ssd_serve.models.interface import ForwardResult, ModelFacts
from ssd_serve.models.ranks.parallel import Alone, Group, rank_config
from ssd_serve.models.rope import interleave, rotation_table
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.linear import Linear, LinearFactory, MatrixShare


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer."""

    input_norm: RmsNorm  # [hidden]
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim
    qk_norm: RmsNorm | None  # [heads + kv_heads, head_dim]
    output: Linear  # heads * head_dim -> hidden
    mlp_norm: RmsNorm  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a whole decoder."""

    embedding: torch.Tensor  # [vocabulary, hidden], of this rank's tokens
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm  # [hidden]
    head: Linear  # hidden -> vocabulary, this rank's tokens


@dataclass(frozen=True, slots=True)
class Inputs:
    """One forward's rows, on the device."""

    tokens: torch.Tensor  # [rows], int64
    positions: torch.Tensor  # [rows], int64
    plan: Any
    """The attention's."""
    wanted: torch.Tensor | None = None
    """int64, the rows whose logits are wanted; None: all."""


class Decoder:
    """`Model` over a `DecoderConfig`, which is one rank's (`rank_config`) where a group shares the model.

    `features` names layers whose outputs are returned: `layer.<index>`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        attention: AttentionBackend[Any],
        operations: RowOperations,
        *,
        facts: ModelFacts,
        slots: int,
        features: tuple[int, ...] = (),
        group: Group | None = None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._operations = operations
        self._facts = facts
        self._slots = slots
        self._features = frozenset(features)
        self._group = group or Alone()
        self._device = weights.embedding.device
        # [context, 1, head_dim / 2]: one rotation for all heads of a row
        self._rotations = (
            rotation_table(config.rope, config.head_dim, facts.context).unsqueeze(1).to(self._device)
        )

    @property
    def facts(self) -> ModelFacts:
        """Sizes and names."""
        return self._facts

    @property
    def attention(self) -> AttentionBackend[Any]:
        """The tree attention in use."""
        return self._attention

    @property
    def slots(self) -> int:
        """Number of KV slots."""
        return self._slots

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ForwardResult:
        """Run one ragged batch; see `Model.forward`."""
        wanted = len(batch.rows_wanted)
        inputs = Inputs(
            torch.from_numpy(batch.tokens).to(self._device),
            torch.from_numpy(batch.positions).to(self._device),
            self._attention.plan(batch),
            None if wanted == batch.rows else torch.from_numpy(batch.rows_wanted).to(self._device),
        )
        logits, features = self.run(inputs)
        return ForwardResult(logits, features, completion(self._device))

    def run(self, inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits of the wanted rows, float32 [wanted, vocabulary], and features, from what is on the device.

        Nothing here depends on values: with a capturable attention it can be captured and replayed.
        """
        rotations = self._rotations.index_select(0, inputs.positions)  # [rows, 1, head_dim / 2], complex64
        hidden = self._embed(inputs.tokens)  # [rows, hidden]
        features: dict[str, torch.Tensor] = {}
        added: torch.Tensor | None = None  # what the last block adds to `hidden`: the next norm does it
        for index, layer in enumerate(self._weights.layers):
            rows = self._operations.norm(hidden, added, layer.input_norm)
            added = self._attend(index, layer, rows, rotations, inputs.plan)
            rows = self._operations.norm(hidden, added, layer.mlp_norm)
            added = self._group.add(layer.down(self._operations.gate(layer.gate_up(rows))))
            if index in self._features:
                features[f"layer.{index}"] = hidden + added
        return self._logits(hidden, added, inputs.wanted), features

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [rows, hidden]: each token's rank gives its row, the others nothing."""
        embedding, parallel = self._weights.embedding, self._group.parallel
        if parallel.size == 1:
            return embedding.index_select(0, tokens)
        own = tokens - parallel.nearly_even(self._facts.vocabulary).start
        known = own.clamp(0, len(embedding) - 1)
        others = (own != known).unsqueeze(1)
        return self._group.add(embedding.index_select(0, known).masked_fill_(others, 0))

    def _attend(
        self, index: int, layer: DecoderLayer, rows: torch.Tensor, rotations: torch.Tensor, plan: object
    ) -> torch.Tensor:
        """The attention block of a layer: normed rows [rows, hidden] -> [rows, hidden]."""
        c = self._config
        heads = layer.qkv(rows).view(rows.shape[0], -1, c.head_dim)
        heads = self._operations.rotate(heads, rotations, c.heads + c.kv_heads, layer.qk_norm)
        self._attention.write(index, heads[:, c.heads :], plan)
        attended = self._attention.run(index, heads[:, : c.heads], plan)  # [rows, heads * head_dim]
        return self._group.add(layer.output(attended.to(rows.dtype)))

    def _logits(
        self, hidden: torch.Tensor, added: torch.Tensor | None, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits of the wanted rows: float32 [wanted, vocabulary]; on other ranks than 0 a part of them."""
        vocabulary = self._facts.vocabulary
        if wanted is not None:
            if not len(wanted):
                return torch.empty((0, vocabulary), device=self._device)
            hidden = hidden.index_select(0, wanted)
            added = None if added is None else added.index_select(0, wanted)
        share = self._weights.head(self._operations.norm(hidden, added, self._weights.norm)).float()
        return self._group.gather(share, vocabulary)


def kv_layout(config: DecoderConfig, dtype: torch.dtype) -> KVLayout:
    """What the decoder remembers of a token, in the dtype that attention computes in."""
    return KVLayout(
        tuple(LayerKV(config.kv_heads, config.head_dim, window) for window in config.windows), dtype
    )


def matrix_elements(config: DecoderConfig) -> int:
    """Numbers in all matrices that one forward of one row reads (the head, not the embedding)."""
    attention = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    return config.hidden * (config.layers * (attention + 3 * config.intermediate) + config.vocabulary)


def largest_matrix(config: DecoderConfig) -> int:
    """Numbers in the largest matrix."""
    attention = (config.heads + 2 * config.kv_heads) * config.head_dim
    return config.hidden * max(config.vocabulary, 2 * config.intermediate, attention)


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


def read_weights(
    config: DecoderConfig,
    checkpoint: Checkpoint,
    make: LinearFactory,
    progress: Callable[[int, int], None] | None = None,
) -> DecoderWeights:
    """Read one rank's share of all weights; missing, misshapen and unexpected tensors are a
    `CheckpointError`.

    `config` is the whole model's. `progress` is told how many layers of how many are read.
    """
    checkpoint.require(list(tensor_names(config)))
    embedding = make.embedding("model.embed_tokens.weight", (config.vocabulary, config.hidden))
    if config.tied:
        checkpoint.ignore("lm_head.weight")
        head = make.wrap(embedding)
    else:
        tokens = make.parallel.nearly_even(config.vocabulary)
        head = make.by_outputs(
            [MatrixShare("lm_head", config.vocabulary, own=tokens)], config.hidden, bias=False
        )
    layers: list[DecoderLayer] = []
    for index in range(config.layers):
        layers.append(_read_layer(config, make, f"model.layers.{index}"))
        if progress is not None:
            progress(index + 1, config.layers)
    norm = RmsNorm(make.tensor("model.norm.weight", (config.hidden,)), config.norm_epsilon)
    checkpoint.finish()
    return DecoderWeights(embedding, tuple(layers), norm, head)


def _read_layer(config: DecoderConfig, make: LinearFactory, prefix: str) -> DecoderLayer:

    def norm(name: str) -> RmsNorm:
        return RmsNorm(make.tensor(f"{prefix}.{name}.weight", (c.hidden,)), c.norm_epsilon)

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
    return DecoderLayer(
        input_norm=norm("input_layernorm"),
        qkv=make.by_outputs(qkv, c.hidden, bias=c.qkv_bias),
        qk_norm=_read_qk_norm(own, make, attention) if c.qk_norm else None,
        output=make.by_inputs(MatrixShare(f"{attention}.o_proj", c.hidden), queries, bias=c.output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=make.by_outputs(gate_up, c.hidden, bias=c.mlp_bias),
        down=make.by_inputs(MatrixShare(f"{mlp}.down_proj", c.hidden), c.intermediate, bias=c.mlp_bias),
    )


def _read_qk_norm(config: DecoderConfig, make: LinearFactory, prefix: str) -> RmsNorm:
    """The norm of query and key heads, one weight row a head: [heads + kv_heads, head_dim]."""
    order = interleave(config.head_dim, 1)
    query, key = (
        make.tensor(f"{prefix}.{name}_norm.weight", (config.head_dim,))[order] for name in ("q", "k")
    )
    weight = torch.cat((query.expand(config.heads, -1), key.expand(config.kv_heads, -1)))
    return RmsNorm(weight, config.norm_epsilon)
