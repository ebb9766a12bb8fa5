"""Builds a verifier from settings, and an engine from given parts.

Nothing else builds engines. Knows the parts; it opens no sockets and runs no round.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ssd_serve.base.cost import CostTable, HostCost
from ssd_serve.base.devices import Device, parse_device
from ssd_serve.base.draft_messages import NOISE_SCHEME, PROTOCOL_VERSION, Hello
from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.base.errors import MemoryShortError
from ssd_serve.base.logs import DETAIL, Logger, get_logger
from ssd_serve.base.messages import Ready
from ssd_serve.base.names import as_label, without_revision
from ssd_serve.base.trusted_files import cache_folder
from ssd_serve.cache.prefix import PrefixCache
from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.drafter.inline import InlineChannel, LookupChannel
from ssd_serve.drafter.sources.loading import draft_features
from ssd_serve.kernels.attention.checked import DifferenceLog
from ssd_serve.kernels.native.library import NativeLibrary, native_library
from ssd_serve.models.config import model_name
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import Model, ModelFacts
from ssd_serve.models.load import load_served
from ssd_serve.models.memory import available_memory
from ssd_serve.models.parallel import Group
from ssd_serve.models.sizes import ModelSizes, model_sizes, torch_device
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.models.wrapped import wrap_model
from ssd_serve.sampling.grammar import Grammars
from ssd_serve.sampling.model_defaults import model_defaults
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.transport.channel import Channel
from ssd_serve.transport.rank_sockets import Leader
from ssd_serve.verifier.control.mode_controller import ModeController
from ssd_serve.verifier.control.planner import Cores, DraftBounds, ModeConfig, RoundPlanner
from ssd_serve.verifier.control.timing import StepTimes, TimingFiles
from ssd_serve.verifier.control.wait import CostBasedWait, WaitPolicy
from ssd_serve.verifier.drafters.admission import check_hello
from ssd_serve.verifier.drafters.features import FeatureStore
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.ranks import LeadingRank
from ssd_serve.verifier.request import RequestLimits
from ssd_serve.verifier.round import Rounds
from ssd_serve.verifier.scheduler import Scheduler, SchedulerLimits

_KV_SHARE, _KV_SHARE_OF_GPU = 0.25, 0.4
"""Most of the free memory that the KV cache takes where the settings name no size. Other programs run beside a
server on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Parts of an engine. `drafters` has no connections yet; without any the engine decodes plainly."""

    model: Model
    drafters: DrafterPool
    cost: CostTable
    slots: int
    config: EngineConfig = field(default_factory=EngineConfig)
    policy: WaitPolicy = field(default_factory=WaitPolicy)
    host: HostCost = field(default_factory=HostCost)
    mode_config: ModeConfig | None = None
    noise: NoiseRows | None = None
    """None: the engine's own. Engines of one model may share rows."""
    native: NativeLibrary | None = None
    clock: Callable[[], float] = time.perf_counter
    features: FeatureStore | None = None
    """Store of target features for drafters; None if no draft reads them."""
    grammars: Grammars | None = None
    """Grammar compiler; None if no output can be constrained."""


def build_engine(parts: EngineParts) -> Engine:
    """Build an engine of these parts, for a server, a test or a benchmark."""
    facts, config = parts.model.facts, parts.config
    context = min(facts.context, config.context or facts.context)
    budget = 0 if config.mode is Mode.AR else config.budget
    tree_nodes = config.tree_nodes * max(1, len(config.drafts))  # each drafter fills a tree of its own
    pool = SlotPool(parts.slots)
    scheduler = Scheduler(
        pool,
        PrefixCache(pool) if config.prefix_cache else None,
        SchedulerLimits(config.max_running, config.max_waiting, config.prefill_chunk),
    )
    planner = RoundPlanner(
        parts.drafters,
        parts.cost,
        parts.policy,
        DraftBounds(context, budget, config.draft_width, config.max_tpot_s, config.shape),
        parts.host,
        parts.mode_config,
        parts.clock,
    )
    bounds = RequestLimits(min(context, parts.slots - 1), facts.vocabulary, facts.eos_token_ids, tree_nodes)
    noise = parts.noise or NoiseRows(
        facts.vocabulary, capacity_for(facts.vocabulary), facts.device, parts.native
    )
    rounds = Rounds(parts.model, noise, facts.eos_token_ids, parts.native, parts.clock)
    if parts.features is not None:
        parts.drafters.offer(parts.features)
    return Engine(rounds, scheduler, parts.drafters, planner, bounds, parts.clock, parts.grammars)


