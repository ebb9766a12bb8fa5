"""The prompts of the comparison: those of `ssd bench modes`, as requests that every engine understands.

A prompt whose plain continuation is a loop is left out, since any drafter guesses a loop.
"""

from collections.abc import Callable, Sequence

from ssd_serve.bench.peers.client import Ask
from ssd_serve.bench.prompts import MAX_REPEATED, Prompt, held_out_prompts, repeated_share
from ssd_serve.bench.rig import Rig, Way
from ssd_serve.bench.sample import Runner
from ssd_serve.models.hub import resolve_model
from ssd_serve.settings import EMBEDDED, Mode, Settings

_AT_ONCE, _MAX_TRIED = 16, 240


def choose_prompts(
    temperatures: Sequence[float], count: int, tokens: int, say: Callable[[str], None]
) -> dict[float, list[Ask]]:
    """`count` requests for each temperature, each with `tokens` new tokens.

    The embedded target continues the prompts; with ballast it computes the same function. Where too few
    continuations are no loops, the least repetitive ones fill up.
    """
    rig = Rig(Settings(mode=Mode.AR, draft=EMBEDDED, log_level="warning"))
    pool = held_out_prompts(resolve_model(EMBEDDED, "target"), rig.tokenizer)
    engine, runner = rig.engine(Way("ar")), Runner(tokens)
    chosen: dict[float, list[Ask]] = {}
    for temperature in temperatures:
        tried: list[tuple[float, Prompt]] = []
        for start in range(0, min(len(pool), _MAX_TRIED), _AT_ONCE):
            some = pool[start : start + _AT_ONCE]
            texts = runner.run_together(engine, some, temperature)
            tried += [(repeated_share(text), prompt) for text, prompt in zip(texts, some, strict=True)]
            if sum(share <= MAX_REPEATED for share, _ in tried) >= count:
                break
        kept = sorted(tried, key=lambda item: max(item[0], MAX_REPEATED))[:count]
        loops = sum(share > MAX_REPEATED for share, _ in kept)
        say(f"temperature {temperature:g}: {len(tried)} prompts tried, {loops} of {len(kept)} kept are loops")
        chosen[temperature] = [Ask(prompt.tokens, tokens, temperature, prompt.seed) for _, prompt in kept]
    return chosen
