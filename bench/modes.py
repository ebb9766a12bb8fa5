"""`ssd bench modes`: plain decoding, synchronous chains and trees, and SSD, interleaved in one run.

Two settings: `real` (each device one core, or a GPU) and `emulated` (each forward padded by sleeping to a
device table, everything else real; always labelled so). Knows what is compared; the rig knows how it is put
together.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ssd_serve.bench.devices import Devices
from ssd_serve.bench.emulated import EmulatedModel, overrun_share
from ssd_serve.bench.prompts import Chosen, Prompt, repeated_share
from ssd_serve.bench.rig import Rig, Way, remote_drafter
from ssd_serve.bench.timed_request import Runner, Sample
from ssd_serve.devices import Device, parse_device, pin
from ssd_serve.memory import settle_memory
from ssd_serve.messages import SamplingParameters, Submit
from ssd_serve.models.warmup import SHORT_CONTEXT, measure_steps
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.planning.cost import CostTable
from ssd_serve.verifier.planning.startup_benchmark import measure_cost
from ssd_serve.verifier.request import accept, share

TARGET_CORE, DRAFT_CORE = "cpu:0", "cpu:1"
CORES = Devices(parse_device(TARGET_CORE), parse_device(DRAFT_CORE))
_TUNING_PROMPTS, _TUNING_TOKENS = 4, 64
_DISTURBING = 64
"""Requests that keep the drafter growing while the target is measured beside it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    setting: str
    tokens: int
    equal_devices: bool
    """Also the baselines with the drafter's cores; on GPUs there is no such thing."""
    devices: Devices = CORES


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows of one setting: results of each mode, ratios of SSD to the others, and what else was seen."""

    results: list[dict[str, object]]
    ratios: list[dict[str, object]]
    notes: dict[str, object]


def run_modes(rig: Rig, plan: Plan, chosen: Mapping[float, Chosen], say: Callable[[str], None]) -> Outcome:
    """One setting, all modes, and the temperatures of `chosen` with their prompts."""
    pin(plan.devices.target)
    settle_memory()
    ssd = rig.engine(Way("ssd"))
    with remote_drafter(rig, ssd, str(plan.devices.draft)):
        bench = _Bench(rig, plan, say)
        results: list[dict[str, object]] = []
        ratios: list[dict[str, object]] = []
        notes: dict[str, object] = {}
        for temperature, choice in chosen.items():
            prompts = choice.prompts
            say(f"{plan.setting}, temperature {temperature:g}: tuning chain and tree")
            ways = bench.tune(prompts, temperature)
            engines = {way: rig.engine(way) for way in ways} | {Way("ssd"): ssd}
            samples = bench.interleave(engines, prompts, temperature)
            results += [_result(plan.setting, way, temperature, got) for way, got in samples.items()]
            ratios += _ratios(plan.setting, temperature, samples)
            notes[f"replaced_prompts_share_t{temperature:g}"] = choice.replaced
            notes[f"loops_kept_t{temperature:g}"] = choice.loops_kept
            if plan.equal_devices and not plan.devices.on_gpu:
                results += bench.equal_devices(prompts[::3], temperature, ways)
        notes["target_step_ms"] = _step_times(rig.cost)
        notes["draft_step_ms"] = 1e3 * rig.draft_step_s
        notes["draft_step_ms_remote"] = 1e3 * ssd.drafters.step_s
        if isinstance(rig.target, EmulatedModel):
            notes["target_overrun_share"] = rig.target.overruns / max(1, rig.target.forwards)
            notes["target_forwards"] = rig.target.forwards
            notes["drafter_overrun_share"] = overrun_share(rig.settings)
            if isinstance(rig.draft, EmulatedModel):
                notes["inline_draft_overrun_share"] = rig.draft.overruns / max(1, rig.draft.forwards)
        else:
            notes["target_step_with_and_without_drafter_ms"] = bench.disturbance(
                ssd, next(iter(chosen.values())).prompts[0]
            )
    return Outcome(results, ratios, notes)


class _Bench:
    def __init__(self, rig: Rig, plan: Plan, say: Callable[[str], None]) -> None:
        self._rig = rig
        self._plan = plan
        self._say = say
        self._runner = Runner(plan.tokens)
        self._tuner = Runner(min(_TUNING_TOKENS, plan.tokens), first=1 << 32)

    def tune(self, prompts: Sequence[Prompt], temperature: float) -> list[Way]:
        """Plain decoding, the best chain and the best tree, found on a few of the prompts."""
        fan_out = self._rig.settings.draft_fan_out
        chains = [Way("sd-chain", steps) for steps in (2, 3, 4, 5, 6, 8, 10)]
        shapes = [(0, 2), (0, 4), (0, 8), (0, 16), (2, 4), (2, 8), (4, 4), (4, 8), (4, 16), (6, 4), (6, 8)]
        trees = [Way("sd-tree", steps, width, fan_out) for steps, width in shapes]
        few = prompts[:_TUNING_PROMPTS]
        return [Way("ar"), self._best(chains, few, temperature), self._best(trees, few, temperature)]

    def _best(self, ways: Sequence[Way], prompts: Sequence[Prompt], temperature: float) -> Way:
        engines = {way: self._rig.engine(way) for way in ways}
        samples = self.interleave(engines, prompts, temperature, self._tuner)
        speed = {way: _speed(got) for way, got in samples.items()}
        self._say("  " + ", ".join(f"{way.label}: {value:.1f}" for way, value in speed.items()))
        return max(speed, key=speed.__getitem__)

    def interleave(
        self,
        engines: dict[Way, Engine],
        prompts: Sequence[Prompt],
        temperature: float,
        runner: Runner | None = None,
    ) -> dict[Way, list[Sample]]:
        """Every prompt on every engine, the order of engines rotating from prompt to prompt."""
        run = (runner or self._runner).run
        samples: dict[Way, list[Sample]] = {way: [] for way in engines}
        order = list(engines)
        for engine in engines.values():  # rates, calibration and noise settle on a prompt that is not counted
            run(engine, prompts[0], temperature)
        for index, prompt in enumerate(prompts):
            turn = index % len(order)
            for way in order[turn:] + order[:turn]:
                samples[way].append(run(engines[way], prompt, temperature))
        return samples

    def equal_devices(
        self, prompts: Sequence[Prompt], temperature: float, ways: Sequence[Way]
    ) -> list[dict[str, object]]:
        """The same baselines when the target has the cores of both, as SSD has."""
        target, draft = self._plan.devices.target, self._plan.devices.draft
        pin(Device("cpu", tuple(sorted({*target.indices, *draft.indices}))))
        try:
            cost = measure_cost(self._rig.target)
            engines = {way: self._rig.engine(way, cost) for way in ways}
            samples = self.interleave(engines, prompts, temperature)
        finally:
            pin(target)
        return [
            _result(f"{self._plan.setting}-both-cores", way, temperature, got) for way, got in samples.items()
        ]

    def disturbance(self, ssd: Engine, prompt: Prompt) -> dict[str, list[float]]:
        """Target step time by rows in ms: alone, and while the drafter grows many trees."""
        counts = (1, 8)
        alone = measure_steps(self._rig.target, counts, repeats=15)
        parameters = SamplingParameters(temperature=0.0, max_tokens=64, ignore_eos=True)
        vocabulary = self._rig.target.facts.vocabulary
        submits = [Submit((1 << 40) + index, prompt.tokens, parameters, 1) for index in range(_DISTURBING)]
        requests = [accept(submit, share(submit, ()), 512, vocabulary) for submit in submits]
        for request in requests:
            ssd.drafters.open(request)
        ssd.drafters.wait(1.0)
        beside = measure_steps(self._rig.target, counts, repeats=15)
        for request in requests:
            ssd.drafters.close(request)
        ssd.drafters.drain({})
        return {
            str(rows): [1e3 * statistics.median(seen[rows, SHORT_CONTEXT]) for seen in (alone, beside)]
            for rows in counts
        }


def _speed(samples: Sequence[Sample]) -> float:
    return sum(sample.decoded for sample in samples) / sum(sample.seconds for sample in samples)


def _step_times(cost: CostTable) -> dict[str, float]:
    return {str(rows): round(1e3 * cost.seconds(rows), 3) for rows in (1, 2, 4, 8, 16, 32, 64)}


def _result(setting: str, way: Way, temperature: float, samples: Sequence[Sample]) -> dict[str, object]:
    speeds = sorted(sample.tokens_per_s for sample in samples)
    wall = sum(sample.seconds for sample in samples)
    figures = [sample.figures for sample in samples]
    rounds = max(1, sum(each.rounds for each in figures))
    hits, misses = sum(each.hits for each in figures), sum(each.misses for each in figures)
    drafted = sum(each.drafted for each in figures)
    return {
        "setting": setting,
        "mode": way.mode,
        "shape": way.label,
        "temperature": temperature,
        "tokens_per_s": round(statistics.median(speeds), 2),
        "tokens_per_s_quartiles": [round(value, 2) for value in _quartiles(speeds)],
        "tokens_per_s_total": round(_speed(samples), 2),
        "tokens_per_round": round(sum(sample.decoded for sample in samples) / rounds, 3),
        "acceptance": round(sum(each.accepted for each in figures) / drafted, 3) if drafted else None,
        "nodes_per_round": round(drafted / rounds, 2),
        "hit_rate": round(hits / max(1, hits + misses), 3) if way.mode != "ar" else None,
        "ready_depth": round(sum(each.ready_depth for each in figures) / rounds, 2),
        "ready_nodes": round(sum(each.ready_nodes for each in figures) / rounds, 1),
        "forward_share": round(sum(sample.forward_s for sample in samples) / wall, 4),
        "wait_share": round(sum(sample.wait_s for sample in samples) / wall, 4),
        "host_share": round(sum(sample.host_s for sample in samples) / wall, 4),
        "host_ms_per_round": round(1e3 * sum(sample.host_s for sample in samples) / rounds, 3),
        "repeated_8grams": round(statistics.mean(repeated_share(sample.tokens) for sample in samples), 3),
        "requests": len(samples),
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3


def _ratios(setting: str, temperature: float, samples: dict[Way, list[Sample]]) -> list[dict[str, object]]:
    """SSD against each other mode, prompt by prompt."""
    ours = samples[Way("ssd")]
    found: list[dict[str, object]] = []
    for way, theirs in samples.items():
        if way.mode == "ssd":
            continue
        pairs = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs, strict=True)]
        found.append(
            {
                "setting": setting,
                "temperature": temperature,
                "ratio": f"ssd/{way.mode}",
                "median": round(statistics.median(pairs), 3),
                "quartiles": [round(value, 3) for value in _quartiles(pairs)],
                "of_totals": round(_speed(ours) / _speed(theirs), 3),
            }
        )
    return found
