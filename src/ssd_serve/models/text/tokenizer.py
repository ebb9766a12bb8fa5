"""A model's tokenizer: text to ids and back, its chat template, and its identity.

Free of torch, because the HTTP server uses it. Knows model folders; knows no requests.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ssd_serve.base.errors import RequestError
from ssd_serve.models.config import model_name
from ssd_serve.models.text.chat import ChatTemplates
from ssd_serve.models.weights.formats import format_of

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_LONG_CHARACTERS = 4096
_CONTEXT = 8
"""Tokens of a prompt's end that its continuation is decoded with."""
_MISSING = -1
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_PIECES = 3
"""Tokens that may be waiting for the last byte of a character."""
_MAX_HELD = 16
"""A character has at most four bytes; more tokens than this are not waiting for the rest of one."""

Decode = Callable[[Sequence[int]], str]


class DetokenizeStream:
    """Joined, the results of `push` and `flush` are the text of all tokens pushed.

    `context` are tokens before the first pushed one (the end of a prompt). Their text is not returned, but
    for a character that only the pushed tokens complete.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._before = list(context)
        """The latest tokens with returned text, as many as the next text may depend on."""
        self._held: list[int] = []
        while self._before and len(self._held) < _MAX_PIECES and decode(self._before).endswith(_BROKEN):
            self._held.insert(0, self._before.pop())

    def push(self, token: int) -> str:
        """The text that became final with this token: often a word, sometimes nothing."""
        self._held.append(token)
        text = self._decode([*self._before, *self._held])
        known = len(self._decode(self._before)) if self._before else 0
        # Tokens without text are held too, e.g. special ones that are skipped.
        if len(text) > known and not text.endswith(_BROKEN):
            self._before, self._held = self._held, []
            return text[known:]
        return self._relieve(text, known) if len(self._held) > _MAX_HELD else ""

    def _relieve(self, text: str, known: int) -> str:
        """Return what no further token can change, or else forget a newest token that has no text."""
        for cut in range(len(self._held) - 1, 0, -1):
            sure = self._decode([*self._before, *self._held[:cut]])
            if known < len(sure) < len(text) and text.startswith(sure):
                self._before, self._held = self._held[:cut], self._held[cut:]
                return sure[known:]
        if text == self._decode([*self._before, *self._held[:-1]]):
            self._held.pop()
        return ""

    def flush(self) -> str:
        """Return the text that was held back, broken characters included, at the end of the output."""
        known = len(self._decode(self._before)) if self._before else 0
        text = self._decode([*self._before, *self._held])
        self._before, self._held = self._held, []
        return text[known:]


class Tokenizer:
    """The tokenizer of a model folder (`tokenizer.json`, or `tokenizer.model`)."""

    def __init__(self, folder: Path) -> None:
        parts = format_of(folder).tokenizer(folder)
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._templates = ChatTemplates(parts.chat_templates, dict(parts.special))
        own, ids = self.token_id(parts.special.get("eos_token", "")), parts.eos_token_ids
        self.eos_token_ids = ids if own is None or own in ids else (*ids, own)
        """Ids that end a text, from the model's configuration and the tokenizer's."""
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token for token, each in added.items() if each.special)
        """Ids whose text is skipped unless a request asks for it."""
        self.name = model_name(folder)

    @property
    def has_chat_template(self) -> bool:
        """Return True if chat requests are possible."""
        return bool(self._templates.sources)

    def chat_template(self, name: str | None = None, tools: bool = False) -> str:
        """Return the source of the chat template for a conversation with or without tools; empty: there is none."""
        if not self.has_chat_template:
            return ""
        return self._templates.sources[self._templates.choose(name, tools)]

    @property
    def vocabulary(self) -> int:
        """Number of ids, added tokens included. A model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids; names of special tokens in the text become those tokens."""
        if len(text) <= _LONG_CHARACTERS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # The same ids, and meanwhile the other threads of this process go on.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text. Ids beyond the vocabulary have no text."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> DetokenizeStream:
        """A detokeniser for one output; `context` is the prompt, so that the first word keeps its space."""
        return DetokenizeStream(lambda ids: self.decode(ids, skip_special_tokens), context[-_CONTEXT:])

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, /, **allowed: Any
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`. `chat_template` names
        one of several templates."""
        if not self.has_chat_template:
            raise RequestError(f"{self.name} has no chat template; use /v1/completions", "messages")
        name = self._templates.choose(allowed.pop("chat_template", None), bool(allowed.get("tools")))
        template = self._templates.of(name)
        return template.render(messages, add_generation_prompt=add_generation_prompt, **allowed)

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._backend.to_str()

    @cached_property
    def _spell(self) -> Callable[[str], bytes]:
        decoder = self._backend.decoder
        is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        return _bytes_of_signs if is_byte_level else _bytes_of_pieces

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token in the middle of a text, of special tokens too; none for an unknown id."""
        name = self._backend.id_to_token(token)
        return b"" if name is None else self._spell(name)

    def meanings(self) -> dict[int, bytes]:
        """Return the bytes of each id's text, or the name of a special token."""
        special, spell = self.special_token_ids, self._spell
        return {
            token: b"<|special|>" + name.encode() if token in special else spell(name)
            for name, token in self._backend.get_vocab(True).items()
        }

    def vocabulary_hash(self) -> str:
        """SHA-256 over all pairs of id and token: equal exactly where ids mean the same."""
        digest = hashlib.sha256()
        for token, token_id in sorted(self._backend.get_vocab(True).items(), key=lambda item: item[1]):
            data = token.encode("utf-8", "surrogatepass")
            digest.update(f"{token_id} {len(data)} ".encode() + data)
        return digest.hexdigest()


@cache
def _signs() -> dict[str, int]:
    """The bytes of the printable signs that stand for them in byte-level vocabularies (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _bytes_of_signs(name: str) -> bytes:
    signs = _signs()
    return bytes(signs[sign] for sign in name) if all(sign in signs for sign in name) else name.encode()


def _bytes_of_pieces(name: str) -> bytes:
    if _BYTE.fullmatch(name):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class CommonTokens:
    """Mapping of a target's tokens to a draft's. `ids` int64 [target's vocabulary]: the draft's ids, -1 where
    it has no such token; `read` is the same with a similar token in those places. `share`: of the target's
    tokens, how many the draft has."""

    ids: npt.NDArray[np.int64]
    read: npt.NDArray[np.int64]
    share: float


def common_tokens(
    target: Tokenizer, draft: Tokenizer, target_vocabulary: int, draft_vocabulary: int
) -> CommonTokens:
    """Vocabularies are those of the models' matrices, which may be padded. A token that the draft does not
    have is read as the last token of its text there."""
    known = {meaning: token for token, meaning in draft.meanings().items() if token < draft_vocabulary}
    wanted = {token: meaning for token, meaning in target.meanings().items() if token < target_vocabulary}
    ids = np.full(target_vocabulary, _MISSING, dtype=np.int64)
    for token, meaning in wanted.items():
        ids[token] = known.get(meaning, _MISSING)
    read = np.maximum(ids, 0)
    unknown = [token for token in wanted if ids[token] == _MISSING]
    for token in unknown:
        inside = draft.encode(target.decode([token], skip_special_tokens=False), add_special_tokens=False)
        if inside and inside[-1] < draft_vocabulary:
            read[token] = inside[-1]
    return CommonTokens(ids, read, 1 - len(unknown) / max(1, len(wanted)))
