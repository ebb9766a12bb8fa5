"""Runs requests on the engines and devices of a benchmark, timed from the first token on.

The prompt is not part of decoding speed.
"""

import hashlib
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from ssd_serve.base.cost import CostTable
from ssd_serve.base.devices import Device, parse_device, pin
from ssd_serve.base.errors import SsdError
from ssd_serve.base.messages import Committed, Figures, Finished, SamplingParameters, Submit
from ssd_serve.base.resources import settle_memory
from ssd_serve.bench.emulated import EmulatedModel, device_table, emulated_table, overrun_share
from ssd_serve.bench.options import Devices
from ssd_serve.bench.prompts import NEW_TOKENS, Prompt
from ssd_serve.bench.rig import EngineMode, Rig, remote_drafter
from ssd_serve.verifier.control.timing import measure_cost
from ssd_serve.verifier.engine import Engine

ASYNC_MODES = (EngineMode("ssd"), EngineMode("ssd", lookup=True))
"""Modes with a drafter on a device of its own; the last one is compared with all others."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """The outcome of one request: `decoded` tokens followed the first ones, in `seconds` of wall time."""

    tokens: tuple[int, ...]
    decoded: int
    seconds: float
    forward_s: float
    wait_s: float
    host_s: float
    figures: Figures

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens a second."""
        return self.decoded / self.seconds


def token_hash(tokens: Sequence[int]) -> str:
    """Return a short hash by which result files identify a text."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


class Runner:
    """Runs requests on engines, with request numbers that never repeat."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._number = 1

    def run_batch(
        self, engine: Engine, prompts: Sequence[Prompt], temperature: float
    ) -> list[tuple[int, ...]]:
        """Return the continuations of several prompts in one batch, untimed."""
        numbers = [self._submit(engine, prompt, temperature) for prompt in prompts]
        texts: dict[int, tuple[int, ...]] = dict.fromkeys(numbers, ())
        while engine.busy:
            for report in engine.step():
                if isinstance(report, Committed):
                    texts[report.request] += report.tokens
        return [texts[number] for number in numbers]

    def run_each(
        self, engine: Engine, prompts: Sequence[Prompt], temperature: float
    ) -> list[tuple[int, ...]]:
        """Return the continuations, one request at a time: on a GPU a batch rounds differently."""
        return [self.run(engine, prompt, temperature).tokens for prompt in prompts]

    def run(self, engine: Engine, prompt: Prompt, temperature: float) -> TimedRequest:
        """Run one request alone on the engine."""
        self._submit(engine, prompt, temperature)
        tokens: list[int] = []
        before = 0
        started, clocked = 0.0, (0.0, 0.0, 0.0)
        while True:
            reports = engine.step()
            for report in reports:
                if isinstance(report, Committed):
                    tokens.extend(report.tokens)
                elif isinstance(report, Finished):
                    seconds = time.perf_counter() - started
                    now = _clocked(engine)
                    forward, wait, host = (end - start for start, end in zip(clocked, now, strict=True))
                    return TimedRequest(
                        tuple(tokens), len(tokens) - before, seconds, forward, wait, host, report.figures
                    )
            if not started and tokens:
                started, before, clocked = time.perf_counter(), len(tokens), _clocked(engine)

    def _submit(self, engine: Engine, prompt: Prompt, temperature: float) -> int:
        self._number += 1
        parameters = SamplingParameters(temperature=temperature, max_tokens=self._max_tokens, ignore_eos=True)
        refused = engine.submit(Submit(self._number, prompt.tokens, parameters, prompt.seed))
        if refused is not None:
            raise SsdError(f"the benchmark's own request was refused: {refused.message}")
        return self._number


def _clocked(engine: Engine) -> tuple[float, float, float]:
    return engine.times.forward_s, engine.times.wait_s, engine.times.host_s


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The devices of target and draft by name, and their number; an empty `draft`: the target's device."""

    target: str
    draft: str
    devices: int

    @property
    def name(self) -> str:
        """Both names for messages."""
        return f"{self.target} and {self.draft}" if self.draft else self.target


