"""Anybody's own pair: its prompts, and what is refused before anything is loaded.

Knows models' folders, files and tokenizers, not what is measured.
"""

from dataclasses import replace
from pathlib import Path

from ssd_serve.base.engine_settings import EMBEDDED
from ssd_serve.base.errors import PairMismatchError, UserError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.datasets import as_prompts, read_questions
from ssd_serve.bench.prompts import Prompt, held_out_prompts
from ssd_serve.models.config import positive_size, read_raw
from ssd_serve.models.hub import find_model, resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer


def prompts_of(
    settings: Settings, file: Path | None, count: int, tokens: int, chat: bool | None = None
) -> list[Prompt]:
    """At most `count` prompts that leave room for `tokens` new ones, in the target's tokens: of a file, or
    places in Python sources. Raises `UserError` for a pair that cannot be measured, and for prompts that do
    not fit."""
    target = find_model(settings.engine_config(), settings.target, "target")
    tokenizer = Tokenizer(target)
    check_pair(settings, tokenizer)
    longest = context_of(settings, target) - tokens
    if longest < 1:
        raise UserError(f"{tokenizer.name} has no room for {tokens} new tokens: ask for fewer")
    if file is not None:
        return as_prompts(read_questions(file)[:count], tokenizer, longest, chat)
    pool = held_out_prompts(resolve_model(EMBEDDED, "target"), tokenizer)
    return [replace(prompt, tokens=prompt.tokens[-longest:]) for prompt in pool[:count]]


def check_in_process(settings: Settings) -> None:
    """Raises `UserError` for a pair that cannot be compared in one process: models that do not fit together,
    and a target on several ranks."""
    if settings.tensor_parallel > 1:
        raise UserError(
            "`ssd bench modes` computes the target in its own process, on one device: "
            "`ssd bench ssd-table` measures ranks, on real servers"
        )
    check_pair(settings, Tokenizer(find_model(settings.engine_config(), settings.target, "target")))


def check_pair(settings: Settings, tokenizer: Tokenizer) -> None:
    """Raises `PairMismatchError` where the draft cannot guess for a target with this tokenizer."""
    if settings.draft_model is None:
        raise PairMismatchError("nothing drafts for this target: give a draft model behind it")
    folder = find_model(settings.engine_config(), settings.draft_model, "draft")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return  # a head on the target, which shares its tokenizer
    draft = Tokenizer(folder)
    if draft.vocabulary_hash() != tokenizer.vocabulary_hash():
        raise PairMismatchError(
            f"{draft.name} and {tokenizer.name} have different tokenizers: choose a draft model of the "
            "target's family"
        )


def context_of(settings: Settings, target: Path) -> int:
    """Prompt and answer of one request in tokens."""
    own = positive_size(read_raw(target), "max_position_embeddings")
    return min(own, settings.context or own)
