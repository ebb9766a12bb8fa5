"""Text of tokens: what the server needs of a tokenizer, incremental decoding, and stop strings.

Text, usage and finish reason do not depend on how messages group tokens. Knows nothing about HTTP or the
engine.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ssd_serve.base.errors import EngineDeadError
from ssd_serve.base.messages import Finished

TOKEN_UNITS = 8
"""Decoding a token takes about as long as tokenizing so many characters."""


def token_units(counts: Iterable[int]) -> int:
    """Return the cost of decoding so many tokens, in characters."""
    return TOKEN_UNITS * sum(counts)


class Detokenizer(Protocol):
    """Incremental decoding of one output; bytes of an unfinished character are held back."""

    def push(self, token: int) -> str:
        """Return the text that is certain with this token."""
        ...

    def flush(self) -> str:
        """Return the text that is still held back, at the end."""
        ...


class TextTokenizer(Protocol):
    """Text to tokens and back. Calls may come from several threads."""

    @property
    def eos_token_ids(self) -> Collection[int]:
        """Ids that end an output unless they are ignored."""
        ...

    def chat_template(self, name: str | None = None, tools: bool = False) -> str:
        """Return the source of the chat template of a conversation with or without tools; empty: there is none.

        Raises `RequestError` where there is none of this name.
        """
        ...

    @property
    def special_token_ids(self) -> Collection[int]:
        """Ids that are skipped in texts unless a request asks for them."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token in the middle of a text, of special tokens too."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, /, **variables: Any
    ) -> str:
        """Return the conversation as one text; `RequestError` where there is no template or it refuses."""
        ...

    def stream(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """Return an incremental decoder for tokens that follow `context`."""
        ...


@dataclass(slots=True)
class LoadedTokenizer:
    """The model's tokenizer, which is loaded after the server has started to listen."""

    tokenizer: TextTokenizer | None = None

    def __call__(self) -> TextTokenizer:
        """Return the tokenizer. Raises `EngineDeadError` before it is loaded."""
        if self.tokenizer is None:
            raise EngineDeadError("the model's tokenizer has not been loaded")
        return self.tokenizer


class TokenTexts:
    """Texts and bytes of single tokens, special tokens included, as they are in the middle of a text."""

    def __init__(self, tokenizer: Callable[[], TextTokenizer]) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def _of(self, token: int) -> tuple[str, bytes]:
        if token not in self._known:
            data = self._tokenizer().token_bytes(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(rf"\x{byte:02x}" for byte in data)
            self._known[token] = text, data
        return self._known[token]

    def text_of(self, token: int) -> str:
        r"""Return the token's text; a part of a character is written as OpenAI does: `bytes:\xf0\x9f`."""
        return self._of(token)[0]

    def bytes_of(self, token: int) -> bytes:
        return self._of(token)[1]

    def is_special(self, token: int) -> bool:
        """Return True for a token that is skipped in texts."""
        return token in self._tokenizer().special_token_ids


class StopStrings:
    """An Aho-Corasick automaton of stop strings, built once per request and shared by its choices.

    A state is the longest suffix of the text that is a prefix of a stop string. The cost per character therefore
    does not depend on the number and length of the strings.
    """

    def __init__(self, strings: tuple[str, ...] = ()) -> None:
        self.strings = strings
        self.next: list[dict[str, int]] = [{}]
        """Next state by character, for each state; state 0 is the empty prefix."""
        self.back: list[int] = [0]
        """State of the longest proper suffix that is a prefix, for each state."""
        self.length: list[int] = [0]
        """Length of the prefix, for each state."""
        self.complete: list[str | None] = [None]
        """Longest stop string that ends here, for each state."""
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self.next[state].get(character)
            if following is None:
                following = self.next[state][character] = len(self.next)
                self.next.append({})
                self.back.append(0)
                self.length.append(self.length[state] + 1)
                self.complete.append(None)
            state = following
        self.complete[state] = string

    def _link(self) -> None:
        """Set `back` breadth first: a suffix is shorter than its state."""
        waiting = deque(self.next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self.next[state].items():
                waiting.append(following)
                end = self.step(self.back[state], character)
                self.back[following] = end
                self.complete[following] = self.complete[following] or self.complete[end]

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character. Amortized cost is constant."""
        while state and character not in self.next[state]:
            state = self.back[state]
        return self.next[state].get(character, 0)


class StopScanner:
    """Finds the first stop string in a growing text, and holds back possible beginnings of one.

    The stop string that ends first wins; of two with the same end, the longer one.
    """

    def __init__(self, stops: StopStrings, include_stop: bool) -> None:
        self._stops = stops
        self._include = include_stop
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text to show now, and the stop string that was found, if any."""
        stops, state = self._stops, self._state
        for place, character in enumerate(text, 1):
            state = stops.step(state, character)
            stop = stops.complete[state]
            if stop is not None:
                found = self.release() + text[:place]
                return found if self._include else found[: len(found) - len(stop)], stop
        buffer = self._held + text
        shown = len(buffer) - stops.length[state]
        self._state, self._held = state, buffer[shown:]
        return buffer[:shown], None

    def release(self) -> str:
        """Return the text that is held back, at the end of the text."""
        held, self._held, self._state = self._held, "", 0
        return held


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules of one request for its text."""

    stops: StopStrings = field(default_factory=StopStrings)
    include_stop: bool = False
    min_tokens: int = 0
    """Stop strings have no effect in the first `min_tokens` tokens."""
    stop_token_set: frozenset[int] = frozenset()
    """Ids that may end the output; their text is held back until the engine reports the end or more tokens."""
    empty: bool = False
    """The output has no tokens; the one that the engine makes behind every prompt is dropped."""

    def end(self, report: Finished) -> Finished:
        """Return the engine's report of the end as these rules have it."""
        if not self.empty:
            return report
        figures = msgspec.structs.replace(report.figures, tokens=0)
        return msgspec.structs.replace(report, reason="length", stop_token=None, figures=figures)


class TextAssembler:
    """The text of one choice. Push tokens in order until one stops; then, or at the end, `finish`."""

    def __init__(self, detokenizer: Detokenizer, rules: TextRules) -> None:
        self._detokenizer = detokenizer
        self._rules = rules
        self._scanner = StopScanner(rules.stops, rules.include_stop)
        self._waiting: int | None = None
        self.tokens = 0
        """Tokens that count as output."""
        self.length = 0
        """Characters decoded so far, held back ones included."""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """Add one token and return the text that it makes certain.

        The token is not counted in `tokens` where the text stopped before it.
        """
        text = self._settle()
        if self.stopped_by is not None or self._rules.empty:
            return text
        self.tokens += 1
        if token in self._rules.stop_token_set:
            self._waiting = token
            return text
        return text + self._decode(token)

    def finish(self, stop_token: int | None = None) -> str:
        """End the text; the text of `stop_token`, the id that ended it, is included only where requested."""
        if self.stopped_by is not None:
            return ""
        if self._waiting is not None and self._waiting == stop_token and not self._rules.include_stop:
            self._waiting = None
        text = self._settle()
        if self.stopped_by is None:
            text += self._search(self._detokenizer.flush())
        if self.stopped_by is None:
            text += self._scanner.release()
        return text

    def _settle(self) -> str:
        """Decode a held token that was not the end."""
        if self._waiting is None:
            return ""
        token, self._waiting = self._waiting, None
        return self._decode(token)

    def _decode(self, token: int) -> str:
        return self._search(self._detokenizer.push(token))

    def _search(self, new: str) -> str:
        self.length += len(new)
        if not self._rules.stops.strings or self.tokens <= self._rules.min_tokens:
            return new
        text, self.stopped_by = self._scanner.feed(new)
        return text
