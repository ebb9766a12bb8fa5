"""`ssd bench lossless`: the same requests in every mode, batch, budget and with every kind of drafter.

In fp32 every output must equal plain decoding token for token; a first difference is judged in float64 and
counts as a near-tie only where the two tokens' scores are closer than 1e-5. In bf16 the rate of divergence is
measured. Knows what is compared; the rig knows how it is put together.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from ssd_serve.base.devices import pin
from ssd_serve.base.engine_settings import EMBEDDED
from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.base.seeds import choice_seed, mix
from ssd_serve.base.settings import Settings
from ssd_serve.bench.devices import Devices
from ssd_serve.bench.lossless.float64 import Float64Decoder
from ssd_serve.bench.lossless.named import load_named
from ssd_serve.bench.lossless.random_pair import write_random_pair
from ssd_serve.bench.lossless.rig import Case, LoadedPair, LoadedTarget, Outputs, run_case
from ssd_serve.kernels.native.library import native_library
from ssd_serve.models.hub import resolve_model
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.parameters import is_greedy, needs_counts
from ssd_serve.sampling.processors import TokenCounts, process

NEAR_TIE = 1e-5
"""Score gap, in float64, below which a first difference is floating-point noise."""
MAX_NEAR_TIES = 1e-5
"""Near-ties a compared token that are still called lossless. Cases that meet the same one count it once."""
BATCHES = (1, 4, 16)
BUDGETS = (0, 1, 4, 8, 32)
DRAFTERS = ("sane", "garbage", "killed")
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
_BASELINE = Case("ar", 1)
_CPUS = Devices()


@dataclass(frozen=True, slots=True)
class ProofPlan:
    """How much to run."""

    pairs: tuple[str, ...] = (EMBEDDED, "random-llama", "random-mistral-window")
    batches: tuple[int, ...] = BATCHES
    budgets: tuple[int, ...] = BUDGETS
    sets: int = 5
    """Different sets of requests, which the cases take in turn."""
    max_tokens: int = 48
    drafts: tuple[str, ...] = ()
    """What drafts for `pairs`, which are then targets, each as `SSD_DRAFT` names it; nothing: their own."""


QUICK = ProofPlan((EMBEDDED, "random-llama"), batches=(4,), budgets=(0, 8), sets=1, max_tokens=24)


@dataclass(frozen=True, slots=True)
class _Difference:
    """Where a request first differed from plain decoding, and how close the two tokens' scores are."""

    request: int
    index: int
    gap: float

    @property
    def near_tie(self) -> bool:
        """Whether floating-point noise explains it."""
        return self.gap < NEAR_TIE


def cases(plan: ProofPlan, draft: str = "") -> Iterator[Case]:
    """The full product; with a draft that is looked up in this process there is no drafter to be killed."""
    drafters = DRAFTERS if not draft or Settings(draft=draft).draft_models else DRAFTERS[:2]
    for batch in plan.batches:
        yield Case("ar", batch)
        for budget in plan.budgets:
            yield Case("sd", batch, budget)
            for drafter in drafters:
                yield Case("ssd", batch, budget, drafter)


