"""The one door to an engine: puts it together from given parts, whether for a server, a test or a benchmark.

What is not given is as usual. Knows how the parts fit; loads nothing, measures nothing and starts nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ssd_serve.cache.prefix import PrefixCache
from ssd_serve.cache.slots import SlotPool
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.interface import Model
from ssd_serve.sampling.grammar import Grammars
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.verifier.request import RequestLimits
from ssd_serve.verifier.drafters.pool import DrafterPool
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.features import FeatureStore
from ssd_serve.base.cost import CostTable, HostCost
from ssd_serve.verifier.control.budget import WaitPolicy, NoWait
from ssd_serve.verifier.control.execution import ModeConfig
from ssd_serve.verifier.control.round_planner import DraftBounds, RoundPlanner
from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.verifier.round import Rounds
from ssd_serve.verifier.scheduler import Scheduler, SchedulerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of. `drafters` has none connected yet; without any it decodes plainly."""

    model: Model
    drafters: DrafterPool
    cost: CostTable
    slots: int
    config: EngineConfig = EngineConfig()
    policy: WaitPolicy = field(default_factory=NoWait)
    host: HostCost = field(default_factory=HostCost)
    governing: ModeConfig | None = None
    noise: NoiseRows | None = None
    """None: the engine's own. Engines of one model may share rows."""
    native: NativeLibrary | None = None
    clock: Callable[[], float] = time.perf_counter
    rounds: Rounds | None = None
    """Rounds of another kind, with the same model; None: the usual ones."""
    planner_kind: type[RoundPlanner] = RoundPlanner
    features: FeatureStore | None = None
    """What drafters may read of the target; its model gives it."""
    grammars: Grammars | None = None
    """What outputs may have to match; None: none can."""


def build_engine(parts: EngineParts) -> Engine:
    """A fresh engine of these parts."""
    facts = parts.model.facts
    config = parts.config
    context = min(facts.context, config.context or facts.context)
    budget = 0 if config.mode is Mode.AR else config.budget
    tree_nodes = config.tree_nodes * max(1, len(config.drafts))  # each drafter fills a tree of its own
    limits = SchedulerLimits(config.max_running, config.max_waiting, config.prefill_chunk)
    pool = SlotPool(parts.slots)
    scheduler = Scheduler(pool, PrefixCache(pool) if config.prefix_cache else None, limits)
    planner = parts.planner_kind(
        parts.drafters,
        parts.cost,
        parts.policy,
        DraftBounds(context, budget, config.draft_width, config.max_tpot_s),
        parts.host,
        parts.governing,
        parts.clock,
    )
    bounds = RequestLimits(min(context, parts.slots - 1), facts.vocabulary, facts.eos_token_ids, tree_nodes)
    rounds = parts.rounds or _rounds(parts)
    if parts.features is not None:
        parts.drafters.authorizer.offer(parts.features.layers)
    return Engine(
        rounds,
        scheduler,
        parts.drafters,
        planner,
        bounds,
        parts.clock,
        parts.features,
        parts.grammars,
    )


def _rounds(parts: EngineParts) -> Rounds:
    facts = parts.model.facts
    noise = parts.noise or NoiseRows(
        facts.vocabulary, capacity_for(facts.vocabulary), facts.device, parts.native
    )
    return Rounds(parts.model, noise, facts.eos_token_ids, parts.native, parts.clock)
