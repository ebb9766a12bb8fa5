"""A DFlash head in one forward: blocks of rows that see each other and the target's features of earlier positions.

A context row is a projected feature: each layer stores its key and value of it, and nothing else is computed. The
other rows of a batch are blocks, an anchor and masks each, and attend to the context and to their own block. Knows
batches, weights and attention backends; no trees and no target.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ssd_serve.drafter.sources.dflash.config import DFlashConfig
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.device import completion
from ssd_serve.kernels.rows import RmsNorm
from ssd_serve.models.architectures.contract import ModelParts
from ssd_serve.models.architectures.dense.decoder import DenseModel
from ssd_serve.models.architectures.dense.weights import DecoderLayer
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

    def before(self, rows: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve normed rows [rows, hidden]; also return the coefficients of `after`."""
        _, taps, groups, _ = self.base.shape
        dynamic = self.projection(rows).view(-1, 2, taps, groups, 1)
        return self.mix(rows, dynamic[:, 0], 0, block), dynamic[:, 1]

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
    gates: bool
    whole: bool
    """True: tokens outside the candidates have scores too."""

    def vectors(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return vectors [rows, count, rank] of the tokens before [rows, count], for rows [rows, hidden]."""
        found = self.before[tokens]
        if self.hidden is None:
            return found
        if not self.gates:
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

    usual: DecoderLayer
    attention_conv: Convolution | None
    mlp_conv: Convolution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashWeights:
    """Weights of a whole head."""

    embedding: Table  # [vocabulary, hidden]
    mask: torch.Tensor | None  # [hidden], in place of the mask token's embedding
    fuse: Linear  # features -> hidden
    fused_norm: RmsNorm  # [hidden]
    context: Linear  # hidden -> 2 * layers * kv_heads * head_dim: the keys of all layers, then their values
    context_norm: RmsNorm  # [layers * kv_heads, head_dim]
    layers: tuple[BlockLayer, ...]
    norm: RmsNorm  # [hidden]
    head: Linear  # hidden -> draft vocabulary
    proposed: torch.Tensor | None  # int64 [draft vocabulary], ids of the target; None: all
    pairs: PairScores | None


class DFlashHead(DenseModel):
    """`Model` of batches with context rows first, which have `vectors`, and whole blocks after them."""

    def __init__(self, config: DFlashConfig, weights: DFlashWeights, parts: ModelParts) -> None:
        embedding, self._dtype = weights.embedding, DTYPES[parts.facts.dtype]
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
        forms = {False: batch}
        if True in self.config.causal:
            forms[True] = _causal(batch)
        plans: dict[bool, Any] = {
            causal: self._attention.plan(forms[causal]) for causal in dict.fromkeys(self.config.causal)
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
        w, block, operations = self._weights, self.config.block, self._operations
        heads, count = self._layer_config.heads, 0 if inputs.vectors is None else len(inputs.vectors)
        rotations = self._rotations.index_select(0, inputs.positions)  # [rows, 1, head_dim / 2]
        known = self._context(inputs.vectors, rotations[:count]) if inputs.vectors is not None else None
        if count == len(inputs.tokens):
            for index, causal in enumerate(self.config.causal):
                self._attention.write(index, known[index], inputs.plan[causal]) if known is not None else None
            return torch.empty((0, self.config.draft_vocabulary), device=self._device), {}
        hidden, rotations = self._embed(inputs.tokens[count:]), rotations[count:]
        added: torch.Tensor | None = None
        for index, layer in enumerate(w.layers):
            blocks, plan, later = layer.usual.blocks, inputs.plan[self.config.causal[index]], None
            rows = operations.norm(hidden, added, layer.usual.input_norm)
            if layer.attention_conv is not None:
                rows, later = layer.attention_conv.before(rows, block)
            qkv = blocks.qkv(rows).view(len(rows), -1, self._layer_config.head_dim)
            rotated = heads + self._layer_config.kv_heads
            qkv = operations.rotate(qkv, rotations, rotated, blocks.qk_norm)
            queries, stored = qkv[:, :heads], qkv[:, heads:]
            if known is not None:
                stored = torch.cat((known[index], stored))
                queries = torch.cat((queries.new_zeros((count, *queries.shape[1:])), queries))
            self._attention.write(index, stored, plan)
            added = blocks.output(self._attention.run(index, queries, plan)[count:].to(rows.dtype))
            if layer.attention_conv is not None and later is not None:
                added = layer.attention_conv.mix(added, later, 1, block)
            rows = operations.norm(hidden, added, blocks.mlp_norm)
            if layer.mlp_conv is not None:
                rows, later = layer.mlp_conv.before(rows, block)
            added = blocks.down(operations.gate(blocks.gate_up(rows)))
            if layer.mlp_conv is not None and later is not None:
                added = layer.mlp_conv.mix(added, later, 1, block)
        return self._outputs(hidden, added, inputs.wanted, count)

    def _context(self, vectors: torch.Tensor, rotations: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values of context rows by layer: [rows, 2 * kv_heads, head_dim]."""
        c = self._layer_config
        keys, size = c.layers * c.kv_heads, (len(vectors), c.layers, c.kv_heads, c.head_dim)
        heads = self._weights.context(vectors).view(len(vectors), -1, c.head_dim)
        heads = self._operations.rotate(heads, rotations, keys, self._weights.context_norm)
        both = heads[:, :keys].reshape(size), heads[:, keys:].reshape(size)
        return list(torch.cat(both, dim=2).unbind(1))

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = self._weights.mask
        masked = tokens == self.config.mask
        rows = self._embedding.index_select(0, tokens if mask is None else tokens.masked_fill(masked, 0))
        if mask is not None:
            rows[masked] = mask.to(rows)
        return rows if self.config.input_scale == 1.0 else rows * self.config.input_scale

    def _outputs(
        self, hidden: torch.Tensor, added: torch.Tensor | None, wanted: torch.Tensor | None, count: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if wanted is not None:
            hidden = hidden.index_select(0, wanted - count)
            added = None if added is None else added.index_select(0, wanted - count)
        rows = self._operations.norm(hidden, added, self._weights.norm)
        logits = self._weights.head(rows).float()
        if self.config.output_scale != 1.0:
            logits = logits * self.config.output_scale
        if self.config.softcap > 0:
            logits = torch.tanh(logits / self.config.softcap) * self.config.softcap
        return logits, {ROWS: rows}

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
