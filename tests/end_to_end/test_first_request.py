"""What a newcomer's first request gives: with most seeds, a function."""

import json
import re
from pathlib import Path

from lab.pair.__main__ import WEIGHTS
from lab.pair.experiment import FIRST_REQUEST, FIRST_SEEDS, FIRST_TOKENS, first_functions
from ssd_serve import LLM
from ssd_serve.recipes.export import best_sampling

ROOT = Path(__file__).parents[2]


def test_the_readmes_first_request_gives_a_function_with_most_seeds() -> None:
    (body,) = re.findall(r"-d '(\{.*\})'", (ROOT / "README.md").read_text(encoding="utf-8"))
    request = json.loads(body)
    assert (request["prompt"], request["max_tokens"]) == (FIRST_REQUEST, FIRST_TOKENS)
    with LLM() as llm:
        params = llm.get_default_sampling_params().model_copy(update={"max_tokens": FIRST_TOKENS})
        assert first_functions(llm, params) >= 0.6 * len(FIRST_SEEDS)


def test_it_is_sampled_as_most_functions_were_found_to_parse() -> None:
    figures = json.loads((ROOT / "bench/results/pair.json").read_text(encoding="utf-8"))
    usual = json.loads((ROOT / WEIGHTS[0]).with_name("generation_config.json").read_text(encoding="utf-8"))
    assert {name: usual[name] for name in ("temperature", "top_p")} == best_sampling(figures)
