"""The tokenizer that the server needs. The model's own tokenizer lives with the models."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ssd_serve.base.errors import EngineDeadError
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.server.text.output import Detokenizer

TOKEN_UNITS = 8
"""Decoding a token takes about as long as tokenizing so many characters."""


def token_units(counts: Iterable[int]) -> int:
    """Return the cost of decoding so many tokens, in characters."""
    return TOKEN_UNITS * sum(counts)


class TextTokenizer(Protocol):
    """Text to tokens and back. Calls may come from several threads."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Ids that end an output unless they are ignored."""
        ...

    @property
    def chat_template(self) -> str:
        """Source of the model's chat template; empty where it has none."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, /, **variables: Any
    ) -> str:
        """Return the conversation as one text; `RequestError` where there is no template or it refuses."""
        ...

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """Return an incremental decoder for tokens that follow `context`."""
        ...


class ServingTokenizer:
    """The model's tokenizer, loaded after the server has started to listen."""

    def __init__(self) -> None:
        self._loaded: Tokenizer | None = None

    def set(self, tokenizer: Tokenizer) -> None:
        """Use this tokenizer. Must be called before an engine is ready."""
        self._loaded = tokenizer

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._loaded is None:
            raise EngineDeadError("the model's tokenizer has not been loaded")
        return self._loaded

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._tokenizer.eos_token_ids

    @property
    def chat_template(self) -> str:
        return self._tokenizer.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, /, **variables: Any
    ) -> str:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt, **variables)

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        return self._tokenizer.stream(context, skip_special_tokens)


class TokenTexts:
    """Texts of single tokens, special tokens included, as they are in the middle of a text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def text_of(self, token: int) -> str:
        """Return the token's text; a part of a character gives the replacement character."""
        if token not in self._known:
            # At the start of a text some tokenizers drop a leading space.
            before = self._tokenizer.encode("a", add_special_tokens=False)
            stream = self._tokenizer.detokenizer(before, skip_special_tokens=False)
            self._known[token] = stream.push(token) or stream.flush()
        return self._known[token]
