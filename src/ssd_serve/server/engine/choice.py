"""A choice of an HTTP request: its plan, its output so far, and its end.

Turns the engine's reports into text. Knows no channel and no protocol.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ssd_serve.base.messages import (
    Committed,
    Figures,
    Finished,
    PromptProgress,
    RoundTrace,
    SamplingParameters,
    TokenLogprobs,
)
from ssd_serve.server.observability.timing import ChoiceTimer, ChoiceTiming
from ssd_serve.server.service import Service
from ssd_serve.server.text import TextAssembler, TextRules


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """Request of one choice to the engine, and the rules for its text."""

    prompt: tuple[int, ...]
    parameters: SamplingParameters
    seed: int
    rules: TextRules
    skip_special_tokens: bool
    generated: tuple[int, ...] = ()
    """Output of an earlier response that broke off: this choice continues behind it."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The end of a choice. `cause` is the stop string or stop id."""

    reason: str
    cause: str | int | None
    figures: Figures
    complete: bool = True
    """False: `figures` were counted here, since the engine's did not arrive."""
    first_token_s: float | None = None
    decoding_s: float = 0.0
    """Seconds from the first tokens to the last."""


@dataclass(slots=True)
class ChoiceOutput:
    """Output of one choice: a delta, or the sum of its deltas."""

    choice: int
    texts: list[str] = field(default_factory=list[str])
    """Joined once: repeated concatenation would copy a long output with each delta."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    offsets: list[int] = field(default_factory=list[int])
    """Start of each token in the choice's text."""
    rounds: list[int] = field(default_factory=list[int])
    """Number of tokens of each round; the first round ended the prompt."""
    traces: list[RoundTrace] = field(default_factory=list[RoundTrace])
    """Details of the rounds, where traced."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """Log-probabilities of the prompt's tokens from the second on, where requested."""
    resumed_text: str = ""
    """Text that the client has from an earlier response; in the first delta only."""
    progress: PromptProgress | None = None
    """Progress of the prompt, before the first token."""
    end: ChoiceEnd | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: "ChoiceOutput") -> None:
        self.texts += delta.texts
        self.tokens += delta.tokens
        self.rounds += delta.rounds
        self.traces += delta.traces
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        self.prompt_logprobs += delta.prompt_logprobs
        self.end = delta.end or self.end
        self.resumed_text += delta.resumed_text


class RunningChoice:
    """Assembles the text of one choice and measures its times."""

    def __init__(self, service: Service, index: int, plan: ChoicePlan) -> None:
        detokenizer = service.tokenizer.stream(plan.prompt, plan.skip_special_tokens)
        self.index = index
        self.request = 0
        """The engine's number of its request."""
        self.running = False
        self.interrupted = False
        """True where several engines worked on it: none has all of its statistics."""
        self.course: ChoiceTiming | None = None
        """Times and counts, once it has ended."""
        self._rules = plan.rules
        self._assembler = TextAssembler(detokenizer, plan.rules)
        self._watch = ChoiceTimer(service.metrics, len(plan.prompt))
        self._resumed_texts: list[str] = []
        self._resumed_length = 0
        self._resumed_tokens = 0
        self._reports = 0

    @property
    def stopped(self) -> bool:
        """True where a stop string ended the text; the engine may not have reported the end yet."""
        return self._assembler.stopped_by is not None

    @property
    def _tokens(self) -> int:
        return self._assembler.tokens - self._resumed_tokens

    def resume(self, tokens: Sequence[int]) -> None:
        """Decode output of an earlier response."""
        texts = [self._assembler.push(token) for token in tokens]
        self._resumed_length += sum(map(len, texts))
        self._resumed_texts += texts
        self._resumed_tokens = self._assembler.tokens

    def receive(self, reports: Iterable[Committed]) -> ChoiceOutput:
        """Decode tokens one by one, up to the token that completes a stop string."""
        output = ChoiceOutput(self.index, resumed_text=self._take_resumed_text())
        for report in reports:
            if self.stopped:
                break
            self._reports += bool(report.tokens)  # without tokens, a report is of a chunk of the prompt
            output.prompt_logprobs += report.prompt_logprobs
            output.progress = report.progress or output.progress
            text, offsets = self._decode(report.tokens)
            count = len(offsets)
            output.texts.append(text)
            output.offsets += offsets
            output.tokens += report.tokens[:count]
            output.logprobs += report.logprobs[:count]
            output.rounds += [count] * bool(count)
            if report.trace is not None:
                output.traces.append(report.trace)
            self._watch.tokens(count)
        return output

    def _decode(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text that is certain, and the offset of each token that counts."""
        assembler, text, offsets = self._assembler, "", list[int]()
        for token in tokens:
            before, offset = assembler.tokens, assembler.length - self._resumed_length
            text += assembler.push(token)
            if assembler.tokens > before:
                offsets.append(offset)
            if self.stopped:
                break
        return text, offsets

    def _take_resumed_text(self) -> str:
        texts, self._resumed_texts = self._resumed_texts, []
        return "".join(texts)

    def end(self, report: Finished) -> ChoiceOutput:
        """End the choice as the engine reports; text that was held back may still complete a stop string."""
        report = self._rules.end(report)
        text = self._assembler.finish(report.stop_token if report.reason == "stop" else None)
        figures = self._counted_figures() if self.interrupted else report.figures
        self._watch.figures(figures)
        if self.stopped:
            return self._last_delta("stop", self._assembler.stopped_by, figures, not self.interrupted, text)
        return self._last_delta(report.reason, report.stop_token, figures, not self.interrupted, text)

    def end_without_report(self) -> ChoiceOutput:
        """End the choice at its stop string, with the statistics that were counted here."""
        return self._last_delta("stop", self._assembler.stopped_by, self._counted_figures(), False)

    def close(self, reason: str) -> None:
        """Count the end in the metrics, once."""
        if self.running:
            self.running = False
            self.course = self._watch.end(reason, self._tokens)

    def _last_delta(
        self, reason: str, cause: str | int | None, figures: Figures, complete: bool, text: str = ""
    ) -> ChoiceOutput:
        self.close(reason)
        watch = self._watch
        end = ChoiceEnd(reason, cause, figures, complete, watch.first_token_s, watch.decoding_s)
        return ChoiceOutput(self.index, [text], resumed_text=self._take_resumed_text(), end=end)

    def _counted_figures(self) -> Figures:
        # The first report ends the prompt; each later one is a round, and its last token is the bonus token.
        tokens = self._tokens
        return Figures(rounds=max(0, self._reports - 1), tokens=tokens, accepted=tokens - self._reports)
