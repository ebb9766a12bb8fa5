"""Grammars of outputs: structured output as requests describe it, and tool calls as formats write them.

Knows request fields, schemas of tools and marks of thinking; no tokens, and not how outputs are held to them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ssd_serve.base.errors import GrammarError
from ssd_serve.sampling.grammar import (
    ANY_OBJECT,
    GrammarPart,
    check_grammar,
    from_choices,
    from_json_schema,
    from_lark,
    from_regex,
    from_rules,
    named_part,
    serialize_parts,
)
from ssd_serve.sampling.thinking import BEGIN, END
from ssd_serve.server.errors import ApiError, bad_request
from ssd_serve.server.limits import MAX_GRAMMAR_CHARACTERS
from ssd_serve.server.openai.conversation import Function
from ssd_serve.server.openai.formats import JsonObject, JsonOfSchema, StructuralTags, StructuredOutputs
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.service import Service


async def grammar_of(
    service: Service,
    body: GenerationRequest,
    thinking: bool | None = None,
    calls: Callable[[], Sequence[GrammarPart]] | None = None,
) -> str:
    """Return the grammar of a request's output; empty where any text is allowed.

    `thinking` is that of `MessageRules`: thinking comes before the text that must match. `calls` makes the
    grammar of tool calls. Raises 400 where the grammar cannot be compiled.
    """
    asked = body.response_format, body.structured_outputs, body.json_schema, body.grammar or None, calls
    if all(each is None for each in asked):
        return ""

    def work() -> str:
        constraints = _constraints(body)
        if calls is not None:
            constraints["tools"] = calls()
        return _compiled(constraints, thinking)

    # Short grammars can take long too.
    return await service.worker_pool.run(service.limits.inline_characters + 1, work)


Constraints = dict[str, Sequence[GrammarPart]]
"""Grammars by the fields that ask for them: the main part first, then the parts that it refers to."""


def _compiled(constraints: Constraints, thinking: bool | None) -> str:
    if not constraints:
        return ""
    if len(constraints) > 1:
        one, other, *_ = constraints
        raise _wrong(other, f"asks for another output than {one}; give one of them")
    ((field, parts),) = constraints.items()
    try:
        grammar = _after_thinking(parts, thinking)
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise _wrong(field, f"{len(grammar)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
        check_grammar(grammar)
    except GrammarError as error:
        raise _wrong(field, str(error)) from error
    return grammar


def _constraints(body: GenerationRequest) -> Constraints:
    found: Constraints = {}
    form = body.response_format
    if isinstance(form, JsonObject):
        found["response_format"] = [from_json_schema(ANY_OBJECT)]
    elif isinstance(form, JsonOfSchema):
        found["response_format"] = [from_json_schema(form.json_schema.json_schema)]
    elif isinstance(form, StructuralTags):
        found["response_format"] = _tags(form)
    if body.json_schema is not None:
        found["json_schema"] = [from_json_schema(body.json_schema)]
    if body.grammar:
        found["grammar"] = [_rules("grammar", body.grammar)]
    if body.structured_outputs is not None:
        found |= _structured(body.structured_outputs)
    return found


def _structured(wanted: StructuredOutputs) -> Constraints:
    name, compact = "structured_outputs", bool(wanted.disable_any_whitespace)
    found: Constraints = {}
    if wanted.json_schema is not None:
        found[f"{name}.json"] = [from_json_schema(wanted.json_schema, compact)]
    if wanted.json_object:
        found[f"{name}.json_object"] = [from_json_schema(ANY_OBJECT, compact)]
    if wanted.regex is not None:
        found[f"{name}.regex"] = [from_regex(wanted.regex)]
    if wanted.choice is not None:
        found[f"{name}.choice"] = [from_choices(wanted.choice)]
    if wanted.grammar is not None:
        found[f"{name}.grammar"] = [_rules(f"{name}.grammar", wanted.grammar)]
    if wanted.structural_tag is not None:
        found[f"{name}.structural_tag"] = _tags(wanted.structural_tag)
    if not found:
        raise _wrong(name, "says nothing of the output; give one of its fields, or leave it out")
    return found


def _rules(field: str, rules: str) -> GrammarPart:
    try:
        return from_rules(rules)
    except GrammarError as error:
        raise _wrong(field, str(error)) from error


def _tags(wanted: StructuralTags) -> list[GrammarPart]:
    """Return the grammar of text in which every trigger begins one of the structures."""
    begun: list[str] = []
    rules: list[str] = []
    schemas: list[GrammarPart] = []
    for place, each in enumerate(wanted.structures):
        trigger = next((one for one in wanted.triggers if each.begin.startswith(one)), None)
        if trigger is None:
            raise _wrong("structural_tag", f"no trigger begins {each.begin!r}")
        begun.append(f"part_{place}")
        rules.append(f"trigger_{place}[suffix={json.dumps(trigger)}]: /(?s:.)*/")
        rest, end = (json.dumps(text) if text else "" for text in (each.begin[len(trigger) :], each.end))
        rules.append(f"part_{place}: trigger_{place} {rest} @schema_{place} {end}")
        schemas.append(named_part(f"schema_{place}", from_json_schema(each.json_schema)))
    text = "\n".join([f"start: ({' | '.join(begun)})* TEXT", "TEXT: /(?s:.)*/", *rules])
    return [from_lark(text), *schemas]


def _after_thinking(parts: Sequence[GrammarPart], thinking: bool | None) -> str:
    """Return the grammar for the engine; where the model thinks, only the text after thinking must match."""
    if thinking is None:
        return serialize_parts(*parts)
    thought = "thought" if thinking else f"({json.dumps(BEGIN)} thought)?"
    rules = [
        f"start: {thought} SPACE @body",
        f"thought[suffix={json.dumps(END)}]: /(?s:.)*/",
        r"SPACE: /[ \n]{0,4}/",
    ]
    body, *others = parts
    return serialize_parts(from_lark("\n".join(rules)), named_part("body", body), *others)


def _wrong(field: str, what: str) -> ApiError:
    return bad_request(f"{field}: {what}", field, "invalid_value")


_CALLS_MARK, _ARGUMENTS_MARK = "[TOOL_CALLS]", "[ARGS]"
_TEXT = "WORDS: /(?s:.)*/"
_SPACE = r"SPACE: /[ \n]{0,4}/"


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a model's calls. The marks are those of Mistral's format, as grammar rules: a token or a text.
    Without a mark of arguments, calls are a list."""

    name: str
    calls_mark: str = ""
    arguments_mark: str = ""

    @classmethod
    def of(cls, name: str, template: str, encode: Callable[[str], Sequence[int]]) -> "CallForm":
        """Return the form of a format for a model with this chat template; `encode` tokenizes marks."""
        if name != "mistral":
            return cls(name)
        arguments = _mark_rule(_ARGUMENTS_MARK, encode) if _ARGUMENTS_MARK in template else ""
        return cls(name, _mark_rule(_CALLS_MARK, encode), arguments)


