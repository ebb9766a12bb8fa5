"""Schemathesis hooks: small requests, and reasons for which a valid request may be refused.

Loaded by its command line (`SCHEMATHESIS_HOOKS=tests.server.contract_hooks`).
"""

import re
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response

from tests.server.fakes import VOCABULARY

SERVED = "ssd-embedded"
LARGEST_ID = 2**31 - 1
IDS = {"prompt", "tokens", "stop_token_ids", "allowed_token_ids", "generated_token_ids"}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SMALL = {**dict.fromkeys(LIMITS, 16), "min_tokens": 2, "n": 3}
TOLD = (
    r"token id \d+ is outside the vocabulary",
    r"tokens; prompt and output together may have",
    r"output tokens and \d+ prompt tokens are",
    r"no tokens; the model needs at least one",
    r"holds a lone surrogate",
    r"min_tokens: \d+ is more than",
    r"prompts x n is \d+; at most",
    r"best_of: only as many as n",
    r"max_tokens: differs from max_completion_tokens",
    r"allowed_token_ids: bad_words and min_tokens leave none",
    r"bad_words: a word has no tokens",
    r"generated_token_ids: has \d+ lists; the request has",
    r"generated_token_ids: \d+ tokens are more than",
    r"the conversation must begin with the user",
    r"messages\.\d+\.content: field required",
    r"messages\.\d+\.tool_call_id: field required",
    r"tools: how this model would call them is not known",
    r"chat_template: names one of the model's templates",
    r"prompt_logprobs: (cannot be streamed|echo with logprobs tells them)",
    r"add_generation_prompt: begins a message",
    r"continue_final_message: the model's chat template does not write",
    r"unknown field; did you mean",
    r"another name of \w+; give one of them",
    r"more than \d+ fields that are not known",
    r"^(response_format|json_schema|grammar|structured_outputs(\.[a-z_]+)?|structural_tag): ",
    r"^(min_tokens|allowed_token_ids|bad_words|ignore_eos): could leave no token",
    r"^tools: (none can be called where|asks for another output)",
    r"^tool_choice: tools have none to call",
    r"^tool_choice\.name: field required",
    r"^max_tokens: field required",
    r"^n: a (response|message) is one",
    r"^(input: says|messages: say) nothing",
)
"""Patterns of documented validation errors (status 400) that the schema of the document cannot express."""


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    if isinstance(case.body, dict):
        case.body = _tamed(case.body)
        asked = [case.body.get(name) for name in LIMITS]
        case.body = {name: value for name, value in case.body.items() if name not in LIMITS or value != -1}
        unlimited = all(value in (None, -1) for value in asked)
        generates = case.operation.path.endswith(("/completions", "/responses"))
        if generates and unlimited:
            case.body["max_tokens"] = SMALL["max_tokens"]  # a real engine would go on to the context's end


@schemathesis.check
def refused_only_for_what_the_document_tells(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code != 400:
        return
    message = response.json()["error"]["message"]
    assert any(re.search(rule, message) for rule in TOLD), f"refused for what no rule tells: {message}"


def _tamed(body: dict[str, Any]) -> dict[str, Any]:
    tame = {name: _small_ids(value) if name in IDS else _whole(value) for name, value in body.items()}
    for name, most in SMALL.items():
        if _is_number(tame.get(name), most + 1, LARGEST_ID):
            tame[name] = most
    if isinstance(tame.get("model"), str) and len(tame["model"]) % 3:
        tame["model"] = SERVED
    if isinstance(tame.get("logit_bias"), dict):
        tame["logit_bias"] = {
            str(int(name) % VOCABULARY) if re.fullmatch("[0-9]{1,9}", name) else name: value
            for name, value in tame["logit_bias"].items()
        }
    return tame


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _small_ids(value: Any) -> Any:
    value = _whole(value)
    if isinstance(value, list):
        return [_small_ids(each) for each in value]
    return value % VOCABULARY if _is_number(value, VOCABULARY, LARGEST_ID) else value


def _is_number(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
