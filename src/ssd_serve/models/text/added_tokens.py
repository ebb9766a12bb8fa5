"""Added tokens of a tokenizer folder: all files that can name them, to the ids of transformers.

`tokenizer_config.json` lists them in `added_tokens_decoder`; without that entry `added_tokens.json` does, and
`special_tokens_map.json` names the special ones.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import Json, read_json

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_MARK = re.compile(r"<[|｜][^\s<>|｜{}]+[|｜]>")
"""Marks of chat templates that are tokens in most vocabularies."""


def special_tokens(folder: Path, settings: Json) -> dict[str, AddedToken]:
    """Return the named special tokens (`bos_token`, ...) of a folder; `settings` is its `tokenizer_config.json`."""
    found = dict(_named(settings))
    if "added_tokens_decoder" not in settings:
        found |= _named(_optional(folder / "special_tokens_map.json"))
    return found


def add_tokens(backend: Tokenizer, folder: Path, settings: Json, named: Mapping[str, AddedToken]) -> None:
    """Add the tokens that the folder names to the tokenizer. Raises `CheckpointError` where an id differs."""
    special = {token.content: token for token in named.values()} | dict(_extra(settings))
    try:
        if "added_tokens_decoder" in settings:
            listed = {int(index): _token(each) for index, each in settings["added_tokens_decoder"].items()}
        else:
            # In this file transformers passes over `additional_special_tokens`.
            special |= dict(_extra(_optional(folder / "special_tokens_map.json"), _EXTRA[:1]))
            listed = {
                int(index): AddedToken(content, normalized=content not in special, special=content in special)
                for content, index in _optional(folder / "added_tokens.json").items()
            }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: its lists of added tokens are damaged ({error})") from error
    for token in listed.values():
        token.special = token.special or token.content in {each.content for each in named.values()}
    known = {each.content: repr(each) for each in backend.get_added_tokens_decoder().values()}
    new = [
        listed[index] for index in sorted(listed) if known.get(listed[index].content) != repr(listed[index])
    ]
    contents = {*known, *(token.content for token in new)}
    new += [token for content, token in special.items() if content not in contents]
    backend.add_tokens(new)
    for index, token in listed.items():
        if (found := backend.token_to_id(token.content)) != index:
            raise CheckpointError(
                f"{folder}: the added token {token.content!r} has the id {index} in its files and {found} in "
                "its vocabulary; get the tokenizer's files again"
            )


def check_marks(backend: Tokenizer, named: Mapping[str, str], template: str, vocabulary: int | None) -> None:
    """Raise `CheckpointError` where the end token, or a mark of the chat template, is no token of the model.

    Models whose marks are all plain text exist (`<|user|>` of Zephyr); marks of both kinds are a damaged folder.
    `vocabulary` is the model's, None where it is not known.
    """
    end = named.get("eos_token")
    index = None if end is None else backend.token_to_id(end)
    if end is not None and (index is None or (vocabulary is not None and index >= vocabulary)):
        raise CheckpointError(
            f"the end token {end!r} is no token of the model: no text would end; name the right eos_token in "
            "tokenizer_config.json, or get the tokenizer's files again"
        )
    ids = {mark: backend.token_to_id(mark) for mark in sorted(set(_MARK.findall(template)))}
    texts = [mark for mark, found in ids.items() if found is None]
    if texts and len(texts) < len(ids):
        raise CheckpointError(
            f"the chat template has marks that are no tokens of the model: {', '.join(texts)}; get the files that "
            "name them (tokenizer.json, tokenizer_config.json, added_tokens.json)"
        )


def _named(source: Json) -> Iterator[tuple[str, AddedToken]]:
    for key, value in source.items():
        if key.endswith("_token") and (
            isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)
        ):
            yield key, _token(value, special=True)


def _extra(source: Json, keys: Sequence[str] = _EXTRA) -> Iterator[tuple[str, AddedToken]]:
    found: Any = next((source[key] for key in keys if source.get(key)), [])
    for each in found.values() if isinstance(found, Mapping) else found:
        token = _token(each, special=True)
        yield token.content, token


def _token(value: Any, special: bool = False) -> AddedToken:
    """Return a token that is stored as a string or as an object with `content` and flags."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    return AddedToken(str(value["content"]), **{**flags, "special": special or flags.get("special", False)})


def _optional(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}
