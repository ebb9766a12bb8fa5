"""PARD and PARD-2 drafts: a whole model that guesses several positions in one forward.

Below an anchor, the node to expand, come copies of a mask token at consecutive positions; the logits of the anchor's
row and of the copies are a block. Rows see the anchor's ancestors and earlier copies of the same anchor, so any number
of anchors share a forward. Copies keep no KV. PARD reads nothing of its target and may draft ahead of it. PARD-2 adds
the projected target outputs of the position before to a token's embedding; tokens after the last committed one, and
masks, repeat the root's.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.base.errors import CheckpointError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.node import Node
from ssd_serve.drafter.sources.contract import Block
from ssd_serve.drafter.sources.draft_model import (
    RankingInputs,
    StepSource,
    blocks_of,
    prefill_rows_of,
)
from ssd_serve.drafter.sources.features import FeatureStepSource
from ssd_serve.drafter.sources.loading import LoadedSource, SourceConfig, draft_times
from ssd_serve.drafter.sources.pard.config import PardConfig, is_pard2, parse_pard
from ssd_serve.drafter.sources.registry import RegisteredSource, SourceDescription
from ssd_serve.drafter.sources.rows import StepRows, TreeRowBuilder
from ssd_serve.drafter.sources.whole_model import (
    DraftModel,
    StepSourceArguments,
    load_weights,
    require_folder,
    with_target_tokens,
)
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.sizes import activation_dtype
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.models.weights.checkpoint import Checkpoint, open_shards
from ssd_serve.models.weights.formats import read_config
from ssd_serve.models.weights.linear import DenseLinear
from ssd_serve.models.wrapped import MappedModel, WrappedModel, wrap_model

_PROJECTIONS = ("warp_model.safetensors", "warp_model.bin")


class WithoutToken(WrappedModel):
    """A model that never proposes one token."""

    def __init__(self, model: Model, token: int) -> None:
        super().__init__(model)
        self._token = token

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ForwardResult:
        """See `Model.forward`; the token's logits are -inf."""
        result = self._model.forward(batch)
        result.logits[:, self._token] = -torch.inf
        return result


class PardSource(StepSource[Block]):
    """Expands anchors with blocks of `positions` positions."""

    def __init__(self, arguments: StepSourceArguments, *, mask: int, positions: int) -> None:
        super().__init__(*arguments)
        self._mask, self._positions = mask, positions

    def _rows_of(self, tree: TreeRowBuilder, node: Node) -> range:
        row = tree.row_of(node)
        room = self._model.facts.context - 1 - tree.positions[row]
        masks = tree.append_copies(node, self._mask, min(self._positions - 1, room))
        return range(row, row + 1 + masks)  # the anchor's row is new, hence the last one

    def _rank(self, logits: torch.Tensor, inputs: RankingInputs) -> Sequence[Block]:
        return blocks_of(self.ranked(logits, inputs), inputs.counts)


class Pard2Source(PardSource, FeatureStepSource[Block]):
    """Expands anchors of requests with target outputs for all committed tokens before the root.

    The KV of accepted tokens is computed again with the outputs that have come since.
    """

    def __init__(
        self, arguments: StepSourceArguments, *, mask: int, positions: int, projection: DenseLinear
    ) -> None:
        """`projection` maps target outputs [rows, width] to [rows, hidden], the factor included."""
        super().__init__(arguments, mask=mask, positions=positions)
        self._projection = projection

    @property
    def _width(self) -> int:
        return self._projection.weight.shape[1]

    @torch.inference_mode()
    def _vectors(self, features: torch.Tensor) -> torch.Tensor:
        return self._projection(features.to(self._projection.weight))

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        super().open(request, tokens, parameters, seed)
        if len(tokens) == 1:
            self._begin(request)

    def add(self, request: int, position: int, vectors: torch.Tensor) -> bool:
        """Take projected outputs; the first token's row reads that of zeros."""
        table = self._known[request].table
        if position == 0 and (not len(table) or table.end != 0):
            self._begin(request)
        return super().add(request, position, vectors)

    def _begin(self, request: int) -> None:
        super().add(request, -1, self._vectors(torch.zeros((1, self._width))))

    def prepared(self, batch: Batch, groups: Sequence[StepRows]) -> Batch:
        """Add a vector for each row."""
        parts: list[torch.Tensor] = []
        for group in groups:
            held, table, committed = group.held, self._known[group.request].table, len(group.committed)
            parts.append(table.part(held.start + len(held.slots) - 1, committed))
            root = table.part(held.start + len(held.tokens) - 2, 1)
            parts.append(root.expand(len(group.rows.tokens) - committed, -1))
        return replace(batch, vectors=torch.cat(parts))


