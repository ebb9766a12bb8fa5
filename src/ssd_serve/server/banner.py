"""The start screen of `ssd serve`: models, devices, estimated speed, and commands to try."""

import json
import math
import shlex
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.messages import Ready
from ssd_serve.base.settings import Settings
from ssd_serve.base.version import __version__
from ssd_serve.server.service import model_name

ASSUMED_ACCEPTANCE = 0.7
"""Assumed acceptance of the first draft token, as measured for a well-distilled pair."""

_DEEPEST_INLINE = 32
_SHORT_STEP_MS = 5.0

_BUSY_CORES = 0.3
"""Cores that others must use, for a line about it: less disturbs no speed."""

MODES = {
    "ar": "plain decoding, no draft model",
    "sd": "{} drafts, then the target verifies, in turns on one device",
    "ssd": "{} drafts on its own device while the target verifies",
}
_LOOKUPS = {"ngram", "suffix"}

EMBEDDED_NOTE = (
    "The embedded pair is for tests: a small model of Python code, trained on the standard library. "
    "It is not a chatbot: it knows no facts and follows no instructions. "
    "A model that answers: ssd serve smollm2"
)
QUESTION = "What is the capital of Japan?"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated speed of one request, from step times alone."""

    plain_tokens_per_s: float
    tokens_per_round: float
    tokens_per_s: float

    @property
    def speed_up(self) -> float:
        """Estimated speed relative to plain decoding."""
        return self.tokens_per_s / self.plain_tokens_per_s


def estimate(ready: Ready, acceptance: float = ASSUMED_ACCEPTANCE) -> Estimate | None:
    """Estimate the speed of one request; None if step times are unknown.

    A chain of k draft tokens, each accepted with probability p, commits (1 - p^(k+1)) / (1 - p) tokens per
    round. In mode ssd, k draft steps fit into a target step; in mode sd, k maximizes tokens per second.
    """
    if ready.target_step_ms <= 0:
        return None
    plain = 1000 / ready.target_step_ms
    if ready.mode == "ar" or ready.draft_step_ms <= 0:
        return Estimate(plain, 1.0, plain)
    cost = ready.draft_step_ms / ready.target_step_ms
    if ready.mode == "ssd":
        tokens = _tokens_of_chain(1 / cost, acceptance)
        return Estimate(plain, tokens, plain * tokens)
    speeds = [
        (_tokens_of_chain(k, acceptance) / (1 + k * cost), _tokens_of_chain(k, acceptance))
        for k in range(_DEEPEST_INLINE)
    ]
    speed, tokens = max(speeds)
    return Estimate(plain, tokens, plain * speed)


def _tokens_of_chain(length: float, acceptance: float) -> float:
    return (1.0 - math.pow(acceptance, length + 1)) / (1.0 - acceptance)


def show_banner(
    console: Console,
    ready: Ready,
    settings: Settings,
    url: str,
    program: str = "ssd",
    chats: bool = False,
    others: float = 0.0,
    cores: int = 1,
) -> None:
    """Print the screen. `url` is the server's address, `program` the name of its command; `chats`: the model has a
    chat template; `others`: how many of the `cores` other programs use."""
    console.print()
    console.print(Text.assemble(("ssd-serve", "bold"), f" {__version__} is ready at ", (url, "bold cyan")))
    console.print()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in facts(ready, settings):
        table.add_row(label, text)
    if others >= _BUSY_CORES:
        table.add_row("busy", busy_line(others, cores))
    if settings.page:
        table.add_row("page", f"{url}/ in a browser: chat, and a race of plain and speculative decoding")
    console.print(Padding(table, (0, 2)))
    console.print()
    console.print("Try it:", style="bold")
    for line in commands(settings, url, program, chats):
        # Wrapped lines could not be copied.
        console.print("  " + line, soft_wrap=True, highlight=False, markup=False)
    console.print()


def facts(ready: Ready, settings: Settings) -> list[tuple[str, str]]:
    """Return label and text of each line about the server."""
    timing = "wrapped" if settings.model_wrapper else "measured"
    expected = "expected of such a processor" if ready.guessed and not settings.model_wrapper else timing
    name = EMBEDDED if settings.target == EMBEDDED else ready.target
    target = f"{name} on {ready.target_device}, {ready.target_step_ms:.1f} ms a step ({expected})"
    draft = f"{ready.draft} on {ready.draft_device or ready.target_device}"
    if ready.draft_step_ms > 0:
        draft += f", {ready.draft_step_ms:.1f} ms a step ({timing})"
    if ready.mode == "ssd" and settings.joining_drafters > 1:
        draft = f"{settings.joining_drafters} drafters: {draft}"
    context = f"{ready.context} tokens a request (prompt and output), {ready.slots} tokens cached in all"
    drafts = "a lookup in the text so far" if set(ready.draft.split(",")) <= _LOOKUPS else "the draft model"
    rows = [("mode", f"{ready.mode}: {MODES.get(ready.mode, '').format(drafts)}"), ("target", target)]
    if ready.mode != "ar":
        rows.append(("draft", draft))
    rows.append(("context", context))
    if ready.kv_bytes:
        sizes = ready.weight_bytes / 1e9, ready.kv_bytes / 1e9
        rows.append(("memory", "weights {:.1f} GB, KV cache up to {:.1f} GB".format(*sizes)))
    rows.append(("speed", _speed_line(ready, settings)))
    if settings.model_wrapper is not None:
        rows.append(
            ("wrapped", f"models are wrapped by {settings.model_wrapper}; step times are not their own")
        )
    if settings.target == EMBEDDED:
        rows.append(("model", EMBEDDED_NOTE))
    return rows


def busy_line(others: float, cores: int) -> str:
    """Say what other programs use, and that the target leaves it to them."""
    used = min(others, cores)
    return f"this machine is busy: other programs use {used:.1f} of the {cores} cores, which makes answers slower"


def _speed_line(ready: Ready, settings: Settings) -> str:
    found = estimate(ready)
    if found is None:
        return "not measured yet; `ssd bench modes` does"
    most = "about" if ready.guessed else "at most"
    plain = f"plain decoding gives {most} {found.plain_tokens_per_s:.0f} tokens/s to one request"
    if ready.mode == "ar":
        return plain
    if ready.draft_step_ms <= 0:
        return f"{plain}. The gain of drafts is not known yet; `ssd bench modes` measures it."
    caution = _caution(ready) if settings.model_wrapper is None else ""
    return (
        f"{plain}. With a draft whose first token is accepted {ASSUMED_ACCEPTANCE * 10:.0f} times in 10, these "
        f"step times allow up to {found.tokens_per_round:.1f} tokens a round, {found.speed_up:.1f}x{caution}. "
        "That is an estimate; `ssd bench modes` measures it."
    )


def _caution(ready: Ready) -> str:
    """Return why the speed here may be below the estimate."""
    reasons: list[str] = []
    if ready.target_device.startswith("cpu"):
        reasons.append("each verified token costs time")
        if ready.mode == "ssd":
            reasons.append("target and drafter share the memory")
    if ready.target_step_ms < _SHORT_STEP_MS:
        reasons.append("steps are so short that the engine's own work counts")
    return f"; less here, where {_listed(reasons)}" if reasons else ""


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def commands(settings: Settings, url: str, program: str = "ssd", chats: bool = False) -> list[str]:
    """Return commands to copy, one per line."""
    name = model_name(settings)
    prompt = "def fibonacci(n):" if settings.target == EMBEDDED else "Once upon a time"
    asked: dict[str, object] = {"prompt": prompt, "max_tokens": 64, "stream": True}
    if chats and settings.target != EMBEDDED:
        asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    path = "chat/completions" if "messages" in asked else "completions"
    body = json.dumps({"model": name, **asked})
    keyed = settings.api_key or settings.api_keys_file
    variable = "SSD_API_KEY" if settings.api_key else "KEY"
    key = f' -H "Authorization: Bearer ${variable}"' if keyed else ""
    client_key = "the key" if keyed else "none"
    metrics = f"{url.rpartition(':')[0]}:{settings.metrics_port}" if settings.metrics_port else url
    return [
        f"curl -N {url}/v1/{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}",
        f"{shlex.quote(program)} chat --url {url}      (in another terminal)"
        if "messages" in asked
        else f"{shlex.quote(program)} generate {shlex.quote(prompt)}      (without this server)",
        f'OpenAI(base_url="{url}/v1", api_key="{client_key}")      (Python, after pip install openai)',
        f"{metrics}/metrics      (Prometheus; also /health, /version, /v1/models)",
        f"{shlex.quote(program)} settings      (all settings; see docs/settings.md)",
        "Ctrl-C stops the server.",
    ]
