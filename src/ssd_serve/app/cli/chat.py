"""`ssd chat` and `ssd run`: conversations in the terminal.

The model is in this process (`ssd chat`), behind a server that runs already (`ssd chat --url`), or behind a server
that lives as long as the chat (`ssd run`).
"""

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from ssd_serve.app.cli.chat_client import ChatClient, remote_summary
from ssd_serve.app.cli.generate import GenerateOptions, summary
from ssd_serve.app.cli.terminal import ChatTerminal
from ssd_serve.app.llm.llm import LLM
from ssd_serve.app.llm.sampling_params import SamplingParams
from ssd_serve.base.errors import SettingsError, SsdError
from ssd_serve.base.logs import ProgressLine
from ssd_serve.base.settings import Settings

CHAT_SAMPLING: Mapping[str, float] = {"temperature": 0.2, "top_p": 0.9}
"""Sampling of a chat where neither the user nor the model names a temperature (docs/chat.md)."""


def run_chat(settings: Settings, wish: GenerateOptions) -> int:
    """Start an engine, talk, end it."""
    wish.check()
    line, terminal = ProgressLine(), _terminal()
    with LLM.of(settings, line.show) as llm:
        defaults = llm.get_default_sampling_params()
        params = wish.params(defaults.model_copy(update=dict(_added(llm.ready.sampling, wish))))
        line.clear()
        if not llm.tokenizer.has_chat_template:
            raise SettingsError(f"{llm.ready.target} has no chat template; try `ssd generate`")

        def answer() -> None:
            _own_answer(llm, terminal, params)

        _talk(terminal, f"This is {llm.ready.target}.", answer)
    return 0


def run_chat_with(url: str, settings: Settings, wish: GenerateOptions) -> int:
    """Talk to a server that runs already."""
    wish.check()
    _talk_to(ChatClient(url, settings.api_key), wish)
    return 0


def run_run(settings: Settings, wish: GenerateOptions) -> int:
    """Start a server, on a free port unless the user has named one, talk to it, end it."""
    from ssd_serve.app.cli.serve import run_serve

    wish.check()
    if settings.tls_certificate or (settings.api_keys_file and not settings.api_key):
        raise SettingsError(
            "`ssd run` talks over HTTP with the key SSD_API_KEY: for TLS or SSD_API_KEYS_FILE start `ssd serve`, and "
            "`ssd chat --url URL --api-key KEY` in another terminal"
        )
    usual: dict[str, object] = {"port": 0, "log_level": "warning"}
    changes = {name: value for name, value in usual.items() if name not in settings.model_fields_set}
    own = settings.model_copy(update=changes)
    return run_serve(
        own, lambda url: _talk_to(ChatClient(url, own.api_key), wish, f" It is served at {url}, too.")
    )


def _terminal() -> ChatTerminal:
    return ChatTerminal(sys.stdin, sys.stdout, sys.stdin.isatty() and sys.stdout.isatty())


def _added(defaults: Mapping[str, object], wish: GenerateOptions) -> Mapping[str, float]:
    """Sampling that a chat adds to a model's defaults: none if these or the user name a temperature."""
    if "temperature" in defaults or "temperature" in wish.sampling:
        return {}
    return {name: value for name, value in CHAT_SAMPLING.items() if name not in defaults}


def _talk(terminal: ChatTerminal, greeting: str, answer: Callable[[], None]) -> None:
    """Run all turns; a turn that fails or is stopped is left out of the conversation."""
    if terminal.colours:
        print(f"{greeting} Ctrl-C stops an answer, /help lists commands, /exit ends the chat.")
    for text in terminal.asked():
        terminal.ask(text)
        try:
            answer()
        except KeyboardInterrupt:
            terminal.drop("stopped")
        except SsdError as error:
            terminal.drop(str(error))


def _own_answer(llm: LLM, terminal: ChatTerminal, params: SamplingParams) -> None:
    with closing(llm.stream_chat(terminal.messages, params, progress=True)) as pieces:
        for piece in pieces:
            if piece.progress is not None:
                terminal.read(piece.progress)
                continue
            drafted = piece.token_ids[:-1]
            terminal.show(piece.text, len(piece.token_ids), llm.tokenizer.decode(drafted) if drafted else "")
            if piece.output is not None:
                terminal.end(piece.output.text, summary(piece.output, llm.ready))


def _talk_to(client: ChatClient, wish: GenerateOptions, where: str = "") -> None:
    terminal, model = _terminal(), client.model()
    sampling: dict[str, Any] = {**wish.sampling}
    if model.sampling is not None:
        # With a part of the prefix cache of its own the server may say how much of a prompt it has read.
        own = {"return_progress": True, "cache_salt": secrets.token_hex(16)}
        sampling = {**own, **_added(model.sampling, wish), **sampling}

    def answer() -> None:
        _remote_answer(client, terminal, {"model": model.name, "messages": terminal.messages, **sampling})

    _talk(terminal, f"This is {model.name}.{where}", answer)


def _remote_answer(client: ChatClient, terminal: ChatTerminal, body: Mapping[str, Any]) -> None:
    text, tokens = "", 0
    figures: Mapping[str, Any] = {}
    with closing(client.stream(body)) as pieces:
        for piece in pieces:
            if piece.progress is not None:
                terminal.read(piece.progress)
                continue
            terminal.show(piece.text, piece.tokens - tokens)
            text, tokens, figures = text + piece.text, piece.tokens, piece.figures or figures
    terminal.end(text, remote_summary(tokens, terminal.rate(time.perf_counter()), figures))
