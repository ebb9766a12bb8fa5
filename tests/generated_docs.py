"""The tables of the documents that are made from code, and a program that writes them.

    .venv/bin/python -m tests.generated_docs

Knows which page holds which table; the words are those of the code.
"""

from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import AliasChoices, BaseModel

from ssd_serve.app.cli.main import EXIT_CODES, build_parser
from ssd_serve.app.cli.output import as_markdown
from ssd_serve.base.attention_backends import BACKENDS
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import origins, resolve
from ssd_serve.server.access.tenants import Tenants
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.observability.metrics import ServerMetrics
from ssd_serve.server.openai.fields import SpeculationOptions
from ssd_serve.server.openai.formats import StructuredOutputs
from ssd_serve.server.openai.protocol import GenerationRequest, StreamOptions
from ssd_serve.server.openapi import OPERATIONS, SecuritySchemes
from tests.server.fakes import READY, STATUS

DOCS = Path(__file__).parents[1] / "docs"
_BUCKETS_BOUND = "le"
_ALWAYS = ("help", "help_all", "config")
"""Flags of many commands, which the head of docs/cli.md describes."""
_SCALARS = ("string", "integer")
_UNTITLED = ("positional arguments", "options", "optional arguments")
"""Groups of argparse itself."""


def settings_table() -> str:
    """Every setting with its plain default, as `ssd settings --markdown` prints it."""
    return as_markdown(origins(resolve({"target": EngineConfig.target}), {}))


def exit_codes_table() -> str:
    """Every exit code of `ssd`."""
    rows = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES]
    return "\n".join(["| code | meaning |", "|---|---|", *rows])


def metrics_table() -> str:
    """Every metric of a server that has keys and an engine."""
    engine = EngineClient()
    engine.ready = READY
    engine.status = msgspec.structs.replace(STATUS, drafter_requests={"drafter-0": 1})
    metrics = ServerMetrics(engine, lambda: True, Tenants(Settings(api_key="0123456789abcdef" * 2)))
    metrics.ended.labels("stop").inc()
    families: Iterable[Metric] = text_string_to_metric_families(metrics.render().decode())
    rows = sorted(_metric_row(family) for family in families if not family.name.endswith("_created"))
    return "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows])


def _metric_row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = sorted({label for sample in family.samples for label in sample.labels} - {_BUCKETS_BOUND})
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {shown} | {family.documentation} |"


def backends_table() -> str:
    """Every tree attention backend."""
    rows = [f"| `{name}` | {each.where.value} | {each.what} |" for name, each in BACKENDS.items()]
    return "\n".join(["| backend | where | what it is |", "|---|---|---|", *rows])


def api_table() -> str:
    """Every path of the API, with its statuses on a server that has keys."""
    keys, rows = SecuritySchemes(keyed=True), list[str]()
    for path, operation in OPERATIONS.items():
        answers = f"{operation.summary} (whole or streamed)" if operation.chunk else operation.summary
        methods = ", ".join(method.upper() for method in operation.methods)
        statuses = ", ".join(map(str, keys.problems(path, operation)))
        rows.append(f"| `{path}` | {methods} | {answers} | {statuses} |")
    return "\n".join(["| path | methods | what | statuses besides 200 |", "|---|---|---|---|", *rows])


def fields_reference() -> str:
    """The fields of every request body: those of all generating bodies once, then each body's own."""
    shared = GenerationRequest.model_fields
    parts = ["## Fields of all requests that generate", _fields(GenerationRequest, ())]
    for path, operation in OPERATIONS.items():
        if operation.body is not None:
            generates = issubclass(operation.body, GenerationRequest)
            parts += [f"## {path}", _fields(operation.body, shared if generates else ())]
    for nested in (StreamOptions, SpeculationOptions, StructuredOutputs):
        parts += [f"## {nested.__name__}", _fields(nested, ())]
    return "\n\n".join(parts)


def _fields(body: type[BaseModel], known: Container[str]) -> str:
    """Table of the fields that are not `known`, and the names of those that are refused."""
    rows, refused, schema = (
        ["| field | value | meaning |", "|---|---|---|"],
        list[str](),
        body.model_json_schema(),
    )
    for name, described in schema["properties"].items():
        if None in described.get("enum", ()):
            refused += [name] if name not in known else []
        elif name not in known:
            field = body.model_fields.get(name)
            aliases = None if field is None else field.validation_alias
            others = [str(each) for each in aliases.choices[1:]] if isinstance(aliases, AliasChoices) else []
            names = f"`{name}`" + (f" ({_code(others)})" if others else "")
            rows.append(f"| {names} | {_value(described)} | {described.get('description', '')} |")
    note = (
        f"\n\nNot built, and refused with any value that would matter: {_code(sorted(refused))}."
        if refused
        else ""
    )
    return "\n".join(rows) + note


