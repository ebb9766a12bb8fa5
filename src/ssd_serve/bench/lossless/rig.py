"""The losslessness proof's loaded target with its drafts, and an engine for each case.

The cases run in this process and do not depend on time. Drafters are behind deterministic channels, a round
waits for a fixed number of draft steps, and the cost model is a fixed curve.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch

from ssd_serve.base.cost import CostTable, HostCost, Reading, Timing
from ssd_serve.base.devices import Device
from ssd_serve.base.draft_messages import NOISE_SCHEME, PROTOCOL_VERSION, Hello
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import SsdError
from ssd_serve.base.logs import get_logger
from ssd_serve.base.messages import Committed, Finished, Submit
from ssd_serve.base.settings import Settings
from ssd_serve.bench.lossless.drafters import GarbageDrafter, MemoryDrafter, RigDraft
from ssd_serve.bench.options import Devices
from ssd_serve.drafter.assembly import hello_of, load_draft
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.inline import InlineChannel, LookupChannel
from ssd_serve.drafter.sources.loading import LoadedSource
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.config import model_name
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.models.wrapped import WrappedModel
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.transport.channel import Channel
from ssd_serve.verifier.assembly import EngineParts, build_engine
from ssd_serve.verifier.control.wait import FixedSteps, WaitPolicy
from ssd_serve.verifier.drafters.admission import check_hello
from ssd_serve.verifier.drafters.features import FeatureStore
from ssd_serve.verifier.drafters.pool import DrafterPool
from ssd_serve.verifier.engine import Engine

_CPUS = Devices()
_SLOTS = 4096
GROWTH = GrowthLimits(width=4, fan_out=4, depth=8, nodes=512)
_STEPS = 3
_FEATURE_BYTES = 64 << 20
_TICK_S = 1e-3
"""Step of the engine's clock between two reads."""
_PREFILL_CHUNK = 48
_MIN_STEPS = 8
"""Rounds before a drafter is killed, at least; one of its nodes must have been accepted."""


class FixedCost(CostTable):
    """A fixed cost curve."""

    def __init__(self) -> None:
        super().__init__([Timing(1, 0, 0.010), Timing(64, 0, 0.012)])

    def observe(self, rows: int, seconds: float, reading: Reading | None = None) -> None:
        """Ignore the measurement."""


class FixedHost(HostCost):
    """The host cost before any measurement."""

    def observe(self, requests: int, nodes: int, seconds: float) -> None:
        """Ignore the measurement."""


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration for the same requests.

    `mode` is ar, sd or ssd, `drafter` is sane, garbage or killed. `batch` is the maximum of running requests,
    `budget` the maximum of nodes a round. With few `slots` of the KV cache, requests wait.
    """

    mode: str
    batch: int
    budget: int = 0
    drafter: str = "sane"
    slots: int = _SLOTS


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tokens of each request, and counters; `cached` are prompt tokens from the prefix cache."""

    tokens: dict[int, tuple[int, ...]]
    drafted: int
    accepted: int
    preemptions: int = 0
    cached: int = 0


class _OnGpu(WrappedModel):
    """Wrapper that makes the model's GPU the current device during a forward, as Triton requires."""

    def forward(self, batch: Batch) -> ForwardResult:
        with torch.cuda.device(self.facts.device):
            return self._model.forward(batch)


