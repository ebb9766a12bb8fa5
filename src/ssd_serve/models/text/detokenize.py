"""Text from tokens, one token at a time.

A token may hold a part of a character, and some tokenizers write a token differently at the start of a text.
So a few earlier tokens are decoded along with the new ones, and text that ends within a character is held
back: briefly, so that output without end that is no text costs no more than other output. Knows a decoding
function; knows no tokenizer and no stop strings.

By hand, because `tokenizers.DecodeStream` cannot give what it holds back at the end of an output, and decodes
all of it again with each token where an output is no text: two seconds for 4,000 tokens.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_PIECES = 3
"""Tokens that may be waiting for the last byte of a character."""
_MAX_HELD = 16
"""A character has at most four bytes; more tokens than this are not waiting for the rest of one."""


class DetokenizeStream:
    """Joined, the results of `push` and `flush` are the text of all tokens pushed.

    `context` are tokens before the first pushed one (the end of a prompt). Their text is not returned, but
    for a character that only the pushed tokens complete.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._before = list(context)
        """Tokens whose text was returned; only as many as the next text may depend on."""
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
        """What was held back, broken characters included, at the end of the text."""
        known = len(self._decode(self._before)) if self._before else 0
        text = self._decode([*self._before, *self._held])
        self._before, self._held = self._held, []
        return text[known:]
