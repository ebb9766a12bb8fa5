"""Answers of one message, told as another API than chat completions tells them.

What the message holds is found as for chat completions, and a `MessageVoice` says it in its API's words.
Knows runs and streams, no API's names.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ssd_serve.server.engine.choice import ChoiceEnd
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.streaming import named_event
from ssd_serve.server.openai.answers import Visit
from ssd_serve.server.openai.replies import speculation

Entry = Mapping[str, Any]
"""A choice, or a piece of one, as chat completions tell it."""
Told = tuple[str, dict[str, object]]
"""An event of a stream: its name, and what it says."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens so far. `cached_tokens` are 0 where they would tell what others have asked."""

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    thought_tokens: int = 0
    metrics: Mapping[str, object] | None = None
    """Figures of speculation, once it is over."""


class MessageVoice(Protocol):
    """How one API tells a message. Methods are called in this order, `whole` where nothing is streamed."""

    def opening(self, counted: TokenCount) -> Iterable[Told]:
        """Before the first token."""
        ...

    def part(self, entry: Entry) -> Iterable[Told]:
        """More of the message."""
        ...

    def closing(self, entry: Entry, counted: TokenCount) -> Iterable[Told]:
        """The end; `entry` is the last one."""
        ...

    def whole(self, entry: Entry, counted: TokenCount) -> Mapping[str, object]:
        """All that was told."""
        ...

    def failed(self, error: ApiError) -> Told:
        """In a stream that has begun."""
        ...


class Spoken:
    """A job of one choice, told by a voice. See `Manner`."""

    def __init__(self, voice: MessageVoice) -> None:
        self._voice = voice
        self._last: Entry = {}
        self._counted: TokenCount | None = None

    async def whole(self, visit: Visit) -> Mapping[str, object]:
        async for _ in self._told(visit):
            pass
        return self._voice.whole(self._last, self._counted or _counted(visit, 0, 0, None))

    async def events(self, visit: Visit) -> AsyncGenerator[bytes, None]:
        async for told in self._told(visit):
            yield named_event(*told)

    def failed(self, error: ApiError) -> bytes:
        return named_event(*self._voice.failed(error))

    async def _told(self, visit: Visit) -> AsyncGenerator[Told, None]:
        voice, tokens, begun, thoughts = self._voice, 0, False, _ThoughtCount()
        ending: ChoiceEnd | None = None
        async with visit.run() as stream:
            async for piece in stream.deltas():
                if not begun:
                    begun = True
                    for told in voice.opening(_counted(visit, 0, 0, None)):
                        yield told
                tokens += len(piece.tokens)
                visit.tenant.output(len(piece.tokens))
                ending = piece.end or ending
                entry = visit.job.shape.part(piece)
                thoughts.part({} if entry is None else entry["delta"], len(piece.tokens))
                if entry is not None:
                    self._last = entry
                    for told in voice.part(entry):
                        yield told
        self._counted = _counted(visit, tokens, thoughts.tokens, ending)
        for told in voice.closing(self._last, self._counted):
            yield told


def _counted(visit: Visit, tokens: int, thoughts: int, ending: ChoiceEnd | None) -> TokenCount:
    usage = cast("Mapping[str, Any]", visit.usage(tokens, {} if ending is None else {0: ending}))
    cached: Mapping[str, int] = usage["prompt_tokens_details"] or {}
    return TokenCount(
        usage["prompt_tokens"],
        tokens,
        cached.get("cached_tokens", 0),
        thoughts,
        None if ending is None else speculation([ending.figures], ending.complete),
    )


class _ThoughtCount:
    """Counts the tokens that came before the first word or call, where there were thoughts."""

    def __init__(self) -> None:
        self.tokens = 0
        self._before = 0
        self._over = False

    def part(self, delta: Any, tokens: int) -> None:
        self._over = self._over or bool(delta.get("content") or delta.get("tool_calls"))
        if not self._over:
            self._before += tokens
        if "reasoning_content" in delta or self.tokens:
            self.tokens = self._before
