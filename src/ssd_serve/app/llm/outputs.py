"""Outputs of prompts: whole texts and pieces of them, made from the tokens that the engine commits."""

from collections import deque
from dataclasses import dataclass

from ssd_serve.base.errors import SsdError
from ssd_serve.base.messages import (
    Committed,
    Figures,
    Finished,
    TokenLogprobs,
)
from ssd_serve.server.text import TextAssembler


@dataclass(frozen=True, slots=True)
class Output:
    """A generated text. `prompt` is the index of its prompt, `choice` its index among the n texts of that
    prompt."""

    prompt: int
    choice: int
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """stop: an end token or a stop string; length: as many tokens as may be."""
    stop_reason: str | int | None
    """The stop string or the token that ended the text."""
    seed: int
    logprobs: tuple[TokenLogprobs, ...] | None
    """Log-probabilities of each token, if requested."""
    figures: Figures
    """Statistics of speculation."""
    first_tokens: int
    """Tokens that came first, with the end of the prompt."""
    first_token_s: float
    seconds: float
    """Seconds from the submission to the first tokens, and to the last."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first ones; None: nothing came after them."""
        tokens, seconds = len(self.token_ids) - self.first_tokens, self.seconds - self.first_token_s
        return tokens / seconds if tokens and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Piece:
    """More of a text. The last one has the whole `output`; text may be held back until then."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    output: Output | None = None


@dataclass(frozen=True, slots=True)
class TextPlace:
    """Identity of a text within a call, with its seed."""

    prompt: int
    choice: int
    prompt_token_ids: tuple[int, ...]
    seed: int


class Continuation:
    """A text that is being generated: it takes the engine's reports and returns pieces. `scored`: with
    log-probabilities."""

    def __init__(self, place: TextPlace, assembler: TextAssembler, scored: bool) -> None:
        self.place = place
        self.pieces = deque[Piece]()
        """Pieces that the caller has not taken yet."""
        self.output: Output | None = None
        self.failure: SsdError | None = None
        """Reason why there is no output."""
        self._assembler = assembler
        self._scored = scored
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._began = self._first_s = self._last_s = 0.0
        self._first_tokens = 0

    @property
    def over(self) -> bool:
        """True if the text is finished."""
        return self.output is not None or self.failure is not None

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the text, which must be reported to the engine."""
        return self._assembler.stopped_by is not None

    def begin(self, now: float) -> None:
        """Record the time of submission; times are in seconds of any clock."""
        self._began = now

    def take(self, report: Committed, now: float) -> None:
        """Add tokens, up to the one that completes a stop string."""
        if self.stopped:
            return
        text, before = "", self._assembler.tokens
        for token in report.tokens:
            text += self._assembler.push(token)
            if self.stopped:
                break
        counted = self._assembler.tokens - before
        self._last_s = now - self._began
        if not self._tokens:
            self._first_s, self._first_tokens = self._last_s, counted
        self._text.append(text)
        self._tokens.extend(report.tokens[:counted])
        self._logprobs.extend(report.logprobs[:counted])
        self.pieces.append(Piece(text, report.tokens[:counted], report.logprobs[:counted]))

    def end(self, report: Finished) -> None:
        """End the text as the engine reports."""
        text = self._assembler.finish(report.stop_token if report.reason == "stop" else None)
        self._text.append(text)
        cause, place = self._assembler.stopped_by, self.place
        self.output = Output(
            place.prompt,
            place.choice,
            place.prompt_token_ids,
            "".join(self._text),
            tuple(self._tokens),
            "stop" if cause is not None else report.reason,
            report.stop_token if cause is None else cause,
            place.seed,
            tuple(self._logprobs) if self._scored else None,
            report.figures,
            self._first_tokens,
            self._first_s,
            self._last_s,
        )
        self.pieces.append(Piece(text, output=self.output))
