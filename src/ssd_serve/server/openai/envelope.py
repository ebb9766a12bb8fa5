"""What a request says that this server has no field for: told and passed over, or refused as a slip.

Clients add what other servers know; a request does not fail because of it. But a name that nearly is one of
ours was meant to be it, and a name that others have for one of ours says the same twice. Knows names of
fields, not what they do.
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

HEADER = "X-SSD-Ignored"
"""Of an answer: the fields of its request that changed nothing, with commas."""

_ALIKE = 0.85
"""Of two names without their punctuation, by difflib's ratio."""
_LONGEST_NAME = 64
_MOST_TOLD = 32


@dataclass(frozen=True, slots=True)
class Envelope:
    """How requests are read: `strict`, only as the document says."""

    strict: bool = False

    def ignored(self, body: BaseModel) -> tuple[str, ...]:
        """Names of the fields that change nothing, with those of the objects that they stand in.

        Raises `ApiError` for one that nearly is a known one, for another name of one that is given too, for
        too many, and for any where this is strict.
        """
        return tuple(dict.fromkeys(self._unknown(body, "")))

    def _unknown(self, body: BaseModel, path: str) -> Iterator[str]:
        """Of an object and the objects in it; lists of them share a name."""
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
            told = path + name[:_LONGEST_NAME]
            if name in known:
                raise bad_request(
                    f"{told}: another name of {known[name]}; give one of them", told, "invalid_value"
                )
            meant = _nearest(name, bare)
            if meant is not None:
                raise _unknown_field(told, f"unknown field; did you mean {meant}?")
            if self.strict:
                raise _unknown_field(told, "unknown field")


def names_of(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Every name that a field may be given by, and the field."""
    for field, info in kind.model_fields.items():
        yield field, field
        yield from ((other, field) for other in _aliases(info))


def _aliases(info: FieldInfo) -> Iterable[str]:
    alias = info.validation_alias
    return [str(each) for each in alias.choices] if isinstance(alias, AliasChoices) else []


@cache
def _known(kind: type[BaseModel]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The fields by every name, and the names without their punctuation."""
    known = dict(names_of(kind))
    return known, {_bare(each): each for each in known}


def _nearest(name: str, bare: Mapping[str, str]) -> str | None:
    if len(name) > _LONGEST_NAME:
        return None
    found = difflib.get_close_matches(_bare(name), bare, n=1, cutoff=_ALIKE)
    return bare[found[0]] if found else None


def _bare(name: str) -> str:
    """`maxTokens` and `max-tokens` are `max_tokens`."""
    return re.sub(r"[-_ ]", "", name.casefold())


def _unknown_field(path: str, what: str) -> ApiError:
    return bad_request(f"{path}: {what}", path, "unknown_field")


def for_log(names: Iterable[str]) -> str:
    """The names as a log may have them: what is no usual name may be a text of the user's."""
    usual = [name for name in names if re.fullmatch(r"[a-z][a-z0-9_.]*", name)]
    return ", ".join(usual[:_MOST_TOLD]) or "of no usual names"


def told_ignored(request: Request) -> dict[str, str]:
    """The header of the answer to a request whose body was read; none where nothing was ignored."""
    names: tuple[str, ...] = request.state.ignored
    return {HEADER: ",".join(quote(name) for name in names[:_MOST_TOLD])} if names else {}
