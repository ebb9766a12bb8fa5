"""The embedded draft with fewer and fewer of the target's tokens: what its guesses are still worth.

Its tokenizer loses the rarest merges, and the tokens that they made: these it cannot propose, and reads as
the last token of their text. Knows tokenizers as JSON, and how texts are generated.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssd_serve import LLM, SamplingParams
from ssd_serve.bench.emulated import emulating
from ssd_serve.bench.prompts import NEW_TOKENS, Prompt, held_out_prompts
from ssd_serve.models.hub import embedded_folder
from ssd_serve.models.text.common_tokens import common_tokens
from ssd_serve.models.text.tokenizer import Tokenizer

_TABLE = "mi300x-70b-1b"
"""Devices that are emulated: small models on cores are not worth drafting for."""


def run_vocabulary(shares: Sequence[float], temperatures: Sequence[float], count: int) -> dict[str, object]:
    """Tokens a round by share of common tokens and temperature."""
    target = embedded_folder("target")
    prompts = held_out_prompts(target, Tokenizer(target))[:count]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as name:
        for share in shares:
            draft = Path(name) / f"{share:g}"
            common = with_fewer_tokens(embedded_folder("draft"), draft, share)
            with LLM(target, draft=draft, mode="sd", model_wrapper=emulating(_TABLE)) as llm:
                rows += [_row(llm, prompts, common, temperature) for temperature in temperatures]
    return {"benchmark": "vocabulary", "tokens": NEW_TOKENS, "table": _TABLE, "results": rows}


def _row(llm: LLM, prompts: Sequence[Prompt], common: float, temperature: float) -> dict[str, object]:
    return {
        "common": round(common, 4),
        "temperature": temperature,
        "prompts": len(prompts),
        "tokens_per_round": round(tokens_per_round(llm, prompts, temperature), 3),
    }


def with_fewer_tokens(draft: Path, folder: Path, share: float) -> float:
    """Write a draft whose tokenizer has about this share of the tokens; returns what it is."""
    folder.mkdir()
    for file in draft.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    read: dict[str, Any] = json.loads((draft / "tokenizer.json").read_text(encoding="utf-8"))
    model = read["model"]
    dropped = round((1 - share) * len(model["vocab"]))
    kept = len(model["merges"]) - dropped
    lost = {left + right for left, right in model["merges"][kept:]}
    model["merges"] = model["merges"][:kept]
    # Names that no text has: the matrix keeps its rows.
    model["vocab"] = {(f"\ue000{id_}" if name in lost else name): id_ for name, id_ in model["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(read), encoding="utf-8")
    own, mine = Tokenizer(draft), Tokenizer(folder)
    return common_tokens(own, mine, own.vocabulary, own.vocabulary).share


def tokens_per_round(llm: LLM, prompts: Sequence[Prompt], temperature: float) -> float:
    """Over all prompts, one after the other."""
    asked = SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0)
    figures = [llm.generate(list(prompt.tokens), asked)[0].figures for prompt in prompts]
    return sum(each.tokens for each in figures) / sum(each.rounds for each in figures)
