"""Benchmark rig: a loaded target and an engine for each decoding mode, all in this process.

The engines share the target, its kernels and its measured cost table, so that only drafting differs. The
drafter of `ssd` is a real process on its own device.
"""

import contextlib
import os
import time
from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from ssd_serve.base.cost import CostTable, HostCost
from ssd_serve.base.devices import parse_device
from ssd_serve.base.draft_messages import NOISE_SCHEME, PROTOCOL_VERSION, Growth, Hello
from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.base.errors import SsdError
from ssd_serve.base.logs import get_logger
from ssd_serve.base.names import pinned
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.local import make_run_dir
from ssd_serve.cluster.process import WorkerPlan, WorkerProcess, start_worker, worker_command
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.inline import InlineChannel, LookupChannel
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.device import Done, ForwardEnd
from ssd_serve.kernels.native.library import native_library
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.load import load_served
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.models.warmup import SHORT_CONTEXT, measure_steps
from ssd_serve.models.wrapped import WrappedModel, wrap_model
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.transport.channel import Channel
from ssd_serve.transport.listener import Listener
from ssd_serve.verifier.assembly import EngineParts, build_engine
from ssd_serve.verifier.control.mode_controller import ModeController
from ssd_serve.verifier.control.planner import Cores, ModeConfig
from ssd_serve.verifier.control.timing import measure_cost
from ssd_serve.verifier.control.wait import CostBasedWait, FixedSteps, WaitPolicy
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.engine import Engine

_SLOTS = 20480
_JOIN_S = 600.0
"""Timeout for a drafter to join; on a GPU its first start may compile kernels."""


@dataclass(frozen=True, slots=True)
class EngineMode:
    """A decoding mode, and the shape of synchronous drafts: `mode` is ar, ngram, sd-chain, sd-tree or ssd.

    `steps` 0 drafts as many steps as pay. `sd-chain` drafts all its steps in one call, so that no Python
    between them is measured. `lookup` adds n-gram lookup to the draft model.
    """

    mode: str
    steps: int = 0
    width: int = 1
    fan_out: int = 1
    lookup: bool = False

    @property
    def label(self) -> str:
        """Name for tables and result files."""
        lookup = " + lookup" if self.lookup else ""
        if self.mode in ("ar", "ssd"):
            return f"{self.mode}{lookup}"
        if self.mode == "ngram":
            return f"ngram {self.fan_out}"
        shape = "" if self.mode == "sd-chain" else f" {self.width}x{self.fan_out}"
        return f"{self.mode}{shape} {self.steps or 'adaptive'}{lookup}"


@dataclass(frozen=True, slots=True)
class _LoadedDraft:
    """A draft model in this process, and the seconds of one step."""

    model: Model
    noise: NoiseRows
    step_s: float


