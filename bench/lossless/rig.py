"""The rig of the losslessness proof: a loaded pair, an engine for a case, and drafters that behave or do not.

Everything runs in this process and does not depend on time: drafters stand behind deterministic channels, a
round awaits a fixed number of draft steps, and the cost model is a fixed curve.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd_serve.bench.devices import Devices
from ssd_serve.bench.lossless.fixed_costs import FixedCost, FixedHost
from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.devices import Device
from ssd_serve.drafter.build import CoreParts, build_core
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.errors import SsdError
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.logs import get_logger
from ssd_serve.messages import (
    NOISE_SCHEME,
    PROTOCOL_VERSION,
    Close,
    Committed,
    Finished,
    Growth,
    Hello,
    Open,
    Outcome,
    Pause,
    Resync,
    Submit,
)
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.load import ModelWish, load_model
from ssd_serve.models.wrapped import WrappedModel
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.seeds import mix
from ssd_serve.verifier.build import EngineParts, build_engine
from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.planning.growth import FixedSteps, Never
from ssd_serve.verifier.scheduler import SchedulerLimits

_CPUS = Devices()
_SLOTS = 4096
_GROWTH = GrowthLimits(width=4, fan_out=4, depth=8, nodes=512)
_STEPS = 3
_PREFILL_CHUNK = 48
_MIN_STEPS = 8
"""A drafter that is to die lives at least as many rounds, and until a node of it was accepted."""
_RULES_HOLD = 64
"""So many outcomes are answered with nonsense that follows the rules of messages."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run the same requests. `batch`: requests at a time; `budget`: most nodes a round."""

    mode: str
    """ar, sd or ssd"""
    batch: int
    budget: int = 0
    drafter: str = "sane"
    """sane, garbage or killed"""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tokens of each request, and what speculation did."""

    tokens: dict[int, tuple[int, ...]]
    drafted: int
    accepted: int


class _OnGpu(WrappedModel):
    """A model whose GPU is the current one while it computes: that is where kernels start."""

    def forward(self, batch: Batch) -> ForwardResult:
        with torch.cuda.device(self.facts.device):
            return self._model.forward(batch)


class LoadedPair:
    """A loaded target and draft, each on its device; which cores of a CPU is left to the caller."""

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
        self.name = name
        self.folder = target
        self.target = _load(target, devices.target, dtype, native, batch_invariant)
        self.draft = _load(draft, devices.draft, dtype, native)
        facts = self.target.facts
        self.eos = facts.eos_token_ids
        self.vocabulary = facts.vocabulary
        self.native = native
        capacity = capacity_for(facts.vocabulary)
        self.noise = NoiseRows(facts.vocabulary, capacity, facts.device, native)
        self.draft_noise = NoiseRows(facts.vocabulary, capacity, self.draft.facts.device, native)
        self.hello = Hello(
            protocol=PROTOCOL_VERSION,
            noise=NOISE_SCHEME,
            tokenizer=name,
            vocabulary=facts.vocabulary,
            context=facts.context,
            name=name,
            step_ms=1.0,
        )

    def engine(self, case: Case) -> Engine:
        """A fresh engine of a case, without its drafter."""
        budget = 0 if case.mode == "ar" else case.budget
        return build_engine(
            EngineParts(
                model=self.target,
                # Time stands still for the drafters' links: a busy machine must not make one look silent.
                drafters=Drafters(self.hello, clock=lambda: 0.0, log=get_logger("bench", "error")),
                cost=FixedCost(),
                host=FixedHost(),
                slots=_SLOTS,
                limits=SchedulerLimits(case.batch, 1024, _PREFILL_CHUNK),
                # The plain baseline computes every prompt: reuse is one more thing to be proven.
                prefix_cache=case.mode != "ar",
                context=512,
                budget=budget,
                draft_width=_GROWTH.width,
                tree_nodes=_GROWTH.nodes,
                policy=FixedSteps(_STEPS) if budget else Never(),
                noise=self.noise,
                native=self.native,
            )
        )

    def core(self) -> DrafterCore:
        """A fresh drafter."""
        model = DraftModel(self.draft, _SLOTS, self.draft_noise)
        return build_core(CoreParts(guesses=model, limits=_GROWTH, ends=self.eos, name=self.name))


def _load(
    path: Path, device: Device, dtype: str, native: NativeLibrary | None, batch_invariant: bool = False
) -> Model:
    def load() -> Model:
        return load_model(
            path,
            ModelWish(
                device=device.torch_name,
                dtype=dtype,
                slots=_SLOTS,
                context=512,
                native=native,
                batch_invariant=batch_invariant,
            ),
        )

    if device.kind == "cpu":
        return load()
    with torch.cuda.device(device.torch_name):
        return _OnGpu(load())


class MemoryDrafter:
    """A drafter at the other end of a memory channel; it works while it is waited for and once a round."""

    def __init__(self, pair: LoadedPair, engine: Engine) -> None:
        self._core = pair.core()
        self._its = connect(engine, pair.hello, self.work)

    def work(self) -> None:
        """Drain, one step, publish."""
        for message in self._its.receive():
            if isinstance(message, Open | Outcome | Close | Resync | Pause):
                for reply in self._core.handle(message):
                    self._its.send(reply)
        for growth in self._core.step():
            self._its.send(growth)

    def die(self) -> None:
        """Be gone, without a word."""
        self._its.close()


class GarbageDrafter:
    """Knows the roots and invents the rest: random candidates and impossible tokens. In the end it breaks the
    rules of messages too, for which it is hung up on."""

    def __init__(self, pair: LoadedPair, engine: Engine) -> None:
        self._vocabulary = pair.vocabulary
        self._random = 1
        self._invented = 0
        self._its = connect(engine, pair.hello, self.work)

    def work(self) -> None:
        """Answer every message with nonsense."""
        for message in self._its.receive():
            if isinstance(message, Outcome | Open):
                self._invent(message.request, message.epoch, message.root)

    def _invent(self, request: int, epoch: int, root: int) -> None:
        first, second = self._tokens(), self._tokens()
        wild = [
            Expansion(root, ROOT_STEP, first, [5.0, -1.0, -2.0, -2.0]),
            Expansion(root, first[0], second, [-0.1, -3e30, 3e30, -1.0]),
            Expansion(root ^ 5, 3, second, [0.0, 0.0, 0.0, 0.0]),
        ]
        impossible = [Expansion(root, ROOT_STEP, [-2, self._vocabulary], [0.0, 0.0])]
        infinite = [Expansion(root, ROOT_STEP, [1, 2], [float("inf"), float("nan")])]
        for sequence, each in enumerate((wild, impossible)):
            self._its.send(pack(request, epoch, sequence, each, "garbage", snapshot=False))
        self._invented += 1
        if self._invented == _RULES_HOLD:
            self._its.send(pack(request, epoch, 2, infinite, "garbage", snapshot=False))
            self._its.send(Growth(request, epoch, 99, b"123", b"1", b"", b"xyz", b""))

    def _tokens(self) -> list[int]:
        tokens: list[int] = []
        for _ in range(3):
            self._random = mix(self._random, 7)
            tokens.append(self._random % self._vocabulary)
        return [*tokens, tokens[0]]


def connect(engine: Engine, hello: Hello, work: Callable[[], object]) -> MemoryChannel:
    """Join `engine`; `work` is called when it waits. Returns the drafter's end."""
    mine, its = memory_pair()
    its.send(hello)
    mine.on_wait = work
    engine.drafters.connect(mine)
    return its


