"""What the benchmarks have in common: the embedded pair at a larger cost, and prompts that do not loop."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ssd_serve.bench.prompts import MAX_REPEATED, Chosen, Prompt, held_out_prompts, repeated_share
from ssd_serve.bench.rig import Rig, Way
from ssd_serve.bench.timed_request import Runner
from ssd_serve.models.hub import resolve_model
from ssd_serve.recipes.ballast import add_ballast
from ssd_serve.settings import EMBEDDED, Mode, Settings

BALLAST_HIDDEN, TARGET_LAYERS, DRAFT_LAYERS = 1024, 16, 2
_AT_ONCE, _MAX_TRIED = 16, 240


def ballast_pair(folder: Path) -> dict[str, str]:
    """Write the embedded pair with ballast into `target` and `draft`: the settings that name it."""
    target, draft = folder / "target", folder / "draft"
    add_ballast(resolve_model(EMBEDDED, "target"), target, BALLAST_HIDDEN, TARGET_LAYERS)
    add_ballast(resolve_model(EMBEDDED, "draft"), draft, BALLAST_HIDDEN, DRAFT_LAYERS)
    return {"target": str(target), "draft": str(draft)}


def choose_prompts(
    temperatures: Sequence[float], count: int, tokens: int, say: Callable[[str], None]
) -> dict[float, Chosen]:
    """Prompts whose plain continuation by the embedded target is no loop; the ballast pair's is the same.

    Where too few are found, the least repetitive ones fill up, and the result says how many.
    """
    rig = Rig(Settings(mode=Mode.AR, draft=EMBEDDED, log_level="warning"))
    pool = held_out_prompts(resolve_model(EMBEDDED, "target"), rig.tokenizer)
    engine, runner = rig.engine(Way("ar")), Runner(tokens)
    chosen: dict[float, Chosen] = {}
    for temperature in temperatures:
        tried: list[tuple[float, Prompt]] = []
        fine = 0
        for start in range(0, min(len(pool), _MAX_TRIED), _AT_ONCE):
            some = pool[start : start + _AT_ONCE]
            texts = runner.run_together(engine, some, temperature)
            tried += [(repeated_share(text), prompt) for text, prompt in zip(texts, some, strict=True)]
            fine = sum(share <= MAX_REPEATED for share, _ in tried)
            if fine >= count:
                break
        kept = sorted(tried, key=lambda item: max(item[0], MAX_REPEATED))[:count]
        say(f"temperature {temperature:g}: {fine} of {len(tried)} continuations are no loops")
        loops = sum(share > MAX_REPEATED for share, _ in kept)
        chosen[temperature] = Chosen(tuple(prompt for _, prompt in kept), 1 - fine / len(tried), loops)
    return chosen