@dataclass(frozen=True, slots=True)
class Entry:
    """A mode on a device share."""

    mode: EngineMode
    share: DeviceShare


class RigStage:
    """Runs entries on shares of these devices.

    Baselines use the target's device, both devices (on CPUs), or a draft on cores of the host. They draft in
    this process; the drafters of SSD are processes that live as long as `drafting`.
    """

    def __init__(self, rig: Rig, setting: str, devices: Devices) -> None:
        self.setting = setting
        self.fan_out = rig.settings.draft_fan_out
        self._rig = rig
        self._runner = Runner(NEW_TOKENS)
        self._engines: dict[Entry, Engine] = {}
        self._settled: set[Entry] = set()
        self._temperature = 0.0
        target, draft = devices.target, devices.draft
        table = emulated_table(rig.settings)
        own = device_table(table).target_devices if table else 1
        self.async_share = DeviceShare(str(target), str(draft), own + 1)
        self.baseline_shares: Sequence[DeviceShare] = (DeviceShare(str(target), "", own),)
        if not devices.on_gpu and not table:
            cores = Device("cpu", tuple(sorted({*target.indices, *draft.indices})))
            self.baseline_shares = (*self.baseline_shares, DeviceShare(str(cores), "", 2))
        if target.kind == "cuda" and draft.kind == "cpu":
            self.baseline_shares = (*self.baseline_shares, self.async_share)
        self._costs: dict[str, CostTable] = {}
        for share in (*self.baseline_shares, self.async_share):
            pin(parse_device(share.target))
            if share.target not in self._costs:
                self._costs[share.target] = measure_cost(rig.target)
        settle_memory()

    @contextmanager
    def drafting(self) -> Generator[None]:
        """Keep the drafter processes of SSD running; only the drafter of the running mode has work."""
        with ExitStack() as drafters:
            for mode in ASYNC_MODES:
                engine = self._rig.engine(mode, self._costs[self.async_share.target])
                drafters.enter_context(remote_drafter(self._rig, engine, self.async_share.draft))
                self._engines[Entry(mode, self.async_share)] = engine
            yield

    def run(self, entry: Entry, prompt: Prompt, temperature: float) -> TimedRequest:
        """Run one request on the entry's devices, by an engine with the cost table of those devices."""
        if temperature != self._temperature:  # the baselines are tuned anew for each temperature
            kept = {entry: engine for entry, engine in self._engines.items() if entry.mode in ASYNC_MODES}
            self._engines = kept
            self._temperature = temperature
            self._settled.clear()
        share, draft_device = entry.share, ""
        pin(parse_device(share.target))
        if share.draft and entry.mode not in ASYNC_MODES:
            cores = parse_device(share.draft)
            draft_device = cores.torch_name
            torch.set_num_threads(max(1, len(cores.indices)))
        if entry not in self._engines:
            cost = self._costs[share.target]
            self._engines[entry] = self._rig.engine(entry.mode, cost, draft_device=draft_device)
        if entry not in self._settled:  # rates, calibration and noise settle in a run that is not counted
            self._settled.add(entry)
            self._runner.run(self._engines[entry], prompt, temperature)
        return self._runner.run(self._engines[entry], prompt, temperature)

    def overruns(self) -> dict[str, float]:
        """Return the shares of forwards that took longer than the device table; empty on real devices."""
        rig = self._rig
        if not isinstance(rig.target, EmulatedModel) or not isinstance(rig.draft, EmulatedModel):
            return {}
        return {
            "target_overrun_share": rig.target.overruns / max(1, rig.target.forwards),
            "drafter_overrun_share": overrun_share(rig.settings),
            "inline_draft_overrun_share": rig.draft.overruns / max(1, rig.draft.forwards),
        }
