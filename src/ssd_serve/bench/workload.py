"""What the benchmarks have in common: the embedded pair at a larger cost, and prompts that do not loop."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ssd_serve.base.engine_settings import EMBEDDED, Mode
from ssd_serve.base.settings import Settings
from ssd_serve.bench.datasets import as_prompts, read_questions
from ssd_serve.bench.prompts import NEW_TOKENS, Chosen, choose, held_out_prompts
from ssd_serve.bench.rig import EngineWay, Rig
from ssd_serve.bench.timed_request import Runner
from ssd_serve.models.hub import resolve_model
from ssd_serve.recipes.ballast import add_ballast

BALLAST_HIDDEN, TARGET_LAYERS, DRAFT_LAYERS = 1024, 16, 2


def ballast_pair(folder: Path) -> dict[str, str]:
    """Write the embedded pair with ballast into `target` and `draft`: the settings that name it."""
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
) -> dict[float, Chosen]:
    """Prompts of held-out files, or of `file`, for each temperature. The target of these settings continues
    them: a copy with ballast rounds otherwise than what it is a copy of, and so writes other texts. On a GPU
    each is continued alone, as it is measured, for a batch is rounded otherwise, too."""
    rig = Rig(settings.model_copy(update={"mode": Mode.AR, "log_level": "warning"}), device)
    if file is None:
        pool = held_out_prompts(resolve_model(EMBEDDED, "target"), rig.tokenizer)
    else:
        pool = as_prompts(read_questions(file), rig.tokenizer, rig.target.facts.context - tokens, chat)
    engine, runner = rig.engine(EngineWay("ar")), Runner(tokens)
    chosen: dict[float, Chosen] = {}
    go_on = runner.run_together if device == "cpu" else runner.run_each
    for temperature in temperatures:
        found = chosen[temperature] = choose(
            pool, count, tuning, partial(go_on, engine, temperature=temperature)
        )
        say(f"temperature {temperature:g}: {found.left_out:.0%} of the prompts left out, because they loop")
    return chosen
