"""What the server needs of a tokenizer.

The tokenizer itself lives with the models; this names only the calls that are made.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from ssd_serve.server.text.output import Detokenizer


class TextTokenizer(Protocol):
    """Text to tokens and back. Calls may come from several threads."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Ids that end an output unless they are ignored."""
        ...

    @property
    def chat_template(self) -> str:
        """The source of the model's chat template; empty where it has none."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        /,
        **variables: object,
    ) -> str:
        """The conversation as one text; `RequestError` when the model has no template or it refuses."""
        ...

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder of what follows `context`, whose end the first words depend on."""
        ...


class TokenTexts:
    """The text of single tokens, special ones included, as it is in the middle of a text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        """The token's text; a piece of a character gives the replacement character."""
        if token not in self._known:
            # At the start of a text some tokenizers drop a leading space.
            before = self._tokenizer.encode("a", add_special_tokens=False)
            stream = self._tokenizer.detokenizer(before, skip_special_tokens=False)
            self._known[token] = stream.push(token) or stream.flush()
        return self._known[token]
