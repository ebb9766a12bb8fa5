"""Chooses where a round computes: the controller's mode, on the number of cores that is fastest.

Prompts are prefilled on all cores if that saves more than a round without drafts costs. Kernels on several
threads wait for the slowest thread. So a round uses all cores only if that is clearly faster, by the times
at start and by those of the latest rounds. Knows drafters as working or paused; chooses no nodes.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch

from ssd_serve.base.cost import CostTable, Reading
from ssd_serve.base.devices import Device
from ssd_serve.verifier.control.budget import WaitPolicy
from ssd_serve.verifier.control.mode_controller import ModeController
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode

_MIN_SAVING = 0.9
"""Maximum time on all cores, as a share of the time on the shared cores."""
_CLEARLY_SLOWER = 1.2
"""A choice below this multiple of its time at start counts as unchanged while others compute: its latest
rounds may have been prefill, which does not predict decoding."""
_LATEST_ROUNDS = 5
"""Number of latest rounds; their median slowness counts, so that one descheduled round does not."""
_PROBE_EVERY_S = 1.0
"""Seconds between rounds that probe whether all cores are as fast again as at start."""


class ThreadCountSelector:
    """Chooses between `shared_cores`, the target's share while a drafter runs, and `all_cores`, by cost."""

    def __init__(self, shared_cores: CostTable, all_cores: CostTable, clock: Callable[[], float]) -> None:
        self._tables = {False: shared_cores, True: all_cores}
        self._slowness = {all_cores: deque([1.0], _LATEST_ROUNDS) for all_cores in (False, True)}
        self._clock = clock
        self._looked_at = clock()

    def table(self, all_cores: bool) -> CostTable:
        """Return the cost of forwards on all cores, or on the shared cores."""
        return self._tables[all_cores]

    def likely_table(self, rows: int, reading: Reading) -> CostTable:
        """Return the cost table of the thread count that a batch of this size would use."""
        lately = {all_cores: median(self._slowness[all_cores]) for all_cores in self._tables}
        clearly = {
            all_cores: slowness if slowness > _CLEARLY_SLOWER else 1.0
            for all_cores, slowness in lately.items()
        }
        return self._tables[self._pays(rows, reading, clearly)]

    def all_cores(self, rows: int, reading: Reading) -> bool:
        """Return whether the next round, of `rows` rows, computes on all cores."""
        shared_cores, lately = median(self._slowness[False]), self._slowness[True]
        if self._pays(rows, reading, {False: shared_cores, True: median(lately)}):
            return True
        if self._pays(rows, reading, {False: shared_cores, True: lately[-1]}):
            return True  # the last probe was faster: check whether it lasts
        if not self._pays(rows, reading, {False: 1.0, True: 1.0}):
            return False  # all cores were not faster at start either: do not probe
        now = self._clock()
        if now - self._looked_at < _PROBE_EVERY_S:
            return False
        self._looked_at = now
        return True

    def _pays(self, rows: int, reading: Reading, slowness: Mapping[bool, float]) -> bool:
        few_s, all_s = (
            slowness[all_cores] * self._tables[all_cores].first_seconds(rows, reading)
            for all_cores in (False, True)
        )
        return all_s <= _MIN_SAVING * few_s

    def saved_s(self, rows: int, reading: Reading) -> float:
        """Seconds that the next round saves with all cores; 0 if it does not use them."""
        if not self.all_cores(rows, reading):
            return 0.0
        return self._tables[False].first_seconds(rows, reading) - self._tables[True].first_seconds(
            rows, reading
        )

    def observe(self, all_cores: bool, rows: int, seconds: float, reading: Reading) -> None:
        """A round's forward took `seconds`."""
        self._slowness[all_cores].append(seconds / self._tables[all_cores].first_seconds(rows, reading))


class Cores:
    """Cores of the target: with a concurrent drafter, or `exclusive`. Other devices than CPUs do not
    change."""

    def __init__(self, shared: Device, exclusive: Device | None) -> None:
        self._shared = shared
        self._exclusive = exclusive or shared
        self.has_exclusive = exclusive is not None
        """True if the target may also use the drafter's cores, in modes without a drafter of its own."""

    @property
    def differ(self) -> bool:
        """True if the target's cores depend on the mode."""
        return self._shared != self._exclusive

    def of(self, mode: SpeculationMode) -> Device:
        """Return the cores of a mode."""
        return self._shared if mode is SpeculationMode.ASYNC else self._exclusive

    def enter(self, mode: SpeculationMode, all_cores: bool = True) -> None:
        """Bind the process to the cores of this mode, with as many threads; without `all_cores` with no more
        threads than with a concurrent drafter."""
        device = self.of(mode)
        if device.kind != "cpu" or not device.indices or not self.differ:
            return
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # cores may be taken from this process while it runs
                os.sched_setaffinity(0, device.indices)
        shared_cores = len(self._shared.indices) or len(device.indices)
        torch.set_num_threads(len(device.indices) if all_cores else min(shared_cores, len(device.indices)))


