"""What a pair is worth: losses and agreement on held-out text, functions that parse, texts that loop, and
what a newcomer's first request gives.

Knows recipes and benchmarks' texts; what they mean for speed is measured elsewhere.
"""

from collections.abc import Sequence
from pathlib import Path

from ssd_serve import LLM, SamplingParams
from ssd_serve.bench.prompts import LOOP, NEW_TOKENS, Prompt, held_out_prompts, repeated_share
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.corpus import standard_library
from ssd_serve.recipes.evaluation import evaluate_pair
from ssd_serve.recipes.export import best_sampling
from ssd_serve.recipes.functions import TEMPERATURES, cut_function

FIRST_REQUEST = "def read_lines(path):"
"""Of the README, for `FIRST_TOKENS` tokens, sampled as most functions parse."""
FIRST_TOKENS = 64
FIRST_SEEDS = range(10)
_TEMPERATURES = (0.0, 0.6, 1.0)


def run_pair(target: Path, draft: Path, samples: int, places: int) -> dict[str, object]:
    """All figures; losses are of a plain training decoder, texts of the engine in plain decoding."""
    figures = evaluate_pair(target, draft, standard_library(), samples, 0, TEMPERATURES)
    prompts = held_out_prompts(target, Tokenizer(target))[:places]
    with LLM(target, mode="ar") as llm:
        loops = {str(temperature): loop_share(llm, prompts, temperature) for temperature in _TEMPERATURES}
        sampling = best_sampling(figures)
        first = first_functions(llm, SamplingParams.model_validate({"max_tokens": FIRST_TOKENS} | sampling))
    return {
        **figures,
        "loops": {"tokens": NEW_TOKENS, "places": len(prompts), "share": loops},
        "first_request": {"prompt": FIRST_REQUEST, "seeds": len(FIRST_SEEDS), "functions": first} | sampling,
    }


def loop_share(llm: LLM, prompts: Sequence[Prompt], temperature: float) -> float:
    """Share of the continuations that are loops."""
    texts = llm.generate(
        [list(prompt.tokens) for prompt in prompts],
        SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0),
    )
    return sum(repeated_share(each.token_ids) > LOOP for each in texts) / len(texts)


def first_functions(llm: LLM, params: SamplingParams) -> int:
    """With how many seeds the first request gives a function; it may be cut off by the number of tokens."""
    found = 0
    for seed in FIRST_SEEDS:
        (output,) = llm.generate(FIRST_REQUEST, params.model_copy(update={"seed": seed}))
        found += is_function(FIRST_REQUEST + output.text)
    return found


def is_function(text: str) -> bool:
    """Whether a text begins with a function: a whole one, or one that was cut off within a line."""
    whole_lines = text[: text.rfind("\n") + 1]
    return cut_function(text + "\npass\n") is not None or cut_function(whole_lines + "pass\n") is not None
