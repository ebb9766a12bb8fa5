"""Grammars as the engine reads them, from what people give: schemas, regular expressions, choices, rules.

Knows llguidance's ways to write them; neither tokens nor who asks.
"""

import json
from collections.abc import Mapping, Sequence

from ssd_serve.base.errors import GrammarError

Part = dict[str, object]
"""One of llguidance's grammars."""
ANY_OBJECT: Mapping[str, object] = {"type": "object"}
"""The schema of JSON objects."""
_WHITE_SPACE = r" ?(\n[ \t]{0,24})?"
"""Between the parts of JSON: a blank, or a line's end and an indent. Weak models would write nothing else."""


def of_schema(schema: Mapping[str, object], compact: bool = False) -> Part:
    """JSON that matches a schema; `compact`: without white space between its parts."""
    spaces = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITE_SPACE}
    told = schema.get("x-guidance")
    own: Mapping[str, object] = told if isinstance(told, dict) else {}
    return {"json_schema": {**schema, "x-guidance": {**spaces, **own}}}


def of_regex(regex: str) -> Part:
    """A text that a regular expression matches as a whole."""
    found, escaped = list[str](), False
    for sign in regex:  # slashes end an expression in Lark
        found.append("\\/" if sign == "/" and not escaped else sign)
        escaped = sign == "\\" and not escaped
    return of_lark(f"start: /{''.join(found)}/")


def of_choice(texts: Sequence[str]) -> Part:
    """One of these texts."""
    return of_lark(f"start: {' | '.join(map(json.dumps, texts))}")


def of_rules(rules: str) -> Part:
    """A grammar in Lark, as llguidance reads it, or in GBNF. Raises `GrammarError`."""
    if "::=" not in rules:
        return of_lark(rules)
    try:
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
    except ImportError:
        return of_lark(rules)  # what is missing is said when it is checked
    try:
        return of_lark(gbnf_to_lark(rules))
    except (GbnfToLarkError, RecursionError) as error:
        raise GrammarError(f"this GBNF cannot be read: {error}") from error


def of_lark(lark: str) -> Part:
    """A grammar in Lark."""
    return {"lark_grammar": lark}


def named(name: str, part: Part) -> Part:
    """A grammar that others refer to as `@name`."""
    return {"name": name, **part}


def written(*parts: Part) -> str:
    """All of it; the first one may refer to the others by their names. Raises `GrammarError`."""
    try:
        return json.dumps({"grammars": parts})
    except RecursionError:
        raise GrammarError("too deeply nested") from None
