"""Settings from a YAML file: a mapping of their names, with dashes or underscores. Knows no other sources."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import yaml  # type: ignore[import-untyped]

from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import successor, suggestion


def read_config(path: Path) -> dict[str, object]:
    """The settings that the file names. Raises `SettingsError` for what is not a setting, or no such file."""
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
    return _settings(path, cast("Mapping[object, object]", found))


def _settings(path: Path, found: Mapping[object, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in Settings.model_fields:
            hint = successor(name, str) or suggestion(name, Settings.model_fields)
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