def describe_pard(config: EngineConfig, folder: Path | None) -> SourceDescription:
    """The target layers of PARD-2, none of PARD. In mode sync only roots are anchors."""
    own = _parsed(config, folder) if folder is not None else PardConfig(0, 1)
    block = own.positions if config.mode is Mode.SD else None
    return SourceDescription(features=own.features, block=block, keeps_tree=not own.features)


def load_pard(source: SourceConfig) -> LoadedSource:
    """Load a draft with masks and measure its step."""
    config, folder = source.config, require_folder(source)
    own = _parsed(config, folder)
    if own.features:
        # Captured forwards have no vectors. With a number of layers, the files may have further tensors.
        layers = int(read_config(folder)["num_hidden_layers"])
        source = replace(source, config=replace(config, graphs=False), layers=layers)
    weights, slots = load_weights(source, config.draft_width * (own.positions - 1))
    proposing = WithoutToken(weights, own.mask)
    model, info = with_target_tokens(config, proposing, Tokenizer(folder), own.mask)
    mask = info.vocabulary if isinstance(model, MappedModel) else own.mask
    model = wrap_model(model, "draft", config.model_wrapper)
    rows = {width: own.positions * width for width in source.widths}
    seconds, prefill_s_per_token = draft_times(model, replace(source, widths=list(rows.values())))
    draft = DraftModel(model, slots, native=source.native, prefill_rows=prefill_rows_of(prefill_s_per_token))
    arguments, facts = draft.arguments(config.draft_fan_out), weights.facts
    pard = PardSource(arguments, mask=mask, positions=own.positions)
    if own.features:
        place, dtype = facts.device, activation_dtype(facts.dtype)
        weight, bias = read_projection(folder, own, facts.hidden, config.allow_pickle)
        projection = DenseLinear(weight.to(place, dtype), None if bias is None else bias.to(place, dtype))
        pard = Pard2Source(arguments, mask=mask, positions=own.positions, projection=projection)
    return LoadedSource(
        pard, info, {width: seconds[each] for width, each in rows.items()}, prefill_s_per_token
    )


def _parsed(config: EngineConfig, folder: Path) -> PardConfig:
    raw = read_config(folder)
    if not is_pard2(raw):
        return parse_pard(raw, config.draft_depth)
    target = load_description(find_model(config, config.target, "target"))
    return parse_pard(raw, config.draft_depth, len(target.sizes(Parallel()).kv), int(target.config.hidden))


def read_projection(
    folder: Path, config: PardConfig, hidden: int, allow_pickle: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read the matrix [hidden, width] and the bias of a PARD-2 draft, from a file of their own or with its weights.

    Both are times the factor, in float32. Raises `CheckpointError`.
    """
    with ExitStack() as stack:
        name = next((each for each in _PROJECTIONS if (folder / each).is_file()), None)
        if name is not None:
            files = open_shards(folder, (name, f"{name}.index.json"), stack, allow_pickle=allow_pickle)
        else:
            whole = stack.enter_context(Checkpoint(folder, allow_pickle=allow_pickle, partly=True))
            files = {each: whole.file(each) for each in whole.names()}
        found: list[torch.Tensor] = []
        for part, shape in (("weight", (hidden, config.width)), ("bias", (hidden,)))[: 1 + config.bias]:
            if (tensor := f"target_proj.{part}") not in files:
                raise CheckpointError(f"{folder} lacks {tensor}, here and in {' or '.join(_PROJECTIONS)}")
            if (own := files[tensor].shape(tensor)) != shape:
                raise CheckpointError(f"{folder}: {tensor} has shape {own}, config.json says {shape}")
            found.append(config.scale * files[tensor].read(tensor, slice(None), None).float())
    return found[0], found[1] if config.bias else None


SOURCE = RegisteredSource(load_pard, describe_pard)
