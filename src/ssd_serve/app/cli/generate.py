"""`ssd generate`: a text in the terminal, from an engine of its own."""

import json
import math
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ssd_serve.app.llm.engine import Output
from ssd_serve.app.llm.llm import LLM
from ssd_serve.app.llm.sampling_params import SamplingParams
from ssd_serve.base.engine_config import Mode
from ssd_serve.base.errors import RequestError, SettingsError
from ssd_serve.base.logs import ProgressLine
from ssd_serve.base.messages import Ready
from ssd_serve.base.seeds import MASK64
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import flag_name

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "0 or more"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "top_k": (lambda value: value >= 0, "0 (off) or more"),
    "max_tokens": (lambda value: value >= 1, "at least 1"),
    "seed": (lambda value: 0 <= value <= MASK64, "from 0 to 2^64 - 1"),
}


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of one generation: the prompt, and the sampling parameters that were given."""

    text: str
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])

    def check(self) -> None:
        """Raise `SettingsError` for a value out of range. Call it before anything is loaded."""
        for name, value in self.sampling.items():
            in_range, described = _RANGES[name]
            if not in_range(value):
                raise SettingsError(f"{flag_name(name)} must be {described}")
        with errors_as_flags():
            self.params(SamplingParams())

    def params(self, default: SamplingParams) -> SamplingParams:
        """Return the sampling parameters; those that were not given are as in `default`."""
        return SamplingParams.model_validate({**dict(default), **self.sampling})


@contextmanager
def errors_as_flags() -> Generator[None]:
    """Error message of a request, with fields as flags."""
    try:
        yield
    except RequestError as error:
        flag = "the text" if error.field == "prompt" else flag_name(error.field)
        raise SettingsError(flag + str(error).removeprefix(error.field)) from error


def run_generate(settings: Settings, wish: GenerateOptions, *, as_json: bool) -> int:
    """Start an engine, generate, print, end it."""
    wish.check()
    line = ProgressLine()
    with errors_as_flags(), LLM.of(settings, line.show) as llm:
        params = wish.params(llm.get_default_sampling_params())
        line.clear()
        for piece in llm.stream(wish.text, params):
            if not as_json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            if piece.output is not None:
                shown = json.dumps(report(piece.output, llm.ready))
                print(shown if as_json else f"\n{summary(piece.output, llm.ready)}")
    return 0


def report(output: Output, ready: Ready) -> dict[str, object]:
    """The object that `--json` prints."""
    figures = output.figures
    # The first token comes with the last chunk of the prompt, which does not count as a round.
    in_rounds = figures.tokens - output.first_tokens
    speculates = ready.mode != Mode.AR.value
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "prompt_tokens": len(output.prompt_token_ids),
        "mode": ready.mode,
        "target": ready.target,
        "target_device": ready.target_device,
        "draft_device": ready.draft_device or None,
        "tokens_per_s": _rounded(output.tokens_per_s),
        "first_token_s": _rounded(output.first_token_s),
        "tokens_per_round": _rounded(_ratio(in_rounds, figures.rounds)),
        "acceptance": _rounded(_ratio(figures.accepted, figures.drafted)),
        "hit_rate": _rounded(_ratio(figures.hits, figures.hits + figures.misses)) if speculates else None,
        "rounds": figures.rounds,
        "drafted": figures.drafted,
        "accepted": figures.accepted,
    }


def summary(output: Output, ready: Ready) -> str:
    """The line that ends the output in a terminal."""
    shown = report(output, ready)
    parts = [f"{len(output.token_ids)} tokens", f"mode {ready.mode}", f"seed {output.seed}"]
    for name, unit in (
        ("tokens_per_s", "tokens/s"),
        ("tokens_per_round", "tokens a round"),
        ("acceptance", "acceptance"),
        ("hit_rate", "hit rate"),
    ):
        value = shown[name]
        parts.append(f"{value} {unit}" if name.startswith("tokens") else f"{unit} {value}")
    return "[" + ", ".join(part for part in parts if "None" not in part) + "]"


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