def run_case(pair: LoadedPair, case: Case, submits: Sequence[Submit]) -> Outputs:
    """All requests to their ends."""
    engine = pair.engine(case)
    drafter: MemoryDrafter | GarbageDrafter | None = None
    if case.mode == "sd":
        engine.drafters.connect(InlineChannel(pair.core(), pair.hello), synchronous=True)
    elif case.mode == "ssd":
        drafter = GarbageDrafter(pair, engine) if case.drafter == "garbage" else MemoryDrafter(pair, engine)
    for submit in submits:
        refused = engine.submit(submit)
        if refused is not None:
            raise SsdError(f"the proof's own request was refused: {refused.message}")
    tokens: dict[int, list[int]] = {submit.request: [] for submit in submits}
    steps = 0
    while engine.busy:
        if drafter is not None:
            drafter.work()
        for report in engine.step():
            if isinstance(report, Committed):
                tokens[report.request].extend(report.tokens)
            elif isinstance(report, Finished) and report.reason not in ("stop", "length"):
                raise SsdError(f"request {report.request} ended with {report.reason}: {report.message}")
        steps += 1
        seen = engine.totals.figures.accepted > 0 or case.budget == 0
        if case.drafter == "killed" and isinstance(drafter, MemoryDrafter) and steps >= _MIN_STEPS and seen:
            drafter.die()
            drafter = None
    figures = engine.totals.figures
    return Outputs(
        {number: tuple(each) for number, each in tokens.items()}, figures.drafted, figures.accepted
    )