def _value(schema: Any) -> str:
    """The type and the range of a value, in words."""
    kinds = [each for each in schema.get("anyOf", schema.get("oneOf", ())) if each.get("type") != "null"]
    if "type" not in schema and kinds:
        return " or ".join(dict.fromkeys(_value(each) for each in kinds))
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        items = schema.get("items", {})
        return f"list of {items['type']}s" if items.get("type") in _SCALARS else f"list of {_value(items)}"
    return str(schema.get("type", "any")) + _range(schema)


def _range(schema: Any) -> str:
    """The bounds of a number that are meant for people: those of 31 bits and more are left out."""
    text = ""
    for key, words in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to")):
        bound = schema.get(key)
        if bound is not None and abs(bound) < 2**31 - 1:
            text += f" {words} {bound:,}"
    return text


def cli_reference() -> str:
    """Every command with its own arguments, and once the groups of settings with their flags."""
    root: Any = build_parser()
    groups = ["| group | flags, in parentheses their other names |", "|---|---|"]
    for group in _commands_below(root)["serve"][0]._action_groups:
        settings = [each.option_strings for each in group._group_actions if _is_setting(each)]
        flags = [f"`{own}`" + (f" ({_code(others)})" if others else "") for own, *others in settings]
        groups += [f"| {group.title.partition(' (')[0]} | {', '.join(flags)} |"] * bool(flags)
    return "\n\n".join([*_commands(root), "## Settings as flags", "\n".join(groups)])


def _commands(parser: Any) -> Iterator[str]:
    """Heading and table of each command, and of the commands below it."""
    for command, text in _commands_below(parser).values():
        if _commands_below(command):
            yield from _commands(command)
            continue
        rows = [f"| `{command.prog}` | {text} |", "|---|---|"]
        for group in command._action_groups:
            own = [
                each for each in group._group_actions if not _is_setting(each) and each.dest not in _ALWAYS
            ]
            rows += [f"| **{group.title}** | |"] * (bool(own) and group.title not in _UNTITLED)
            rows += [_argument(command, each) for each in own]
        if any(map(_is_setting, command._actions)):
            rows.append("| settings | [as flags](#settings-as-flags) |")
        yield f"## {command.prog}"
        yield "\n".join(rows)


def _commands_below(parser: Any) -> dict[str, tuple[Any, str]]:
    """Commands below a parser by name, each with its help text."""
    assert parser.words is not None  # this property fills a parser that is filled on first use
    found = [each for each in parser._actions if isinstance(each.choices, dict)]
    return {
        each.dest: (found[0].choices[each.dest], each.help) for each in found and found[0]._choices_actions
    }


def _argument(parser: Any, argument: Any) -> str:
    choices = "{" + ",".join(argument.choices) + "}" if argument.choices else ""
    value = argument.metavar or choices or argument.dest.upper()
    value = " ".join(value) if isinstance(value, tuple) else value
    value += " ..." if argument.nargs in ("+", "*") else ""
    name = " ".join([", ".join(argument.option_strings), value * (argument.nargs != 0)]).strip()
    text = parser._get_formatter()._expand_help(argument) if argument.help else ""
    return f"| `{name}` | {text} |"


def _is_setting(argument: Any) -> bool:
    return str(argument.dest).startswith("setting_")


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for each in words)


TABLES = {
    "api": api_table,
    "cli": cli_reference,
    "fields": fields_reference,
    "kernels": backends_table,
    "settings": settings_table,
    "exit-codes": exit_codes_table,
    "metrics": metrics_table,
}
"""Generated tables by name of their page, which is the name of their markers."""


def block(page: str, name: str) -> str:
    """Content of a page between its markers."""
    _, _, rest = page.partition(f"<!-- {name}:begin -->")
    text, end, _ = rest.partition(f"<!-- {name}:end -->")
    assert end
    return text.strip()


def write_tables() -> None:
    """Put every table into its page."""
    for name, table in TABLES.items():
        file = DOCS / f"{name}.md"
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        page = file.read_text(encoding="utf-8")
        head, tail = page.split(begin)[0], page.split(end)[1]
        file.write_text(f"{head}{begin}\n\n{table()}\n\n{end}{tail}", encoding="utf-8")


if __name__ == "__main__":
    write_tables()
