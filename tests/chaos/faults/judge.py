"""Compares the texts of disturbed clients with those of undisturbed ones, token by token.

A first difference is judged in float64, as `ssd bench lossless` does. Knows texts, not how they came about.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.base.settings import Settings
from ssd_serve.bench.lossless.proof import Judge, first_difference
from ssd_serve.bench.lossless.rig import LoadedPair, Outputs
from ssd_serve.models.hub import resolve_model
from tests.chaos.faults.client import Heard


@dataclass(frozen=True, slots=True)
class TextVerdict:
    """`lost`: tokens that never came; `wrong` and `near_ties`: texts that differ in those that came."""

    lost: int
    wrong: int
    near_ties: int


def judge(settings: Settings, undisturbed: Sequence[Heard], disturbed: Sequence[Heard]) -> TextVerdict:
    """What differs. The models are loaded only where something does."""
    lost = sum(
        max(0, len(one.tokens) - len(other.tokens)) for one, other in zip(undisturbed, disturbed, strict=True)
    )
    differing: dict[int, tuple[Heard, list[int]]] = {}
    for number, (one, other) in enumerate(zip(undisturbed, disturbed, strict=True)):
        index = first_difference(one.tokens, other.tokens)
        if index is not None and index < len(other.tokens):
            differing[number] = one, other.tokens
    near_ties = _near_ties(settings, differing) if differing else 0
    return TextVerdict(lost, len(differing) - near_ties, near_ties)


def _near_ties(settings: Settings, differing: dict[int, tuple[Heard, list[int]]]) -> int:
    target, draft = resolve_model(settings.target, "target"), resolve_model(settings.draft_models[0], "draft")
    pair = LoadedPair("faults", target, draft)
    submits = [
        Submit(
            number,
            heard.wish.prompt,
            SamplingParameters(
                temperature=heard.wish.temperature, max_tokens=heard.wish.tokens, ignore_eos=True
            ),
            heard.wish.seed,
        )
        for number, (heard, _) in differing.items()
    ]
    plain = Outputs({number: tuple(one.tokens) for number, (one, _) in differing.items()}, 0, 0)
    found = Outputs({number: tuple(other) for number, (_, other) in differing.items()}, 0, 0)
    return sum(each.near_tie for each in Judge(pair).differences(submits, plain, found))
