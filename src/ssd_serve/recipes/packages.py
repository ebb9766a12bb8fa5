"""The installed packages whose sources may be trained on: those under licences that only ask to be named.

Reads what packages declare of themselves (PEP 639 expressions, else classifiers, else the old field) and
refuses whatever it does not know. Does not know corpora or tokens.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from ssd_serve.recipes.corpus import SourceFile, read_source

PERMISSIVE = frozenset(
    {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND", "ISC"}
    | {"MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"}
)
"""SPDX identifiers of licences that ask for no more than their own text."""
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}
_FIELDS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    **{name: name for name in PERMISSIVE},
}
_OWN = "ssd-serve"
_VENDORED = frozenset(
    {"_vendor", "_vendored_packages", "thirdparty", "thirdparty_files", "third_party", "vendor"}
)
"""Folders of other projects' files, whose licences the package does not declare."""
_LARGEST = 300_000
"""Characters; what is larger is a table more often than a program."""


@dataclass(frozen=True)
class PythonPackage:
    """An installed package: its licence as an SPDX expression and its Python sources."""

    name: str
    version: str
    licence: str
    files: tuple[SourceFile, ...]


def permissive_packages() -> tuple[PythonPackage, ...]:
    """Those with sources, by name; a file's path begins with the package's name."""
    found: dict[str, PythonPackage] = {}
    for distribution in distributions():
        licence = permissive_licence(distribution)
        if licence is None or distribution.name == _OWN or distribution.name in found:
            continue
        files = tuple(_sources(distribution))
        if files:
            found[distribution.name] = PythonPackage(distribution.name, distribution.version, licence, files)
    return tuple(found[name] for name in sorted(found))


def permissive_licence(distribution: Distribution) -> str | None:
    """The licence as an SPDX expression where all of it is permissive; None for others and where it is not
    clear."""
    metadata = distribution.metadata
    expression = _first(metadata.get_all("License-Expression"))
    if not expression:
        named = [text.split(" :: ")[-1] for text in metadata.get_all("Classifier") or [] if _is_licence(text)]
        old = _first(metadata.get_all("License"))
        known = [_CLASSIFIERS.get(name) for name in named] or [_FIELDS.get(old)]
        if None in known:
            return None
        return " AND ".join(sorted({name for name in known if name is not None}))
    without_exceptions = re.sub(r"\bWITH \S+", "", expression)
    names = set(re.findall(r"[\w.+-]+", without_exceptions)) - {"AND", "OR"}
    return expression if names <= PERMISSIVE else None


def _first(values: list[str] | None) -> str:
    return values[0] if values else ""


def _is_licence(classifier: str) -> bool:
    return classifier.startswith("License :: ") and not classifier.endswith("OSI Approved")


def _sources(distribution: Distribution) -> Iterator[SourceFile]:
    for file in sorted(distribution.files or [], key=str):
        path = Path(str(distribution.locate_file(file)))
        outside = ".." in file.parts or not _VENDORED.isdisjoint(file.parts)
        if path.suffix != ".py" or outside or not path.is_file():
            continue
        text = read_source(path)
        if text is not None and len(text) <= _LARGEST:
            yield SourceFile(f"{distribution.name}/{file.as_posix()}", text)
