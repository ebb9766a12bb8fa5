"""Which draft sources there are, one line each. Free of torch: a source is imported when it is loaded.

Knows how a source is chosen, not what it does.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ssd_serve.models.config import read_raw

if TYPE_CHECKING:
    from collections.abc import Callable

    from ssd_serve.drafter.sources.loading import LoadedSource, SourceOrder

ANY_MODEL = "*"
SOURCES: dict[str, str] = {
    ANY_MODEL: "ssd_serve.drafter.sources.whole_model:load_draft_model",
    "ngram": "ssd_serve.drafter.sources.ngram:load_ngram",
}
"""What loads a source, as `module:function`, by what chooses it: the name that `SSD_DRAFT` gives, or an entry
of `architectures` in the draft's `config.json`. All other drafts are whole models."""


def is_source(name: str) -> bool:
    """Whether a draft is a source of that name, rather than a folder or a hub id."""
    return name in SOURCES and name != ANY_MODEL


def load_source(name: str, order: "SourceOrder") -> "LoadedSource":
    """The source that a draft of this name is; its files, if it has any, are in the order's folder."""
    module, _, function = SOURCES[name if order.folder is None else _kind(order.folder)].partition(":")
    load = cast("Callable[[SourceOrder], LoadedSource]", getattr(import_module(module), function))
    return load(order)


def _kind(folder: Path) -> str:
    return next(filter(is_source, read_raw(folder).get("architectures") or []), ANY_MODEL)
