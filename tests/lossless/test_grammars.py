"""Structured output: valid for every schema, and the same with and without speculation."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest

from ssd_serve import LLM, SamplingParams
from ssd_serve.app.llm.engine import Output
from ssd_serve.app.llm.sampling_params import StructuredOutputsParams
from tests.examples import WHOLE

SCHEMAS = 90 if WHOLE else 6
PROMPTS = ("def read", "The settings as JSON:\n", "import json\n\ndata = ", "class Node:\n    ")


def prompts_and_params(count: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts with parameters: greedy, sampled and penalised texts."""
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
    return generate("ar", *prompts_and_params(SCHEMAS))


def test_structured_output_is_valid_json(plain: list[Output]) -> None:
    for seed, output in enumerate(plain):
        assert output.finish_reason == "stop", (seed, output.text)
        jsonschema.validate(json.loads(output.text), make_schema(seed))


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_structured_output_is_lossless(plain: list[Output], mode: str) -> None:
    drafted = generate(mode, *prompts_and_params(SCHEMAS))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


def test_regex_and_choice_output_with_speculation() -> None:
    """End tokens are made likely: else the length of a text would depend on the processor."""
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
            params = SamplingParams(seed=1, max_tokens=300, structured_outputs=wanted, logit_bias=likely)
            text = llm.generate("x = ", params)[0].text
            assert re.fullmatch(texts[name], text), text


Schema = dict[str, Any]
_NAMES = ("name", "id", "kind", "value", "items", "path", "level", "tags", "from", "até", "x-y", "is_open")
_WORDS = ("red", "green", "a b", 'say "no"', "naïve", "0", "", "null", "C:\\x", "日本")
_PATTERNS = ("^[a-z]{2,5}$", "^\\d{4}-\\d{2}$", "^(on|off)$", "^[A-Z][a-z]*/[0-9]{1,3}$")


def make_schema(seed: int) -> Schema:
    return _Maker(random.Random(seed)).thing(3)


class _Maker:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def thing(self, depth: int) -> Schema:
        simple: list[Callable[[], Schema]] = [self._text, self._number, self._of_few, self._plain]
        nested = [self._object, self._object, self._list, self._either]
        if depth == 3:
            return self._object(3)
        if depth > 0 and self._chance.random() < 0.5:
            return self._chance.choice(nested)(depth)
        return self._chance.choice(simple)()

    def _object(self, depth: int) -> Schema:
        names = self._chance.sample(_NAMES, self._chance.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: self.thing(depth - 1) for name in names},
            "required": names[: self._chance.randint(0, len(names))],
            "additionalProperties": False,
        }

    def _list(self, depth: int) -> Schema:
        least = self._chance.randint(0, 2)
        return {
            "type": "array",
            "items": self.thing(depth - 1),
            "minItems": least,
            "maxItems": least + self._chance.randint(0, 2),
        }

    def _either(self, depth: int) -> Schema:
        return {"anyOf": [self.thing(depth - 1), {"type": "null"}]}

    def _text(self) -> Schema:
        if self._chance.random() < 0.4:
            return {"type": "string", "pattern": self._chance.choice(_PATTERNS)}
        return {"type": "string", "minLength": self._chance.randint(0, 3), "maxLength": 12}

    def _number(self) -> Schema:
        low = self._chance.randint(-50, 50)
        if self._chance.random() < 0.5:
            return {"type": "integer", "minimum": low, "maximum": low + self._chance.randint(0, 900)}
        return {"type": "integer", "exclusiveMinimum": low, "maximum": low + 1000}

    def _of_few(self) -> Schema:
        if self._chance.random() < 0.3:
            return {"const": self._chance.choice(_WORDS)}
        return {"enum": [*self._chance.sample(_WORDS, 3), 17, True, None]}

    def _plain(self) -> Schema:
        return {"type": self._chance.choice(["boolean", "null", ["boolean", "null"]])}
