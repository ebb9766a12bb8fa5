"""The one door to a drafter's core: puts it together from given parts. Loads nothing and runs nothing."""

from collections.abc import Collection
from dataclasses import dataclass

from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.grammar_paths import GrammarPaths
from ssd_serve.drafter.sources.contract import DraftSource
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.drafter.width import StepWidth
from ssd_serve.base.logs import Logger


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParts:
    """What a drafter's core is made of. `ends` are the ids that end a text, `name` is who says what grows;
    `widths` chooses the width of a step instead of `limits`; `paths` says which guesses grammars leave
    out."""

    guesses: DraftModel | DraftSource
    limits: GrowthLimits
    ends: Collection[int]
    name: str
    log: Logger | None = None
    widths: StepWidth | None = None
    paths: GrammarPaths | None = None


def build_core(parts: CoreParts) -> DrafterCore:
    """A fresh core, with no request open."""
    guesses = parts.guesses
    source = guesses.source(parts.limits.fan_out) if isinstance(guesses, DraftModel) else guesses
    return DrafterCore(
        source, parts.limits, frozenset(parts.ends), parts.name, parts.log, parts.widths, parts.paths
    )
