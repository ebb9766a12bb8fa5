"""An EAGLE head as a draft source: it reads what the target has computed of committed tokens, and goes on
from what it says itself.

A row is a token and the vector of the place before it. Of committed tokens that is the target's features, as
the head makes a vector of them; of guesses it is the head's own output at their parent. So the KV of a guess
that was right is not the KV of the committed token: that one is computed anew, with its true vector, in the
next step. What is kept below it keeps what was computed there. Knows one head and vectors that it is given;
not how they travel, nor what is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ssd_serve.base.errors import ProtocolError, SettingsError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.slots import SlotPool
from ssd_serve.cache.vectors import VectorTable
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest
from ssd_serve.drafter.sources.draft_model import ModelSource
from ssd_serve.drafter.sources.loading import (
    LoadedSource,
    SourceConfig,
    draft_slots,
    measure_draft,
    tokenizer_info,
)
from ssd_serve.drafter.sources.tree_rows import MOST_TEXT_ROWS, DraftKvState, StepRows, text_rows_of
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.heads.eagle import OWN, EagleHead
from ssd_serve.models.heads.load import head_sizes, load_head
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.load import served_options
from ssd_serve.models.wrapped import WrappedModel, wrap_model
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.sampling.ranking import NativeRanking, trusted_ranking


@dataclass(slots=True)
class _Known:
    """Of one request: its committed tokens, the target's vectors, and the head's own ones by node."""

    text: list[int]
    given: VectorTable = field(default_factory=VectorTable)
    own: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


class EagleSource(ModelSource):
    """Expands nodes with one forward of a head. It drafts for requests whose committed tokens it can read."""

    def __init__(
        self,
        head: EagleHead,
        pool: SlotPool,
        noise: NoiseRows,
        fan_out: int,
        native: NativeRanking | None = None,
        text_rows: int = MOST_TEXT_ROWS,
        *,
        model: Model | None = None,
    ) -> None:
        """`model` runs the head's forwards; None: the head itself."""
        super().__init__(model or head, pool, noise, fan_out, native, text_rows)
        self._head = head
        self._known: dict[int, _Known] = {}

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        super().open(request, (), parameters, seed)
        self._known[request] = _Known(list(tokens))

    def close(self, request: int) -> None:
        super().close(request)
        self._known.pop(request, None)

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        """Accepted nodes become committed tokens that are still to be read."""
        held, known = self.held[request], self._known[request]
        self.pool.free([slot for name in path if (slot := held.nodes.pop(name, None)) is not None])
        super().commit(request, (), (), kept)
        alive = {*kept, *path[-1:]}
        known.own = {name: own for name, own in known.own.items() if name in alive}
        known.text.extend(tokens)
        _read_on(held, known)

    def read(self, request: int, position: int, features: torch.Tensor) -> None:
        if position < 0 or features.shape[1] != self._head.width:
            raise ProtocolError(
                f"features are {features.shape[1]} wide, not {self._head.width}, or of no place"
            )
        self.give(request, position, self._head.fuse(features))

    def give(self, request: int, position: int, vectors: torch.Tensor) -> None:
        """Fused features [places, hidden] of committed tokens from a position on. After a gap the head begins
        anew, without what is before it."""
        known = self._known.get(request)
        if known is None:
            return
        held = self.held[request]
        if position != known.given.end or not len(known.given):
            self.pool.free(held.all_slots())
            held.start, held.tokens = position + 1, []
            known.given.begin(position)
            known.own.clear()
        known.given.extend(vectors)
        _read_on(held, known)

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> Sequence[Candidates | None]:
        """One forward for those that it can read so far."""
        ready = [index for index, pick in enumerate(picks) if self._can_grow(pick)]
        found = super().expand([picks[index] for index in ready], [scales[index] for index in ready])
        if len(ready) == len(picks):
            return found
        places = {index: place for place, index in enumerate(ready)}
        return [found[places[index]] if index in places else None for index in range(len(picks))]

    def prepared(self, batch: Batch, groups: Sequence[tuple[DraftKvState, StepRows, list[int]]]) -> Batch:
        """With a vector for each row."""
        parts: list[torch.Tensor] = []
        for held, group, _ in groups:
            known = self._known[group.request]
            parts.append(known.given.part(held.start + len(held.slots) - 1, len(group.fed)))
            parts += [known.own[parent][None] for parent in group.parents]
        return replace(batch, vectors=torch.cat(parts))

    def computed(
        self, result: ForwardResult, groups: Sequence[tuple[DraftKvState, StepRows, list[int]]]
    ) -> None:
        """The nodes that were wanted have vectors for their children."""
        own = iter(result.features[OWN])
        for _, group, _ in groups:
            self._known[group.request].own.update((name, next(own)) for name in group.names)

    def _can_grow(self, pick: NodeRequest) -> bool:
        """Whether all committed tokens can be read, and the guesses above the pick have been."""
        held, known = self.held[pick.request], self._known[pick.request]
        if not held.tokens or held.start + len(held.tokens) < len(known.text):
            return False
        node = pick.at
        while node.parent is not None:
            node = node.parent
            if node.name not in known.own:
                return False
        return True


def _read_on(held: DraftKvState, known: _Known) -> None:
    """A token can be read once the place before it has a vector."""
    end = min(len(known.text), known.given.end + 1) if len(known.given) else 0
    held.tokens.extend(known.text[held.start + len(held.tokens) : end])


class _WithoutFeatures(WrappedModel):
    """A head whose rows carry nothing: it takes as long."""

    def forward(self, batch: Batch) -> ForwardResult:
        vectors = torch.zeros(batch.rows, self._model.facts.hidden)
        return self._model.forward(replace(batch, vectors=vectors))


def load_eagle(order: SourceConfig) -> LoadedSource:
    """Load the head, for the target that the settings name."""
    config, folder, device = order.config, order.folder, order.device
    if folder is None:
        raise SettingsError(f"{config.draft_model} names no head: set SSD_DRAFT to a folder or a hub id")
    target = find_model(config, config.target, "target")
    sizes = head_sizes(
        folder,
        target,
        device=device,
        dtype=config.dtype,
        features=config.eagle_features,
        allow_pickle=config.allow_pickle,
        native=order.native,
    )
    slots = draft_slots(config, sizes, device)
    wish = replace(served_options(config, device, slots, order.native), graphs=False)
    head = load_head(folder, wish, sizes, order.log)
    model: Model = wrap_model(head, "draft", config.model_wrapper)
    seconds, prefill_s_per_token = measure_draft(_WithoutFeatures(model), order.widths)
    facts = head.facts
    noise = NoiseRows(facts.vocabulary, capacity_for(facts.vocabulary), facts.device, order.native)
    ranking = trusted_ranking(order.native) if facts.device == "cpu" else None
    return LoadedSource(
        EagleSource(
            *(
                head,
                SlotPool(slots),
                noise,
                config.draft_fan_out,
                ranking,
                text_rows_of(prefill_s_per_token),
            ),
            model=model,
        ),
        tokenizer_info(target, facts.context),
        seconds,
        sizes.description.config.features,
        prefill_s_per_token,
    )
