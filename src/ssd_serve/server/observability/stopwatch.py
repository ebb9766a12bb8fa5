"""Times one choice from its submission to its end. Knows seconds and counts, not whose they are."""

import time
from dataclasses import dataclass

from ssd_serve.base.messages import Figures
from ssd_serve.server.observability.metrics import ServerMetrics


@dataclass(frozen=True, slots=True)
class Course:
    """How one choice went. Moments are those of `time.monotonic`, in seconds."""

    reason: str
    """`stop`, `length`, `abort` or `error`."""
    prompt_tokens: int
    output_tokens: int
    begun: float
    first: float | None
    """When the first token came; None: none has."""
    last: float
    """When the last token came."""
    ended: float
    figures: Figures | None
    """None: the engine did not tell them."""

    @property
    def read_from(self) -> float | None:
        """When it left the queue, its prompt to be read; None: not known."""
        if self.first is None or self.figures is None or self.figures.prompt_s <= 0:
            return None
        return max(self.begun, self.first - self.figures.prompt_s)


class Stopwatch:
    """Runs from now on. What it finds is counted in the metrics."""

    def __init__(self, metrics: ServerMetrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._begun = time.monotonic()
        self._first: float | None = None
        self._last = self._begun
        self._figures: Figures | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token; None: none has come."""
        return None if self._first is None else self._first - self._begun

    @property
    def decoding_s(self) -> float:
        """Seconds from the first tokens to the last."""
        return 0.0 if self._first is None else self._last - self._first

    def tokens(self, count: int) -> None:
        """`count` tokens arrived together."""
        now = time.monotonic()
        if count > 0 and self._first is None:
            self._first = now
            self._metrics.first_token.observe(now - self._begun)
        elif count > 0:
            for _ in range(count):
                self._metrics.between.observe((now - self._last) / count)
        self._last = now

    def figures(self, figures: Figures) -> None:
        """The engine has told what it did."""
        self._figures = figures
        if self.first_token_s is not None:
            self._metrics.observe_prompt(self.first_token_s, figures.prompt_s)
        if figures.rounds:
            self._metrics.round_tokens.observe(figures.tokens / figures.rounds)
            self._metrics.round_nodes.observe(figures.drafted / figures.rounds)

    def end(self, reason: str, tokens: int) -> Course:
        """The choice ended: `stop`, `length`, `abort` or `error`."""
        now = time.monotonic()
        self._metrics.ended.labels(reason).inc()
        self._metrics.whole.observe(now - self._begun)
        if self._first is not None:
            self._metrics.decoding.observe(now - self._first)
        self._metrics.prompt_tokens.observe(self._prompt_tokens)
        self._metrics.output_tokens.observe(tokens)
        return Course(
            reason,
            self._prompt_tokens,
            tokens,
            self._begun,
            self._first,
            self._last,
            now,
            self._figures,
        )
