"""From what a request says of its output to the grammar that the engine follows.

Knows fields, and how thoughts and tags are written; no tokens, and not how outputs are held to them.
"""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ssd_serve.base.errors import GrammarError
from ssd_serve.sampling.grammar import check_grammar
from ssd_serve.sampling.grammar import (
    ANY_OBJECT,
    GrammarPart,
    named_part,
    from_choices,
    from_lark,
    from_regex,
    from_rules,
    from_json_schema,
    serialize_parts,
)
from ssd_serve.sampling.thinking import BEGIN, END
from ssd_serve.server.errors import ApiError, bad_request
from ssd_serve.server.limits import MAX_GRAMMAR_CHARACTERS
from ssd_serve.server.openai.output_formats import (
    JsonObject,
    JsonOfSchema,
    StructuralTags,
    StructuredOutputs,
)
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.service import Service


class _Wish(NamedTuple):
    """What a field asks for: a grammar, and those that it refers to."""

    field: str
    parts: Sequence[GrammarPart]


async def grammar_of(
    service: Service,
    body: GenerationRequest,
    thinking: bool | None = None,
    calls: Callable[[], Sequence[GrammarPart]] | None = None,
) -> str:
    """The grammar of a request's output; empty where it may be any text. `thinking`: as for `MessageRules`;
    thoughts come before what must match. `calls` makes what calls of tools must be. 400 for what cannot be
    compiled."""
    asked = body.response_format, body.structured_outputs, body.json_schema, body.grammar or None, calls
    if all(each is None for each in asked):
        return ""

    def work() -> str:
        wishes = _wishes(body)
        if calls is not None:
            wishes.append(_Wish("tools", calls()))
        return _compiled(wishes, thinking)

    return await service.worker_pool.run(service.limits.inline_characters + 1, work)  # small ones take long too


def _compiled(wishes: Sequence[_Wish], thinking: bool | None) -> str:
    if not wishes:
        return ""
    if len(wishes) > 1:
        one, other = wishes[:2]
        raise _wrong(other.field, f"asks for another output than {one.field}; give one of them")
    field, parts = wishes[0]
    try:
        grammar = _behind_thoughts(parts, thinking)
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise _wrong(field, f"{len(grammar)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
        check_grammar(grammar)
    except GrammarError as error:
        raise _wrong(field, str(error)) from error
    return grammar


def _wishes(body: GenerationRequest) -> list[_Wish]:
    found: list[_Wish] = []
    form = body.response_format
    if isinstance(form, JsonObject):
        found.append(_Wish("response_format", [from_json_schema(ANY_OBJECT)]))
    elif isinstance(form, JsonOfSchema):
        found.append(_Wish("response_format", [from_json_schema(form.json_schema.json_schema)]))
    elif isinstance(form, StructuralTags):
        found.append(_Wish("response_format", _tags(form)))
    if body.json_schema is not None:
        found.append(_Wish("json_schema", [from_json_schema(body.json_schema)]))
    if body.grammar:
        found.append(_Wish("grammar", [_rules("grammar", body.grammar)]))
    if body.structured_outputs is not None:
        found += _structured(body.structured_outputs)
    return found


def _structured(wanted: StructuredOutputs) -> list[_Wish]:
    name, compact = "structured_outputs", bool(wanted.disable_any_whitespace)
    found: list[_Wish] = []
    if wanted.json_schema is not None:
        found.append(_Wish(f"{name}.json", [from_json_schema(wanted.json_schema, compact)]))
    if wanted.json_object:
        found.append(_Wish(f"{name}.json_object", [from_json_schema(ANY_OBJECT, compact)]))
    if wanted.regex is not None:
        found.append(_Wish(f"{name}.regex", [from_regex(wanted.regex)]))
    if wanted.choice is not None:
        found.append(_Wish(f"{name}.choice", [from_choices(wanted.choice)]))
    if wanted.grammar is not None:
        found.append(_Wish(f"{name}.grammar", [_rules(f"{name}.grammar", wanted.grammar)]))
    if wanted.structural_tag is not None:
        found.append(_Wish(f"{name}.structural_tag", _tags(wanted.structural_tag)))
    if not found:
        raise _wrong(name, "says nothing of the output; give one of its fields, or leave it out")
    return found


def _rules(field: str, rules: str) -> GrammarPart:
    try:
        return from_rules(rules)
    except GrammarError as error:
        raise _wrong(field, str(error)) from error


def _tags(wanted: StructuralTags) -> list[GrammarPart]:
    """Text in which what begins with a trigger is one of the parts."""
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


def _behind_thoughts(parts: Sequence[GrammarPart], thinking: bool | None) -> str:
    """The grammar as the engine reads it; where a model thinks, only what follows its thoughts must match."""
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
