"""The one door to a drafter's core: puts it together from given parts. Loads nothing and runs nothing."""

from collections.abc import Collection
from dataclasses import dataclass

from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.contract import DraftSource
from ssd_serve.drafter.sources.draft_model import ModelSource
from ssd_serve.drafter.width import LiveWidth
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.logs import Logger
from ssd_serve.models.interface import Model
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded model that guesses, and the KV slots that it was loaded with. `noise` None: rows of its own;
    drafters of one model may share them."""

    model: Model
    slots: int
    noise: NoiseRows | None = None
    native: NativeLibrary | None = None

    def source(self, fan_out: int) -> ModelSource:
        """The model as a source of `fan_out` candidates a node."""
        facts = self.model.facts
        noise = self.noise or NoiseRows(
            facts.vocabulary, capacity_for(facts.vocabulary), facts.device, self.native
        )
        return ModelSource(self.model, SlotPool(self.slots), noise, fan_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParts:
    """What a drafter's core is made of. `ends` are the ids that end a text, `name` is who says what grows;
    `widths` chooses the width of a step instead of `limits`."""

    guesses: DraftModel | DraftSource
    limits: GrowthLimits
    ends: Collection[int]
    name: str
    log: Logger | None = None
    widths: LiveWidth | None = None


def build_core(parts: CoreParts) -> DrafterCore:
    """A fresh core, with no request open."""
    guesses = parts.guesses
    source = guesses.source(parts.limits.fan_out) if isinstance(guesses, DraftModel) else guesses
    return DrafterCore(source, parts.limits, frozenset(parts.ends), parts.name, parts.log, parts.widths)
