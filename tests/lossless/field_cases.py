"""A value for every field of every generating API, with the fields that it needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ssd_serve.server.anthropic import MessagesRequest
from ssd_serve.server.openai.protocol import ChatRequest, CompletionRequest
from ssd_serve.server.openai.responses_protocol import ResponsesRequest

ASK = [{"role": "user", "content": "Write a function that adds two numbers."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]
LONG = {"max_tokens": 120}

_SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 5,
    "top_p": 0.7,
    "min_p": 0.1,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.8,
    "frequency_penalty": 0.8,
    "logit_bias": {"300": 6.0, "301": -100},
    "allowed_token_ids": list(range(200, 900)),
    "bad_words": ["def", "return"],
    "seed": 12,
}
_COMMON: dict[str, Any] = {
    **_SAMPLED,
    "model": "ssd-embedded",
    "stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True},
    "n": 1,
    "min_tokens": 12,
    "max_tokens": 7,
    "stop": ["\n", "("],
    "stop_token_ids": [262, 300],
    "include_stop_str_in_output": ({"stop": ["\n"]}, True),
    "ignore_eos": True,
    "response_format": (LONG, {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
    "structured_outputs": (LONG, {"regex": "[a-c]{4,20}[.]"}),
    "json_schema": (LONG, SCHEMA),
    "grammar": (LONG, 'root ::= ("ab" | "c")+ "."'),
    "generated_token_ids": [[300, 301, 302]],
    "skip_special_tokens": False,
    "return_token_ids": True,
    "add_special_tokens": False,
    "request_id": "of-a-test",
    "priority": 3,
    "truncate_prompt_tokens": 3,
    "prompt_logprobs": 2,
    "speculation": {"max_nodes": 2, "num_speculative_tokens": 3, "shape": "tree"},
    "return_progress": True,
    "cache_salt": "a-secret-of-this-test",
    "user": "eve",
    "safety_identifier": "eve",
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
}
_COMPLETION: dict[str, Any] = {
    **_COMMON,
    "n": 3,
    "prompt": "import",
    "echo": True,
    "logprobs": 2,
    "best_of": 1,
}
_CHAT: dict[str, Any] = {
    **_COMMON,
    "n": 3,
    "messages": [{"role": "system", "content": "Be brief."}, *ASK],
    "max_completion_tokens": ({"max_tokens": 9}, 9),
    "logprobs": True,
    "top_logprobs": ({"logprobs": True}, 2),
    "add_generation_prompt": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "chat_template": "default",
    "continue_final_message": (
        {"messages": [*ASK, {"role": "assistant", "content": "def add("}], "add_generation_prompt": False},
        True,
    ),
    "tools": (LONG, TOOLS),
    "tool_choice": ({**LONG, "tools": TOOLS}, "required"),
    "parallel_tool_calls": ({**LONG, "tools": TOOLS, "tool_choice": "required"}, False),
    "reasoning_effort": "low",
    "include_reasoning": False,
    "thinking_token_budget": 4,
}
_FLAT = [{"type": "function", **FUNCTION}]
_RESPONSES: dict[str, Any] = {
    **_COMMON,
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Add."}]}],
    "instructions": "Be brief.",
    "max_output_tokens": 9,
    "tools": (LONG, _FLAT),
    "tool_choice": ({**LONG, "tools": _FLAT}, {"type": "function", "name": "weather"}),
    "parallel_tool_calls": ({**LONG, "tools": _FLAT, "tool_choice": "required"}, False),
    "text": (LONG, {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}),
    "reasoning": {"effort": "low"},
    "include": (LONG, ["message.output_text.logprobs"]),
    "top_logprobs": ({"include": ["message.output_text.logprobs"]}, 2),
    "store": False,
}
_ANTHROPIC_TOOLS = [{"name": "weather", "input_schema": SCHEMA, "strict": True}]
_MESSAGES: dict[str, Any] = {
    **_COMMON,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Add."}]}],
    "system": "Be brief.",
    "tools": (LONG, _ANTHROPIC_TOOLS),
    "tool_choice": ({**LONG, "tools": _ANTHROPIC_TOOLS}, {"type": "any", "disable_parallel_tool_use": True}),
    "thinking": {"type": "enabled", "budget_tokens": 4},
    "output_config": (LONG, {"format": {"type": "json_schema", "schema": SCHEMA}}),
    "output_format": (LONG, {"type": "json_schema", "schema": SCHEMA}),
    "stop_sequences": ["\n"],
}


@dataclass(frozen=True)
class Api:
    """An API path that generates."""

    path: str
    kind: type[BaseModel]
    fields: Mapping[str, Any]
    """Fields of every request."""
    values: Mapping[str, Any]
    """Value by field; a pair holds other fields that it needs, and the value."""

    @property
    def not_built(self) -> set[str]:
        """Known fields that are not built."""
        return {name for name, field in self.kind.model_fields.items() if field.annotation is object}

    def body(self, field: str) -> dict[str, Any]:
        value = self.values[field]
        beside, value = value if isinstance(value, tuple) else ({}, value)
        return {**self.fields, **beside, field: value}


_ALWAYS = {"seed": 11, "max_tokens": 16, "temperature": 0.6}
APIS = (
    Api("/v1/completions", CompletionRequest, {**_ALWAYS, "prompt": "def add(a, b):"}, _COMPLETION),
    Api("/v1/chat/completions", ChatRequest, {**_ALWAYS, "messages": ASK}, _CHAT),
    Api("/v1/responses", ResponsesRequest, {**_ALWAYS, "input": "Add two numbers."}, _RESPONSES),
    Api("/v1/messages", MessagesRequest, {**_ALWAYS, "messages": ASK}, _MESSAGES),
)
