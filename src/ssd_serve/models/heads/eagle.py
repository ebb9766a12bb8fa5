"""An EAGLE head in one forward: from a token and a vector of the place before it to the next token.

The vector [hidden] is what the target has computed there, or what the head itself has computed there. EAGLE-3
puts token and vector side by side into the attention of its layer; EAGLE-1 makes one row of them first. Knows
batches, weights and attention backends; no trees and no target.
"""

from dataclasses import dataclass

import torch

from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.device import completion
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.layers import HeadPlaces, NativeHead, can_narrow
from ssd_serve.kernels.native.packed import NativePackedLinear
from ssd_serve.kernels.rows import NativeRows, RmsNorm
from ssd_serve.models.architectures.contract import ModelParts
from ssd_serve.models.architectures.dense.decoder import DenseModel, packed_places
from ssd_serve.models.architectures.dense.weights import DecoderLayer, LayerBlocks
from ssd_serve.models.heads.config import EagleConfig
from ssd_serve.models.interface import ForwardResult, Inputs
from ssd_serve.models.sizes import DTYPES
from ssd_serve.models.weights.linear import Linear, Table

OWN = "own"
"""The feature of a forward that is the head's own vector of each wanted row: [wanted, hidden]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleWeights:
    """Weights of a whole head. `embedding` or `head` None: the target's is used."""

    embedding: Table | None  # [target's vocabulary, hidden]
    token_norm: RmsNorm | None  # [hidden], of embeddings
    feature_norms: tuple[RmsNorm, ...]  # [fused * target_hidden], or [target_hidden] each, or none
    fuse: Linear  # fused * target_hidden -> hidden; EAGLE-1: a token and a vector, 2 * hidden -> hidden
    hidden_norm: RmsNorm | None  # [hidden], of what the layer adds to, for its attention
    blocks: LayerBlocks  # qkv reads 2 * hidden; EAGLE-1: hidden
    norm: RmsNorm | None  # [hidden]
    head: Linear | None  # hidden -> draft vocabulary
    proposed: torch.Tensor | None  # int64 [draft vocabulary], ids of the target; None: all
    more_layers: tuple[DecoderLayer, ...] = ()  # Gumiho, P-EAGLE
    guesses: tuple[
        tuple[Linear, ...], ...
    ] = ()  # Gumiho's heads: 2 * hidden -> hidden, then hidden -> hidden
    mask: torch.Tensor | None = None  # P-EAGLE: the features of a mask, [fused * target_hidden]


