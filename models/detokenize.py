"""Text from tokens, one token at a time.

A token may hold a part of a character, and some tokenizers write a token differently at the start of a text.
So a few earlier tokens are decoded along with the new ones, and text that ends within a character is held
back. Knows a decoding function; knows no tokenizer and no stop strings.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class DetokenizeStream:
    """Joined, the results of `push` and `flush` are the text of all tokens pushed.

    `context` are tokens before the first pushed one (the end of a prompt); their text is not returned.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._before = list(context)
        """Tokens whose text was returned; only as many as the next text may depend on."""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that became final with this token: often a word, sometimes nothing."""
        self._held.append(token)
        text = self._decode([*self._before, *self._held])
        if text.endswith(_BROKEN):
            return ""
        known = len(self._decode(self._before)) if self._before else 0
        if len(text) <= known:  # a token without text, e.g. a special one that is skipped
            return ""
        self._before, self._held = self._held, []
        return text[known:]

    def flush(self) -> str:
        """What was held back, broken characters included, at the end of the text."""
        known = len(self._decode(self._before)) if self._before else 0
        text = self._decode([*self._before, *self._held])
        self._before, self._held = self._held, []
        return text[known:]