class LoadedTarget:
    """A loaded target in `folder`, its `drafts`, and `lookups`, which need no device.

    `tokenizer` identifies the vocabulary; `features` are layers; some drafts read their outputs.
    """

    drafts: Sequence[RigDraft] = ()
    lookups: Sequence[Callable[[], Channel]] = ()
    features: tuple[int, ...] = ()

    def __init__(
        self, name: str, folder: Path, model: Model, native: NativeLibrary | None, tokenizer: str
    ) -> None:
        self.name = name
        self.folder = folder
        self.target = model
        facts = model.facts
        self.eos = facts.eos_token_ids
        self.vocabulary = facts.vocabulary
        self.native = native
        self.noise = NoiseRows(facts.vocabulary, capacity_for(facts.vocabulary), facts.device, native)
        self.hello = Hello(
            protocol=PROTOCOL_VERSION,
            noise=NOISE_SCHEME,
            tokenizer=tokenizer,
            vocabulary=facts.vocabulary,
            context=facts.context,
            name=name,
            step_ms=1.0,
        )

    def engine(self, case: Case) -> Engine:
        """Build the engine of a case, without its drafters."""
        plain = case.mode == "ar"
        budget = 0 if plain else case.budget
        return build_engine(
            EngineParts(
                model=self.target,
                # A constant clock: a busy machine must not make a drafter look silent.
                drafters=DrafterPool(self.hello, clock=lambda: 0.0, log=get_logger("bench", "error")),
                cost=FixedCost(),
                host=FixedHost(),
                slots=case.slots,
                config=EngineConfig(
                    max_running=case.batch,
                    max_waiting=1024,
                    prefill_chunk=_PREFILL_CHUNK,
                    # The plain baseline computes every prompt: prefix reuse is tested too.
                    prefix_cache=not plain,
                    context=512,
                    budget=budget,
                    draft_width=GROWTH.width,
                    tree_nodes=GROWTH.nodes * max(1, len(self.drafts) + len(self.lookups)),
                ),
                policy=FixedSteps(_STEPS) if budget else WaitPolicy(),
                noise=self.noise,
                native=self.native,
                clock=partial(next, count(0.0, _TICK_S)),
                features=FeatureStore(self.features, _FEATURE_BYTES, case.slots)
                if self.features and not plain
                else None,
            )
        )


class LoadedPair(LoadedTarget):
    """A loaded target and draft model, each on its device; the caller chooses CPU cores."""

    def __init__(
        self,
        name: str,
        target: Path,
        draft: Path,
        dtype: str = "fp32",
        native: NativeLibrary | None = None,
        devices: Devices = _CPUS,
        batch_invariant: bool = False,
    ) -> None:
        model = load_on(target, devices.target, wish(dtype, native, batch_invariant))
        super().__init__(name, target, model, native, name)
        self.draft = load_on(draft, devices.draft, wish(dtype, native))
        device = self.draft.facts.device
        self._draft_noise = NoiseRows(self.vocabulary, capacity_for(self.vocabulary), device, native)
        self.drafts = (RigDraft(self.hello, self._core),)

    def _core(self) -> DrafterCore:
        model = DraftModel(self.draft, _SLOTS, self._draft_noise)
        return DrafterCore(model.source(GROWTH.fan_out), GROWTH, self.eos, self.name)


def wish(
    dtype: str,
    native: NativeLibrary | None,
    batch_invariant: bool = False,
    features: tuple[int, ...] = (),
) -> ModelOptions:
    """Return the loading options of a model on the CPU."""
    return ModelOptions(
        device="cpu",
        dtype=dtype,
        slots=_SLOTS,
        context=512,
        native=native,
        batch_invariant=batch_invariant,
        features=features,
    )


def load_on(path: Path, device: Device, wished: ModelOptions) -> Model:
    """Load a model for a device; forwards of a GPU are captured, as in serving."""
    wished = replace(wished, device=device.torch_name, graphs=device.kind != "cpu")
    if device.kind == "cpu":
        return load_model(path, wished)
    with torch.cuda.device(device.torch_name):
        return _OnGpu(load_model(path, wished))


class _Cores:
    """Makes drafter cores over one source, one at a time; the requests of the last core are closed."""

    def __init__(self, loaded: LoadedSource, name: str) -> None:
        self._loaded = loaded
        self._name = name
        self._last: DrafterCore | None = None

    def __call__(self) -> DrafterCore:
        if self._last is not None:
            for request in list(self._last.requests):
                self._last.forget(request)
        loaded = self._loaded
        self._last = DrafterCore(
            loaded.source,
            GROWTH,
            loaded.tokenizer.ends,
            self._name,
            description=loaded.description,
        )
        return self._last


