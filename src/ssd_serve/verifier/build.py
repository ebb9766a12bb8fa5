"""The one door to an engine: puts it together from given parts, whether for a server, a test or a benchmark.

What is not given is as usual. Knows how the parts fit; loads nothing, measures nothing and starts nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ssd_serve.base.cost import CostTable, HostCost
from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.cache.prefix import PrefixCache
from ssd_serve.cache.slots import SlotPool
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.interface import Model
from ssd_serve.sampling.grammar import Grammars
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.verifier.control.budget import NoWait, WaitPolicy
from ssd_serve.verifier.control.execution import ModeConfig
from ssd_serve.verifier.control.round_planner import DraftBounds, RoundPlanner
from ssd_serve.verifier.drafters.pool import DrafterPool
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.features import FeatureStore
from ssd_serve.verifier.request import RequestLimits
from ssd_serve.verifier.round import Rounds
from ssd_serve.verifier.scheduler import Scheduler, SchedulerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Parts of an engine. `drafters` has no connections yet; without any the engine decodes plainly."""

    model: Model
    drafters: DrafterPool
    cost: CostTable
    slots: int
    config: EngineConfig = field(default_factory=EngineConfig)
    policy: WaitPolicy = field(default_factory=NoWait)
    host: HostCost = field(default_factory=HostCost)
    mode_config: ModeConfig | None = None
    noise: NoiseRows | None = None
    """None: the engine's own. Engines of one model may share rows."""
    native: NativeLibrary | None = None
    clock: Callable[[], float] = time.perf_counter
    rounds: Rounds | None = None
    """Rounds of another kind, with the same model; None: the usual ones."""
    planner_kind: type[RoundPlanner] = RoundPlanner
    features: FeatureStore | None = None
    """Store of target features for drafters; None if no draft reads them."""
    grammars: Grammars | None = None
    """Grammar compiler; None if no output can be constrained."""


def build_engine(chunks: EngineParts) -> Engine:
    """A fresh engine of these parts."""
    facts = chunks.model.facts
    config = chunks.config
    context = min(facts.context, config.context or facts.context)
    budget = 0 if config.mode is Mode.AR else config.budget
    tree_nodes = config.tree_nodes * max(1, len(config.drafts))  # each drafter fills a tree of its own
    limits = SchedulerLimits(config.max_running, config.max_waiting, config.prefill_chunk)
    pool = SlotPool(chunks.slots)
    scheduler = Scheduler(pool, PrefixCache(pool) if config.prefix_cache else None, limits)
    planner = chunks.planner_kind(
        chunks.drafters,
        chunks.cost,
        chunks.policy,
        DraftBounds(context, budget, config.draft_width, config.max_tpot_s),
        chunks.host,
        chunks.mode_config,
        chunks.clock,
    )
    bounds = RequestLimits(min(context, chunks.slots - 1), facts.vocabulary, facts.eos_token_ids, tree_nodes)
    rounds = chunks.rounds or _rounds(chunks)
    if chunks.features is not None:
        chunks.drafters.authorizer.offer(chunks.features.layers)
    return Engine(
        rounds,
        scheduler,
        chunks.drafters,
        planner,
        bounds,
        chunks.clock,
        chunks.features,
        chunks.grammars,
    )


def _rounds(chunks: EngineParts) -> Rounds:
    facts = chunks.model.facts
    noise = chunks.noise or NoiseRows(
        facts.vocabulary, capacity_for(facts.vocabulary), facts.device, chunks.native
    )
    return Rounds(chunks.model, noise, facts.eos_token_ids, chunks.native, chunks.clock)
