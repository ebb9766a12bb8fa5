"""`ssd bench lossless`: the same requests in every mode, batch, budget and with every kind of drafter.

Every output must equal plain decoding token for token. A first difference is judged in float64: it is a
near-tie only if the scores of the two tokens are closer than the rounding of the dtype, fp32 or bf16.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

import torch

from ssd_serve.base.devices import pin
from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.base.seeds import choice_seed, mix
from ssd_serve.base.settings import Settings
from ssd_serve.bench.lossless.judge import NEAR_TIE, Dtype, Judge, compared
from ssd_serve.bench.lossless.random_pair import write_random_pair
from ssd_serve.bench.lossless.rig import Case, LoadedPair, LoadedTarget, load_named, run_case
from ssd_serve.bench.options import Devices
from ssd_serve.kernels.native.library import native_library
from ssd_serve.models.hub import resolve_model

MAX_NEAR_TIES = 1e-5
"""Distinct near-ties a distinct position that still count as lossless; a single one always does."""
BATCHES = (1, 4, 16)
BUDGETS = (0, 1, 4, 8, 32)
DRAFTERS = ("sane", "garbage", "killed")
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
_BASELINE = Case("ar", 1)
_CPUS = Devices()


@dataclass(frozen=True, slots=True)
class ProofPlan:
    """The size of a run.

    `sets` of requests are taken by the cases in turn. `drafts`, each as `SSD_DRAFT` names it, draft for
    `pairs`, which are then targets; without any, the draft models of the pairs draft.
    """

    pairs: tuple[str, ...] = (EMBEDDED, "random-llama", "random-mistral-window")
    batches: tuple[int, ...] = BATCHES
    budgets: tuple[int, ...] = BUDGETS
    sets: int = 5
    max_tokens: int = 48
    drafts: tuple[str, ...] = ()


QUICK = ProofPlan((EMBEDDED, "random-llama"), batches=(4,), budgets=(0, 8), sets=1, max_tokens=24)


def cases(plan: ProofPlan, draft: str = "") -> Iterator[Case]:
    """Yield the Cartesian product of the plan; lookup sources have no drafter that could be killed."""
    drafters = DRAFTERS if not draft or Settings(draft=draft).draft_models else DRAFTERS[:2]
    for batch in plan.batches:
        yield Case("ar", batch)
        for budget in plan.budgets:
            yield Case("sd", batch, budget)
            for drafter in drafters:
                yield Case("ssd", batch, budget, drafter)


def requests(vocabulary: int, max_tokens: int, number: int = 0) -> list[Submit]:
    """Return 16 requests: four temperatures, four kinds of parameters, two choices of each prompt."""
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


@dataclass(slots=True)
class Proof:
    """Results of cases, their totals, and the distinct positions and near-ties behind them.

    A position is one token of a plain text; many cases compare the same one.
    """

    rows: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    totals: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("cases", "tokens", "accepted", "divergences", "near_ties", "idle_cases"), 0
        )
    )
    positions: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """Tokens of the plain texts of each pair and set that a speculating case was compared with."""
    near_ties: set[tuple[str, int, int, int]] = field(default_factory=set[tuple[str, int, int, int]])

    @property
    def distinct(self) -> int:
        """Number of distinct positions."""
        return sum(self.positions.values())

    @property
    def holds(self) -> bool:
        """True if something was compared, near-ties explain every difference, and no case was idle."""
        return (
            self.distinct > 0
            and self.totals["divergences"] == self.totals["near_ties"]
            and self.totals["idle_cases"] == 0
        )

    @property
    def few_near_ties(self) -> bool:
        """True if near-ties are rare enough to call fp32 lossless."""
        return len(self.near_ties) <= max(1.0, MAX_NEAR_TIES * self.distinct)

    def run(self, pair: LoadedTarget, plan: ProofPlan, draft: str, dtype: Dtype = "fp32") -> None:
        """Run all cases of a pair and add their results."""
        sets = [requests(pair.vocabulary, plan.max_tokens, number) for number in range(plan.sets)]
        plains = [run_case(pair, _BASELINE, submits) for submits in sets]
        judge = Judge(pair, dtype)
        for index, case in enumerate(cases(plan, draft)):
            number = index % plan.sets
            submits, plain = sets[number], plains[number]
            started = time.monotonic()
            found = run_case(pair, case, submits)
            differences = judge.differences(submits, plain, found)
            near_ties = [each for each in differences if each.near_tie]
            tokens = compared(submits, plain, differences)
            self.rows.append(
                {
                    "pair": pair.name,
                    "draft": draft,
                    **asdict(case),
                    "requests": number,
                    "tokens": tokens,
                    "drafted": found.drafted,
                    "accepted": found.accepted,
                    "divergences": len(differences),
                    "near_ties": len(near_ties),
                    "gaps": [each.gap for each in differences],
                    "seconds": round(time.monotonic() - started, 2),
                }
            )
            self.near_ties |= {(pair.name, number, each.request, each.index) for each in near_ties}
            speculates = bool(case.budget) and case.mode != "ar"
            if speculates:
                self.positions[pair.name, number] = sum(map(len, plain.tokens.values()))
            self.totals["cases"] += 1
            self.totals["tokens"] += tokens
            self.totals["accepted"] += found.accepted
            self.totals["divergences"] += len(differences)
            self.totals["near_ties"] += len(near_ties)
            # A case that should speculate and never had a node accepted proves nothing.
            self.totals["idle_cases"] += speculates and case.drafter != "garbage" and not found.accepted

    def summary(self) -> dict[str, object]:
        """Return the totals for the result file, with the bound that the distinct positions allow."""
        return {
            **self.totals,
            "distinct_near_ties": len(self.near_ties),
            "positions": self.distinct,
            "near_ties_per_token_at_most": upper_bound(len(self.near_ties), self.distinct),
        }


def upper_bound(events: int, trials: int) -> float | None:
    """Return the 95 % upper bound of a rate after `events` in `trials` (Poisson); None without trials."""
    low, high = 0.0, 3.0 + 4.0 * (events + 1)
    for _ in range(50):
        middle = (low + high) / 2
        below = sum(middle**k / math.factorial(k) for k in range(events + 1)) * math.exp(-middle)
        low, high = (middle, high) if below > 0.05 else (low, middle)
    return min(1.0, round(high / trials, 9)) if trials else None


def run_lossless(plan: ProofPlan, say: Callable[[str], None], devices: Devices = _CPUS) -> dict[str, object]:
    """Run the fp32 proof of all pairs and the bf16 proof of the first, and return the result file."""
    if devices.target.kind == "cuda":
        pin(devices.target)
    torch.set_num_threads(1)  # more threads would change sums, and the products are tiny
    proof, bf16 = Proof(), Proof()
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as folder:
        for name, draft in product(plan.pairs, plan.drafts or ("",)):
            started = time.monotonic()
            proof.run(_load(name, draft, Path(folder) / name, devices), plan, draft)
            seconds = time.monotonic() - started
            say(f"{name} {draft}: {seconds:.0f} s; so far {proof.summary()}")
        draft = next(iter(plan.drafts), "")
        pair = _load(plan.pairs[0], draft, Path(folder) / "bf16", devices, "bf16")
        bf16.run(pair, plan, draft, "bf16")
    rate = round(1e3 * bf16.totals["divergences"] / max(1, bf16.totals["tokens"]), 3)
    say(f"bf16: {bf16.summary()}")
    return {
        "lossless": proof.holds and proof.few_near_ties and bf16.holds,
        "totals": proof.summary(),
        "near_tie_gap": NEAR_TIE,
        "bf16": {
            "pair": pair.name,
            "kernels": "torch" if pair.target.facts.kernels == "torch" else "compiled",
            "attention": pair.target.facts.attention,
            "batch_invariant": pair.target.facts.batch_invariant,
            **bf16.summary(),
            "divergences_per_1000_tokens": rate,
            "results": bf16.rows,
        },
        "results": proof.rows,
        "devices": devices.names(),
    }


def _load(name: str, draft: str, folder: Path, devices: Devices, dtype: Dtype = "fp32") -> LoadedTarget:
    """Load a pair of this name, or this target with a draft as `SSD_DRAFT` names it."""
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
