"""`ssd bench modes`: plain decoding, n-gram lookup, synchronous chains and trees, and SSD, interleaved.

Trees and SSD also run with n-gram lookup besides their draft model. Every mode runs on all device shares that
it can use. Baselines are tuned on prompts of their own.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ssd_serve.base.devices import parse_device, pin
from ssd_serve.base.engine_config import EMBEDDED, Mode
from ssd_serve.base.settings import Settings
from ssd_serve.bench.emulated import emulating
from ssd_serve.bench.options import Devices
from ssd_serve.bench.prompts import ChosenPrompts, Prompt, without_loops
from ssd_serve.bench.rig import EngineMode, Rig
from ssd_serve.bench.runner import ASYNC_MODES, DeviceShare, Entry, RigStage, TimedRequest, token_hash
from ssd_serve.bench.statistics import adjacent, interleave, quartiles, ratio_interval, tune
from ssd_serve.bench.workload import ballast_pair, choose_prompts

CORES = Devices(parse_device("cpu:0"), parse_device("cpu:1"))
PLAIN = EngineMode("ar")
_STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_FAN_OUTS = (1, 2, 4, 8)
_EMULATED_WIDTH = 12
"""Wider steps of the embedded draft take a CPU longer than the table's device."""
_TUNING_PROMPTS = 8
COLUMNS = (
    *("setting", "shape", "temperature", "target", "draft", "devices", "tokens_per_s"),
    *("tokens_per_s_quartiles", "ssd", "verdict", "by_device", "tokens_per_round", "acceptance", "hit_rate"),
)


_LLAMA = "Llama 3.1 70B / 3.2 1B"
PUBLISHED = (
    "Published by others, not measured here (plain, synchronous, SSD in tokens/s, target on 4 devices):",
    f"- AMD, MI300X, {_LLAMA}: 52.3, 138.1, 225.9",
    f"- SSD paper, H100, {_LLAMA}: HumanEval 54.7, 176, 283; UltraFeedback 54.7, 138, 215; "
    "Alpaca 54.7, 145, 224; GSM8K 54.7, 188, 301",
    "- SSD paper, H100, Qwen3 32B / 0.6B: 88.8, 136.8, 203.8 (mean of these)",
)


class ModesStage(Protocol):
    """The engines that run entries. `baseline_shares` are the shares of modes without a remote drafter."""

    setting: str
    fan_out: int
    async_share: DeviceShare
    baseline_shares: Sequence[DeviceShare]

    def run(self, entry: Entry, prompt: Prompt, temperature: float) -> TimedRequest:
        """Run one request on the entry's devices."""
        ...


@dataclass(frozen=True, slots=True)
class ModesResult:
    """Rows of `ModesRow` fields, one for each entry and temperature, and the single answers behind them."""

    results: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    answers: list[dict[str, object]] = field(default_factory=list[dict[str, object]])


def run_modes(
    stage: ModesStage, chosen: Mapping[float, ChosenPrompts], say: Callable[[str], None]
) -> ModesResult:
    """Measure every entry at each temperature of `chosen`; the rows of SSD come last."""
    found = ModesResult()
    for temperature, texts in chosen.items():
        say(f"{stage.setting}, temperature {temperature:g}: tuning")
        tuned: dict[Entry, dict[str, float]] = {}
        for share in stage.baseline_shares:
            if not share.draft:
                tuned[Entry(PLAIN, share)] = {}
            tuned |= dict(_tuned(stage, share, temperature, texts.tuning, say))
        entries = [*tuned, *(Entry(mode, stage.async_share) for mode in ASYNC_MODES)]
        say(f"  measuring {len(entries)} modes on {len(texts.prompts)} prompts")
        samples = _samples(stage, entries, texts.prompts, temperature, found.answers)
        written = {
            f"{entry.mode.label} on {entry.share.name}": [sample.tokens for sample in some]
            for entry, some in samples.items()
        }
        kept = without_loops(texts.prompts, written)
        if len(kept) < len(texts.prompts):
            say(f"  {len(kept)} prompts are counted: after the others a text is a loop")
        samples = {entry: [some[place] for place in kept] for entry, some in samples.items()}
        ours = samples[entries[-1]]
        for entry, theirs in samples.items():
            row = _row(stage, entry, theirs, ours)
            found.results.append(
                {
                    "setting": stage.setting,
                    "temperature": temperature,
                    **row,
                    "tuned": tuned.get(entry, {}),
                }
            )
    return found


