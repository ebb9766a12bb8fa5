"""Settings as command-line flags, and a parser that explains what it does not know.

Every field of `Settings` becomes a flag; other packages may add them to their parsers too.
"""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from ssd_serve.base.engine_settings import EngineSettings
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.names import suggestion
from ssd_serve.base.settings import FrontSettings, Settings
from ssd_serve.base.settings_sources import flag_name, rename_hint

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]
"""Type of argparse's subparsers, which has no public name."""

_PREFIX = "setting_"
"""Keeps settings apart from other arguments of the same name."""
_GROUPS: dict[str, type[BaseSettings]] = {
    "models, devices and speculation": EngineSettings,
    "front end": FrontSettings,
    "processes": Settings,
}
ALIASES: dict[str, tuple[str, ...]] = {
    "target": ("-m", "--model"),
    "draft": ("-md", "--model-draft", "--speculative-model"),
    "tensor_parallel": ("-tp", "--tensor-parallel-size"),
    "context": ("-c", "--ctx-size", "--max-model-len"),
    "max_running": ("-np", "--parallel", "--max-num-seqs"),
    "prefill_chunk": ("-ub", "--ubatch-size"),
    "draft_device": ("-devd", "--device-draft"),
    "served_model_name": ("-a", "--alias"),
    "prefix_cache": ("--enable-prefix-caching",),
    "root_path": ("--api-prefix",),
    "tls_certificate": ("--ssl-cert-file", "--ssl-certfile"),
    "tls_key": ("--ssl-key-file", "--ssl-keyfile"),
    "tool_parser": ("--tool-call-parser",),
}
"""Names of the same flags in vLLM and llama.cpp."""
FOREIGN = {
    "--gpu-memory-utilization": "give the KV cache a size with --kv-memory-mb",
    "--mem-fraction-static": "give the KV cache a size with --kv-memory-mb",
    "--quantization": "the number format is read from the model's files (docs/models.md)",
    "--n-gpu-layers": "name the device of the whole model with --target-device cuda:0",
    "--prompt": "`ssd generate TEXT --target MODEL` takes the text without a flag",
    "-ngl": "name the device of the whole model with --target-device cuda:0",
}
"""Flags of vLLM, SGLang and llama.cpp that have no counterpart, and what to do instead."""

