"""A DFlash head in one forward: blocks of rows that see each other and the target's features of earlier positions.

A context row is a projected feature: each layer stores its key and value of it, and nothing else is computed. The
other rows of a batch are blocks, an anchor and masks each, and attend to the context and to their own block. Knows
batches, weights and attention backends; no trees and no target.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ssd_serve.drafter.sources.dflash.config import DFlashConfig
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.device import completion
from ssd_serve.kernels.rows import RmsNorm
from ssd_serve.models.architectures.contract import ModelParts
from ssd_serve.models.architectures.dense.decoder import DenseModel
from ssd_serve.models.architectures.dense.weights import LayerBlocks
from ssd_serve.models.interface import ForwardResult, Inputs
from ssd_serve.models.rope import rotation_table
from ssd_serve.models.sizes import DTYPES
from ssd_serve.models.weights.linear import Linear, Table

ROWS = "rows"
"""The feature of a forward that is the normed row of each wanted row: [wanted, hidden]."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A dynamic convolution over the rows of each block, before and after a part of a layer (DFlash 2).

    A row reads itself and the rows before it in its block. A coefficient is a constant of each channel and a number of
    each group that depends on the normed row.
    """

    base: torch.Tensor  # [2, taps, groups, channels of a group]
    projection: Linear  # hidden -> 2 * taps * groups

    def around(
        self, part: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, block: int
    ) -> torch.Tensor:
        """Map normed rows [rows, hidden] by a part of a layer, with a convolution before and one after it."""
        _, taps, groups, _ = self.base.shape
        dynamic = self.projection(rows).view(-1, 2, taps, groups, 1)
        return self.mix(part(self.mix(rows, dynamic[:, 0], 0, block)), dynamic[:, 1], 1, block)

    def mix(self, rows: torch.Tensor, dynamic: torch.Tensor, side: int, block: int) -> torch.Tensor:
        """Convolve rows [rows, hidden] with these coefficients [rows, taps, groups, 1]."""
        _, taps, groups, channels = self.base.shape
        blocks = rows.view(-1, block, groups, channels)
        factors = (self.base[side].to(rows) + dynamic).view(-1, block, taps, groups, channels)
        mixed = factors[:, :, 0] * blocks
        for back in range(1, min(taps, block)):
            mixed[:, back:] += factors[:, back:, back] * blocks[:, :-back]
        return mixed.view_as(rows)


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of tokens after others; see `PairConfig`."""

    before: torch.Tensor  # [vocabulary, rank]
    after: torch.Tensor  # [draft vocabulary, rank]
    hidden: Linear | None
    """The gate (hidden + rank -> rank), or the projection of the row (hidden -> rank)."""
    whole: bool
    """True (DSpark): tokens outside the candidates have scores too."""

    def vectors(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return vectors [rows, count, rank] of the tokens before [rows, count], for rows [rows, hidden]."""
        found = self.before[tokens]
        if self.hidden is None:
            return found
        if not self.whole:
            return found * self.hidden(rows).to(found)[:, None]
        wide = rows.to(found)[:, None].expand(-1, tokens.shape[1], -1)
        return found * torch.sigmoid(self.hidden(torch.cat((wide, found), dim=-1)))

    def __call__(self, before: torch.Tensor, after: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, before, after]; `after` are places in the draft vocabulary."""
        return (self.vectors(before, rows) @ self.after[after].transpose(1, 2)).float()

    def all_after(self, before: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the scores of the whole draft vocabulary after one token of each row [rows]."""
        return (self.vectors(before[:, None], rows)[:, 0] @ self.after.T).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayer:
    """Weights of one layer."""

    input_norm: RmsNorm
    blocks: LayerBlocks
    attention_conv: Convolution | None
    mlp_conv: Convolution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashWeights:
    """Weights of a whole head. `embedding` or `head` None: the target's is used."""

    embedding: Table | None  # [vocabulary, hidden]
    mask: torch.Tensor | None  # [hidden], in place of the mask token's embedding
    fuse: Linear  # features -> hidden
    fused_norm: RmsNorm  # [hidden]
    context: Linear  # hidden -> 2 * layers * kv_heads * head_dim: the keys of all layers, then their values
    context_norm: RmsNorm  # [layers * kv_heads, head_dim]
    layers: tuple[BlockLayer, ...]
    norm: RmsNorm  # [hidden]
    head: Linear | None  # hidden -> draft vocabulary
    proposed: torch.Tensor | None  # int64 [draft vocabulary], ids of the target; None: all
    pairs: PairScores | None


class DFlashHead(DenseModel):
    """`Model` of batches with context rows first, which have `vectors`, and whole blocks after them."""

    def __init__(self, config: DFlashConfig, weights: DFlashWeights, parts: ModelParts) -> None:
        if weights.embedding is None or weights.head is None:
            raise ValueError("a head needs its target's embedding and LM head")
        embedding, self._dtype, self._head = weights.embedding, DTYPES[parts.facts.dtype], weights.head
        if isinstance(embedding, torch.Tensor):
            embedding = embedding.to(parts.facts.device, self._dtype)
        super().__init__(config.layer, parts, embedding.device)
        rotations = rotation_table(
            config.layer.rope, config.layer.head_dim, parts.facts.context + config.block
        )
        self._rotations = rotations.unsqueeze(1).to(self._device)  # a block is whole at the context's end too
        self.config, self.pairs = config, weights.pairs
        self._weights, self._embedding = weights, embedding
        self.proposed = None if weights.proposed is None else weights.proposed.to(torch.int32).numpy()
        """Ids of the tokens that logits are of, int32 [proposed]; None: the whole vocabulary."""
        self._ids = None if weights.proposed is None else weights.proposed.to(self._device)
        self._places = None
        if self._ids is not None:
            self._places = torch.zeros(config.vocabulary, dtype=torch.int64, device=self._device)
            self._places[self._ids] = torch.arange(len(self._ids), device=self._device)

    @property
    def width(self) -> int:
        """Numbers of the target's features at one position."""
        return len(self.config.features) * self.config.hidden

    @torch.inference_mode()
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Project the target's features [positions, width] to context vectors [positions, hidden]."""
        return self._weights.fused_norm(self._weights.fuse(features.to(self._device, self._dtype)))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ForwardResult:
        """Run one ragged batch; see `Model.forward`. Wanted rows are rows of blocks."""
        plans: dict[bool, Any] = {
            causal: self._attention.plan(_causal(batch) if causal else batch)
            for causal in set(self.config.causal)
        }
        inputs = Inputs(
            torch.from_numpy(batch.tokens).to(self._device),
            torch.from_numpy(batch.positions).to(self._device),
            plans,
            torch.from_numpy(batch.rows_wanted).to(self._device),
            None if batch.vectors is None else batch.vectors.to(self._device, self._dtype),
        )
        logits, features = self.run(inputs)
        return ForwardResult(logits, features, completion(self._device))

    def run(self, inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return logits of the wanted rows, float32 [wanted, proposed], and their normed rows."""
        count, known = 0, None
        rotations = self._rotations.index_select(0, inputs.positions)  # [rows, 1, head_dim / 2]
        if inputs.vectors is not None:
            count = len(inputs.vectors)
            known = self._context(inputs.vectors, rotations[:count])
            if count == len(inputs.tokens):
                for index, causal in enumerate(self.config.causal):
                    self._attention.write(index, known[index], inputs.plan[causal])
                return torch.empty((0, self.config.draft_vocabulary), device=self._device), {}
        hidden, rotations = self._embed(inputs.tokens[count:]), rotations[count:]
        added: torch.Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            stored = None if known is None else known[index]
            attend = partial(
                self._attend_block, index, stored, rotations, inputs.plan[self.config.causal[index]]
            )
            for norm, convolution, part in (
                (layer.input_norm, layer.attention_conv, attend),
                (layer.blocks.mlp_norm, layer.mlp_conv, partial(self._feed_forward, layer.blocks)),
            ):
                rows = self._operations.norm(hidden, added, norm)
                block = self.config.block
                added = part(rows) if convolution is None else convolution.around(part, rows, block)
        if inputs.wanted is not None:
            hidden = hidden.index_select(0, inputs.wanted - count)
            added = None if added is None else added.index_select(0, inputs.wanted - count)
        rows = self._operations.norm(hidden, added, self._weights.norm)
        return self._head(rows).float(), {ROWS: rows}

    def _attend_block(
        self,
        index: int,
        known: torch.Tensor | None,
        rotations: torch.Tensor,
        plan: object,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of normed block rows, after the keys and values `known` of context rows were stored."""
        c, blocks = self._layer_config, self._weights.layers[index].blocks
        qkv = blocks.qkv(rows).view(len(rows), -1, c.head_dim)
        qkv = self._operations.rotate(qkv, rotations, c.heads + c.kv_heads, blocks.qk_norm)
        queries, stored = qkv[:, : c.heads], qkv[:, c.heads :]
        if known is not None:
            stored = torch.cat((known, stored))
            queries = torch.cat((queries.new_zeros((len(known), *queries.shape[1:])), queries))
        self._attention.write(index, stored, plan)
        attended = self._attention.run(index, queries, plan)[len(queries) - len(rows) :]
        return blocks.output(attended.to(rows.dtype))

    def _feed_forward(self, blocks: LayerBlocks, rows: torch.Tensor) -> torch.Tensor:
        return blocks.down(self._operations.gate(blocks.gate_up(rows)))

    def _context(self, vectors: torch.Tensor, rotations: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values of context rows by layer: [rows, 2 * kv_heads, head_dim]."""
        c = self._layer_config
        keys, size = c.layers * c.kv_heads, (len(vectors), c.layers, c.kv_heads, c.head_dim)
        heads = self._weights.context(vectors).view(len(vectors), -1, c.head_dim)
        heads = self._operations.rotate(heads, rotations, keys, self._weights.context_norm)
        both = heads[:, :keys].reshape(size), heads[:, keys:].reshape(size)
        return list(torch.cat(both, dim=2).unbind(1))

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if (mask := self._weights.mask) is None:
            return self._embedding.index_select(0, tokens)
        masked = tokens == self.config.mask
        rows = self._embedding.index_select(0, tokens.masked_fill(masked, 0))
        rows[masked] = mask.to(rows)
        return rows

    def places_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return places in the draft vocabulary of proposed tokens."""
        return tokens if self._places is None else self._places[tokens]

    @torch.inference_mode()
    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the target's vocabulary, float32 [rows, vocabulary]: -inf for tokens never proposed."""
        if self._ids is None:
            return logits
        whole = torch.full((len(logits), self.config.vocabulary), -torch.inf, device=self._device)
        return whole.index_copy_(1, self._ids, logits)


def _causal(batch: Batch) -> Batch:
    """Return the batch with rows that see no tree slots after their own: a request's rows are its first tree slots."""
    starts = np.repeat(batch.request_offsets[:-1], np.diff(batch.request_offsets))
    bits = batch.ancestry_bits()
    bits = bits & (np.arange(bits.shape[1]) <= (np.arange(batch.rows) - starts)[:, None])
    return replace(batch, ancestry=np.packbits(bits, axis=1, bitorder="little").view("<u8"))
