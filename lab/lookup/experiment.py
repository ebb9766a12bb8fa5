"""Decodes the same texts plainly, with lookup, with a draft model and with both, one text after the other.

The embedded pair with ballast, in this process: nothing but what drafts is different. Knows texts and ways;
what lookup does is the drafter's.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.lookup.texts import KINDS, prompts_of
from ssd_serve import LLM, SamplingParams
from ssd_serve.bench.prompts import LOOP, repeated_share
from ssd_serve.bench.rotation import rotate
from ssd_serve.bench.statistics import ratio_interval
from ssd_serve.bench.tables import text_table
from ssd_serve.bench.workload import ballast_pair
from ssd_serve.models.hub import embedded_folder
from ssd_serve.recipes.corpus import standard_library
from ssd_serve.recipes.evaluation import held_out_files

PLAIN, LOOKUP, MODEL, BOTH = "plain", "lookup", "model", "model and lookup"
PAIRS = ((LOOKUP, PLAIN), (MODEL, PLAIN), (BOTH, PLAIN), (BOTH, MODEL))
"""Which ways are compared."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    tokens: tuple[int, ...]
    seconds: float
    rounds: int


def run_lookup(
    count: int, tokens: int, temperatures: Sequence[float], say: Callable[[str], None]
) -> dict[str, object]:
    """Tokens a second of each way, and ratios of pairs of them, by kind of text and temperature."""
    texts = [file.text for file in held_out_files(embedded_folder("target"), standard_library()).files]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways = _ways(ballast_pair(Path(folder)), stack)
        for kind in KINDS:
            prompts = [*prompts_of(kind, texts, count)]
            for temperature in temperatures:
                say(f"{kind}, temperature {temperature:g}: {len(prompts)} texts")
                rows.append(_row(kind, temperature, ways, prompts, tokens))
    return {"benchmark": "lookup", "tokens": tokens, "results": rows}


def _ways(pair: Mapping[str, str], stack: ExitStack) -> dict[str, LLM]:
    """All in this process, on its cores, and none of them may stop drafting: that is what is measured."""
    drafts = {PLAIN: "none", LOOKUP: "ngram", MODEL: pair["draft"], BOTH: f"{pair['draft']},ngram"}
    return {
        way: stack.enter_context(
            LLM(
                pair["target"],
                draft=draft,
                mode="ar" if way == PLAIN else "sd",
                kv_memory_mb=256,
                prefix_cache=False,
            )
        )
        for way, draft in drafts.items()
    }


def _row(
    kind: str, temperature: float, ways: Mapping[str, LLM], prompts: Sequence[str], tokens: int
) -> dict[str, object]:
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=1)

    def run(way: str, prompt: str) -> _Decoded:
        (output,) = ways[way].generate(prompt, params)
        return _Decoded(output.token_ids, output.seconds - output.first_token_s, output.figures.rounds)

    for way in ways:  # rates and trust settle in a run that is not counted
        run(way, prompts[0])
    found = rotate(ways, prompts, run)
    kept = [
        place for place, each in enumerate(found[PLAIN]) if repeated_share(each.tokens) <= LOOP
    ]  # a loop is looked up by anything
    if not kept:
        return {
            "kind": kind,
            "temperature": temperature,
            "texts": 0,
            "loops_left_out": len(prompts),
            "ratios": {},
        }
    speeds = {way: [(tokens - 1) / each[place].seconds for place in kept] for way, each in found.items()}
    return {
        "kind": kind,
        "temperature": temperature,
        "texts": len(kept),
        "loops_left_out": len(prompts) - len(kept),
        "tokens_per_s": {way: round(sum(each) / len(each), 2) for way, each in speeds.items()},
        "tokens_per_round": {
            way: round(sum(tokens - 1 for _ in kept) / sum(each[place].rounds for place in kept), 3)
            for way, each in found.items()
        },
        "ratios": {f"{one} / {other}": _ratio(speeds[one], speeds[other]) for one, other in PAIRS},
    }


def _ratio(one: Sequence[float], other: Sequence[float]) -> dict[str, Any] | None:
    interval = ratio_interval([a / b for a, b in zip(one, other, strict=True)])
    return None if interval is None else {**asdict(interval), "verdict": str(interval.verdict)}


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    rows: list[tuple[object, ...]] = []
    for row in result["results"]:
        rows += [
            (
                row["kind"],
                f"{row['temperature']:g}",
                row["texts"],
                pair,
                f"{each['mean']:.2f} ({each['low']:.2f} to {each['high']:.2f})",
                each["verdict"],
            )
            for pair, each in row["ratios"].items()
            if each is not None
        ]
    return text_table(("text", "T", "texts", "ways", "ratio", ""), rows)
