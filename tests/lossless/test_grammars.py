"""Structured output: valid for every schema, and the same with and without speculation."""

import json
import re
from collections.abc import Sequence

import jsonschema
import pytest

from ssd_serve import LLM, SamplingParams
from ssd_serve.app.llm.outputs import Output
from ssd_serve.app.llm.sampling_params import StructuredOutputsParams
from tests.lossless.schemas import make_schema

SCHEMAS = 200
PROMPTS = ("def read", "The settings as JSON:\n", "import json\n\ndata = ", "class Node:\n    ")


def asked(count: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts and what is asked of each: greedy, sampled and penalised texts."""
    params: list[SamplingParams] = []
    for seed in range(count):
        temperature, penalty = ((0.0, 1.0), (0.8, 1.0), (1.0, 1.2))[seed % 3]
        params.append(
            SamplingParams(
                seed=seed,
                temperature=temperature,
                repetition_penalty=penalty,
                top_p=0.95,
                max_tokens=700,
                structured_outputs=StructuredOutputsParams.model_validate({"json": make_schema(seed)}),
            )
        )
    return [PROMPTS[seed % len(PROMPTS)] for seed in range(count)], params


def generate(mode: str, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[Output]:
    with LLM(mode=mode, max_running=8, speculation_may_stop=False) as llm:
        return llm.generate(list(prompts), list(params), progress=False)


@pytest.fixture(scope="module")
def plain() -> list[Output]:
    return generate("ar", *asked(SCHEMAS))


def test_structured_output_is_valid_json(plain: list[Output]) -> None:
    for seed, output in enumerate(plain):
        assert output.finish_reason == "stop", (seed, output.text)
        jsonschema.validate(json.loads(output.text), make_schema(seed))


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_structured_output_is_lossless(plain: list[Output], mode: str) -> None:
    drafted = generate(mode, *asked(SCHEMAS))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


def test_regex_and_choice_output_with_speculation() -> None:
    """Where a text may end or go on, it is likely to end: else that would depend on the processor."""
    forms = {
        "regex": r"[a-z]+@[a-z]+\.(com|org)",
        "choice": ["yes", "no", "may be"],
        "grammar": 'root ::= ("ab" | "c")+ "."',
    }
    texts = {"regex": r"[a-z]+@[a-z]+\.(com|org)", "choice": "yes|no|may be", "grammar": r"(ab|c)+\."}
    with LLM(mode="sd") as llm:
        likely = {llm.tokenizer.encode(end)[-1]: 8.0 for end in ("@", ".")}
        for name, form in forms.items():
            wanted = StructuredOutputsParams.model_validate({name: form})
            asked = SamplingParams(seed=1, max_tokens=300, structured_outputs=wanted, logit_bias=likely)
            text = llm.generate("x = ", asked)[0].text
            assert re.fullmatch(texts[name], text), text