def initial_shapes(mode: str, fan_out: int) -> list[EngineMode]:
    """Return the shapes from which the tuning of a mode begins."""
    if mode == "sd-chain":
        return [EngineMode(mode, steps) for steps in (1, 2, 4, 8)]
    if mode == "ngram":
        return [EngineMode(mode, fan_out=fan_out) for fan_out in (1, 4)]
    return [EngineMode(mode, steps, width, fan_out) for steps in (0, 2, 4) for width in (4, 16)]


def neighbours(mode: EngineMode) -> Iterator[EngineMode]:
    """Yield the shapes that differ by one step in one dimension."""
    if mode.steps:
        yield from (replace(mode, steps=steps) for steps in adjacent(_STEPS, mode.steps))
    if mode.mode == "ngram":
        yield from (replace(mode, fan_out=fan_out) for fan_out in adjacent(_FAN_OUTS, mode.fan_out))
    elif mode.mode == "sd-tree":
        yield from (replace(mode, width=width) for width in adjacent(_WIDTHS, mode.width))


def _tuned(
    stage: ModesStage,
    share: DeviceShare,
    temperature: float,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> Iterator[tuple[Entry, dict[str, float]]]:
    """Yield the fastest shape of each baseline, and the tokens/s of all shapes that were tried."""

    def speeds(modes: Sequence[EngineMode], some: Sequence[Prompt]) -> dict[EngineMode, float]:
        found = _samples(stage, [Entry(mode, share) for mode in modes], some, temperature)
        return {
            entry.mode: sum(one.decoded for one in samples) / sum(one.seconds for one in samples)
            for entry, samples in found.items()
        }

    for name in ("sd-chain", "sd-tree") if share.draft else ("ngram", "sd-chain", "sd-tree"):
        best, tried = tune(initial_shapes(name, stage.fan_out), neighbours, speeds, prompts)
        tokens_per_s = {mode.label: round(speed, 1) for mode, speed in tried.items()}
        say(f"  on {share.name}: {best.label} of {tokens_per_s}")
        yield Entry(best, share), tokens_per_s
        if name == "sd-tree":
            yield Entry(replace(best, lookup=True), share), {}


def _samples(
    stage: ModesStage,
    entries: Sequence[Entry],
    prompts: Sequence[Prompt],
    temperature: float,
    answers: list[dict[str, object]] | None = None,
) -> dict[Entry, list[TimedRequest]]:
    """Run all entries on all prompts; append each single answer to `answers`, if given."""

    def run(entry: Entry, prompt: Prompt, place: int) -> TimedRequest:
        sample = stage.run(entry, prompt, temperature)
        if answers is not None:
            answers.append(
                {
                    "setting": stage.setting,
                    "temperature": temperature,
                    "shape": entry.mode.label,
                    "target": entry.share.target,
                    "prompt": prompt.path,
                    "seed": prompt.seed,
                    "order": place,
                    "decoded": sample.decoded,
                    "seconds": round(sample.seconds, 6),
                    "tokens": token_hash(sample.tokens),
                }
            )
        return sample

    return interleave(entries, prompts, run)


def _row(
    stage: ModesStage, entry: Entry, samples: Sequence[TimedRequest], ours: Sequence[TimedRequest]
) -> dict[str, object]:
    """Return the figures of an entry; `ssd` is the tokens/s of `ours` over its own, prompt by prompt."""
    mode, share = entry.mode, entry.share
    speeds = [sample.tokens_per_s for sample in samples]
    wall = sum(sample.seconds for sample in samples)
    figures = [sample.figures for sample in samples]
    rounds = max(1, sum(each.rounds for each in figures))
    hits, misses = sum(each.hits for each in figures), sum(each.misses for each in figures)
    drafted = sum(each.drafted for each in figures)
    ratios = [own.tokens_per_s / speed for own, speed in zip(ours, speeds, strict=True)]
    ratio = None if mode == ASYNC_MODES[-1] else ratio_interval(ratios)
    return {
        "mode": mode.mode,
        "shape": mode.label,
        "target": share.target,
        "draft": share.draft,
        "devices": share.devices,
        "requests": len(samples),
        "tokens_per_s": round(statistics.median(speeds), 2),
        "tokens_per_s_quartiles": quartiles(speeds),
        "ssd": None if ratio is None else asdict(ratio),
        "verdict": None if ratio is None else ratio.verdict,
        "by_device": None if ratio is None else ratio.mean * share.devices / stage.async_share.devices,
        "tokens_per_round": round(sum(sample.decoded for sample in samples) / rounds, 3),
        "acceptance": round(sum(each.accepted for each in figures) / drafted, 3) if drafted else None,
        "nodes_per_round": round(drafted / rounds, 2),
        "hit_rate": round(hits / max(1, hits + misses), 3) if mode != PLAIN else None,
        "forward_share": round(sum(sample.forward_s for sample in samples) / wall, 4),
        "wait_share": round(sum(sample.wait_s for sample in samples) / wall, 4),
        "host_share": round(sum(sample.host_s for sample in samples) / wall, 4),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesPlan:
    """A run in `settings` (real, emulated). `file` has the prompts, None: held-out files; `chat` applies the
    chat template, None: to questions."""

    settings: Sequence[str]
    temperatures: Sequence[float]
    prompts: int
    table: str
    devices: Devices
    file: Path | None = None
    chat: bool | None = None


def run_settings(settings: Settings, plan: ModesPlan, say: Callable[[str], None]) -> dict[str, object]:
    """Measure in each setting and return the result file."""
    devices = plan.devices
    on_gpu = devices.on_gpu and settings.target != EMBEDDED
    if devices.target.kind == "cuda":
        pin(devices.target)  # kernels are tried while a model is loaded, on the current GPU
    result = ModesResult()
    notes: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as name:
        folder = Path(name)
        for setting in plan.settings:
            own = settings.model_copy(update={"mode": Mode.SSD, "prefix_cache": False})
            if setting == "emulated":
                width = min(_EMULATED_WIDTH, own.draft_width)
                wrapper = emulating(plan.table, folder)
                own = own.model_copy(update={"model_wrapper": wrapper, "draft_width": width})
            elif settings.target == EMBEDDED:
                say("writing the embedded pair with ballast (the same function at a larger cost)")
                own = own.model_copy(update=ballast_pair(folder))
            say(f"{setting}: choosing prompts")
            chosen = choose_prompts(
                own.model_copy(update={"model_wrapper": None}),
                plan.temperatures,
                plan.prompts,
                say,
                tuning=_TUNING_PROMPTS,
                file=plan.file,
                chat=plan.chat,
                device=devices.target.torch_name if on_gpu else "cpu",
            )
            stage = RigStage(Rig(own, devices.target.torch_name), setting, devices)
            with stage.drafting():
                found = run_modes(stage, chosen, say)
                left_out = {f"{temperature:g}": some.left_out for temperature, some in chosen.items()}
                notes[setting] = {"left_out": left_out, **stage.overruns()}
            result.results.extend(found.results)
            result.answers.extend(found.answers)
    names = [Path(each).name for each in (settings.target, *settings.draft_models)]
    return {
        "benchmark": "modes",
        "pair": " with ".join(names),
        "prompts": "places in held-out files" if plan.file is None else plan.file.name,
        "table": plan.table if "emulated" in plan.settings else None,
        "results": result.results,
        "notes": notes,
        "answers": result.answers,
    }