@dataclass(frozen=True, slots=True)
class AssembledVerifier:
    """A verifier that is ready for requests."""

    engine: Engine
    facts: ModelFacts
    slots: int
    weight_bytes: int
    """Bytes of all weights on one rank."""
    step_s: float
    step_s_guessed: bool
    """True if `step_s` follows from figures of the processor alone."""
    times: StepTimes
    differences: DifferenceLog
    sampling: Mapping[str, int | float]
    """Sampling values that requests take from the model's `generation_config.json` if they name none."""


def assemble_verifier(
    config: EngineConfig,
    say: Callable[[str], None],
    log: Logger | None = None,
    ranks: LeadingRank | None = None,
) -> AssembledVerifier:
    """Load the target, on all `ranks` if there are several, and measure its step times. In mode `sd`, load
    the draft into this process, too."""
    device = config.rank_device(0)
    path = find_model(config, config.target, "target", report=say)
    log = log or get_logger("verifier")
    native, differences = native_library(config, log), DifferenceLog(log)
    sizes = model_sizes(
        path,
        device=device,
        dtype=config.dtype,
        ranks=config.tensor_parallel,
        allow_pickle=config.allow_pickle,
        native=native,
    )
    leader = None if ranks is None else ranks.meet()
    slots = _slots(config, sizes, device, leader)
    say(f"loading the target {model_name(path)} ({sizes.resident_bytes / 1e9:.2f} GB) on {device}")
    features = draft_features(config, path) if config.mode is not Mode.AR else ()
    share = partial(
        load_served,
        config,
        path,
        device,
        slots,
        native,
        log,
        differences,
        batch_invariant=config.batch_invariant,
        features=features,
    )
    model = (
        share(group=Group()) if ranks is None or leader is None else ranks.load(leader, path, slots, share)
    )
    model = wrap_model(model, "target", config.model_wrapper)
    if torch_device(device) != "cpu":
        say("measuring step times")
    folder = cache_folder(config.cache_dir, log.warning)
    alone = config.target_device_alone
    cores = Cores(parse_device(device), parse_device(alone) if alone else None)
    modes = _modes(config, cores)
    files = TimingFiles(folder, log)
    times = StepTimes(model, files, folder, lambda text: say(f"measuring step times{DETAIL}{text}"))
    mode_config = _mode_config(config, cores, modes, times)
    cost = mode_config.controller.costs[modes[0]]
    tokenizer = Tokenizer(path)
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        noise=NOISE_SCHEME,
        tokenizer=tokenizer.vocabulary_hash(),
        vocabulary=model.facts.vocabulary,
        context=model.facts.context,
        name="verifier",
    )
    drafters = DrafterPool(hello, time.perf_counter, log)
    drafters.authorizer.sources = frozenset(as_label(without_revision(each)) for each in config.draft_models)
    grammars = Grammars(tokenizer.to_json, model.facts.vocabulary, model.facts.eos_token_ids)
    grammars.prepare()
    parts = EngineParts(
        model=model,
        drafters=drafters,
        cost=cost,
        slots=slots,
        config=config,
        policy=mode_config.policies[modes[0]],
        mode_config=mode_config if config.speculation_may_stop and len(modes) > 1 else None,
        native=native,
        features=FeatureStore(features, config.features_mb << 20, slots) if features else None,
        grammars=grammars,
    )
    engine = build_engine(parts)
    models = config.draft_models if SpeculationMode.SYNC in modes else ()
    if models:
        cores.enter(SpeculationMode.SYNC)  # what their steps take is measured where they will draft
    ends, price = model.facts.eos_token_ids, engine.planner.node_price
    for channel in _inline_channels(config, models, hello, ends, native, grammars, price, say):
        engine.drafters.connect(channel, synchronous=True)
    cores.enter(modes[0])
    sampling = model_defaults(path) if config.generation_config == "auto" else {}
    if sampling:
        log.info("requests take from generation_config.json what they leave out", **sampling)
    return AssembledVerifier(
        engine,
        model.facts,
        slots,
        sizes.resident_bytes,
        cost.seconds(1),
        times.guessed,
        times,
        differences,
        sampling,
    )