class EagleHead(DenseModel):
    """`Model` that takes batches with vectors. Logits cover the tokens `proposed`: see `spread`."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, parts: ModelParts) -> None:
        """The weights have an embedding and a head, their own or the target's."""
        if weights.embedding is None or weights.head is None:
            raise ValueError("a head needs its target's embedding, and some its target's head")
        embedding, self._dtype = weights.embedding, DTYPES[parts.facts.dtype]
        if isinstance(embedding, torch.Tensor):
            embedding = embedding.to(parts.facts.device, self._dtype)
        super().__init__(config.layer, parts, embedding.device)
        self._config = config
        self._weights = weights
        self._embedding = embedding
        self._head = weights.head
        self._places = None if weights.proposed is None else weights.proposed.to(self._device)
        self.proposed = None if weights.proposed is None else weights.proposed.to(torch.int32).numpy()
        """Ids of the tokens that logits are of, ascending or not, int32 [proposed]; None: the whole vocabulary."""
        self._fused = fused_head(config, weights, parts)

    @property
    def config(self) -> EagleConfig:
        """The configuration of the head."""
        return self._config

    @property
    def mask_vector(self) -> torch.Tensor:
        """P-EAGLE: the vector of a mask, [1, hidden]. Raises `ValueError` for other heads."""
        if self._weights.mask is None:
            raise ValueError("the head knows no masks")
        return self.fuse(self._weights.mask[None])

    @property
    def width(self) -> int:
        """Numbers of the target's features at one place."""
        return self._config.fused * self._config.target_hidden

    @torch.inference_mode()
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fuse rows of the target's features, side by side [rows, fused * target_hidden], into the head's
        vectors: [rows, hidden]. EAGLE-1 uses them unchanged."""
        norms = self._weights.feature_norms
        features = features.to(self._device, self._dtype)
        if self._config.joins:
            return features
        if len(norms) == 1 and self._config.one_norm:
            features = norms[0](features)
        elif norms:
            parts = features.chunk(len(norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)
        return self._weights.fuse(features)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ForwardResult:
        """Run one ragged batch with vectors [rows, hidden]; see `Model.forward`."""
        if batch.vectors is None:
            raise ValueError("a head's batch carries vectors")
        inputs = Inputs(
            torch.from_numpy(batch.tokens).to(self._device),
            torch.from_numpy(batch.positions).to(self._device),
            self._attention.plan(batch),
            torch.from_numpy(batch.rows_wanted).to(self._device),
            batch.vectors.to(self._device, self._dtype),
        )
        logits, features = self.run(inputs)
        return ForwardResult(logits, features, completion(self._device))

    def run(self, inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits of the wanted rows, float32 [wanted, proposed], and their own vectors."""
        if inputs.vectors is None or inputs.wanted is None:
            raise ValueError("a head's rows carry vectors")
        blocks, joins = self._weights.blocks, self._config.joins
        rotations = self._rotations.index_select(0, inputs.positions)  # [rows, 1, head_dim / 2]
        token = self._embedding.index_select(0, inputs.tokens)
        if self._fused is not None:
            logits, own = self._fused.run(
                token, inputs.vectors.clone(), rotations, inputs.plan, inputs.wanted
            )
            return logits, {OWN: own}
        token = self._normed(token, self._weights.token_norm)
        hidden = inputs.vectors.clone()  # [rows, hidden], as is the token: what the layer adds to
        if joins:
            hidden = self._weights.fuse(torch.cat((token, hidden), dim=-1))
        rows = self._normed(hidden, self._weights.hidden_norm)
        if self._config.residual_is_normed:
            hidden = rows.clone()
        read = rows if joins else torch.cat((token, rows), dim=-1)  # [rows, hidden or 2 * hidden]
        hidden = self._layer(0, blocks, read, hidden, rotations, inputs)
        for index, layer in enumerate(self._weights.more_layers, 1):
            read = self._normed(hidden, layer.input_norm)
            hidden = self._layer(index, layer.blocks, read, hidden, rotations, inputs)
        own = hidden.index_select(0, inputs.wanted)
        normed = self._normed(own, self._weights.norm)
        return self._head(normed).float(), {OWN: normed if self._config.feed_normed else own}

    def _layer(
        self,
        index: int,
        blocks: LayerBlocks,
        read: torch.Tensor,
        hidden: torch.Tensor,
        rotations: torch.Tensor,
        inputs: Inputs,
    ) -> torch.Tensor:
        """Add a layer to rows `hidden` [rows, hidden]; its attention reads `read`."""
        added = blocks.output(self._attend(index, blocks, read, rotations, inputs.plan))
        rows = self._operations.norm(hidden, added, blocks.mlp_norm)
        return hidden + blocks.down(self._operations.gate(blocks.gate_up(rows)))

    def _normed(self, rows: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        """Rows as they are where there is no norm."""
        return rows if norm is None else self._operations.norm(rows, None, norm)

    @torch.inference_mode()
    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the target's vocabulary, float32 [rows, vocabulary]: -inf for tokens never proposed."""
        if self._places is None:
            return logits
        whole = torch.full((len(logits), self._config.vocabulary), -torch.inf, device=self._device)
        return whole.index_copy_(1, self._places, logits)


def fused_head(config: EagleConfig, weights: EagleWeights, parts: ModelParts) -> NativeHead | None:
    """Return the head as one compiled call, if it is an EAGLE-3 head with packed matrices and compiled steps."""
    attention, norms = parts.attention, (weights.token_norm, weights.hidden_norm, weights.norm)
    if type(parts.operations) is not NativeRows or not isinstance(attention, NativeAttention):
        return None
    if (
        config.joins
        or weights.more_layers
        or not can_narrow(attention)
        or not isinstance(weights.head, NativePackedLinear)
    ):
        return None
    token, hidden, last = norms
    if token is None or hidden is None or last is None:
        return None
    places = packed_places(weights.blocks, token)
    if places is None:
        return None
    normed = config.residual_is_normed, config.feed_normed
    return NativeHead(HeadPlaces(places, weights.head, (token, hidden, last), *normed), attention)
