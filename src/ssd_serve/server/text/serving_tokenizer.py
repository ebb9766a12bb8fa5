"""The model's tokenizer as the front end wants it."""

from collections.abc import Mapping, Sequence
from typing import Any

from ssd_serve.base.errors import EngineDeadError
from ssd_serve.models.text.tokenizer import DetokenizeStream
from ssd_serve.models.text.tokenizer import Tokenizer


class ServingTokenizer:
    """The model's tokenizer as the server wants it, once it has been found."""

    def __init__(self) -> None:
        self._found: Tokenizer | None = None

    def arrive(self, tokenizer: Tokenizer) -> None:
        """From now on this is the one. Call it before an engine is ready."""
        self._found = tokenizer

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._found is None:
            raise EngineDeadError("the model's tokenizer has not been loaded")
        return self._found

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an output unless they are ignored."""
        return self._tokenizer.eos_token_ids

    @property
    def chat_template(self) -> str:
        """The source of the model's chat template."""
        return self._tokenizer.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._tokenizer.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, /, **variables: Any
    ) -> str:
        """The conversation as one text."""
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt, **variables)

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> DetokenizeStream:
        """A fresh incremental decoder of what follows `context`."""
        return self._tokenizer.stream(context, skip_special_tokens)