@dataclass(frozen=True, slots=True)
class ModeConfig:
    """Choices of the mode controller: for each mode the cores, the cost of forwards there, and the wait
    policy. `shared_cores`: cost of forwards on the target's share of the cores, in modes without a drafter
    process."""

    controller: ModeController[SpeculationMode]
    cores: Cores
    costs: Mapping[SpeculationMode, CostTable]
    policies: Mapping[SpeculationMode, WaitPolicy]
    shared_cores: CostTable | None = None


class ExecutionPlanner:
    """Chooses mode and cores of each round. `cost` and `policy` are those of the next round; without
    `mode_config` they never change."""

    def __init__(
        self,
        drafters: DrafterPool,
        cost: CostTable,
        policy: WaitPolicy,
        mode_config: ModeConfig | None,
        clock: Callable[[], float],
    ) -> None:
        self.cost = cost
        self.policy = policy
        self.mode_config = mode_config
        self.mode: SpeculationMode | None = None
        """Mode that the controller has chosen; None without a controller."""
        self._drafters = drafters
        self._choice: ThreadCountSelector | None = None
        if mode_config is not None and mode_config.shared_cores is not None and mode_config.cores.differ:
            self._choice = ThreadCountSelector(
                mode_config.shared_cores, mode_config.costs[SpeculationMode.PLAIN], clock
            )
        self._entered: tuple[SpeculationMode, bool] | None = None
        """Mode in which the round computes, and whether on all of its cores."""
        self._nodes = 0
        """Nodes of the last round."""

    @property
    def prefills_alone(self) -> bool:
        """True if rounds may prefill on the drafter's cores, while the drafter pauses."""
        return self._choice is not None

    @property
    def prefilling_alone(self) -> bool:
        """True if this round prefills on the drafter's cores."""
        return self._entered is not None and self._entered[0] is not self.mode

    def costs(self, requests: int) -> dict[SpeculationMode, CostTable]:
        """Return the cost table of each mode for batches of `requests` requests."""
        if self.mode_config is None:
            return {}
        costs = dict(self.mode_config.costs)
        if self._choice is not None:
            alone = self._choice.likely_table(requests, Reading())
            costs = {mode: cost if mode is SpeculationMode.ASYNC else alone for mode, cost in costs.items()}
        return costs

    def choose(self, requests: int, decoding: int, rows: int, reading: Reading) -> None:
        """Choose for a round while `requests` requests run and `decoding` of them decode. `rows` are its
        rows without nodes: one for each decoding request, and those of prompts."""
        if self.mode_config is None or not requests:
            return
        self.mode = mode = self.mode_config.controller.choose(requests, decoding > 0)
        all_cores = True
        if self._choice is not None:
            if mode is not SpeculationMode.ASYNC:
                all_cores = self._choice.all_cores(rows + self._nodes, reading)
            elif rows > decoding:
                # At most one draft step and one decode round are lost without drafting.
                few = self._choice.table(all_cores=False)
                round_s = few.first_seconds(decoding, Reading()) if decoding else 0.0
                if self._choice.saved_s(rows, reading) > self._drafters.step_s_in(mode) + round_s:
                    mode = SpeculationMode.PLAIN
        if (mode, all_cores) != self._entered:
            self._enter(mode, all_cores, self.mode_config)

    def observe(self, rows: int, nodes: int, reading: Reading, seconds: float) -> None:
        """The round's forward of `rows` rows, of which some are nodes, took `seconds`."""
        self.cost.observe(rows, seconds, reading)
        self._nodes = nodes
        if (
            self._choice is not None
            and self._entered is not None
            and self._entered[0] is not SpeculationMode.ASYNC
        ):
            self._choice.observe(self._entered[1], rows, seconds, reading)

    def _enter(self, mode: SpeculationMode, all_cores: bool, mode_config: ModeConfig) -> None:
        changes = self._entered is None or self._entered[0] is not mode
        self._entered = (mode, all_cores)
        self.cost = mode_config.costs[mode]
        if self._choice is not None and mode is not SpeculationMode.ASYNC:
            self.cost = self._choice.table(all_cores)
        mode_config.cores.enter(mode, all_cores)
        if changes:
            self.policy = mode_config.policies[mode]
            self._drafters.set_mode(mode)
