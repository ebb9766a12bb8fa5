"""Which draft sources there are, one line each. Free of torch: a source is imported when it is loaded.

Knows how a source is chosen, not what it does.
"""

from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ssd_serve.base.errors import SettingsError
from ssd_serve.models.weights.formats import read_config
from ssd_serve.models.heads.kinds import head_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from ssd_serve.drafter.sources.loading import LoadedSource, SourceConfig

ANY_MODEL, EAGLE = "*", "*eagle"
SOURCES: dict[str, str] = {
    ANY_MODEL: "ssd_serve.drafter.sources.whole_model:load_draft_model",
    EAGLE: "ssd_serve.drafter.sources.eagle:load_eagle",
}
"""What loads a source, as `module:function`, by what chooses it: the name that `SSD_DRAFT` gives, or an entry
of `architectures` in the draft's `config.json`. All other drafts are whole models."""
ITSELF = "self:"
ENTRY_POINTS = "ssd_serve.draft_sources"
"""The group in which installed packages name sources of their own, likewise."""


def self_draft_layers(name: str) -> int | None:
    """Of a target that drafts for itself (`self:N`) with how many of its layers; None: another draft. Raises
    `SettingsError`."""
    if not name.startswith(ITSELF):
        return None
    if not (number := name.removeprefix(ITSELF)).isdecimal() or int(number) < 1:
        raise SettingsError(f"the draft {name} is no number of layers: write e.g. {ITSELF}4")
    return int(number)


def is_source(name: str) -> bool:
    """Whether a draft is a source of that name, rather than a folder or a hub id."""
    return not name.startswith(ANY_MODEL) and (name in SOURCES or bool(_entry_points(name)))


def is_head(folder: Path) -> bool:
    """Whether the draft in a folder is an EAGLE head. Raises `CheckpointError` for heads of other kinds."""
    return _kind(folder) == EAGLE


def load_source(name: str, order: "SourceConfig") -> "LoadedSource":
    """The source that a draft of this name is; its files, if it has any, are in the order's folder."""
    kind = name if order.folder is None else _kind(order.folder)
    found = SOURCES.get(kind)
    point = EntryPoint(kind, found, ENTRY_POINTS) if found else next(iter(_entry_points(kind)))
    try:
        load = cast("Callable[[SourceConfig], LoadedSource]", point.load())
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"the draft source {kind} ({point.value}) cannot be loaded: {error}") from error
    return load(order)


def _entry_points(name: str) -> EntryPoints:
    return entry_points(group=ENTRY_POINTS, name=name)


def _kind(folder: Path) -> str:
    if named := next(filter(is_source, read_config(folder).get("architectures") or []), None):
        return str(named)
    return ANY_MODEL if head_kind(folder) is None else EAGLE
