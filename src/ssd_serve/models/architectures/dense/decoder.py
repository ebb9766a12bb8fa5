"""The dense decoders (Llama, Mistral, Qwen 2, Qwen 3) in one lean forward.

The same code runs a target of many layers and a drafter of two, so a layer is as few torch operators as
possible. Query, key and value are one product, gate and up another, a rotation is one complex product, and
keys and values are stored together. Knows batches, weights and attention backends; knows no request, no
file format and no page size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.kernels.attention.contract import AttentionBackend
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.device import completion
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.layers import LayerPlaces, NativeLayers, can_narrow
from ssd_serve.kernels.native.packed import NativePackedLinear
from ssd_serve.kernels.rows import NativeRows, RmsNorm
from ssd_serve.models.architectures.contract import Architecture, ModelParts
from ssd_serve.models.architectures.dense.config import DecoderConfig, dense_sizes, rank_config
from ssd_serve.models.architectures.dense.weights import DecoderLayer, DecoderWeights, LayerBlocks, read_dense
from ssd_serve.models.config import Json
from ssd_serve.models.interface import ForwardResult, Inputs, ModelFacts, feature_name
from ssd_serve.models.rope import rotation_table


class DenseModel:
    """The parts that decoders and EAGLE heads share: sizes, rotations, and attention without its output."""

    def __init__(self, config: DecoderConfig, parts: ModelParts, device: torch.device) -> None:
        """`config` and `parts` are one rank's."""
        self._layer_config = config
        self._attention = parts.attention
        self._operations = parts.operations
        self._facts = parts.facts
        self._slots = parts.slots
        self._release = parts.release
        self._device = device
        # [context, 1, head_dim / 2]: one rotation for all heads of a row
        rotations = rotation_table(config.rope, config.head_dim, parts.facts.context)
        self._rotations = rotations.unsqueeze(1).to(device)

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

    def release(self, spans: Sequence[range]) -> None:
        """See `Model.release`."""
        self._release(spans)

    def _attend(
        self, index: int, blocks: LayerBlocks, rows: torch.Tensor, rotations: torch.Tensor, plan: object
    ) -> torch.Tensor:
        """Compute a layer's attention without its output: normed rows [rows, inputs] -> [rows, heads * head_dim].

        `rotations` are those of the rows' positions, complex64 [rows, 1, head_dim / 2].
        """
        c = self._layer_config
        heads = blocks.qkv(rows).view(rows.shape[0], -1, c.head_dim)
        heads = self._operations.rotate(heads, rotations, c.heads + c.kv_heads, blocks.qk_norm)
        self._attention.write(index, heads[:, c.heads :], plan)
        return self._attention.run(index, heads[:, : c.heads], plan).to(rows.dtype)


