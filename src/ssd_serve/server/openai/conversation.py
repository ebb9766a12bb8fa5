"""A conversation as a chat template writes it: whose system prompt comes first, and where the answer begins.

Knows messages and templates, no tokens and no HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ssd_serve.base.errors import RequestError
from ssd_serve.server.openai.protocol import ChatRequest, Message, TokenizeRequest, ToolCall
from ssd_serve.server.text.tokenizer import TextTokenizer

_MESSAGE_UNITS = 32


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a template is given."""

    entries: Sequence[Mapping[str, object]]
    variables: Mapping[str, object]
    generation_prompt: bool
    continues: bool
    """The answer goes on where the last message ends, instead of beginning a message of its own."""

    @classmethod
    def of(cls, body: ChatRequest | TokenizeRequest, system_prompt: str | None) -> "TemplateInput":
        """That of a request, after the operator's system prompt. Raises `RequestError` for fields that do not
        go together."""
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise RequestError(
                "add_generation_prompt: begins a message, and continue_final_message goes on with one; give "
                "one of them",
                "add_generation_prompt",
            )
        entries = [_entry(message, place) for place, message in enumerate(body.messages or ())]
        variables = dict(body.chat_template_kwargs or {})
        if isinstance(body, ChatRequest):
            variables = {**_told(body), **variables}
        return cls(
            _behind(system_prompt, entries) if system_prompt else entries,
            variables,
            not continues and body.add_generation_prompt is not False,
            continues,
        )

    @property
    def units(self) -> int:
        """How much work it is to write, in characters."""
        return sum(_MESSAGE_UNITS + sum(map(_length, entry.values())) for entry in self.entries)

    def text(self, tokenizer: TextTokenizer) -> str:
        """All of it. Raises `RequestError` for what the template refuses."""
        written = tokenizer.apply_chat_template(self.entries, self.generation_prompt, **self.variables)
        return _up_to(written, str(self.entries[-1]["content"])) if self.continues else written


def _told(body: ChatRequest) -> dict[str, object]:
    """What a template reads of the other fields."""
    told: dict[str, object] = {}
    if body.tools and body.tool_choice != "none":
        told["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if body.reasoning_effort is not None:
        told["reasoning_effort"] = body.reasoning_effort
        told["enable_thinking"] = body.reasoning_effort != "none"
    return told


def _entry(message: Message, place: int) -> dict[str, object]:
    """A message as templates read it; arguments of calls as the objects that they are."""
    entry = message.template_entry()
    if message.tool_calls:
        entry["tool_calls"] = [
            _called(call, f"messages.{place}.tool_calls.{index}")
            for index, call in enumerate(message.tool_calls)
        ]
    elif message.content is None:
        raise RequestError(f"messages.{place}.content: field required", f"messages.{place}.content")
    if message.role == "tool" and message.tool_call_id is None:
        path = f"messages.{place}.tool_call_id"
        raise RequestError(f"{path}: field required where a tool answers", path)
    return entry


def _called(call: ToolCall, path: str) -> dict[str, object]:
    try:
        arguments: object = msgspec.json.decode(call.function.arguments or "{}")
    except msgspec.DecodeError as error:
        path += ".function.arguments"
        raise RequestError(f"{path}: not JSON: {error}", path) from error
    function = {"name": call.function.name, "arguments": arguments}
    return {**call.model_dump(exclude_none=True), "function": function}


def _behind(system_prompt: str, entries: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """The operator speaks first; a client's own system prompt follows in the same message, since templates
    take one."""
    first, *others = entries
    if first["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *entries]
    return [{**first, "content": f"{system_prompt}\n\n{first['content']}"}, *others]


def _up_to(written: str, last: str) -> str:
    """The written conversation as far as its last message's content goes. Templates may trim that."""
    trimmed = last.strip()
    place = written.rfind(trimmed) if trimmed else -1
    if place < 0:
        raise RequestError(
            "continue_final_message: the model's chat template does not write the last message as it stands; "
            "there is nothing to go on with",
            "continue_final_message",
        )
    begin = place - (len(last) - len(last.lstrip()))
    if begin >= 0 and written.startswith(last, begin):
        return written[: begin + len(last)]
    return written[: place + len(trimmed)]


def _length(value: object) -> int:
    return len(value) if isinstance(value, str) else len(msgspec.json.encode(value))
