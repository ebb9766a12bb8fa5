"""From what a request says of its output to the grammar that the engine follows.

Knows fields, and how thoughts and tags are written; no tokens, and not how outputs are held to them.
"""

import json
from typing import NamedTuple

from ssd_serve.errors import GrammarError
from ssd_serve.sampling.checks import UNMATCHED
from ssd_serve.sampling.grammar import check_grammar
from ssd_serve.sampling.grammar_text import (
    ANY_OBJECT,
    Part,
    of_choice,
    of_lark,
    of_regex,
    of_rules,
    of_schema,
    written,
)
from ssd_serve.server.errors import ApiError, bad_request
from ssd_serve.server.limits import MAX_GRAMMAR_CHARACTERS
from ssd_serve.server.openai.output_formats import (
    JsonObject,
    JsonOfSchema,
    StructuralTags,
    StructuredOutputs,
)
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.openai.tools.reasoning import BEGIN, END
from ssd_serve.server.service import Service


class _Wish(NamedTuple):
    """What a field asks for."""

    field: str
    part: Part


async def grammar_of(
    service: Service, body: GenerationRequest, thinking: bool | None = None, calls: Part | None = None
) -> str:
    """The grammar of a request's output; empty where it may be any text. `thinking`: as for `MessageRules`;
    thoughts come before what must match. `calls`: what calls of tools must be. 400 for what cannot be
    compiled."""
    wishes = [*_wishes(body), *([_Wish("tools", calls)] if calls is not None else [])]
    if not wishes:
        return ""
    if len(wishes) > 1:
        one, other = wishes[:2]
        raise _wrong(other.field, f"asks for another output than {one.field}; give one of them")
    wish = wishes[0]
    for name in UNMATCHED:
        if getattr(body, name):
            raise _wrong(name, f"could leave no token that {wish.field} allows; give one of them")
    grammar = _behind_thoughts(wish.part, thinking)
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise _wrong(wish.field, f"{len(grammar)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
    try:
        # Also small ones take milliseconds.
        await service.off_loop.run(
            service.limits.inline_characters + len(grammar), lambda: check_grammar(grammar)
        )
    except GrammarError as error:
        raise _wrong(wish.field, str(error)) from error
    return grammar


def _wishes(body: GenerationRequest) -> list[_Wish]:
    found: list[_Wish] = []
    form = body.response_format
    if isinstance(form, JsonObject):
        found.append(_Wish("response_format", of_schema(ANY_OBJECT)))
    elif isinstance(form, JsonOfSchema):
        found.append(_Wish("response_format", of_schema(form.json_schema.json_schema)))
    elif isinstance(form, StructuralTags):
        found.append(_Wish("response_format", _tags(form)))
    if body.json_schema is not None:
        found.append(_Wish("json_schema", of_schema(body.json_schema)))
    if body.grammar:
        found.append(_Wish("grammar", _rules("grammar", body.grammar)))
    if body.structured_outputs is not None:
        found += _structured(body.structured_outputs)
    return found


def _structured(wanted: StructuredOutputs) -> list[_Wish]:
    name, compact = "structured_outputs", bool(wanted.disable_any_whitespace)
    found: list[_Wish] = []
    if wanted.json_schema is not None:
        found.append(_Wish(f"{name}.json", of_schema(wanted.json_schema, compact)))
    if wanted.json_object:
        found.append(_Wish(f"{name}.json_object", of_schema(ANY_OBJECT, compact)))
    if wanted.regex is not None:
        found.append(_Wish(f"{name}.regex", of_regex(wanted.regex)))
    if wanted.choice is not None:
        found.append(_Wish(f"{name}.choice", of_choice(wanted.choice)))
    if wanted.grammar is not None:
        found.append(_Wish(f"{name}.grammar", _rules(f"{name}.grammar", wanted.grammar)))
    if wanted.structural_tag is not None:
        found.append(_Wish(f"{name}.structural_tag", _tags(wanted.structural_tag)))
    if not found:
        raise _wrong(name, "says nothing of the output; give one of its fields, or leave it out")
    return found


def _rules(field: str, rules: str) -> Part:
    try:
        return of_rules(rules)
    except GrammarError as error:
        raise _wrong(field, str(error)) from error


def _tags(wanted: StructuralTags) -> Part:
    """Text in which what begins with a trigger is one of the parts."""
    parts: list[str] = []
    rules: list[str] = []
    for place, each in enumerate(wanted.structures):
        trigger = next((one for one in wanted.triggers if each.begin.startswith(one)), None)
        if trigger is None:
            raise _wrong("structural_tag", f"no trigger begins {each.begin!r}")
        rest, end = each.begin[len(trigger) :], each.end
        schema = json.dumps(each.json_schema)
        parts.append(f"part_{place}")
        rules.append(f"trigger_{place}[suffix={json.dumps(trigger)}]: /(?s:.)*/")
        words = [f"trigger_{place}", *([json.dumps(rest)] if rest else []), f"%json {schema}"]
        rules.append(f"part_{place}: {' '.join([*words, *([json.dumps(end)] if end else [])])}")
    return of_lark("\n".join([f"start: ({' | '.join(parts)})* TEXT", "TEXT: /(?s:.)*/", *rules]))


def _behind_thoughts(part: Part, thinking: bool | None) -> str:
    """The grammar as the engine reads it; where a model thinks, only what follows its thoughts must match."""
    if thinking is None:
        return written(part)
    thought = "thought" if thinking else f"({json.dumps(BEGIN)} thought)?"
    rules = [
        f"start: {thought} SPACE @body",
        f"thought[suffix={json.dumps(END)}]: /(?s:.)*/",
        r"SPACE: /[ \n]{0,4}/",
    ]
    return written(of_lark("\n".join(rules)), {"name": "body", **part})


def _wrong(field: str, what: str) -> ApiError:
    return bad_request(f"{field}: {what}", field, "invalid_value")