COMMON = {
    "target": "folder, GGUF file, hub id or short name",
    "draft": "a model, 'ngram', 'suffix' or 'none'",
    "mode": "plain, inline or asynchronous drafts",
    "target_device": "cpu, cpu:0-1, cuda:0, cuda:0-3",
    "draft_device": "the same, for drafts",
    "dtype": "number format of weights",
    "context": "longest prompt + output in tokens",
    "kv_memory_mb": "most MiB of the KV cache",
    "max_running": "most requests at the same time",
    "host": "address to listen on",
    "port": "HTTP port; 0: a free one",
    "api_key": "bearer token that clients need",
    "served_model_name": "model id in the API",
    "drain_seconds": "time for requests to end after Ctrl-C",
}
"""Settings that a short help describes, and their descriptions in it."""
_WIDTH = 79


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_unused: object) -> None:
        if isinstance(parser, Parser):
            parser.shortened = False
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Argument parser without abbreviations.

    Mistakes raise `SettingsError` with a suggestion instead of exiting. `fill` adds its arguments on first use.
    """

    def __init__(self, fill: "Callable[[Parser], None] | None" = None, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        self._fill = fill
        self.shortened = False

    def format_help(self) -> str:
        """Return the help; a shortened one describes `COMMON` settings, and lists the others by name."""
        settings = {each: each.help for each in self._actions if each.dest.startswith(_PREFIX)}
        if not self.shortened or not settings:
            return super().format_help()
        for each in settings:
            each.help = argparse.SUPPRESS
        text = super().format_help()
        for each, described in settings.items():
            each.help = described
        return "\n".join([text, *map(_short_group, _GROUPS)])

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Refuse unknown arguments here: only this parser knows the flags to suggest."""
        self._filled()
        known, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                name = word.partition("=")[0]
                advice = f"; {FOREIGN[name]}" if name in FOREIGN else ""
                hint = advice or rename_hint(name, flag_name) or suggestion(name, self._option_string_actions)
                raise SettingsError(
                    f"the flag {name} is unknown{hint} (`{self.prog} {self._help_flag}` lists all)"
                )
        if unknown:
            raise SettingsError(f"the argument '{unknown[0]}' is one too many (`{self.prog} --help`)")
        return known, unknown

    @property
    def words(self) -> list[str]:
        """Long flags of this parser, and the words that may follow it."""
        self._filled()
        flags = [each for each in self._option_string_actions if each.startswith("--")]
        return flags + [
            str(word)
            for action in self._actions
            if not action.option_strings and action.choices
            for word in action.choices
        ]

    def _filled(self) -> None:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)

    @property
    def _help_flag(self) -> str:
        return "--help-all" if self.shortened else "--help"

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as `SettingsError`."""
        raise SettingsError(f"{message} (`{self.prog} --help` explains)")


def add_settings_flags(
    parser: argparse.ArgumentParser, leave_out: Sequence[str] = (), others: bool = False
) -> None:
    """Add a flag without a default for every setting; missing ones come from variables. `others`: also add the
    names of other servers, and a flag for a configuration file."""
    if others:
        parser.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML, below variables")
        parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="describe all settings")
    for title, kind in _GROUPS.items():
        group = parser.add_argument_group(f"{title} (each is also a variable SSD_<NAME>)")
        for name in _own_fields(kind):
            if name not in leave_out:
                _add_flag(group, name, Settings.model_fields[name], ALIASES.get(name, ()) if others else ())
    if others and isinstance(parser, Parser):
        parser.shortened = True


def _short_group(title: str) -> str:
    """A group of settings in a short help."""
    names = _own_fields(_GROUPS[title])
    rows = [
        f"  {flag_name(name) + ' ' + _metavar(Settings.model_fields[name].annotation):35} {COMMON[name]}"
        for name in names
        if name in COMMON
    ]
    others = "also " + " ".join(flag_name(name) for name in names if name not in COMMON)
    wrapped = textwrap.wrap(
        others, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
    return "\n".join([f"{title}:", *rows, *wrapped, ""])


def _own_fields(kind: type[BaseSettings]) -> list[str]:
    """The settings that a class adds to those of its bases."""
    inherited = {name for base in kind.__bases__ for name in getattr(base, "model_fields", {})}
    return [name for name in kind.model_fields if name not in inherited]


def _add_flag(group: Any, name: str, field: FieldInfo, aliases: Sequence[str]) -> None:
    text = (field.description or "").replace("%", "%%")
    if field.default is not None and field.default != "":
        usual = field.default.value if isinstance(field.default, Enum) else field.default
        text += f" ({str(usual).lower() if isinstance(usual, bool) else usual})"
    how: dict[str, Any] = {"dest": _PREFIX + name, "default": argparse.SUPPRESS, "help": text}
    if field.annotation is bool:
        group.add_argument(flag_name(name), *aliases, action=argparse.BooleanOptionalAction, **how)
    else:
        group.add_argument(flag_name(name), *aliases, metavar=_metavar(field.annotation), **how)


def _metavar(annotation: Any) -> str:
    """Placeholder of a value: its choices, or a word for its type."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    if all(isinstance(kind, str) for kind in kinds):  # a Literal
        return "{" + ",".join(kind or "''" for kind in kinds) + "}"
    kind = kinds[0]
    if get_origin(kind) is Literal:
        return _metavar(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "{" + ",".join(str(each.value) for each in kind) + "}"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def given_config(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings of the configuration file, if one was given."""
    from ssd_serve.base.settings_sources import read_config

    return {} if args.config is None else read_config(args.config)


def given_flags(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings that were given as flags, by field name."""
    given: dict[str, object] = {}
    for name, value in vars(args).items():
        if name.startswith(_PREFIX):
            given[name.removeprefix(_PREFIX)] = value
    return given
