"""Grammars of answers that must call a tool, or must call tools as their schemas say.

Knows how formats write calls, and schemas of tools; not who follows the grammar.
"""

import json
from collections.abc import Mapping, Sequence

from ssd_serve.sampling.grammar_text import Part, of_lark, of_schema
from ssd_serve.server.openai.protocol import Function

CONSTRAINED = ("hermes", "llama3")
"""The formats for which there are grammars."""
_SPACE = r"SPACE: /[ \n]{0,4}/"


def forced_calls(form: str, functions: Sequence[Function], parallel: bool) -> Part:
    """One call or, where they may be parallel, some: of these functions and nothing else."""
    call = _json(_any_call(form, functions))
    if form == "hermes":
        rules = ["start: SPACE call (SPACE call)*" if parallel else "start: SPACE call"]
        rules.append(f'call: "<tool_call>" SPACE {call} SPACE "</tool_call>"')
    else:
        rules = ['start: SPACE call (";" SPACE call)*' if parallel else "start: SPACE call", f"call: {call}"]
    return of_lark("\n".join([*rules, _SPACE]))


def strict_calls(form: str, functions: Sequence[Function], parallel: bool) -> Part:
    """Any words, and calls of these functions among them where the format lets them stand there."""
    call = _json(_any_call(form, functions))
    if form == "hermes":
        times = "*" if parallel else "?"
        rules = [
            f"start: called{times} WORDS",
            f'called: mark SPACE {call} SPACE "</tool_call>"',
            'mark[suffix="<tool_call>"]: /(?s:.)*/',
            "WORDS: /(?s:.)*/",
        ]
    else:
        rules = [
            'start: call (";" SPACE call)* | WORDS' if parallel else "start: call | WORDS",
            f"call: {call}",
            r"WORDS: /([^{ \n](?s:.)*)?/",
        ]
    return of_lark("\n".join([*rules, _SPACE]))


def _any_call(form: str, functions: Sequence[Function]) -> Mapping[str, object]:
    """The schema of a call of one of these. A schema that need not be kept strictly may have keywords that
    nobody here knows."""
    arguments = "arguments" if form == "hermes" else "parameters"
    calls: list[object] = []
    for each in functions:
        given = each.parameters or {"type": "object"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": each.name}, arguments: given},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    lenient = not all(each.strict for each in functions)
    return {"anyOf": calls, **({"x-guidance": {"lenient": True}} if lenient else {})}


def _json(schema: Mapping[str, object]) -> str:
    """JSON of this schema, as a part of a rule."""
    return f"%json {json.dumps(of_schema(schema)['json_schema'])}"
