"""Generating texts from Python: `LLM("path-or-id").generate(prompts)`.

This module handles prompts and parameters; `engine.py` starts the engine.
"""

import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from rich.console import Console
from rich.progress import Progress
from typing_extensions import Self

from ssd_serve.app.llm.engine import Asked, Conversation, Output, Piece, reach_engine
from ssd_serve.app.llm.sampling_params import SamplingParams
from ssd_serve.base.engine_config import Mode
from ssd_serve.base.errors import EngineDeadError, RequestError
from ssd_serve.base.logs import ProgressLine, get_logger
from ssd_serve.base.messages import Ready, ThinkingBudget
from ssd_serve.base.seeds import MASK64, choice_seed, random_seed
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve_arguments
from ssd_serve.cluster.launch import usable_machine
from ssd_serve.cluster.placement import find_models
from ssd_serve.kernels.native.library import compile_early
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.sampling.thinking import make_thinking_budget, starts_in_thinking
from ssd_serve.sampling.validation import (
    bad_word_sequences,
    check_prompt,
    encode,
    engine_parameters,
    output_limit,
    stop_token_set,
)

Prompt = str | Sequence[int]
"""A text, or token ids."""
Messages = Sequence[Mapping[str, str]]
"""A conversation: messages with `role` and `content`."""

_USUAL_MAX_TOKENS = 128


