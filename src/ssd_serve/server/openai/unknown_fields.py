"""Unknown fields of requests: reported in a header and ignored, or refused as a typing error.

Clients send fields of other servers, which must not fail.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast
from urllib.parse import quote

from fastapi import Request
from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from ssd_serve.server.errors import ApiError, bad_request
from ssd_serve.server.limits import MAX_UNKNOWN_FIELDS
from ssd_serve.server.openai.fields import Lenient

IGNORED_HEADER = "X-SSD-Ignored"
"""Response header with the ignored fields of the request, separated by commas."""

_ALIKE = 0.85
"""Similarity (difflib) of a known name and its misspelling, both without punctuation."""
_LONGEST_NAME = 64
_MOST_REPORTED = 32


@dataclass(frozen=True, slots=True)
class UnknownFields:
    """Finds unknown fields; `strict` refuses them."""

    strict: bool = False

    def ignored(self, body: BaseModel) -> tuple[str, ...]:
        """Return the paths of ignored fields.

        Raises `ApiError` for a misspelled field, an alias of a field that is given too, too many fields, and
        any unknown field where this is strict.
        """
        return tuple(dict.fromkeys(self._unknown(body, "")))

    def _unknown(self, body: BaseModel, path: str) -> Iterator[str]:
        extra = body.model_extra or {}
        if extra:
            self._check(type(body), extra, path)
            if not (isinstance(body, Lenient) and body.passes_on):
                yield from (path + name[:_LONGEST_NAME] for name in extra)
        for name, value in body:
            if isinstance(value, BaseModel):
                yield from self._unknown(value, f"{path}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
                for each in cast("list[BaseModel]", value):
                    yield from self._unknown(each, f"{path}{name}.")

    def _check(self, kind: type[BaseModel], extra: Mapping[str, object], path: str) -> None:
        if len(extra) > MAX_UNKNOWN_FIELDS:
            raise _unknown_field(path or "body", f"more than {MAX_UNKNOWN_FIELDS} fields that are not known")
        known, bare = _known(kind)
        for name in extra:
            full = path + name[:_LONGEST_NAME]
            if name in known:
                raise bad_request(
                    f"{full}: another name of {known[name]}; give one of them", full, "invalid_value"
                )
            meant = _nearest(name, bare)
            if meant is not None:
                raise _unknown_field(full, f"unknown field; did you mean {meant}?")
            if self.strict:
                raise _unknown_field(full, "unknown field")


def names_of(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield every name and alias with its field."""
    for field, info in kind.model_fields.items():
        yield field, field
        yield from ((other, field) for other in _aliases(info))


def _aliases(info: FieldInfo) -> Iterable[str]:
    alias = info.validation_alias
    return [str(each) for each in alias.choices] if isinstance(alias, AliasChoices) else []


@cache
def _known(kind: type[BaseModel]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return fields by name and alias, and names by their form without punctuation."""
    known = dict(names_of(kind))
    return known, {_bare(each): each for each in known}


def _nearest(name: str, bare: Mapping[str, str]) -> str | None:
    if len(name) > _LONGEST_NAME:
        return None
    found = difflib.get_close_matches(_bare(name), bare, n=1, cutoff=_ALIKE)
    return bare[found[0]] if found else None


def _bare(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.casefold())


def _unknown_field(path: str, what: str) -> ApiError:
    return bad_request(f"{path}: {what}", path, "unknown_field")


def for_log(names: Iterable[str]) -> str:
    """Return names for the log, without those that may be text of the user."""
    usual = [name for name in names if re.fullmatch(r"[a-z][a-z0-9_.]*", name)]
    return ", ".join(usual[:_MOST_REPORTED]) or "with unusual names"


def ignored_header(request: Request) -> dict[str, str]:
    """Return the header with the ignored fields of a request; empty where there are none."""
    names: tuple[str, ...] = request.state.ignored
    return {IGNORED_HEADER: ",".join(quote(name) for name in names[:_MOST_REPORTED])} if names else {}