class QueuedModel(WrappedModel):
    """Wrapper that reports results as ready at once: each forward is queued behind the previous one."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._last: ForwardEnd = Done()

    def forward(self, batch: Batch) -> ForwardResult:
        result = self._model.forward(batch)
        self._last = result.completion
        return replace(result, completion=Done())

    def wait(self) -> None:
        """Wait until the last forward is over."""
        self._last.wait()


class OneCallChannel(InlineChannel):
    """An inline drafter that runs `steps` draft steps a call on the `queued` model."""

    def __init__(self, core: DrafterCore, hello: Hello, steps: int, queued: QueuedModel) -> None:
        super().__init__(core, hello)
        self._steps_per_call = steps
        self._queued = queued

    def draft(self) -> list[Growth]:
        growth: list[Growth] = []
        for _ in range(self._steps_per_call):
            growth += super().draft()
        self._queued.wait()
        return growth


class Rig:
    """A loaded pair on one device (torch's name); a GPU must be the current device."""

    def __init__(self, settings: Settings, device: str = "cpu") -> None:
        target = find_model(settings.engine_config(), settings.target, "target")
        draft = find_model(settings.engine_config(), settings.draft_model or "", "draft")
        # Drafter processes load the same files without a hub token.
        names = {"target": (settings.target, target), "draft": (settings.draft_model or "", draft)}
        self.settings = settings.model_copy(update={role: pinned(*each) for role, each in names.items()})
        self.tokenizer = Tokenizer(target)
        self.native = native_library(settings.engine_config())
        invariant = settings.batch_invariant
        self.real = load_served(
            settings.engine_config(), target, device, _SLOTS, self.native, batch_invariant=invariant
        )
        self.target = wrap_model(self.real, "target", settings.model_wrapper)
        self.cost = measure_cost(self.target)
        facts = self.real.facts
        self._noise = self._noise_on(facts.device)
        self._draft_folder = draft
        self._inline = self._loaded(device)
        self._drafts: dict[str, _LoadedDraft] = {}
        self.draft, self.draft_step_s = self._inline.model, self._inline.step_s
        self.hello = Hello(
            protocol=PROTOCOL_VERSION,
            noise=NOISE_SCHEME,
            tokenizer=self.tokenizer.vocabulary_hash(),
            vocabulary=facts.vocabulary,
            context=facts.context,
            name="bench",
            step_ms=1e3 * self.draft_step_s,
        )

    def engine(
        self,
        mode: EngineMode,
        cost: CostTable | None = None,
        model: Model | None = None,
        draft_device: str = "",
    ) -> Engine:
        """Build an engine over the shared target. `ssd` still needs its drafter connected.

        `draft_device` is torch's name of a synchronous draft's device; empty: the target's.
        """
        settings, target = self.settings, model or self.target
        policy: WaitPolicy = FixedSteps(1 if mode.mode == "sd-chain" else mode.steps)
        if not mode.steps:
            policy = CostBasedWait(mode.mode == "ssd")
        if mode.mode == "ar" or (mode.mode == "ssd" and not settings.grow_first):
            policy = WaitPolicy()
        engine = build_engine(
            EngineParts(
                model=target,
                drafters=DrafterPool(self.hello, log=get_logger("bench", "warning")),
                cost=cost or self.cost,
                slots=_SLOTS,
                config=EngineConfig(
                    max_running=settings.max_running,
                    max_waiting=1024,
                    prefill_chunk=settings.prefill_chunk,
                    prefix_cache=False,
                    budget=0 if mode.mode == "ar" else settings.budget,
                    draft_width=settings.draft_width if mode.mode == "ssd" else mode.width,
                    tree_nodes=settings.tree_nodes,
                ),
                policy=policy,
                mode_config=self._governing(policy, cost or self.cost) if mode.mode == "ssd" else None,
                noise=self._noise,
                native=self.native,
            )
        )
        if mode.mode not in ("ar", "ssd"):
            engine.drafters.connect(self._channel(mode, draft_device), synchronous=True)
        if mode.lookup:
            engine.drafters.connect(self._lookup(self.settings), synchronous=True)
        engine.drafters.drain({})
        return engine

    def _channel(self, mode: EngineMode, device: str) -> Channel:
        if mode.mode == "ngram":
            return self._lookup(self.settings.model_copy(update={"draft_fan_out": mode.fan_out}))
        inline = self._inline_on(device)
        hello = structs.replace(self.hello, step_ms=1e3 * inline.step_s)
        if mode.mode != "sd-chain":
            return InlineChannel(self._core(mode, inline), hello)
        queued = QueuedModel(inline.model)
        return OneCallChannel(self._core(mode, replace(inline, model=queued)), hello, mode.steps, queued)

    def _inline_on(self, device: str) -> _LoadedDraft:
        """Load the draft on first use; it will compute on this thread's cores."""
        if not device:
            return self._inline
        if device not in self._drafts:
            self._drafts[device] = self._loaded(device)
        return self._drafts[device]

    def _loaded(self, device: str) -> _LoadedDraft:
        draft = load_served(
            self.settings.engine_config(), self._draft_folder, device, 2 * _SLOTS, self.native
        )
        model = wrap_model(draft, "draft", self.settings.model_wrapper)
        width = self.settings.draft_width
        step_s = min(measure_steps(model, (width,))[width, SHORT_CONTEXT])
        return _LoadedDraft(model, self._noise_on(draft.facts.device), step_s)

    def _noise_on(self, device: str) -> NoiseRows:
        vocabulary = self.real.facts.vocabulary
        return NoiseRows(vocabulary, capacity_for(vocabulary), device, self.native)

    def _lookup(self, settings: Settings) -> Channel:
        return LookupChannel("ngram", settings.engine_config(), self.hello, self.real.facts.eos_token_ids)

    def _governing(self, policy: WaitPolicy, cost: CostTable) -> ModeConfig | None:
        """Configure mode control as in serving with a separate target device."""
        if not self.settings.speculation_may_stop:
            return None
        policies: dict[SpeculationMode, WaitPolicy] = {
            SpeculationMode.ASYNC: policy,
            SpeculationMode.PLAIN: WaitPolicy(),
        }
        return ModeConfig(
            ModeController(dict.fromkeys(policies, cost), HostCost()),
            Cores(parse_device(self.real.facts.device), None),
            policies,
        )

    def core(self, mode: EngineMode) -> DrafterCore:
        """Build a drafter in this process, on the target's device."""
        return self._core(mode, self._inline)

    def _core(self, mode: EngineMode, inline: _LoadedDraft) -> DrafterCore:
        depth = mode.steps if mode.mode == "sd-chain" and mode.steps else self.settings.draft_depth
        limits = GrowthLimits(mode.width, mode.fan_out, depth, self.settings.tree_nodes)
        guesses = DraftModel(inline.model, 2 * _SLOTS, inline.noise, self.native)
        ends = self.real.facts.eos_token_ids
        return DrafterCore(guesses.source(limits.fan_out), limits, ends, "bench")


@contextlib.contextmanager
def remote_drafter(rig: Rig, engine: Engine, device: str, count: int = 1) -> Generator[None]:
    """Start `count` drafter processes on a device, and wait until they have joined `engine`."""
    run_dir = make_run_dir(None)
    listener = Listener.unix(run_dir.drafter_socket)
    config = rig.settings.engine_config(
        mode=Mode.SSD, draft_device=device, drafters=count, log_level="warning"
    )
    workers: list[WorkerProcess] = []
    try:
        for name in (f"drafter-{index}" for index in range(count)):
            command = worker_command("drafter", name, run_dir.drafter_socket)
            workers.append(start_worker(WorkerPlan(name, command), config))
        deadline = time.monotonic() + _JOIN_S
        joined = engine.drafters.num_joined + count
        while engine.drafters.num_joined < joined:
            if any(worker.exit_code is not None for worker in workers) or time.monotonic() > deadline:
                raise SsdError("the drafter did not join the benchmark")
            channel = listener.accept()
            if channel is not None:
                engine.drafters.connect(channel)
            engine.drafters.drain({})
            time.sleep(0.02)
        yield
    finally:
        for worker in workers:
            worker.stop()
        listener.close()
        run_dir.remove()


def use_cores(device: str) -> None:
    """Bind this process to the cores of a device name, with one thread a core."""
    cores = parse_device(device).indices
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
