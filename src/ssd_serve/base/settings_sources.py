"""Settings from flags and variables: flags override variables, unknown names are errors.

Only this module and the class of settings read the environment. It handles names and origins of settings, not
their meaning.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, cast

import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError

from ssd_serve.base.errors import SettingsError
from ssd_serve.base.names import suggestion
from ssd_serve.base.settings import (
    OTHER_VARIABLES,
    PREFIX,
    REMOVED_SETTINGS,
    RENAMED_SETTINGS,
    SECRETS,
    Settings,
)

_OF_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")
"""Variables that Kubernetes sets in every container for a service with a name that begins with `ssd`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A setting as `ssd settings` shows it. Secrets are masked in `shown`."""

    name: str
    variable: str
    flag: str
    shown: str
    origin: Literal["flag", "variable", "file", "default"]
    meaning: str


def visible_gpus() -> str | None:
    """Return the GPUs that are visible to this process, if not all: numbers or names, with commas. Raises
    `SettingsError` if ROCm's and CUDA's variables differ, since libraries read either. Raises it too for
    ROCR_VISIBLE_DEVICES alone, which renumbers GPUs below those that Ray counts."""
    hip, cuda = os.environ.get("HIP_VISIBLE_DEVICES"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if hip and cuda and hip != cuda:
        raise SettingsError(
            f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} differ: set both alike, or one"
        )
    if os.environ.get("ROCR_VISIBLE_DEVICES") and hip is None:
        raise SettingsError(
            "set HIP_VISIBLE_DEVICES instead of ROCR_VISIBLE_DEVICES: Ray refuses that one alone"
        )
    return hip or cuda


def flag_name(field: str) -> str:
    """The flag of a setting: `--draft-width` for `draft_width`."""
    return "--" + field.replace("_", "-")


def variable_name(field: str) -> str:
    """The variable of a setting: `SSD_DRAFT_WIDTH` for `draft_width`."""
    return PREFIX + field.upper()


def rename_hint(name: str, called: Callable[[str], str]) -> str:
    """Return the hint for a removed setting, such as `; use X=Y instead`, or an empty string. `called` formats its
    name as a flag, variable or argument."""
    hints = {
        called(field): f"; use {called(now)}={value} instead"
        for field, (now, value) in RENAMED_SETTINGS.items()
    }
    hints |= {called(field): f"; {advice}" for field, advice in REMOVED_SETTINGS.items()}
    return hints.get(name, "")


def resolve_arguments(arguments: Mapping[str, object]) -> Settings:
    """Return the settings from arguments of a Python call, variables and defaults."""
    for name in arguments:
        if name not in Settings.model_fields:
            hint = rename_hint(name, str) or suggestion(name, Settings.model_fields)
            raise SettingsError(f"there is no setting {name}{hint}")
    return resolve(arguments, lambda field: f"the argument {field}")


def resolve(
    flags: Mapping[str, object],
    called: Callable[[str], str] = lambda field: f"the flag {flag_name(field)}",
    config: Mapping[str, object] | None = None,
) -> Settings:
    """Return settings from flags (by field name), variables, a `config` file and defaults, in this order.

    Raises `SettingsError` for wrong values; `called` returns the name of a field for its message.
    """
    known = [variable_name(field) for field in Settings.model_fields]
    for variable, value in os.environ.items():
        if variable.startswith(PREFIX) and variable not in known and not _of_kubernetes(variable, value):
            hint = rename_hint(variable, variable_name) or suggestion(variable, known)
            raise SettingsError(f"the variable {variable} is not a setting{hint} (`ssd settings` lists all)")
    from_file = {
        name: value
        for name, value in (config or {}).items()
        if name not in flags and not _variable_is_set(name)
    }

    def named(field: str) -> str:
        return f"{field} of the configuration file" if field in from_file else called(field)

    given = {**from_file, **flags}
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        raise SettingsError(_explain(error, given, named)) from error


def _of_kubernetes(variable: str, value: str) -> bool:
    address = variable.endswith("_PORT") and "://" in value
    return address or _OF_KUBERNETES.search(variable) is not None


def refuse_empty_keys() -> None:
    """Raise `SettingsError` for a key that is set but empty: other empty variables count as unset, but a key was
    intended. Called by processes that serve clients."""
    for variable in map(variable_name, ("api_key", "api_keys_file", "metrics_key")):
        if os.environ.get(variable) == "":
            raise SettingsError(
                f"the variable {variable} is set but empty: give it a value, or take it away to serve without"
            )


def origins(settings: Settings, flags: Mapping[str, object], config: Collection[str] = ()) -> list[Origin]:
    """Origin of each value, in the order of the class. `config`: names in the configuration file."""
    rows: list[Origin] = []
    for name, field in Settings.model_fields.items():
        value: object = getattr(settings, name)
        rows.append(
            Origin(
                name=name,
                variable=variable_name(name),
                flag=flag_name(name),
                shown=_shown(name, value),
                origin=_origin(name, flags, config),
                meaning=field.description or "",
            )
        )
    return rows


def _origin(
    name: str, flags: Collection[str], config: Collection[str]
) -> Literal["flag", "variable", "file", "default"]:
    if name in flags:
        return "flag"
    if _variable_is_set(name):
        return "variable"
    return "file" if name in config else "default"


def _variable_is_set(field: str) -> bool:
    names = [variable_name(field), OTHER_VARIABLES.get(field, "")]
    return any(os.environ.get(name) for name in names)


def _shown(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name in SECRETS:
        return "****"
    return str(value.value) if isinstance(value, Enum) else str(value)


def _explain(error: ValidationError, flags: Mapping[str, object], called: Callable[[str], str]) -> str:
    """Error message with one sentence for each wrong value, without the values: they may be secrets."""
    sentences: list[str] = []
    for problem in error.errors(include_input=False, include_url=False):
        field = str(problem["loc"][0]).lower() if problem["loc"] else ""
        field = field.removeprefix(PREFIX.lower())
        where = called(field) if field in flags else f"the variable {variable_name(field)}"
        message = problem["msg"]
        sentences.append(f"{where}: {message[:1].lower()}{message[1:]}")
    return "; ".join(sentences)


def read_config(path: Path) -> dict[str, object]:
    """Return the settings of the file. Raises `SettingsError` for unknown settings or a missing file."""
    try:
        found: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path} is no YAML: {' '.join(str(error).split())[:300]}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingsError(f"{path} must be a mapping of settings, such as `port: 9000`")
    return _named_values(path, cast("Mapping[object, object]", found))


def _named_values(path: Path, found: Mapping[object, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in Settings.model_fields:
            hint = rename_hint(name, str) or suggestion(name, Settings.model_fields)
            raise SettingsError(f"{path}: there is no setting {str(key)[:64]}{hint}")
        if name in values:
            raise SettingsError(f"{path}: {name} is given twice")
        if isinstance(value, list):
            value = ",".join(map(str, cast("list[object]", value)))
        if isinstance(value, dict):
            raise SettingsError(f"{path}: {name} has settings of its own; it must be one value")
        if value is not None:
            values[name] = value
    return values
