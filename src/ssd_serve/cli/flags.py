"""Settings as command-line flags, and a parser that explains what it does not know.

Every field of `Settings` becomes a flag; commands of other rooms may add them to their parsers too.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from ssd_serve.errors import SettingsError
from ssd_serve.settings import Settings
from ssd_serve.settings_sources import flag_name, resolve, successor, suggestion

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]
"""What commands are added to; argparse has no public name for it."""

_PREFIX = "setting_"
"""Keeps settings apart from other arguments of the same name."""


class Parser(argparse.ArgumentParser):
    """No abbreviations; mistakes are `SettingsError`s with a suggestion instead of an exit.

    `fill` adds its arguments when they are asked for the first time.
    """

    def __init__(self, fill: "Callable[[Parser], None] | None" = None, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        self._fill = fill

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Refuse what is unknown here already: this parser knows which flags were possible."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        known, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                name = word.partition("=")[0]
                hint = successor(name, flag_name) or suggestion(name, self._option_string_actions)
                raise SettingsError(f"the flag {name} is unknown{hint} (`{self.prog} --help` lists all)")
        if unknown:
            raise SettingsError(f"the argument '{unknown[0]}' is one too many (`{self.prog} --help`)")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """What argparse found wrong, as an error of ours."""
        raise SettingsError(f"{message} (`{self.prog} --help` explains)")


def add_settings_flags(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """A flag for every setting, without values of its own: what is not given comes from variables."""
    group = parser.add_argument_group("settings (each is also a variable SSD_<NAME>)")
    for name, field in Settings.model_fields.items():
        if name in leave_out:
            continue
        text = (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(
                flag_name(name),
                dest=_PREFIX + name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
        else:
            group.add_argument(
                flag_name(name), dest=_PREFIX + name, metavar="X", default=argparse.SUPPRESS, help=text
            )


def given_flags(args: argparse.Namespace) -> dict[str, object]:
    """The settings that were given as flags, by field name."""
    given: dict[str, object] = {}
    for name, value in vars(args).items():
        if name.startswith(_PREFIX):
            given[name.removeprefix(_PREFIX)] = value
    return given


def settings_from(args: argparse.Namespace) -> Settings:
    """Settings of a command whose parser has the settings' flags."""
    return resolve(given_flags(args))
