"""Grammars of answers that must call a tool, or must call tools as their schemas say.

Knows how formats write calls, and schemas of tools; not who follows the grammar.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ssd_serve.base.errors import GrammarError
from ssd_serve.sampling.grammar import ANY_OBJECT, GrammarPart, named_part, from_lark, from_json_schema
from ssd_serve.server.openai.protocol import Function

_CALLS, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_WORDS = "WORDS: /(?s:.)*/"
_SPACE = r"SPACE: /[ \n]{0,4}/"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls. Of Mistral's format: how a grammar says its marks, a token of their own or a
    text; without a mark before arguments, calls are a list."""

    name: str
    calls_mark: str = ""
    arguments_mark: str = ""

    @classmethod
    def of(cls, name: str, template: str, encode: Callable[[str], Sequence[int]]) -> "CallForm":
        """The form of this name for a model with this chat template. `encode` makes tokens of marks."""
        if name != "mistral":
            return cls(name)
        arguments = _said(_ARGUMENTS, encode) if _ARGUMENTS in template else ""
        return cls(name, _said(_CALLS, encode), arguments)


def _said(mark: str, encode: Callable[[str], Sequence[int]]) -> str:
    tokens = encode(mark)
    return f"<[{tokens[0]}]>" if len(tokens) == 1 else json.dumps(mark)


def forced_calls(form: CallForm, functions: Sequence[Function], parallel: bool) -> list[GrammarPart]:
    """One call or, where they may be parallel, some: of these functions and nothing else."""
    if form.name == "hermes":
        rules = ["start: SPACE call (SPACE call)*" if parallel else "start: SPACE call"]
        rules.append('call: "<tool_call>" SPACE object SPACE "</tool_call>"')
    elif form.name == "mistral":
        rules = [f"start: SPACE {_marked(form, parallel, form.calls_mark)}"]
    else:
        rules = ['start: SPACE object (";" SPACE object)*' if parallel else "start: SPACE object"]
    return _with_objects(form, functions, rules)


def strict_calls(form: CallForm, functions: Sequence[Function], parallel: bool) -> list[GrammarPart]:
    """Any words, and calls of these functions among them where the format lets them stand there."""
    if form.name == "hermes":
        times = "*" if parallel else "?"
        rules = [
            f"start: call{times} WORDS",
            'call: mark SPACE object SPACE "</tool_call>"',
            'mark[suffix="<tool_call>"]: /(?s:.)*/',
            _WORDS,
        ]
    elif form.name == "mistral":
        is_token = form.calls_mark.startswith("<")
        begun = f"WORDS {form.calls_mark}" if is_token else "mark"
        rules = [f"start: {_marked(form, parallel, begun)} | WORDS", _WORDS]
        rules += [] if is_token else [f"mark[suffix={form.calls_mark}]: /(?s:.)*/"]
    else:
        rules = [
            'start: object (";" SPACE object)* | WORDS' if parallel else "start: object | WORDS",
            r"WORDS: /([^{ \n](?s:.)*)?/",
        ]
    return _with_objects(form, functions, rules)


def _marked(form: CallForm, parallel: bool, begun: str) -> str:
    """Calls in Mistral's format behind what has `begun` them: a list, or one call after another."""
    if form.arguments_mark:
        return f"{begun} object" + (f" ({form.calls_mark} object)*" if parallel else "")
    return (
        f'{begun} SPACE "[" SPACE object'
        + (' SPACE ("," SPACE object SPACE)*' if parallel else " SPACE")
        + ' "]"'
    )


def _with_objects(form: CallForm, functions: Sequence[Function], rules: Sequence[str]) -> list[GrammarPart]:
    """These rules, where `object` is that of a call of one of the functions. Where some must be called
    strictly, any object will do as arguments of the others; where none must, schemas may have keywords that
    nobody here knows."""
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
    """The schema of a call as an object."""
    arguments = "parameters" if form.name == "llama3" else "arguments"
    return {
        "type": "object",
        "properties": {"name": {"const": name}, arguments: _moved(parameters, f"/properties/{arguments}")},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(schema: Mapping[str, object], place: str) -> object:
    """A schema that stands in another one, at this place: its references lead to the same as before."""
    try:
        return json.loads(json.dumps(schema).replace('"$ref": "#', f'"$ref": "#{place}'))
    except RecursionError:
        raise GrammarError("too deeply nested") from None
