"""Measures what the engine's decisions stand on: steps of target and draft on the cores of each layout, and
the host's share. Knows the bench's rig; decides nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ssd_serve.bench.prompts import Prompt
from ssd_serve.bench.rig import EngineWay as RigWay
from ssd_serve.bench.rig import Rig, use_cores
from ssd_serve.bench.timed_request import Runner
from ssd_serve.cluster.placement import Placement, place
from ssd_serve.devices import Device, Machine, this_machine
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.width import choose_width, widths_to_measure
from ssd_serve.engine_settings import Mode
from ssd_serve.errors import SettingsError
from ssd_serve.models.interface import Model
from ssd_serve.models.warmup import measure_steps
from ssd_serve.settings import Settings
from ssd_serve.verifier.planning.cost import CostTable, HostCost
from ssd_serve.verifier.planning.layout import Layout
from ssd_serve.verifier.planning.startup_benchmark import measure_cost

_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 4, 64, 96


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """A pair on this machine. Maps are by layout; those that the set-up does not have are left out."""

    target: str
    draft: str
    cores: Mapping[Layout, str]
    costs: Mapping[Layout, CostTable]
    draft_forwards_s: Mapping[Layout, Mapping[int, float]]
    """Draft forwards by their number of nodes, on the drafter's cores."""
    draft_host_s: float
    """What a draft step takes beside its forward."""
    host: HostCost
    limits: GrowthLimits

    def draft_s(self, layout: Layout) -> float:
        """A whole draft step of the width that the drafter would choose."""
        return self.draft_forwards_s[layout][self.limits.width] + self.draft_host_s

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts in the governor's order: the set-up's first one first, plain decoding last."""
        return tuple(layout for layout in (Layout.ASYNC, Layout.SYNC, Layout.OFF) if layout in self.costs)


def measure_pair(settings: Settings, say: Callable[[str], None]) -> MeasuredPair:
    """Load the pair and measure it, on CPU cores as the placement gives them to each layout."""
    if settings.draft_model is None:
        raise SettingsError(
            "there is no draft model to explain decisions with: set --draft to a folder or a hub id"
        )
    placement = place(settings, Machine(this_machine().cores, 0))
    if placement.mode is Mode.AR:
        raise SettingsError("mode ar decides nothing; use --mode auto, sd or ssd")
    alone = placement.alone or placement.target
    _enter(alone)
    say("loading the pair")
    rig = Rig(settings.model_copy(update={"mode": placement.mode}))
    say("measuring steps")
    table = measure_cost(rig.target)
    costs = {Layout.OFF: table, Layout.SYNC: table}
    forwards = {Layout.SYNC: _draft_forwards(rig.draft, settings.draft_width)}
    width = choose_width(forwards[Layout.SYNC])
    say("measuring the host's share")
    host, inline_step_s = _host(rig, width)
    draft_host_s = max(0.0, inline_step_s - forwards[Layout.SYNC][width])
    cores = {Layout.OFF: str(alone), Layout.SYNC: str(alone)}
    if placement.mode is Mode.SSD:
        say("measuring steps on the cores that each has beside the other")
        costs[Layout.ASYNC], forwards[Layout.ASYNC] = _beside(rig, placement, settings.draft_width)
        width = choose_width(forwards[Layout.ASYNC])
        cores[Layout.ASYNC] = f"{placement.target} and {placement.draft}"
        if placement.alone is None:  # the set-up has no inline layout, as in the verifier
            del costs[Layout.SYNC], forwards[Layout.SYNC], cores[Layout.SYNC]
    limits = GrowthLimits(width, settings.draft_fan_out, settings.draft_depth, settings.tree_nodes)
    names = rig.target.facts.name, rig.draft.facts.name
    return MeasuredPair(*names, cores, costs, forwards, draft_host_s, host, limits)


def _beside(rig: Rig, placement: Placement, width: int) -> tuple[CostTable, dict[int, float]]:
    """Each alone on its cores: what they take from each other is left out."""
    if placement.draft is not None:
        _enter(placement.draft)
    forwards = _draft_forwards(rig.draft, width)
    _enter(placement.target)
    return measure_cost(rig.target), forwards


def _draft_forwards(draft: Model, most: int) -> dict[int, float]:
    seconds = measure_steps(draft, widths_to_measure(most))
    return {rows: min(each) for (rows, _), each in seconds.items()}


def _host(rig: Rig, width: int) -> tuple[HostCost, float]:
    """Let an engine with the draft inline run some requests: what it has learned of its host, and seconds of
    a whole draft step."""
    engine = rig.engine(RigWay("sd-tree", 0, width, rig.settings.draft_fan_out))
    runner = Runner(_NEW_TOKENS)
    vocabulary = rig.target.facts.vocabulary
    for number in range(_PROMPTS):
        tokens = tuple((7 * number + 13 * index) % vocabulary for index in range(_PROMPT_TOKENS))
        runner.run(engine, Prompt("", tokens, number), 1.0)
    return engine.planner.host, engine.drafters.step_s


def _enter(device: Device) -> None:
    if device.kind == "cpu" and device.indices:
        use_cores(str(device))
