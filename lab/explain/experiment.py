"""What the engine decides by a measured cost table: `python -m lab.explain`.

For synthetic drafts of a given acceptance and for several loads it runs the engine's own budget, growth
policy and governor in simulated time. Knows tables and layouts; loads no model and draws no page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from lab.explain.measurement import MeasuredPair
from ssd_serve.errors import SettingsError
from ssd_serve.plan.guesses import DraftQuality
from ssd_serve.plan.simulation import Costs, Simulated, simulate
from ssd_serve.verifier.planning.cost import Reading
from ssd_serve.verifier.planning.governor import Governor
from ssd_serve.verifier.planning.layout import Layout

_ROUNDS, _MIN_ROUNDS = 240, 40
_GOVERNED, _COUNTED = 8000, 2000
"""Rounds until a governor has settled, and those at the end that are counted."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Which drafts and loads to decide for; `context` tokens of each request."""

    acceptances: tuple[float, ...]
    requests: tuple[int, ...]
    context: int

    def check(self) -> None:
        """A clear error for a value that cannot be meant."""
        if not all(0 <= each < 1 for each in self.acceptances):
            raise SettingsError("--acceptance must be from 0 to below 1")
        if not all(1 <= each <= 64 for each in self.requests):
            raise SettingsError("--requests must be from 1 to 64")
        if self.context < 1:
            raise SettingsError("--at-context must be at least 1")


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """One acceptance at one load: what each layout gives, and which one the governor settles on."""

    acceptance: float
    requests: int
    expected: Mapping[Layout, Simulated]
    gains: Mapping[Layout, float]
    """Tokens as the time that plain rounds should take for them, over the time spent."""
    taken: Layout
    share: float
    """Of the governor's last rounds that ran in the layout that it took; the others are trials."""


def explain(pair: MeasuredPair, question: Situation) -> list[LayoutChoice]:
    """Every acceptance at every load."""
    return [
        _decide(pair, acceptance, requests, question.context)
        for acceptance in question.acceptances
        for requests in question.requests
    ]


def govern(
    layouts: Sequence[Layout],
    rounds: Mapping[Layout, Sequence[tuple[int, float]]],
    requests: int,
    plain_s: float,
) -> tuple[Layout, float]:
    """Show a governor rounds (tokens, seconds) of the layout that it asks for; what it ran most at the end,
    and its share."""
    governor = Governor(tuple(layouts))
    supply = {layout: cycle(each) for layout, each in rounds.items()}
    ran: list[Layout] = []
    for _ in range(_GOVERNED):
        layout = governor.choose(requests)
        tokens, seconds = next(supply[layout])
        governor.observe(tokens / requests * plain_s, seconds, plain_s)
        ran.append(layout)
    last = ran[-_COUNTED:]
    taken = max(layouts, key=last.count)
    return taken, last.count(taken) / len(last)


def _decide(pair: MeasuredPair, acceptance: float, requests: int, context: int) -> LayoutChoice:
    reading = Reading(requests * context, requests * context)
    plain_s = pair.costs[Layout.OFF].first_seconds(requests, reading)
    count = max(_MIN_ROUNDS, _ROUNDS // requests)
    expected: dict[Layout, Simulated] = {}
    for layout in pair.layouts:
        draft_s = 0.0 if layout is Layout.OFF else pair.draft_s(layout)
        costs = Costs(pair.costs[layout], pair.host, draft_s, pair.limits, context)
        expected[layout] = simulate(layout, DraftQuality(acceptance), costs, requests, count)
    gains = {layout: each.tokens_per_s * plain_s / requests for layout, each in expected.items()}
    rounds = {layout: each.rounds for layout, each in expected.items()}
    taken, share = govern(pair.layouts, rounds, requests, plain_s)
    return LayoutChoice(acceptance, requests, expected, gains, taken, share)