class DenseDecoder(DenseModel):
    """`CapturableModel` over a `DecoderConfig`: one rank's share where a group shares the model."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, parts: ModelParts) -> None:
        """`config` is the whole model's; weights and parts are one rank's."""
        super().__init__(rank_config(config, parts.group.parallel), parts, weights.embedding.device)
        self._weights = weights
        self._features = frozenset(parts.features)
        # Features are of all rows: where the last layer has some, it computes all of them to its end.
        self._all_rows = bool(self._features & {FINAL, len(weights.layers) - 1})
        self._group = parts.group
        last = len(weights.layers) - 1
        kept = tuple(dict.fromkeys(each for each in parts.features if 0 <= each < last))
        self._fused = fused_layers(weights.layers, parts, kept)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ForwardResult:
        """Run one ragged batch; see `Model.forward`."""
        wanted = len(batch.rows_wanted)
        inputs = Inputs(
            torch.from_numpy(batch.tokens).to(self._device),
            torch.from_numpy(batch.positions).to(self._device),
            self._attention.plan(batch),
            None if wanted == batch.rows else torch.from_numpy(batch.rows_wanted).to(self._device),
            batch.vectors,
        )
        logits, features = self.run(inputs)
        return ForwardResult(logits, features, completion(self._device))

    def run(self, inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return logits of the wanted rows and features; see `CapturableModel.run`."""
        rotations = self._rotations.index_select(0, inputs.positions)  # [rows, 1, head_dim / 2], complex64
        hidden = self._embed(inputs.tokens)  # [rows, hidden]
        if inputs.vectors is not None:
            hidden = hidden + inputs.vectors.to(hidden)
        features: dict[str, torch.Tensor] = {}
        added: torch.Tensor | None = None  # what the last block adds to `hidden`: the next norm does it
        layers, wanted = self._weights.layers, inputs.wanted
        start = 0
        if self._fused is not None and len(layers) > 1:  # but for the last one, which may compute fewer rows
            start = len(layers) - 1
            kept = hidden.new_empty((len(hidden), len(self._fused.features), hidden.shape[1]))
            added = self._fused.run(range(start), hidden, added, rotations, inputs.plan, kept)
            for place, index in enumerate(self._fused.features):
                features[feature_name(index)] = kept[:, place]
        for index in range(start, len(layers)):
            layer = layers[index]
            rows = self._operations.norm(hidden, added, layer.input_norm)
            blocks = layer.blocks
            attended = self._attend(index, blocks, rows, rotations, inputs.plan)
            if index == len(layers) - 1 and wanted is not None and not self._all_rows:
                # Of the other rows nothing is needed any more: their keys and values are stored.
                if not len(wanted):
                    return self._logits(hidden[:0]), features
                hidden, attended = hidden.index_select(0, wanted), attended.index_select(0, wanted)
                wanted = None
            added = self._group.add(blocks.output(attended))
            rows = self._operations.norm(hidden, added, blocks.mlp_norm)
            added = self._group.add(blocks.down(self._operations.gate(blocks.gate_up(rows))))
            if index in self._features:
                features[feature_name(index)] = hidden + added
        last = self._last(hidden, added, wanted, features)
        return self._logits(last), features

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [rows, hidden]: each token's rank gives its row, the others nothing."""
        embedding, parallel = self._weights.embedding, self._group.parallel
        if parallel.size == 1:
            return embedding.index_select(0, tokens)
        own = tokens - parallel.nearly_even(self._facts.vocabulary).start
        known = own.clamp(0, len(embedding) - 1)
        others = (own != known).unsqueeze(1)
        return self._group.add(embedding.index_select(0, known).masked_fill_(others, 0))

    def _last(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        wanted: torch.Tensor | None,
        features: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """The wanted rows behind the last norm: [wanted, hidden]. With `FINAL` all rows are normed."""
        norm = self._weights.norm
        if FINAL in self._features:
            last = features[feature_name(FINAL)] = self._operations.norm(hidden, added, norm)
            return last if wanted is None else last.index_select(0, wanted)
        if wanted is not None:
            hidden = hidden.index_select(0, wanted)
            added = None if added is None else added.index_select(0, wanted)
        return self._operations.norm(hidden, added, norm) if len(hidden) else hidden

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        """Their logits: float32 [wanted, vocabulary]; on other ranks than 0 a part of them."""
        vocabulary = self._facts.vocabulary
        if not len(last):
            return torch.empty((0, vocabulary), device=self._device)
        return self._group.gather(self._weights.head(last).float(), vocabulary)


def fused_layers(
    layers: Sequence[DecoderLayer], parts: ModelParts, features: Sequence[int] = ()
) -> NativeLayers | None:
    """Return the layers as one compiled call, if all of their steps are compiled and their matrices packed. It returns
    the outputs of the layers `features`, too."""
    attention = parts.attention
    if type(parts.operations) is not NativeRows or not isinstance(attention, NativeAttention):
        return None
    if parts.group.parallel.size > 1 or not can_narrow(attention):
        return None
    found = [packed_places(layer.blocks, layer.input_norm) for layer in layers]
    packed = [each for each in found if each is not None]
    return NativeLayers(packed, attention, features) if len(packed) == len(found) else None


def packed_places(blocks: LayerBlocks, input_norm: RmsNorm) -> LayerPlaces | None:
    """Return a layer's matrices and norms, if all of its matrices are packed."""
    qkv, output, gate_up, down = blocks.qkv, blocks.output, blocks.gate_up, blocks.down
    if (
        not isinstance(qkv, NativePackedLinear)
        or not isinstance(output, NativePackedLinear)
        or not isinstance(gate_up, NativePackedLinear)
        or not isinstance(down, NativePackedLinear)
        or blocks.qk_norm is not None
    ):
        return None
    return LayerPlaces((qkv, output, gate_up, down), (input_norm, blocks.mlp_norm))


def dense_architecture(
    models: str, parse: Callable[[Json, Json], DecoderConfig]
) -> Architecture[DecoderConfig, DecoderWeights]:
    """A member of the family."""
    return Architecture(
        models=models, parse=parse, sizes=dense_sizes, read_weights=read_dense, build=DenseDecoder
    )


def is_dense(architecture: Architecture[Any, Any]) -> bool:
    """Return True if an architecture is a member, rather than one that only borrows from the family."""
    return architecture == dense_architecture(architecture.models, architecture.parse)
