"""Requests that run together on one engine: the crowd that `python -m lab.drafters` drafts for.

Knows an engine by its steps; no drafters and no clocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssd_serve.bench.prompts import Prompt
from ssd_serve.errors import SsdError
from ssd_serve.messages import (
    Committed,
    Finished,
    SamplingParameters,
    Submit,
    VerifierReport,
)
from ssd_serve.verifier.engine import Engine


@dataclass(frozen=True, slots=True)
class CrowdPlan:
    """`requests` run at once, with prompts of `prompt` tokens; `width` nodes of a draft step get `candidates`
    each."""

    drafters: tuple[int, ...] = (1, 2, 4)
    requests: int = 16
    prompt: int = 24
    tokens: int = 128
    temperature: float = 1.0
    width: int = 32
    candidates: int = 16
    depth: int = 16


class DrafterCrowd:
    """Submits requests, and steps the engine with `step`."""

    def __init__(self, engine: Engine, step: Callable[[], Sequence[VerifierReport]]) -> None:
        self._engine = engine
        self._step = step
        self.texts: dict[int, tuple[int, ...]] = {}
        self.ended = False
        """Whether the first has ended."""

    @property
    def decoding(self) -> bool:
        """Whether all prompts have been read."""
        return self._engine.scheduler.decoding == len(self.texts)

    def submit(self, prompts: Sequence[Prompt], plan: CrowdPlan) -> None:
        """All requests of the plan."""
        parameters = SamplingParameters(temperature=plan.temperature, max_tokens=plan.tokens, ignore_eos=True)
        for number in range(plan.requests):
            prompt = prompts[number % len(prompts)]
            self.texts[number] = ()
            submit = Submit(number, prompt.tokens[: plan.prompt], parameters, prompt.seed)
            if self._engine.submit(submit) is not None:
                raise SsdError("the benchmark's own request was refused")

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Rounds until the condition holds or all is done."""
        while self._engine.busy and not condition():
            for report in self._step():
                if isinstance(report, Committed):
                    self.texts[report.request] += report.tokens
                self.ended |= isinstance(report, Finished)
