"""The stage of `ssd bench modes`: a rig whose target moves between shares of the devices from run to run.

Knows how a way is run on its devices, not who is compared.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from ssd_serve.base.cost import CostTable
from ssd_serve.base.devices import Device, parse_device, pin
from ssd_serve.base.memory import settle_memory
from ssd_serve.bench.device_tables import device_table
from ssd_serve.bench.devices import Devices
from ssd_serve.bench.emulated import EmulatedModel, emulated_table, overrun_share
from ssd_serve.bench.modes import BESIDE, Entry, Share
from ssd_serve.bench.prompts import NEW_TOKENS, Prompt
from ssd_serve.bench.rig import Rig, remote_drafter
from ssd_serve.bench.timed_request import Runner, TimedRequest
from ssd_serve.verifier.control.timing import measure_cost
from ssd_serve.verifier.engine import Engine

CORES = Devices(parse_device("cpu:0"), parse_device("cpu:1"))


class RigStage:
    """Shares of these devices: the target's own, and those of both: on CPUs for the target, beside a GPU
    cores for the draft. A baseline drafts in this process; SSD's drafters are processes of their own, as long
    as `drafting` lasts."""

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
        own, both = (device_table(table).devices(beside) if table else 1 + beside for beside in (False, True))
        self.beside = Share(str(target), str(draft), both)
        self.alone: Sequence[Share] = (Share(str(target), "", own),)
        if not devices.on_gpu and not table:
            cores = Device("cpu", tuple(sorted({*target.indices, *draft.indices})))
            self.alone = (*self.alone, Share(str(cores), "", 2))
        if target.kind == "cuda" and draft.kind == "cpu":
            self.alone = (*self.alone, self.beside)
        self._costs: dict[str, CostTable] = {}
        for share in (*self.alone, self.beside):
            pin(parse_device(share.target))
            if share.target not in self._costs:
                self._costs[share.target] = measure_cost(rig.target)
        settle_memory()

    @contextmanager
    def drafting(self) -> Generator[None]:
        """SSD's drafters run on their device; only that of the way that runs has work."""
        with ExitStack() as drafters:
            for way in BESIDE:
                engine = self._rig.engine(way, self._costs[self.beside.target])
                drafters.enter_context(remote_drafter(self._rig, engine, self.beside.draft))
                self._engines[Entry(way, self.beside)] = engine
            yield

    def run(self, entry: Entry, prompt: Prompt, temperature: float) -> TimedRequest:
        """One request on the entry's own devices, by an engine that knows what forwards cost there."""
        if temperature != self._temperature:  # the baselines of another one are over
            self._engines = {known: engine for known, engine in self._engines.items() if known.way in BESIDE}
            self._temperature = temperature
            self._settled.clear()
        share, draft_device = entry.share, ""
        pin(parse_device(share.target))
        if share.draft and entry.way not in BESIDE:
            cores = parse_device(share.draft)
            draft_device = cores.torch_name
            torch.set_num_threads(max(1, len(cores.indices)))
        if entry not in self._engines:
            cost = self._costs[share.target]
            self._engines[entry] = self._rig.engine(entry.way, cost, draft_device=draft_device)
        if entry not in self._settled:  # rates, calibration and noise settle in a run that is not counted
            self._settled.add(entry)
            self._runner.run(self._engines[entry], prompt, temperature)
        return self._runner.run(self._engines[entry], prompt, temperature)

    def overruns(self) -> dict[str, float]:
        """Shares of forwards that took longer than the device table says; empty where there is none."""
        rig = self._rig
        if not isinstance(rig.target, EmulatedModel) or not isinstance(rig.draft, EmulatedModel):
            return {}
        return {
            "target_overrun_share": rig.target.overruns / max(1, rig.target.forwards),
            "drafter_overrun_share": overrun_share(rig.settings),
            "inline_draft_overrun_share": rig.draft.overruns / max(1, rig.draft.forwards),
        }
