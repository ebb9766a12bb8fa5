"""Grammars of answers that must call a tool, or must call tools as their schemas say.

Knows how formats write calls, and schemas of tools; not who follows the grammar.
"""

import json
from collections.abc import Mapping, Sequence

from ssd_serve.errors import GrammarError
from ssd_serve.sampling.grammar_text import ANY_OBJECT, Part, named, of_lark, of_schema
from ssd_serve.server.openai.protocol import Function

CONSTRAINED = ("hermes", "llama3")
"""The formats for which there are grammars."""


def forced_calls(form: str, functions: Sequence[Function], parallel: bool) -> list[Part]:
    """One call or, where they may be parallel, some: of these functions and nothing else."""
    if form == "hermes":
        rules = ["start: SPACE call (SPACE call)*" if parallel else "start: SPACE call"]
        rules.append('call: "<tool_call>" SPACE object SPACE "</tool_call>"')
    else:
        rules = ['start: SPACE object (";" SPACE object)*' if parallel else "start: SPACE object"]
    return _with_objects(form, functions, rules)


def strict_calls(form: str, functions: Sequence[Function], parallel: bool) -> list[Part]:
    """Any words, and calls of these functions among them where the format lets them stand there."""
    if form == "hermes":
        times = "*" if parallel else "?"
        rules = [
            f"start: call{times} WORDS",
            'call: mark SPACE object SPACE "</tool_call>"',
            'mark[suffix="<tool_call>"]: /(?s:.)*/',
            "WORDS: /(?s:.)*/",
        ]
    else:
        rules = [
            'start: object (";" SPACE object)* | WORDS' if parallel else "start: object | WORDS",
            r"WORDS: /([^{ \n](?s:.)*)?/",
        ]
    return _with_objects(form, functions, rules)


def _with_objects(form: str, functions: Sequence[Function], rules: Sequence[str]) -> list[Part]:
    """These rules, where `object` is that of a call of one of the functions. Where some must be called
    strictly, any object will do as arguments of the others; where none must, schemas may have keywords that
    nobody here knows."""
    strict = any(each.strict for each in functions)
    options = {} if strict else {"x-guidance": {"lenient": True}}
    arguments = "arguments" if form == "hermes" else "parameters"
    calls: list[Part] = []
    for place, each in enumerate(functions):
        given = each.parameters if each.strict or not strict else None
        schema = {
            "type": "object",
            "properties": {
                "name": {"const": each.name},
                arguments: _moved(given or ANY_OBJECT, f"/properties/{arguments}"),
            },
            "required": ["name", arguments],
            "additionalProperties": False,
            **options,
        }
        calls.append(named(f"call_{place}", of_schema(schema)))
    one = f"object: {' | '.join(f'@call_{place}' for place in range(len(calls)))}"
    return [of_lark("\n".join([*rules, one, r"SPACE: /[ \n]{0,4}/"])), *calls]


def _moved(schema: Mapping[str, object], place: str) -> object:
    """A schema that stands in another one, at this place: its references lead to the same as before."""
    try:
        return json.loads(json.dumps(schema).replace('"$ref": "#', f'"$ref": "#{place}'))
    except RecursionError:
        raise GrammarError("too deeply nested") from None
