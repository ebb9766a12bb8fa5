"""Renderer of the Helm chart: the part of Go's templates that the chart uses (if, else, range, pipelines)."""

import json
import re
from collections.abc import Mapping
from typing import Any

from tests.deploy.files import DEPLOY

CHART = DEPLOY / "helm/ssd-serve"
_ACTION = re.compile(r"(\s*)\{\{(-?) *(.*?) *\}\}", re.DOTALL)
_TOKEN = re.compile(r'"[^"]*"|\(|\)|\||[^\s()|]+')


def render(values: Mapping[str, Any], release: str = "ssd") -> str:
    """Return all objects of the chart as one YAML stream."""
    scope: dict[str, Any] = {"Values": values, "Release": {"Name": release}}
    texts = [path.read_text(encoding="utf-8") for path in sorted((CHART / "templates").glob("*.yaml"))]
    return "\n---\n".join(_block(_split(text), scope, {})[0] for text in texts)


def _split(text: str) -> list[tuple[str, str]]:
    """Return pairs of a kind ("text" or "action") and its content, in reverse order; `{{-` trims before it."""
    parts: list[tuple[str, str]] = []
    end = 0
    for found in _ACTION.finditer(text):
        before = text[end : found.start()] + ("" if found[2] else found[1])
        parts += [("text", before), ("action", found[3])]
        end = found.end()
    return [*parts, ("text", text[end:])][::-1]


def _block(parts: list[tuple[str, str]], scope: Mapping[str, Any], names: dict[str, Any]) -> tuple[str, str]:
    """Render up to `end` or `else` and return the text and that word."""
    text = ""
    while parts:
        kind, content = parts.pop()
        word, _, rest = content.partition(" ")
        if kind == "text":
            text += content
        elif content in ("end", "else"):
            return text, content
        elif word == "if":
            text += _conditional(parts, bool(_evaluate(rest, scope, names)), scope, names)
        elif word == "range":
            text += _range(parts, rest, scope, names)
        else:
            value = _evaluate(content, scope, names)
            assert value is not None, f"{content} has no value"
            text += value if isinstance(value, str) else json.dumps(value)
    return text, ""


def _conditional(
    parts: list[tuple[str, str]], holds: bool, scope: Mapping[str, Any], names: dict[str, Any]
) -> str:
    then, word = _block(parts, scope, names)
    otherwise = _block(parts, scope, names)[0] if word == "else" else ""
    return then if holds else otherwise


def _range(parts: list[tuple[str, str]], header: str, scope: Mapping[str, Any], names: dict[str, Any]) -> str:
    variables, _, source = header.partition(":=")
    key, value = (name.strip() for name in variables.split(","))
    items: Mapping[str, Any] = _evaluate(source.strip(), scope, names)
    body, text = list(parts), ""
    for name in sorted(items):
        text += _block(list(body), scope, {**names, key: name, value: items[name]})[0]
    _block(parts, scope, {**names, key: "", value: ""})
    return text


def _evaluate(expression: str, scope: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    tokens = _TOKEN.findall(expression)[::-1]
    return _pipeline(tokens, scope, names)


def _pipeline(tokens: list[str], scope: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    piped: list[Any] = []
    while True:
        words: list[Any] = []
        while tokens and tokens[-1] not in "|)":
            words.append(_term(tokens, scope, names))
        words += piped
        value = words[0](*words[1:]) if callable(words[0]) else words[0]
        if not tokens or tokens.pop() == ")":
            return value
        piped = [value]


def _term(tokens: list[str], scope: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    word = tokens.pop()
    if word == "(":
        return _pipeline(tokens, scope, names)
    if word.startswith('"'):
        return json.loads(word)
    if word.startswith("$"):
        return names[word]
    if word.startswith("."):
        value: Any = scope
        for part in word[1:].split("."):
            value = value[part]
        return value
    functions = {
        "quote": json.dumps,
        "toJson": json.dumps,
        "index": lambda of, key: of[key],
        "printf": lambda form, *values: form % values,
    }
    return functions[word]
