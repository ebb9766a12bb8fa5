"""The OpenAI API as a measuring client uses it: what it asks for, and what it reads of a stream.

Every engine with an OpenAI endpoint is understood. Knows neither connections nor what is measured.
"""

from collections.abc import Iterator, Sequence

import msgspec

DATA, DONE = b"data: ", b"[DONE]"
_LINE, _FIELD = b"\n", b"data:"


class Speculation(msgspec.Struct, frozen=True):
    """What a response of this engine tells about its speculation; nulls where the server does not know."""

    num_spec_steps: int = 0
    num_tokens: int = 0
    num_accepted_draft_tokens: int | None = 0
    num_draft_tokens: int | None = None
    cache_hits: int | None = None
    cache_misses: int | None = None


class _Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to a chat message; servers have two names for thoughts."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    """New text, and its ids where the server tells them."""

    text: str | None = ""
    token_ids: list[int] | None = None
    delta: _Delta | None = None

    @property
    def says(self) -> bool:
        """Whether it brings anything of the answer."""
        delta = self.delta or _Delta()
        return bool(
            self.text or self.token_ids or delta.content or delta.reasoning_content or delta.reasoning
        )


class Usage(msgspec.Struct, frozen=True):
    """Counts of the whole answer."""

    completion_tokens: int = 0
    prompt_tokens: int = 0


class Timings(msgspec.Struct, frozen=True):
    """llama.cpp's report of a request; the draft's fields are absent when nothing was drafted."""

    draft_n: int = 0
    draft_n_accepted: int = 0


class _Metrics(msgspec.Struct, frozen=True):
    """This engine's report of a request."""

    speculative_decoding: Speculation | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    timings: Timings | None = None
    metrics: _Metrics | None = None
    error: dict[str, object] | str | None = None

    @property
    def token_ids(self) -> list[int]:
        """The new ids of all choices."""
        return [token for choice in self.choices for token in choice.token_ids or ()]

    @property
    def trouble(self) -> str:
        """The error's message; empty: there is none."""
        told = self.error.get("message", "an error event") if isinstance(self.error, dict) else self.error
        return str(told or "")


def request(prompt: Sequence[int], tokens: int, temperature: float, seed: int) -> dict[str, object]:
    """A stream of exactly so many tokens."""
    return {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "ignore_eos": True,
    }


class Events:
    """Chunks out of bytes as they come; `done` when the server has said that it is."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """The chunks whose line ends in these bytes."""
        *lines, self._rest = (self._rest + data).split(_LINE)
        for line in lines:
            if not line.startswith(_FIELD):
                continue
            told = line.removeprefix(_FIELD).strip()
            if told == DONE:
                self.done = True
            else:
                yield msgspec.json.decode(told, type=Chunk)
