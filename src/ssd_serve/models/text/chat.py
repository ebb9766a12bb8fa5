"""Chat templates: the model author's Jinja template, rendered as transformers renders it, in a sandbox.

Knows template files and message dictionaries; knows no tokens and no HTTP.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from ssd_serve.base.errors import CheckpointError, RequestError
from ssd_serve.models.config import Json, read_json
from ssd_serve.models.text.default_tools import tools_as_text
from ssd_serve.models.text.sandbox import BoundedEnvironment

_MAX_SECONDS = 5.0
_MAX_CHARACTERS = 16 * 2**20
"""Twice what a request may hold."""
_MAX_REASON = 500
_MORE_TEMPLATES = "additional_chat_templates"


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (declared in the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


DEFAULT, _TOOL_USE = "default", "tool_use"


@lru_cache(maxsize=16)
def takes_tools(source: str) -> bool:
    """Return True if a chat template reads the variable `tools`."""
    # Parsed only: jinja2's compiler would compute constants such as 10**(10**8), without a bound.
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    try:
        names = environment.parse(source).find_all(nodes.Name)
        return any(each.name == "tools" and each.ctx == "load" for each in names)
    except (TemplateError, RecursionError):
        return False


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
        self._takes_tools = takes_tools(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool, **allowed: Any
    ) -> str:
        """The prompt of a conversation; tools that the template does not take are described in its texts. A
        conversation that the template refuses, or fails at, is a `RequestError` on `messages`."""
        if self._takes_tools:
            return self._rendered(messages, add_generation_prompt, allowed)
        tools = allowed.get("tools")
        try:
            return self._rendered(tools_as_text(messages, tools), add_generation_prompt, allowed)
        except RequestError:
            if not tools:
                raise
            # Some templates take no system message.
            conversation = tools_as_text(messages, tools, system=False)
            return self._rendered(conversation, add_generation_prompt, allowed)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, allowed: Mapping[str, Any]
    ) -> str:
        # Templates ask whether these are none, not only whether they are defined.
        values = {"tools": None, "documents": None, **self._variables, **allowed}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._environment.rendered(self._code, values)
        except Exception as error:  # a template may raise anything
            reason = str(error) or type(error).__name__
            message = f"the model's chat template does not accept these messages: {reason[:_MAX_REASON]}"
            raise RequestError(message, "messages") from error


class ChatTemplates:
    """The named chat templates of one model. One is chosen for each conversation, as transformers does."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self.sources = sources
        self._compiled = {name: ChatTemplate(source, variables) for name, source in sources.items()}

    def choose(self, name: str | None, tools: bool) -> str:
        """Return the name of the template to use: the named one, `tool_use` for `tools`, or `default`.

        Raises `RequestError` where there is none of that name.
        """
        if name is None:
            name = _TOOL_USE if tools and _TOOL_USE in self.sources else DEFAULT
        if name not in self.sources:
            known = ", ".join(sorted(self.sources)) or "none"
            raise RequestError(
                f"chat_template: names one of the model's templates ({known}); those of requests are not built",
                "chat_template",
            )
        return name

    def of(self, name: str) -> ChatTemplate:
        """Return the template of this name."""
        return self._compiled[name]


def find_templates(folder: Path, tokenizer_config: Json) -> dict[str, str]:
    """Sources of the templates by name: files of Jinja before entries of JSON files; none where the model has
    none. Raises `CheckpointError`."""
    found: object = tokenizer_config.get("chat_template")
    if found is None and (folder / "chat_template.json").is_file():
        found = read_json(folder / "chat_template.json").get("chat_template")
    sources = _named(found)
    for path in (folder / "chat_template.jinja", *sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))):
        if path.is_file():
            name = DEFAULT if path.parent == folder else path.stem
            sources[name] = path.read_text(encoding="utf-8")
    return sources


def _named(found: object) -> dict[str, str]:
    if found is None:
        return {}
    if isinstance(found, str):
        return {DEFAULT: found}
    entries: Any = found if isinstance(found, list) else [found]
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in entries}
    except (KeyError, TypeError) as error:
        raise CheckpointError("a list of chat templates has a name and a template in each entry") from error


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
