"""`ssd generate`: one text, continued in the terminal by the same processes that serve, without HTTP.

Knows the conversation with the verifier and how to print; nothing of how tokens come about.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ssd_serve.cluster.channel import Channel
from ssd_serve.cluster.engines import RunningEngine, start_engine, usable_machine
from ssd_serve.errors import EngineDeadError, SettingsError
from ssd_serve.finding import find_models
from ssd_serve.logs import get_logger
from ssd_serve.messages import (
    Committed,
    Figures,
    Finished,
    Progress,
    Ready,
    Refused,
    SamplingParameters,
    Submit,
)
from ssd_serve.models.tokenizer import Tokenizer
from ssd_serve.seeds import MASK64, random_seed
from ssd_serve.server.text import TextAssembler, TextRules
from ssd_serve.settings import Mode, Settings
from ssd_serve.terminal import ProgressLine

_LOOK_EVERY_S = 0.2
_LONGEST_END_S = 10.0
_REQUEST = 1


@dataclass(frozen=True, slots=True)
class Wish:
    """What to generate."""

    text: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128

    def check(self) -> None:
        """A clear error for a value that cannot be meant."""
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise SettingsError("--temperature must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise SettingsError("--top-p must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise SettingsError("--min-p must be from 0 to 1")
        if self.top_k < 0:
            raise SettingsError("--top-k must be 0 (off) or more")
        if self.max_tokens < 1:
            raise SettingsError("--max-tokens must be at least 1")
        if self.seed is not None and not 0 <= self.seed <= MASK64:
            raise SettingsError("--seed must be from 0 to 2^64 - 1")

    def parameters(self) -> SamplingParameters:
        """The same, as the verifier takes it."""
        return SamplingParameters(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
        )


@dataclass(slots=True)
class Generated:
    """What came out, and how fast. Rates are None where nothing was counted."""

    seed: int
    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str = ""
    figures: Figures = field(default_factory=Figures)
    first_tokens: int = 0
    """Tokens of the first message."""
    first_token_s: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """After the first committed tokens: how fast the text grows once it has begun."""
        tokens, seconds = len(self.token_ids) - self.first_tokens, self.seconds - self.first_token_s
        return tokens / seconds if tokens and seconds > 0 else None

    def add(self, tokens: tuple[int, ...], seconds: float) -> None:
        """More tokens, this long after the request was sent."""
        if not self.token_ids:
            self.first_token_s, self.first_tokens = seconds, len(tokens)
        self.token_ids.extend(tokens)
        self.seconds = seconds

    def report(self, ready: Ready) -> dict[str, object]:
        """The object that `--json` prints."""
        figures = self.figures
        # The first token comes with the last chunk of the prompt, which does not count as a round.
        in_rounds = figures.tokens - self.first_tokens
        speculates = ready.mode != Mode.AR.value
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "prompt_tokens": self.prompt_tokens,
            "mode": ready.mode,
            "target": ready.target,
            "target_device": ready.target_device,
            "draft_device": ready.draft_device or None,
            "tokens_per_s": _rounded(self.tokens_per_s),
            "first_token_s": _rounded(self.first_token_s),
            "tokens_per_round": _rounded(_ratio(in_rounds, figures.rounds)),
            "acceptance": _rounded(_ratio(figures.accepted, figures.drafted)),
            "hit_rate": _rounded(_ratio(figures.hits, figures.hits + figures.misses)) if speculates else None,
            "rounds": figures.rounds,
            "drafted": figures.drafted,
            "accepted": figures.accepted,
        }

    def summary(self, ready: Ready) -> str:
        """The line that ends the output in a terminal."""
        report = self.report(ready)
        parts = [f"{len(self.token_ids)} tokens", f"mode {ready.mode}", f"seed {self.seed}"]
        for name, unit in (
            ("tokens_per_s", "tokens/s"),
            ("tokens_per_round", "tokens a round"),
            ("acceptance", "acceptance"),
            ("hit_rate", "hit rate"),
        ):
            value = report[name]
            parts.append(f"{value} {unit}" if name.startswith("tokens") else f"{unit} {value}")
        return "[" + ", ".join(part for part in parts if "None" not in part) + "]"


def run_generate(settings: Settings, wish: Wish, *, as_json: bool) -> int:
    """Start an engine, generate, print, end it."""
    wish.check()
    if "log_level" not in settings.model_fields_set:
        # Lines of the workers would run into the text.
        settings = settings.model_copy(update={"log_level": "warning"})
    line = ProgressLine()
    log = get_logger("generate", settings.log_level, settings.log_format)
    machine = usable_machine(settings)
    found = find_models(settings, line.show, log.warning)
    tokenizer = Tokenizer(found.target)
    line.show("starting")
    with start_engine(found.settings, log, machine) as engine:
        channel = engine.connect()
        ready = await_ready(engine, channel, line.show)
        line.clear()
        write = _write_nothing if as_json else _write_at_once
        generated = converse(engine, channel, tokenizer, wish, write)
        engine.expect_end()
        channel.close()
    print(json.dumps(generated.report(ready)) if as_json else f"\n{generated.summary(ready)}")
    return 0


def await_ready(engine: RunningEngine, channel: Channel, show: Callable[[str], None]) -> Ready:
    """Wait until the verifier can generate, showing what it does meanwhile."""
    while True:
        for message in _receive(engine, channel):
            if isinstance(message, Progress):
                show(message.text)
            elif isinstance(message, Ready):
                return message


def converse(
    engine: RunningEngine, channel: Channel, tokenizer: Tokenizer, wish: Wish, write: Callable[[str], None]
) -> Generated:
    """Send the request and write its text as it comes."""
    prompt = tuple(tokenizer.encode(wish.text))
    if not prompt:
        raise SettingsError("the text is empty: there is nothing to continue")
    generated = Generated(random_seed() if wish.seed is None else wish.seed, len(prompt))
    rules = TextRules(ending_tokens=frozenset(tokenizer.eos_token_ids))
    assembler = TextAssembler(tokenizer.stream(prompt), rules)

    def show(text: str) -> None:
        generated.text += text
        write(text)

    began = time.perf_counter()
    channel.send(Submit(_REQUEST, prompt, wish.parameters(), generated.seed))
    while True:
        for message in _receive(engine, channel):
            if isinstance(message, Committed):
                generated.add(message.tokens, time.perf_counter() - began)
                show("".join(assembler.push(token) for token in message.tokens))
            elif isinstance(message, Refused):
                where = f"--{message.field.replace('_', '-')}: " if message.field else ""
                raise SettingsError(f"{where}{message.message}")
            elif isinstance(message, Finished):
                if message.reason == "error":
                    raise EngineDeadError(f"the engine gave up: {message.message}")
                show(assembler.finish(message.stop_token if message.reason == "stop" else None))
                generated.finish_reason = message.reason
                generated.figures = message.figures
                return generated


def _receive(engine: RunningEngine, channel: Channel) -> list[object]:
    """What the verifier says next; its death is an error."""
    channel.wait(_LOOK_EVERY_S)
    messages: list[object] = list(channel.receive())
    if engine.failure is not None:
        raise engine.failure
    if channel.closed and not messages:
        reason = engine.await_failure(_LONGEST_END_S)
        raise reason or EngineDeadError("the verifier process closed its channel")
    return messages


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _write_at_once(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _write_nothing(_text: str) -> None:
    return