def ready_report(config: EngineConfig, verifier: AssembledVerifier) -> Ready:
    """Return the message by which front ends learn that the verifier can generate."""
    drafts = ", ".join(map(without_revision, config.drafts))
    return Ready(
        target=verifier.facts.name,
        draft=(drafts or "others") if config.mode is not Mode.AR else "",
        mode=config.mode.value,
        target_device=config.target_device,
        draft_device=config.draft_device or config.drafter_address or "",
        context=min(verifier.facts.context, verifier.slots - 1),
        vocabulary=verifier.facts.vocabulary,
        slots=verifier.slots,
        weight_bytes=verifier.weight_bytes * config.tensor_parallel,
        kv_bytes=verifier.slots * verifier.facts.kv_bytes_per_slot * config.tensor_parallel,
        target_step_ms=1e3 * verifier.step_s,
        guessed=verifier.step_s_guessed,
        draft_step_ms=1e3 * verifier.engine.drafters.step_s,
        protocol=PROTOCOL_VERSION,
        sampling=dict(verifier.sampling),
    )


def _modes(config: EngineConfig, cores: Cores) -> Sequence[SpeculationMode]:
    """Return the modes to choose from: that of the settings first, plain decoding last. Lookups work in all of
    them."""
    if config.mode is Mode.SD and config.draft_models:
        return SpeculationMode.SYNC, SpeculationMode.PLAIN
    if config.mode is not Mode.SSD:
        return (SpeculationMode.PLAIN,)
    if cores.has_exclusive:
        return SpeculationMode.ASYNC, SpeculationMode.SYNC, SpeculationMode.PLAIN
    return SpeculationMode.ASYNC, SpeculationMode.PLAIN


def _mode_config(
    config: EngineConfig, cores: Cores, modes: Sequence[SpeculationMode], times: StepTimes
) -> ModeConfig:
    """Return costs and policies of the modes on the cores of each."""
    tables: dict[Device, CostTable] = {}
    for mode in reversed(modes):
        cores.enter(mode)
        if cores.of(mode) not in tables:
            tables[cores.of(mode)] = times.table(cores.of(mode))
    return ModeConfig(
        ModeController({mode: tables[cores.of(mode)] for mode in modes}, HostCost()),
        cores,
        {mode: _policy(config, mode) for mode in modes},
    )


def _policy(config: EngineConfig, mode: SpeculationMode) -> WaitPolicy:
    if mode is SpeculationMode.PLAIN or not config.grow_first:
        return WaitPolicy()
    return CostBasedWait(concurrent=mode is SpeculationMode.ASYNC)


def _inline_channels(
    config: EngineConfig,
    models: Sequence[str],
    hello: Hello,
    ends: Sequence[int],
    native: NativeLibrary | None,
    grammars: Grammars,
    price: Callable[[], float],
    say: Callable[[str], None],
) -> Iterator[Channel]:
    """Yield the drafters of this process: these models, on the target's device, and lookups."""
    for name in models:
        say(f"loading the draft model {without_revision(name)} inline")
        alone = replace(config, drafts=(name,))
        drafter = assemble_drafter(alone, "inline", config.rank_device(0), native, grammars)
        check_hello(hello, drafter.hello)
        yield InlineChannel(drafter.core, drafter.hello)
    for name in config.lookups:
        yield LookupChannel(name, config, hello, ends, grammars if config.draft_grammars else None, price)


def _slots(config: EngineConfig, sizes: ModelSizes, device: str, leader: Leader | None) -> int:
    """Return the number of KV slots: that of the settings, else of a share of the free memory, at most those of
    all requests. Each rank has all slots, so the one with the least memory decides."""
    ranks = config.tensor_parallel
    context = min(config.context or sizes.context, sizes.context)
    if config.kv_memory_mb is not None:
        budget = (config.kv_memory_mb << 20) // ranks
    else:
        free = available_memory(torch_device(device))
        free = free if leader is None else min(free, leader.min_free)
        free = (free // ranks if torch_device(device) == "cpu" else free) - sizes.resident_bytes
        share = _KV_SHARE if torch_device(device) == "cpu" else _KV_SHARE_OF_GPU
        budget = int(share * max(0, free))
    slots = min(budget // sizes.kv_bytes_per_slot, (config.max_running + 1) * (context + 64))
    if slots < 128:
        raise MemoryShortError(
            f"{budget >> 20} MiB hold {slots} tokens of KV cache, too few for one request; "
            "free memory, raise SSD_KV_MEMORY_MB or choose a smaller model"
        )
    return slots