def load_named(settings: Settings, devices: Devices, native: NativeLibrary | None) -> LoadedTarget:
    """Load the target of the settings and all its drafts on the target's device.

    Raises `SettingsError`, `CheckpointError` and `PairMismatchError`.
    """
    config = settings.engine_config(draft_fan_out=GROWTH.fan_out, draft_width=GROWTH.width)
    folder, log = find_model(config, config.target, "target"), get_logger("bench", "error")
    device = str(devices.target)
    loaded = {
        name: load_draft(replace(config, drafts=(name,)), name, device, native, log)
        for name in config.draft_models
    }
    features = tuple(dict.fromkeys(layer for each in loaded.values() for layer in each.description.features))
    wished = wish(settings.dtype, native, settings.batch_invariant, features)
    model = load_on(folder, devices.target, wished)
    name = model_name(folder)
    target = LoadedTarget(name, folder, model, native, Tokenizer(folder).vocabulary_hash())
    target.features = wished.features
    target.drafts = [
        RigDraft(hello_of(each, draft, f"draft-{place}", 1e-3), _Cores(each, f"draft-{place}"))
        for place, (draft, each) in enumerate(loaded.items())
    ]
    for draft in target.drafts:
        check_hello(target.hello, draft.hello)
    target.lookups = [
        partial(LookupChannel, name, config, target.hello, target.eos) for name in config.lookups
    ]
    return target


def run_case(
    target: LoadedTarget,
    case: Case,
    submits: Sequence[Submit],
    make_drafter: Callable[[RigDraft, Engine], MemoryDrafter] = MemoryDrafter,
) -> Outputs:
    """Run all requests to their end; `make_drafter` makes the asynchronous drafters."""
    engine = target.engine(case)
    drafters = _connected(target, case, engine, make_drafter)
    for submit in submits:
        refused = engine.submit(submit)
        if refused is not None:
            raise SsdError(f"the proof's own request was refused: {refused}")
    tokens: dict[int, list[int]] = {submit.request: [] for submit in submits}
    steps = 0
    while engine.busy:
        for drafter in drafters:
            drafter.work()
        for report in engine.step():
            if isinstance(report, Committed):
                tokens[report.request].extend(report.tokens)
            elif isinstance(report, Finished) and report.reason not in ("stop", "length"):
                raise SsdError(f"request {report.request} ended with {report.reason}: {report.message}")
        steps += 1
        seen = engine.totals.figures.accepted > 0 or case.budget == 0
        if case.drafter == "killed" and steps >= _MIN_STEPS and seen:
            for drafter in drafters:
                if isinstance(drafter, MemoryDrafter):
                    drafter.die()
            drafters = []
    figures, scheduler = engine.totals.figures, engine.scheduler
    return Outputs(
        {number: tuple(each) for number, each in tokens.items()},
        figures.drafted,
        figures.accepted,
        scheduler.preemptions,
        scheduler.prefix.hits if scheduler.prefix is not None else 0,
    )


def _connected(
    target: LoadedTarget,
    case: Case,
    engine: Engine,
    make_drafter: Callable[[RigDraft, Engine], MemoryDrafter],
) -> Sequence[MemoryDrafter | GarbageDrafter]:
    """Connect the drafters of a case and return the asynchronous ones.

    A garbage drafter replaces all others.
    """
    if case.mode == "ar":
        return []
    for lookup in target.lookups:
        engine.drafters.connect(lookup(), synchronous=True)
    if case.mode == "ssd" and case.drafter == "garbage":
        return [GarbageDrafter(target.hello, engine)]
    if case.mode == "ssd":
        return [make_drafter(draft, engine) for draft in target.drafts]
    for draft in target.drafts:
        engine.drafters.connect(InlineChannel(draft.core(), draft.hello), synchronous=True)
    return []
