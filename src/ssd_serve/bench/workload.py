"""The models and prompts of a benchmark: the embedded pair with ballast, or the user's pair and texts."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ssd_serve.base.engine_config import EMBEDDED, Mode
from ssd_serve.base.errors import PairMismatchError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.prompts import (
    NEW_TOKENS,
    ChosenPrompts,
    as_prompts,
    choose,
    held_out_prompts,
    read_questions,
)
from ssd_serve.bench.rig import EngineMode, Rig
from ssd_serve.bench.runner import Runner
from ssd_serve.models.hub import find_model, resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.ballast import add_ballast

BALLAST_HIDDEN, TARGET_LAYERS, DRAFT_LAYERS = 1024, 16, 2


def ballast_pair(folder: Path) -> dict[str, str]:
    """Write the embedded pair with ballast into `target` and `draft`; return the settings that name it."""
    target, draft = folder / "target", folder / "draft"
    add_ballast(resolve_model(EMBEDDED, "target"), target, BALLAST_HIDDEN, TARGET_LAYERS)
    add_ballast(resolve_model(EMBEDDED, "draft"), draft, BALLAST_HIDDEN, DRAFT_LAYERS)
    return {"target": str(target), "draft": str(draft)}


def choose_prompts(
    settings: Settings,
    temperatures: Sequence[float],
    count: int,
    say: Callable[[str], None],
    *,
    tuning: int = 0,
    tokens: int = NEW_TOKENS,
    file: Path | None = None,
    chat: bool | None = None,
    device: str = "cpu",
) -> dict[float, ChosenPrompts]:
    """Choose prompts of held-out files, or of `file`, for each temperature, by their plain continuations.

    The target of these settings continues them: a copy with ballast rounds differently from its original and
    writes other texts. On a GPU each prompt is continued alone, as it is measured.
    """
    rig = Rig(settings.model_copy(update={"mode": Mode.AR, "log_level": "warning"}), device)
    if file is None:
        pool = held_out_prompts(resolve_model(EMBEDDED, "target"), rig.tokenizer)
    else:
        pool = as_prompts(read_questions(file), rig.tokenizer, rig.target.facts.context - tokens, chat)
    engine, runner = rig.engine(EngineMode("ar")), Runner(tokens)
    go_on = runner.run_batch if device == "cpu" else runner.run_each
    chosen: dict[float, ChosenPrompts] = {}
    for temperature in temperatures:
        found = choose(pool, count, tuning, partial(go_on, engine, temperature=temperature))
        chosen[temperature] = found
        say(f"temperature {temperature:g}: {found.left_out:.0%} of the prompts left out, because they loop")
    return chosen


def check_pair(settings: Settings) -> None:
    """Raise `PairMismatchError` if the draft cannot draft for the target."""
    if settings.draft_model is None:
        raise PairMismatchError("nothing drafts for this target: give a draft model behind it")
    tokenizer = Tokenizer(find_model(settings.engine_config(), settings.target, "target"))
    folder = find_model(settings.engine_config(), settings.draft_model, "draft")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return  # an EAGLE head shares its target's tokenizer
    draft = Tokenizer(folder)
    if draft.vocabulary_hash() != tokenizer.vocabulary_hash():
        raise PairMismatchError(
            f"{draft.name} and {tokenizer.name} have different tokenizers: choose a draft model of the "
            "target's family"
        )
