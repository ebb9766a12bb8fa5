"""`python -m lab.rereading`: which rule for guesses below a right one gives most.

Engine, trees and head are real; time is virtual (see `lab.virtual`): each forward of the head takes what the
device table says of a draft model's. It drafts beside the target, or while that waits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lab.rereading.rules import KEPT, RULES, AllAgain
from lab.virtual.pair import embedded_pair
from lab.virtual.rig import DRAFT_SLOTS, TREE_NODES, Decoded, InTurnChannel, TimedModel, TimedPair, decode
from ssd_serve.bench.prompts import LOOP, Prompt, repeated_share
from ssd_serve.bench.rotation import rotate
from ssd_serve.bench.statistics import ratio_interval
from ssd_serve.bench.tables import text_table
from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.eagle import EagleSource
from ssd_serve.kernels.native.library import native_library
from ssd_serve.messages import SamplingParameters
from ssd_serve.models.heads.eagle import EagleHead
from ssd_serve.models.heads.load import head_config, head_sizes, load_head
from ssd_serve.models.hub import embedded_folder
from ssd_serve.models.load import ModelWish
from ssd_serve.plan.virtual_time import Clock, VirtualChannel
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.sampling.ranking import trusted_ranking
from ssd_serve.settings import Settings
from ssd_serve.verifier.features import FeatureStore
from ssd_serve.verifier.planning.growth import WhenItPays

BESIDE, INLINE = "beside", "inline"
_WIDTH, _FAN_OUT, _DEPTH = 16, 16, 16
_FEATURE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class RereadingPlan:
    """What to run; `prompts` of `tokens` new tokens at each temperature."""

    layout: str
    temperatures: tuple[float, ...]
    prompts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class HeadedPair:
    """A target that gives the outputs of `layers`, and a head that reads them. The pair's draft is not
    used but for its times."""

    pair: TimedPair
    head: EagleHead
    layers: tuple[int, ...]


class RereadingRun:
    """A fresh engine, and a drafter that keeps to a rule."""

    def __init__(self, headed: HeadedPair, rule: type[AllAgain], layout: str) -> None:
        self._clock, self._number = Clock(), 0
        pair, facts = headed.pair, headed.pair.target.facts
        features = FeatureStore(headed.layers, _FEATURE_BYTES, pair.target.slots)
        policy = WhenItPays(concurrent=layout == BESIDE)
        self._engine, _ = pair.engine(self._clock, policy, _WIDTH, features=features)
        timed = TimedModel(headed.head, pair.table.draft)
        native = native_library(Settings())
        noise = NoiseRows(facts.vocabulary, capacity_for(facts.vocabulary), native=native)
        ranking = trusted_ranking(native)
        source = EagleSource(headed.head, SlotPool(DRAFT_SLOTS), noise, _FAN_OUT, ranking, model=timed)
        limits = GrowthLimits(_WIDTH, _FAN_OUT, _DEPTH, TREE_NODES, context=facts.context)
        core = rule(source, limits, frozenset(facts.eos_token_ids))
        hello = replace(pair.hello(), features=headed.layers)
        kind = VirtualChannel if layout == BESIDE else InTurnChannel
        self._engine.drafters.connect(kind(self._clock, core, timed, hello), synchronous=layout == INLINE)
        self._engine.drafters.drain({})

    def text(self, prompt: Prompt, temperature: float, tokens: int) -> Decoded:
        """The continuation of a prompt."""
        self._number += 1
        parameters = SamplingParameters(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        return decode(self._engine, self._clock, self._number, prompt, parameters)


def embedded_head(table: str, folder: Path | None) -> tuple[HeadedPair, list[Prompt]]:
    """The embedded target with a head of it, and prompts; None: the embedded head."""
    target, folder = embedded_folder("target"), folder or embedded_folder("head")
    layers = head_config(folder, target).features or ()
    pair, prompts = embedded_pair(table, layers)
    return HeadedPair(pair, loaded_head(folder, target), layers), prompts


def loaded_head(folder: Path, target: Path) -> EagleHead:
    """With the slots that the pair's draft has."""
    native = native_library(Settings())
    wish = ModelWish(device="cpu", dtype="auto", slots=DRAFT_SLOTS, context=None, native=native)
    return load_head(folder, wish, head_sizes(folder, target, device="cpu", dtype="auto", native=native))


def run_rereading(
    headed: HeadedPair, prompts: Sequence[Prompt], plan: RereadingPlan, say: Callable[[str], None]
) -> dict[str, object]:
    """`{"benchmark", "plan", "results", ...}`: a row for each temperature."""
    rows: list[dict[str, object]] = []
    for temperature in plan.temperatures:
        runs = {rule: RereadingRun(headed, kind, plan.layout) for rule, kind in RULES.items()}

        def text(
            rule: str,
            prompt: Prompt,
            runs: Mapping[str, RereadingRun] = runs,
            temperature: float = temperature,
        ) -> Decoded:
            return runs[rule].text(prompt, temperature, plan.tokens)

        found = rotate(runs, prompts[: plan.prompts], text)
        rows.append({"layout": plan.layout, "temperature": temperature, **figures_of(found)})
        say(table({"results": rows[-1:]}))
    return {
        "benchmark": "rereading",
        "time": "virtual: forwards take what a device table says and host work nothing; "
        "not a measurement of any device",
        "plan": asdict(plan),
        "table": headed.pair.table.told(),
        "results": rows,
    }


def figures_of(found: Mapping[str, Sequence[Decoded]]) -> dict[str, object]:
    """By rule, on the texts that do not loop. They are the same of all rules."""
    places = [place for place, each in enumerate(found[KEPT]) if repeated_share(each.tokens) <= LOOP]
    texts = {rule: [some[place] for place in places] for rule, some in found.items()}
    speeds = {rule: [each.decoded / each.seconds for each in some] for rule, some in texts.items()}
    ratios = {
        rule: ratio_interval([one / two for one, two in zip(mine, speeds[KEPT], strict=True)])
        for rule, mine in speeds.items()
        if rule != KEPT
    }
    return {
        "texts": len(places),
        "loops_left_out": len(found[KEPT]) - len(places),
        "tokens_per_s": {rule: _per(some, [each.seconds for each in some]) for rule, some in texts.items()},
        "tokens_per_round": {
            rule: _per(some, [each.figures.rounds for each in some]) for rule, some in texts.items()
        },
        "against_kept": {
            rule: None if each is None else {**asdict(each), "verdict": str(each.verdict)}
            for rule, each in ratios.items()
        },
    }


def _per(texts: Sequence[Decoded], what: Sequence[float]) -> float | None:
    return round(sum(each.decoded for each in texts) / sum(what), 3) if texts else None


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    rows: list[tuple[object, ...]] = []
    for row in result["results"]:
        begin = row["layout"], f"{row['temperature']:g}", row["texts"]
        for rule, speed in row["tokens_per_s"].items():
            ratio = row["against_kept"].get(rule)
            told = f"{ratio['mean']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio else ""
            rows.append((*begin, rule, speed, row["tokens_per_round"][rule], told))
    return text_table(("draft", "T", "texts", "guesses", "tokens/s", "tokens/round", "against kept"), rows)
