"""The registry of draft sources, one line each, and their declarations before loading.

Free of torch: a source's module is imported when it is described or loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import SettingsError
from ssd_serve.models.heads.kinds import EAGLE_KINDS, head_kind
from ssd_serve.models.weights.formats import read_config

if TYPE_CHECKING:
    from ssd_serve.drafter.sources.loading import LoadedSource, SourceConfig

ANY_MODEL, EAGLE = "*", "*eagle"
SOURCES: dict[str, str] = {
    ANY_MODEL: "ssd_serve.drafter.sources.whole_model:load_draft_model",
    EAGLE: "ssd_serve.drafter.sources.eagle:SOURCE",
    "*p-eagle": "ssd_serve.drafter.sources.peagle.source:SOURCE",
    "*pard": "ssd_serve.drafter.sources.pard.source:SOURCE",
    "*medusa": "ssd_serve.drafter.sources.lm_heads.source:SOURCE",
    "*hydra": "ssd_serve.drafter.sources.lm_heads.source:SOURCE",
    "*gumiho": "ssd_serve.drafter.sources.gumiho.source:SOURCE",
    "*dflash": "ssd_serve.drafter.sources.dflash.source:SOURCE",
}
"""`module:name` of a `RegisteredSource`, or of its `load` function where it has no needs.

The key is the value of `SSD_DRAFT` or an entry of `architectures` in the draft's `config.json`; all other
drafts are whole models.
"""
SELF_DRAFT = "self:"
ENTRY_POINTS = "ssd_serve.draft_sources"
"""The entry point group in which installed packages register sources."""


@dataclass(frozen=True, slots=True)
class SourceDescription:
    """The needs of a source, from the target and the drafter's core."""

    features: tuple[int, ...] = ()
    """Target layers that the source reads the outputs of (`FINAL`: the normed last one)."""
    block: int | None = None
    """Tokens below a root that one step drafts at once: only roots are expanded, and trees are no deeper.
    None: node by node."""
    depth: int | None = None
    """Tokens of the deepest path below a root that the source can draft; None: any number."""
    lends: bool = False
    """True: leaves beside a block get its candidates as well, until they are drafted themselves."""
    calibrated: bool = True
    """True: the core fits the scales of the source's scores to outcomes. False: every scale is 1."""
    keeps_tree: bool = True
    """False: the tree below a new root is dropped and drafted again, with the features of committed
    tokens."""


NODE_BY_NODE = SourceDescription()
"""The description of a whole draft model."""


@dataclass(frozen=True, slots=True)
class RegisteredSource:
    """The object that an entry of `SOURCES` names."""

    load: "Callable[[SourceConfig], LoadedSource]"
    describe: Callable[[EngineConfig, Path | None], SourceDescription] = lambda _config, _folder: NODE_BY_NODE
    """Describes the source of a draft folder (None: the source has no files). The verifier calls it too."""


def self_draft_layers(name: str) -> int | None:
    """N of a draft `self:N`, the first N layers of the target; None for other drafts. Raises
    `SettingsError`."""
    if not name.startswith(SELF_DRAFT):
        return None
    if not (number := name.removeprefix(SELF_DRAFT)).isdecimal() or int(number) < 1:
        raise SettingsError(f"the draft {name} is no number of layers: write e.g. {SELF_DRAFT}4")
    return int(number)


def is_source(name: str) -> bool:
    """True if a draft is the name of a registered source rather than a folder or a hub id."""
    return not name.startswith(ANY_MODEL) and (name in SOURCES or bool(_entry_points(name)))


def registered_source(name: str, folder: Path | None) -> RegisteredSource:
    """The source of a draft of this name with its files in `folder`. Raises `SettingsError`."""
    kind = name if folder is None else _kind(folder)
    found = SOURCES.get(kind)
    point = EntryPoint(kind, found, ENTRY_POINTS) if found else next(iter(_entry_points(kind)))
    try:
        entry = point.load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"the draft source {kind} ({point.value}) cannot be loaded: {error}") from error
    if isinstance(entry, RegisteredSource):
        return entry
    return RegisteredSource(cast("Callable[[SourceConfig], LoadedSource]", entry))


def _entry_points(name: str) -> EntryPoints:
    return entry_points(group=ENTRY_POINTS, name=name)


def _kind(folder: Path) -> str:
    if named := next(filter(is_source, read_config(folder).get("architectures") or []), None):
        return str(named)
    kind = head_kind(folder)
    if kind is None:
        return ANY_MODEL
    return EAGLE if kind in EAGLE_KINDS else f"*{kind.lower()}"
