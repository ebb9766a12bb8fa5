"""Names: of models on the Hugging Face hub, and labels that processes give themselves in logs and metrics."""

import difflib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_HUB_ID = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?(?::([A-Za-z0-9][\w.-]*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the hub, its state (a branch, a tag, a commit, or the newest), and one of its GGUF files."""

    name: str
    revision: str | None = None
    variant: str | None = None
    """A part of the name of a GGUF file, such as `Q4_K_M`."""

    def __str__(self) -> str:
        """The name as people write it."""
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.name}{revision}" + ("" if self.variant is None else f":{self.variant}")

    @property
    def commit(self) -> str | None:
        """The revision, where it can never mean something else."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None


def hub_id(name: str) -> HubId | None:
    """Return `owner/name`, `owner/name@revision` or `owner/name:variant` in parts; None for any other text."""
    found = _HUB_ID.fullmatch(name)
    return None if found is None else HubId(*found.groups())


def without_revision(name: str) -> str:
    """Model name without its revision."""
    found = hub_id(name)
    return name if found is None else found.name


def pinned(name: str, path: Path) -> str:
    """Return a model's name with the commit that was found for it, if its folder or file is a hub download."""
    found, folder = hub_id(name), path if path.parent.name == "snapshots" else path.parent
    if found is None or folder.parent.name != "snapshots" or not _COMMIT.fullmatch(folder.name):
        return name
    return str(HubId(found.name, folder.name, found.variant))


LONGEST_LABEL = 128
"""Bytes."""
_DIGEST = 12


def is_label(text: str) -> bool:
    """True if a text may be a label; an empty one may."""
    return len(text) <= LONGEST_LABEL and len(text.encode()) <= LONGEST_LABEL and text.isprintable()


def as_label(text: str) -> str:
    """The text itself where it may be a name, else its end and a digest of it, so that equal texts stay
    equal."""
    if is_label(text):
        return text
    end = "".join(sign for sign in text[-64:] if sign.isascii() and sign.isprintable())
    return f"{end}#{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or an empty string if no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
