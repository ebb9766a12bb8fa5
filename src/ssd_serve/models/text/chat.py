"""Chat templates: the model author's Jinja template, rendered as transformers renders it, in a sandbox.

Knows template files and message dictionaries; knows no tokens and no HTTP.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from ssd_serve.base.errors import CheckpointError, RequestError
from ssd_serve.models.config import Json, read_json
from ssd_serve.models.text.sandbox import BoundedEnvironment

_MAX_SECONDS = 5.0
_MAX_CHARACTERS = 16 * 2**20
"""Twice what a request may hold."""
_MAX_REASON = 500


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (declared in the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Compiled chat template. `variables` are those that every rendering sees (`bos_token`, ...)."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        seconds: float = _MAX_SECONDS,
        characters: int = _MAX_CHARACTERS,
    ) -> None:
        self._environment = BoundedEnvironment(
            seconds,
            characters,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self._environment.add_filter("tojson", _to_json)
        functions: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "strftime_now": _now}
        self._environment.globals.update(functions)
        try:
            self._code = self._environment.compiled(source)
        except (TemplateError, RecursionError) as error:
            raise CheckpointError(f"the model's chat template is damaged: {error}") from error
        self._variables = dict(variables)

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool, **allowed: Any
    ) -> str:
        """The prompt of a conversation. What the template refuses, or fails at, is a `RequestError` on
        `messages`."""
        # Templates ask whether these are none, not only whether they are defined.
        values = {"tools": None, "documents": None, **self._variables, **allowed}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._environment.rendered(self._code, values)
        except Exception as error:  # a template may raise anything
            reason = str(error) or type(error).__name__
            message = f"the model's chat template does not accept these messages: {reason[:_MAX_REASON]}"
            raise RequestError(message, "messages") from error


def find_template(folder: Path, tokenizer_config: Json) -> str | None:
    """The template's source: `chat_template.jinja`, or in a JSON file; None where the model has none."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = tokenizer_config.get("chat_template")
    if found is None and (folder / "chat_template.json").is_file():
        found = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several named templates
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return None if found is None else str(found)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