def _mark_rule(mark: str, encode: Callable[[str], Sequence[int]]) -> str:
    tokens = encode(mark)
    return f"<[{tokens[0]}]>" if len(tokens) == 1 else json.dumps(mark)


def forced_calls(form: CallForm, functions: Sequence[Function], parallel: bool) -> list[GrammarPart]:
    """Return the grammar of one call of these functions, or of several where `parallel`, without text."""
    if form.name == "hermes":
        rules = ["start: SPACE call (SPACE call)*" if parallel else "start: SPACE call"]
        rules.append('call: "<tool_call>" SPACE object SPACE "</tool_call>"')
    elif form.name == "mistral":
        rules = [f"start: SPACE {_marked(form, parallel, form.calls_mark)}"]
    else:
        rules = ['start: SPACE object (";" SPACE object)*' if parallel else "start: SPACE object"]
    return _with_objects(form, functions, rules)


def strict_calls(form: CallForm, functions: Sequence[Function], parallel: bool) -> list[GrammarPart]:
    """Return the grammar of any text with calls of these functions where the format allows them."""
    if form.name == "hermes":
        times = "*" if parallel else "?"
        rules = [
            f"start: call{times} WORDS",
            'call: mark SPACE object SPACE "</tool_call>"',
            'mark[suffix="<tool_call>"]: /(?s:.)*/',
            _TEXT,
        ]
    elif form.name == "mistral":
        is_token = form.calls_mark.startswith("<")
        begun = f"WORDS {form.calls_mark}" if is_token else "mark"
        rules = [f"start: {_marked(form, parallel, begun)} | WORDS", _TEXT]
        rules += [] if is_token else [f"mark[suffix={form.calls_mark}]: /(?s:.)*/"]
    else:
        rules = [
            'start: object (";" SPACE object)* | WORDS' if parallel else "start: object | WORDS",
            r"WORDS: /([^{ \n](?s:.)*)?/",
        ]
    return _with_objects(form, functions, rules)


def _marked(form: CallForm, parallel: bool, start: str) -> str:
    """Return the rule of Mistral's calls after `start`: a list, or one call after another."""
    if form.arguments_mark:
        return f"{start} object" + (f" ({form.calls_mark} object)*" if parallel else "")
    return (
        f'{start} SPACE "[" SPACE object'
        + (' SPACE ("," SPACE object SPACE)*' if parallel else " SPACE")
        + ' "]"'
    )


def _with_objects(form: CallForm, functions: Sequence[Function], rules: Sequence[str]) -> list[GrammarPart]:
    """Add the rule `object`, a call of one of the functions, to the rules.

    Where some functions are strict, any object is allowed as arguments of the others; where none is, unknown
    keywords of schemas are ignored.
    """
    strict = any(each.strict for each in functions)
    options = {} if strict else {"x-guidance": {"lenient": True}}
    calls: list[GrammarPart] = []
    objects: list[str] = []
    for place, each in enumerate(functions):
        given = (each.parameters if each.strict or not strict else None) or ANY_OBJECT
        if form.arguments_mark:
            schema = {**given, **options}
            objects.append(f"{json.dumps(each.name)} {form.arguments_mark} @call_{place}")
        else:
            schema = {**_object(form, each.name, given), **options}
            objects.append(f"@call_{place}")
        calls.append(named_part(f"call_{place}", from_json_schema(schema)))
    return [from_lark("\n".join([*rules, f"object: {' | '.join(objects)}", _SPACE])), *calls]


def _object(form: CallForm, name: str, parameters: Mapping[str, object]) -> dict[str, object]:
    """Return the schema of a call as an object."""
    arguments = "parameters" if form.name == "llama3" else "arguments"
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            arguments: _relocated(parameters, f"/properties/{arguments}"),
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _relocated(schema: Mapping[str, object], place: str) -> object:
    """Return a schema for this place in another one, with its references moved along."""
    try:
        return json.loads(json.dumps(schema).replace('"$ref": "#', f'"$ref": "#{place}'))
    except RecursionError:
        raise GrammarError("too deeply nested") from None
