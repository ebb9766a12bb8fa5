"""Names: of models on the Hugging Face hub, and labels that processes give themselves in logs and metrics."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the hub, and which state of it: a branch, a tag, a commit, or what is newest."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        """The name as people write it."""
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def commit(self) -> str | None:
        """The revision, where it can never mean something else."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None


def hub_id(name: str) -> HubId | None:
    """`owner/name` or `owner/name@revision` in parts; None for a text that is neither."""
    found = _HUB_ID.fullmatch(name)
    return None if found is None else HubId(found[1], found[2])


def without_revision(name: str) -> str:
    """Model name without its revision."""
    found = hub_id(name)
    return name if found is None else found.name


def pinned(name: str, folder: Path) -> str:
    """A model's name with the commit that was found for it, if its folder is a download of the hub."""
    found = hub_id(name)
    if found is None or folder.parent.name != "snapshots" or not _COMMIT.fullmatch(folder.name):
        return name
    return str(HubId(found.name, folder.name))


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
