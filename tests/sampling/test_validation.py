"""Validation of requests: over HTTP and in Python the same ranges, checks and messages."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ValidationError

from ssd_serve.app.llm.sampling_params import SamplingParams
from ssd_serve.base.errors import ContextLengthError, RequestError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.sampling.parameters import PARAMETERS, Parameter, Range, Stage, in_stages
from ssd_serve.sampling.validation import (
    bad_word_sequences,
    check_prompt,
    encode,
    engine_parameters,
    output_limit,
    with_number_fields,
)
from ssd_serve.server.errors import from_ssd_error
from ssd_serve.server.openai.protocol import CompletionRequest
from tests.server.fakes import READY, ByteTokenizer

RANGED = [pytest.param(each, each.range, id=each.name) for each in PARAMETERS if each.range is not None]
OUT_OF_REACH = {"prompt_logprobs", "grammar", "thinking_budget"}
"""Parameters that are set indirectly: by `echo` with `logprobs`, or from structured output."""
MODEL = msgspec.structs.replace(READY, vocabulary=100, context=50)


def fields_of(name: str, value: object) -> dict[str, object]:
    return {name: {3: value} if name == "logit_bias" else value}


def accepted(model: type[BaseModel], fields: dict[str, object]) -> bool:
    try:
        model.model_validate({"prompt": "a", **fields} if model is CompletionRequest else fields)
    except (ValidationError, RequestError):
        return False
    return True


@pytest.mark.parametrize("model", [CompletionRequest, SamplingParams])
@pytest.mark.parametrize(("parameter", "numbers"), RANGED)
def test_numbers_out_of_range_are_refused_over_http_and_in_python(
    model: type[BaseModel], parameter: Parameter, numbers: Range
) -> None:
    if parameter.name in OUT_OF_REACH:
        assert parameter.name not in SamplingParams.model_fields
        return
    step: Any = 1 if numbers.whole else 1e-3
    inside = [numbers.highest, numbers.lowest + step * numbers.above]
    # max_tokens also has 0 (none, over HTTP with echo) and -1 (the rest of the context, in Python).
    below = -2 if parameter.name == "max_tokens" else numbers.lowest - step * (not numbers.above)
    outside = [numbers.highest + step, below, float("nan")]
    outside += [numbers.least_positive / 2] if numbers.least_positive else []
    outside += [numbers.lowest + 0.5] if numbers.whole else []
    assert all(accepted(model, fields_of(parameter.name, value)) for value in inside)
    assert not any(accepted(model, fields_of(parameter.name, value)) for value in outside)


@pytest.mark.parametrize("model", [CompletionRequest, SamplingParams])
def test_http_and_python_accept_every_parameter(model: type[BaseModel]) -> None:
    named = {each.name for each in PARAMETERS} - OUT_OF_REACH
    assert named <= set(model.model_fields)


def test_empty_request_has_default_parameters() -> None:
    plain = SamplingParameters(max_tokens=7)
    for request in (CompletionRequest.model_validate({"prompt": "a"}), SamplingParams()):
        assert engine_parameters(request, MODEL, max_tokens=7, logprobs=None) == plain


def test_missing_parameters_use_generation_config() -> None:
    model = msgspec.structs.replace(MODEL, sampling={"temperature": 0.5, "top_k": 1000, "max_tokens": 9})
    given = {"prompt": "a", "temperature": None, "top_p": 0.9}
    found = engine_parameters(CompletionRequest.model_validate(given), model, max_tokens=7, logprobs=None)
    assert found == SamplingParameters(temperature=0.5, top_p=0.9, top_k=0, max_tokens=7)


def test_request_parameters_override_generation_config() -> None:
    model = msgspec.structs.replace(MODEL, sampling={"temperature": 0.5, "top_p": 0.9})
    values: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0}
    for request in (CompletionRequest.model_validate({"prompt": "a", **values}), SamplingParams(**values)):
        found = engine_parameters(request, model, max_tokens=7, logprobs=None)
        assert found == SamplingParameters(temperature=0.0, top_p=1.0, max_tokens=7)


def test_http_and_python_give_equal_engine_parameters() -> None:
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 100,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 1.0},
        "allowed_token_ids": [3, 4],
        "min_tokens": 2,
        "stop_token_ids": [5],
        "ignore_eos": True,
    }
    requests = CompletionRequest.model_validate({"prompt": "a", **values}), SamplingParams(**values)
    one, other = (
        engine_parameters(each, MODEL, max_tokens=9, logprobs=2, bad_words=((7,),)) for each in requests
    )
    assert one == other
    assert one.top_k == 0, "all of the vocabulary is no restriction"
    assert (one.allowed_token_ids, one.stop_token_ids) == ((3, 4), (5,))
    unset = {each.name for each in PARAMETERS if getattr(one, each.name) == each.neutral}
    assert unset & set(values) == {"top_k"}


@pytest.mark.parametrize(
    ("values", "ending", "message"),
    [
        ({"min_tokens": 6}, (), "min_tokens: 6 is more than the 5 tokens that may be generated"),
        ({"logit_bias": {100: 1.0}}, (), "logit_bias: token id 100 is outside the vocabulary of 100"),
        ({"stop_token_ids": [200]}, (), "stop_token_ids: token id 200 is outside the vocabulary of 100"),
        (
            {"allowed_token_ids": [100]},
            (),
            "allowed_token_ids: token id 100 is outside the vocabulary of 100",
        ),
        ({"allowed_token_ids": [7]}, (), "allowed_token_ids: bad_words and min_tokens leave none of them"),
        (
            {"allowed_token_ids": [7, 8], "min_tokens": 1},
            (8,),
            "allowed_token_ids: bad_words and min_tokens leave none of them",
        ),
    ],
)
def test_invalid_parameter_error_names_the_field(
    values: dict[str, Any], ending: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RequestError) as error:
        engine_parameters(
            SamplingParams(**values),
            MODEL,
            max_tokens=5,
            logprobs=None,
            bad_words=((7,), (1, 2)),
            ending=ending,
        )
    assert (str(error.value), error.value.field) == (message, message.partition(":")[0])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((), "prompt: no tokens; the model needs at least one"),
        ((1, 100, 5), "prompt: token id 100 is outside the vocabulary of 100"),
        ((1, -1, 5), "prompt: token id -1 is outside the vocabulary of 100"),
        ((1,) * 50, "prompt: 50 tokens; prompt and output together may have 50"),
    ],
)
def test_prompt_must_fit_vocabulary_and_context(ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(RequestError) as error:
        check_prompt(ids, MODEL, "prompt")
    assert str(error.value) == message
    check_prompt((1,) * 49, MODEL, "prompt")


def test_max_tokens_is_limited_by_the_context() -> None:
    assert output_limit(None, 16, 40, MODEL, "max_tokens") == 10
    assert output_limit(None, 4, 40, MODEL, "max_tokens") == 4
    assert output_limit(10, 4, 40, MODEL, "max_tokens") == 10
    with pytest.raises(ContextLengthError, match="11 output tokens and 40 prompt tokens are 51") as error:
        output_limit(11, 4, 40, MODEL, "max_tokens")
    answer = from_ssd_error(error.value)
    assert (answer.status, answer.param, answer.code) == (400, "max_tokens", "context_length_exceeded")


def test_bad_word_with_and_without_leading_space() -> None:
    assert bad_word_sequences(ByteTokenizer(), " ab") == ((97, 98),)
    with pytest.raises(RequestError, match="bad_words: a word has no tokens"):
        bad_word_sequences(ByteTokenizer(), "  ")


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="stop: holds a lone surrogate, which is not a character"):
        encode(ByteTokenizer(), "a\ud800", False, "stop")


def test_validation_does_not_import_torch() -> None:
    modules = "sys, ssd_serve.sampling.validation, ssd_serve.server.openai.protocol"
    program = f"import {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_number_fields_are_added_to_a_model() -> None:
    class Bare(BaseModel):
        top_p: int = 7

    whole = with_number_fields(Bare)
    assert (whole.__name__, whole.model_fields["top_p"].default) == ("Bare", 7)
    acting = in_stages(Stage.START, Stage.PENALTY, Stage.TEMPERATURE, Stage.TRUNCATION)
    assert set(whole.model_fields) == {each.name for each in acting}
    assert accepted(whole, {"min_p": 0.3, "top_k": None})
    assert not accepted(whole, {"min_p": 1.01})
    assert not accepted(whole, {"top_k": 1.5})
    assert with_number_fields(whole) is whole