class LLM:
    """A loaded model that continues texts. It is not thread-safe.

        with LLM("path-or-id", draft="path-or-id") as llm:
            print(llm.generate("def read_lines(path):")[0].text)

    It works in this process, with the draft inline; with `mode="ssd"` in processes of its own. Every setting
    of `ssd serve` is an argument, and may come from its variable instead.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        draft: str | Path | Sequence[str | Path] | None = None,
        report: Callable[[str], None] | None = None,
        **settings: object,
    ) -> None:
        """`target` None: that of SSD_TARGET, else the default; `draft`: one or several. `report` receives messages of
        progress while models load; without it a terminal shows them. Every error is an `SsdError`."""
        drafts = [draft] if isinstance(draft, str | Path) else draft
        models = {} if target is None else {"target": str(target)}
        if drafts is not None:
            models["draft"] = ",".join(map(str, drafts)) or "none"
        named = {**models, **settings}
        chosen, line = _usual_here(resolve_arguments(named)), ProgressLine()
        shown = line.show if sys.stderr.isatty() else lambda _text: None
        try:
            self._start(chosen, report or shown)
        finally:
            line.clear()

    @classmethod
    def of(cls, settings: Settings, report: Callable[[str], None]) -> Self:
        """Make an `LLM` of given settings, without defaults of its own."""
        made = cls.__new__(cls)
        made._start(settings, report)
        return made

    def _start(self, settings: Settings, report: Callable[[str], None]) -> None:
        if "log_level" not in settings.model_fields_set:
            # Log lines of workers would mix with the program's output.
            settings = settings.model_copy(update={"log_level": "warning"})
        log = get_logger("generate", settings.log_level, settings.log_format)
        machine = usable_machine(settings)
        compile_early(settings.native_kernels, settings.cache_dir)
        found = find_models(settings, report, log.warning)
        self.tokenizer = Tokenizer(found.target)
        report("starting")
        with ExitStack() as stack:
            access = stack.enter_context(reach_engine(settings, machine, found.names, log, report))
            self.ready: Ready = access.ready
            most = settings.max_running + settings.max_waiting
            self._open: Conversation | None = Conversation(access, self.tokenizer, most)
            # Also close at the program's end, or when this object is collected.
            self._end = weakref.finalize(self, stack.pop_all().close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and its processes. A second call does nothing."""
        self._open = None
        self._end()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of a call: those of the model's `generation_config.json`, unless
        `generation_config="none"`."""
        return SamplingParams.model_validate(self.ready.sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Continue each prompt; the n texts of a prompt follow one another. `params`: for all prompts, or
        one for each; None: as the model asks for it. `progress`: show a bar; None: for several prompts, on
        a terminal."""
        ids = self._all_ids(prompts)
        asked = self._asked(zip(ids, self._all_params(params, len(ids)), strict=True))
        bar = len(asked) > 1 and sys.stderr.isatty() if progress is None else progress
        return self._outputs(asked, bar)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **variables: Any,
    ) -> list[Output]:
        """Return the n answers to a conversation of `{"role": ..., "content": ...}`, or to each of several.
        `params` and `progress`: as of `generate`; `variables` are those of the model's chat template."""
        asked = self._asked_of_chats(_conversations(messages), params, variables)
        bar = len(asked) > 1 and sys.stderr.isatty() if progress is None else progress
        return self._outputs(asked, bar)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **variables: Any,
    ) -> Generator[Piece]:
        """Stream the answer to a conversation; the last piece has the whole output. `progress`: with pieces about
        the prompt."""
        asked = self._asked_of_chats(_conversations(messages), _of_one(params), variables)
        return self._pieces([replace(each, progress=progress) for each in asked])

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Stream the continuation of one prompt; the last piece has the whole output."""
        params = _of_one(params) or self.get_default_sampling_params()
        return self._pieces(self._asked([(self._ids(prompt), params)]))

    def _asked_of_chats(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None,
        variables: Mapping[str, Any],
    ) -> list[Asked]:
        texts = [self.tokenizer.apply_chat_template(each, **variables) for each in conversations]
        # Chat templates write the begin token themselves.
        ids = [self._ids(text, special=False) for text in texts]
        return self._asked(zip(ids, self._all_params(params, len(ids)), strict=True), self.ready.context)

    def _pieces(self, asked: Sequence[Asked]) -> Generator[Piece]:
        conversation = self._conversation()
        (text,) = conversation.ask(asked)
        try:
            while not text.over:
                conversation.turn()
                while text.pieces:
                    yield text.pieces.popleft()
            if text.failure is not None:
                raise text.failure
        finally:
            conversation.drop([text])

    def _outputs(self, asked: Sequence[Asked], bar: bool) -> list[Output]:
        conversation = self._conversation()
        texts = conversation.ask(asked)
        try:
            shown = Progress(console=Console(stderr=True), disable=not bar, transient=sys.stderr.isatty())
            with shown:
                task = shown.add_task("generating", total=len(texts))
                while (over := sum(text.over for text in texts)) < len(texts):
                    shown.update(task, completed=over)
                    conversation.turn()
                shown.update(task, completed=over)
        finally:
            conversation.drop(texts)
        for text in texts:
            if text.failure is not None:
                raise text.failure
        return [text.output for text in texts if text.output is not None]

    def _asked(
        self, prompts: Iterable[tuple[tuple[int, ...], SamplingParams]], usual: int = _USUAL_MAX_TOKENS
    ) -> list[Asked]:
        asked: list[Asked] = []
        for place, (ids, params) in enumerate(prompts):
            words = [each for word in params.bad_words for each in bad_word_sequences(self.tokenizer, word)]
            ending = stop_token_set(params.stop_token_ids, params.ignore_eos, self.tokenizer.eos_token_ids)
            limit = output_limit(params.max_tokens, usual, len(ids), self.ready, "max_tokens")
            parameters = engine_parameters(
                params,
                self.ready,
                max_tokens=limit,
                logprobs=params.logprobs,
                bad_words=tuple(dict.fromkeys(words)),
                ending=ending,
                grammar=params.structured_outputs.written if params.structured_outputs else "",
                thinking_budget=self._thinking_budget(ids, params.thinking_token_budget),
            )
            parameters = msgspec.structs.replace(parameters, max_tokens=max(1, limit))
            seed = random_seed() if params.seed is None else params.seed & MASK64
            seeds = tuple(choice_seed(seed, choice) for choice in range(params.n))
            asked.append(Asked(place, ids, seeds, params, parameters, ending))
        return asked

    def _thinking_budget(self, prompt: Sequence[int], most: int | None) -> ThinkingBudget | None:
        if most is None:
            return None
        thinking = starts_in_thinking(self.tokenizer.decode(prompt, skip_special_tokens=False))
        return make_thinking_budget(most, thinking, partial(self.tokenizer.encode, add_special_tokens=False))

    def _all_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, prompts: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * prompts
        if not all(isinstance(each, SamplingParams) for each in cast(Sequence[object], params)):
            raise RequestError("params: must be SamplingParams, or one for each prompt", "params")
        if len(params) != prompts:
            raise RequestError(
                f"params: there are {len(params)} for {prompts} prompts; give one for all, or one for each",
                "params",
            )
        return params

    def _all_ids(self, prompts: Prompt | Sequence[Prompt]) -> list[tuple[int, ...]]:
        """Token ids of one prompt or of several."""
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [cast(Prompt, prompts)]
        return [self._ids(cast(Prompt, prompt)) for prompt in prompts]

    def _ids(self, prompt: Prompt, special: bool = True) -> tuple[int, ...]:
        ids = encode(self.tokenizer, prompt, special, "prompt") if isinstance(prompt, str) else prompt
        found = tuple(ids)
        check_prompt(found, self.ready, "prompt")
        return found

    def _conversation(self) -> Conversation:
        if self._open is None:
            raise EngineDeadError("this LLM has been closed")
        return self._open


def _conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return one conversation or several as a list."""
    given = messages if messages and isinstance(messages[0], Sequence) else [messages]
    found = cast(list[object], list(given) if not isinstance(messages, str) else [None])
    for each in found:
        if not isinstance(each, Sequence) or not all(isinstance(message, Mapping) for message in each):
            raise RequestError(
                'messages: must be a list of {"role": ..., "content": ...}, or a list of such lists',
                "messages",
            )
    return cast(list[Messages], found)


def _of_one(params: SamplingParams | None) -> SamplingParams | None:
    if params is not None and params.n != 1:
        raise RequestError("n: a stream is one text", "n")
    return params


def _usual_here(settings: Settings) -> Settings:
    """Choose mode `sd` in this process if the user has named none."""
    if "mode" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"mode": Mode.SD if settings.drafts else Mode.AR})
