"""The same structured texts, text by text in turn, with drafts that keep to their grammars and with others.

Knows how texts are generated, and nothing of grammars but the schemas.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from lab.grammars.schemas import make_schema
from ssd_serve import LLM, SamplingParams
from ssd_serve.bench.emulated import emulating
from ssd_serve.bench.statistics import ratio_interval
from ssd_serve.errors import UserError
from ssd_serve.llm.outputs import Output
from ssd_serve.llm.sampling_params import StructuredOutputsParams

_TABLE = "mi300x-70b-1b"
"""Devices that are emulated: small models on cores are not worth drafting for."""
_PROMPT = "The settings as JSON:\n"
_MOST = 300
"""Tokens of a text."""


def run_grammar_drafts(
    modes: Sequence[str], temperatures: Sequence[float], schemas: int
) -> dict[str, object]:
    """Rows by mode and temperature."""
    rows = [row for mode in modes for row in _rows(mode, temperatures, schemas)]
    return {"benchmark": "grammar_drafts", "table": _TABLE, "schemas": schemas, "results": rows}


def _rows(mode: str, temperatures: Sequence[float], schemas: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        ways = {
            way: stack.enter_context(
                LLM(
                    mode=mode,
                    model_wrapper=emulating(_TABLE),
                    speculation_may_stop=False,
                    draft_grammars=keeps,
                )
            )
            for way, keeps in (("any", False), ("kept", True))
        }
        for temperature in temperatures:
            texts: dict[str, list[Output]] = {way: [] for way in ways}
            for seed in range(-2, schemas):  # two that are not counted
                for way, llm in ways.items():
                    text = _text(llm, abs(seed), temperature)
                    texts[way] += [text] if seed >= 0 else []
            rows.append({"mode": mode, "temperature": temperature, **_compared(texts)})
    return rows


def _text(llm: LLM, seed: int, temperature: float) -> Output:
    wanted = StructuredOutputsParams.model_validate({"json": make_schema(seed)})
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=_MOST, structured_outputs=wanted)
    return llm.generate(_PROMPT, params, progress=False)[0]


def _compared(texts: Mapping[str, Sequence[Output]]) -> dict[str, object]:
    """What each way gave, and how much faster the drafts that keep to grammars made the texts."""
    if [each.token_ids for each in texts["any"]] != [each.token_ids for each in texts["kept"]]:
        raise UserError("the texts differ: drafts changed what they may only make faster")
    pairs = zip(texts["any"], texts["kept"], strict=True)
    ratio = ratio_interval([one.seconds / other.seconds for one, other in pairs])
    return {
        "tokens": sum(len(each.token_ids) for each in texts["any"]),
        "tokens_per_round": {way: _tokens_per_round(each) for way, each in texts.items()},
        "times_as_fast": None if ratio is None else asdict(ratio),
    }


def _tokens_per_round(texts: Sequence[Output]) -> float:
    figures = [each.figures for each in texts]
    return round(sum(each.tokens for each in figures) / max(1, sum(each.rounds for each in figures)), 3)
