"""The choices of one HTTP request: what is asked for, what comes of each, and how it ended.

Turns the engine's reports into text, and text into pieces of an answer. Knows no channel and no protocol.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ssd_serve.base.messages import (
    Committed,
    Figures,
    Finished,
    SamplingParameters,
    TokenLogprobs,
)
from ssd_serve.server.observability.stopwatch import Course, Stopwatch
from ssd_serve.server.service import Service
from ssd_serve.server.text.output import TextAssembler, TextRules


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice: what the engine is asked for, and what is done with its tokens."""

    prompt: tuple[int, ...]
    parameters: SamplingParameters
    seed: int
    rules: TextRules
    skip_special_tokens: bool
    generated: tuple[int, ...] = ()
    """Output that the client has from an earlier answer: this one goes on behind it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended. `cause` is the stop string or stop id."""

    reason: str
    cause: str | int | None
    figures: Figures
    complete: bool = True
    """False: the engine did not tell its figures in time, `figures` holds what could be counted here."""
    first_token_s: float | None = None
    decoding_s: float = 0.0
    """From the first tokens to the last."""


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """More output of one choice. `offsets` are where each token begins in the choice's text."""

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    offsets: tuple[int, ...]
    ending: Ending | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    before: str = ""
    """With the first piece: the text that the client has from an earlier answer."""
    rounds: tuple[int, ...] = ()
    """Tokens of each round."""


@dataclass(slots=True)
class ChoiceOutput:
    """Everything of one choice, added up."""

    texts: list[str] = field(default_factory=list[str])
    """Joined once: adding up strings would copy a long answer again with each piece."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    offsets: list[int] = field(default_factory=list[int])
    ending: Ending | None = None
    rounds: list[int] = field(default_factory=list[int])
    """Tokens of each round; the first one ended the prompt."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """Of the prompt's tokens from the second on, where they were asked for."""
    before: str = ""
    """What the client has from an earlier answer."""

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.texts)

    def add(self, piece: ChoicePiece) -> None:
        """Append one piece."""
        self.texts.append(piece.text)
        self.tokens.extend(piece.tokens)
        self.rounds += piece.rounds
        self.logprobs.extend(piece.logprobs)
        self.offsets.extend(piece.offsets)
        self.prompt_logprobs.extend(piece.prompt_logprobs)
        self.ending = piece.ending or self.ending
        self.before += piece.before


class RunningChoice:
    """One choice while it runs."""

    def __init__(self, service: Service, index: int, plan: ChoicePlan) -> None:
        detokenizer = service.tokenizer.detokenizer(plan.prompt, plan.skip_special_tokens)
        self.index = index
        self.request = 0
        self.assembler = TextAssembler(detokenizer, plan.rules)
        self.watch = Stopwatch(service.metrics, len(plan.prompt))
        self.shown = 0
        """Characters that the client has from an earlier answer."""
        self._had: list[str] = []
        self._before = 0
        """Tokens of it that this answer does not count."""
        self.running = False
        self.interrupted = False
        """More than one engine works on it: none of them knows all its figures."""
        self.course: Course | None = None
        """How it went, once it has ended."""
        self._reports = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text; the engine's word on it may still be missing."""
        return self.assembler.stopped_by is not None

    @property
    def _tokens(self) -> int:
        return self.assembler.tokens - self._before

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Take more of what the client has from an earlier answer."""
        had = [self.assembler.push(token) for token in tokens]
        self.shown += sum(map(len, had))
        self._had += had
        self._before = self.assembler.tokens

    def absorb(self, reports: Iterable[Committed]) -> ChoicePiece:
        """Take tokens one by one, up to the one that completes a stop string."""
        text = ""
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        offsets: list[int] = []
        prompt_logprobs: list[TokenLogprobs] = []
        rounds: list[int] = []
        for report in reports:
            if self.stopped:
                break
            self._reports += bool(report.tokens)  # the others only tell of the prompt
            prompt_logprobs += report.prompt_logprobs
            more, found = self._read(report.tokens)
            text += more
            offsets += found
            tokens += report.tokens[: len(found)]
            logprobs += report.logprobs[: len(found)]
            rounds += [len(found)] * bool(found)
            self.watch.tokens(len(found))
        return ChoicePiece(
            choice=self.index,
            text=text,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            offsets=tuple(offsets),
            ending=None,
            prompt_logprobs=tuple(prompt_logprobs),
            before=self._before_it(),
            rounds=tuple(rounds),
        )

    def _read(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """The text that they make certain, and where each that counts begins."""
        assembler, text, offsets = self.assembler, "", list[int]()
        for token in tokens:
            before, offset = assembler.tokens, assembler.length - self.shown
            text += assembler.push(token)
            if assembler.tokens > before:
                offsets.append(offset)
            if self.stopped:
                break
        return text, offsets

    def _before_it(self) -> str:
        """What the client has from an earlier answer; the first time only."""
        had, self._had = "".join(self._had), []
        return had

    def end(self, report: Finished) -> ChoicePiece:
        """The engine ended the choice; held back text may still complete a stop string."""
        text = self.assembler.finish(report.stop_token if report.reason == "stop" else None)
        reason = "stop" if self.stopped else report.reason
        cause = self.assembler.stopped_by if self.stopped else report.stop_token
        figures = self._seen() if self.interrupted else report.figures
        self.watch.figures(figures)
        self.close(reason)
        ending = self._ending(reason, cause, figures, not self.interrupted)
        return ChoicePiece(self.index, text, (), (), (), ending, before=self._before_it())

    def close(self, reason: str) -> None:
        """Count the end, once."""
        if self.running:
            self.running = False
            self.course = self.watch.end(reason, self._tokens)

    def end_alone(self) -> ChoicePiece:
        """The text is complete but the engine did not say so: only what was seen here is known."""
        self.close("stop")
        ending = self._ending("stop", self.assembler.stopped_by, self._seen(), False)
        return ChoicePiece(self.index, "", (), (), (), ending, before=self._before_it())

    def _ending(self, reason: str, cause: str | int | None, figures: Figures, complete: bool) -> Ending:
        return Ending(reason, cause, figures, complete, self.watch.first_token_s, self.watch.decoding_s)

    def _seen(self) -> Figures:
        """Usage as far as the pieces here tell it."""
        tokens = self._tokens
        # The first report ends the prompt; each later one is a round, whose last token is the bonus.
        return Figures(rounds=max(0, self._reports - 1), tokens=tokens, accepted=tokens - self._reports)