def requests(vocabulary: int, max_tokens: int, number: int = 0) -> list[Submit]:
    """A set of 16: four temperatures, four kinds of parameters, two choices of each prompt."""
    stops = tuple(range(5, vocabulary, 41))
    kinds: tuple[dict[str, object], ...] = (
        {"ignore_eos": True},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"stop_token_ids": stops, "min_tokens": 6},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "logit_bias": {3: 2.0, 4: -100.0}, "ignore_eos": True},
    )
    submits: list[Submit] = []
    for index in range(16):
        fields: dict[str, object] = {
            "temperature": TEMPERATURES[(index // 2) % 4],
            "max_tokens": max_tokens - index % 3,
            **kinds[(index + index // 8) % 4],
        }
        text = index // 2 + 8 * number
        prompt = tuple(1 + mix(text, place) % (vocabulary - 1) for place in range(6 + 9 * (text % 5)))
        seed = choice_seed(100 + text, index % 2)
        submits.append(Submit(index, prompt, SamplingParameters(**fields), seed))  # type: ignore[arg-type]
    return submits


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; None for equal texts."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


class Judge:
    """Tells near-ties from errors."""

    def __init__(self, pair: LoadedTarget) -> None:
        self._pair = pair
        self._noise = NoiseRows(pair.vocabulary, 8)
        self._decoder: Float64Decoder | None = None

    def differences(self, submits: Sequence[Submit], plain: Outputs, found: Outputs) -> list[_Difference]:
        """The first difference of each request that differs."""
        judged: list[_Difference] = []
        for submit in submits:
            one, other = plain.tokens[submit.request], found.tokens[submit.request]
            index = first_difference(one, other)
            if index is not None:
                gap = float("inf")
                if index < min(len(one), len(other)):
                    gap = self._gap(submit, one[:index], one[index], other[index])
                judged.append(_Difference(submit.request, index, gap))
        return judged

    def _gap(self, submit: Submit, output: Sequence[int], one: int, other: int) -> float:
        """Distance of two tokens' scores after `output`, in float64."""
        self._decoder = self._decoder or Float64Decoder(self._pair.folder)
        parameters = submit.parameters
        logits = self._decoder.last_logits([*submit.prompt, *output])
        counts = TokenCounts(submit.prompt, output) if needs_counts(parameters) else None
        eos = () if parameters.ignore_eos else self._pair.eos
        scores = process(logits, parameters, counts, (), len(output), eos)
        if not is_greedy(parameters):
            scores = scores - self._noise.rows([submit.seed], [len(submit.prompt) + len(output)])[0]
        return abs(float(scores[one]) - float(scores[other]))


def compared(submits: Sequence[Submit], plain: Outputs, differences: Sequence[_Difference]) -> int:
    """Tokens that were compared: those of differing requests count up to the difference."""
    ends = {each.request: each.index + 1 for each in differences}
    return sum(ends.get(submit.request, len(plain.tokens[submit.request])) for submit in submits)


def run_lossless(plan: ProofPlan, say: Callable[[str], None], devices: Devices = _CPUS) -> dict[str, object]:
    """`{"results", "totals", "bf16", "devices"}`."""
    if devices.target.kind == "cuda":
        pin(devices.target)
    torch.set_num_threads(1)  # more would change sums, and tiny products are not worth them
    rows: list[dict[str, object]] = []
    totals = _no_totals()
    distinct: set[tuple[object, ...]] = set()
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as folder:
        for name, draft in product(plan.pairs, plan.drafts or ("",)):
            started = time.monotonic()
            pair = _load(name, draft, Path(folder) / name, devices)
            found = list(_run_pair(pair, plan, draft))
            for row, near_ties in found:
                rows.append(row)
                distinct |= near_ties
                add(totals, row)
            say(f"{name} {draft}: {len(found)} cases in {time.monotonic() - started:.0f} s; so far {totals}")
    lossless = (
        totals["divergences"] == totals["near_ties"]
        and len(distinct) <= MAX_NEAR_TIES * max(totals["tokens"], 1 / MAX_NEAR_TIES)
        and totals["idle_cases"] == 0
    )
    bf16 = _bf16(plan, devices)
    say(f"bf16: {bf16}")
    return {
        "lossless": lossless,
        "totals": {**totals, "distinct_near_ties": len(distinct)},
        "near_tie_gap": NEAR_TIE,
        "bf16": bf16,
        "results": rows,
        "devices": devices.names(),
    }


def _load(
    name: str, draft: str, folder: Path, devices: Devices, dtype: Literal["fp32", "bf16"] = "fp32"
) -> LoadedTarget:
    """A pair of this name, or this target with a draft that is named."""
    settings = Settings()
    if draft:
        settings = Settings(target=name, draft=draft, dtype=dtype)
        return load_named(settings, devices, native_library(settings.engine_config()))
    native = native_library(settings.engine_config())
    if name == EMBEDDED:
        folders = resolve_model(name, "target"), resolve_model(name, "draft")
    else:
        folders = write_random_pair(name, folder)
    return LoadedPair(name, *folders, dtype, native, devices, settings.batch_invariant)


def _run_pair(
    pair: LoadedTarget, plan: ProofPlan, draft: str
) -> Iterator[tuple[dict[str, object], set[tuple[object, ...]]]]:
    """The result of each case, and which near-ties it met."""
    sets = [requests(pair.vocabulary, plan.max_tokens, number) for number in range(plan.sets)]
    plains = [run_case(pair, _BASELINE, submits) for submits in sets]
    judge = Judge(pair)
    for index, case in enumerate(cases(plan, draft)):
        number = index % plan.sets
        submits, plain = sets[number], plains[number]
        started = time.monotonic()
        found = run_case(pair, case, submits)
        differences = judge.differences(submits, plain, found)
        near_ties = [each for each in differences if each.near_tie]
        row: dict[str, object] = {
            "pair": pair.name,
            "draft": draft,
            **asdict(case),
            "requests": number,
            "tokens": compared(submits, plain, differences),
            "drafted": found.drafted,
            "accepted": found.accepted,
            "divergences": len(differences),
            "near_ties": len(near_ties),
            "gaps": [each.gap for each in differences],
            "seconds": round(time.monotonic() - started, 2),
        }
        yield row, {(pair.name, number, each.request, each.index) for each in near_ties}


def _no_totals() -> dict[str, int]:
    return dict.fromkeys(("cases", "tokens", "accepted", "divergences", "near_ties", "idle_cases"), 0)


def add(totals: dict[str, int], row: dict[str, object]) -> None:
    """Count one case's result."""
    for key in ("tokens", "accepted", "divergences", "near_ties"):
        value = row[key]
        totals[key] += value if isinstance(value, int) else 0
    totals["cases"] += 1
    # A case that should speculate and never had a node accepted proves nothing.
    speculates = row["budget"] and row["mode"] != "ar" and row["drafter"] != "garbage"
    totals["idle_cases"] += bool(speculates and not row["accepted"])


def _bf16(plan: ProofPlan, devices: Devices) -> dict[str, object]:
    """How often plain and speculative texts differ in bf16, over all cases of the first pair.

    Kernels whose results for a row do not depend on its batch never let them; others may.
    """
    draft = next(iter(plan.drafts), "")
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as folder:
        pair = _load(plan.pairs[0], draft, Path(folder), devices, "bf16")
    totals = _no_totals()
    for row, _ in _run_pair(pair, plan, draft):
        add(totals, row)
    rate = round(1e3 * totals["divergences"] / max(1, totals["tokens"]), 3)
    return {
        "pair": pair.name,
        "kernels": "torch" if pair.target.facts.kernels == "torch" else "compiled",
        "attention": pair.target.facts.attention,
        "batch_invariant": pair.target.facts.batch_invariant,
        **totals,
        "divergences_per_1000_tokens": rate,
    }
