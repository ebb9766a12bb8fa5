"""The devices of `ssd bench modes`: one loaded target that moves between device shares from run to run."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from ssd_serve.base.cost import CostTable
from ssd_serve.base.devices import Device, parse_device, pin
from ssd_serve.base.resources import settle_memory
from ssd_serve.bench.device_tables import device_table
from ssd_serve.bench.emulated import EmulatedModel, emulated_table, overrun_share
from ssd_serve.bench.modes import ASYNC_MODES, DeviceShare, Entry
from ssd_serve.bench.options import Devices
from ssd_serve.bench.prompts import NEW_TOKENS, Prompt
from ssd_serve.bench.rig import Rig, remote_drafter
from ssd_serve.bench.runner import Runner, TimedRequest
from ssd_serve.verifier.control.timing import measure_cost
from ssd_serve.verifier.engine import Engine


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
        own, both = (device_table(table).devices(used) if table else 1 + used for used in (False, True))
        self.async_share = DeviceShare(str(target), str(draft), both)
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
            self._engines = {
                known: engine for known, engine in self._engines.items() if known.mode in ASYNC_MODES
            }
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
