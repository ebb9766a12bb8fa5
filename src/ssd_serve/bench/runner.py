"""Runs requests on an engine, timed from the first token on: the prompt is not part of decoding speed."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.base.errors import SsdError
from ssd_serve.base.messages import Committed, Figures, Finished, SamplingParameters, Submit
from ssd_serve.bench.prompts import Prompt
from ssd_serve.verifier.engine import Engine


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """The outcome of one request: `decoded` tokens followed the first ones, in `seconds` of wall time."""

    tokens: tuple[int, ...]
    decoded: int
    seconds: float
    forward_s: float
    wait_s: float
    host_s: float
    figures: Figures

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens a second."""
        return self.decoded / self.seconds


def token_hash(tokens: Sequence[int]) -> str:
    """Return a short hash by which result files identify a text."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


class Runner:
    """Runs requests on engines, with request numbers that never repeat."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._number = 1

    def run_batch(
        self, engine: Engine, prompts: Sequence[Prompt], temperature: float
    ) -> list[tuple[int, ...]]:
        """Return the continuations of several prompts in one batch, untimed."""
        numbers = [self._submit(engine, prompt, temperature) for prompt in prompts]
        texts: dict[int, tuple[int, ...]] = dict.fromkeys(numbers, ())
        while engine.busy:
            for report in engine.step():
                if isinstance(report, Committed):
                    texts[report.request] += report.tokens
        return [texts[number] for number in numbers]

    def run_each(
        self, engine: Engine, prompts: Sequence[Prompt], temperature: float
    ) -> list[tuple[int, ...]]:
        """Return the continuations, one request at a time: on a GPU a batch rounds differently."""
        return [self.run(engine, prompt, temperature).tokens for prompt in prompts]

    def run(self, engine: Engine, prompt: Prompt, temperature: float) -> TimedRequest:
        """Run one request alone on the engine."""
        self._submit(engine, prompt, temperature)
        tokens: list[int] = []
        before = 0
        started, clocked = 0.0, (0.0, 0.0, 0.0)
        while True:
            reports = engine.step()
            for report in reports:
                if isinstance(report, Committed):
                    tokens.extend(report.tokens)
                elif isinstance(report, Finished):
                    seconds = time.perf_counter() - started
                    now = _clocked(engine)
                    forward, wait, host = (end - start for start, end in zip(clocked, now, strict=True))
                    return TimedRequest(
                        tuple(tokens), len(tokens) - before, seconds, forward, wait, host, report.figures
                    )
            if not started and tokens:
                started, before, clocked = time.perf_counter(), len(tokens), _clocked(engine)

    def _submit(self, engine: Engine, prompt: Prompt, temperature: float) -> int:
        self._number += 1
        parameters = SamplingParameters(temperature=temperature, max_tokens=self._max_tokens, ignore_eos=True)
        refused = engine.submit(Submit(self._number, prompt.tokens, parameters, prompt.seed))
        if refused is not None:
            raise SsdError(f"the benchmark's own request was refused: {refused.message}")
        return self._number


def _clocked(engine: Engine) -> tuple[float, float, float]:
    return engine.times.forward_s, engine.times.wait_s, engine.times.host_s
