"""What the engine decides by a measured cost table: `python -m lab.explain`.

For synthetic drafts of a given acceptance and for several loads it runs the engine's own budget, growth
policy and governor in simulated time. Knows tables and layouts; loads no model and draws no page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from lab.explain.measurement import MeasuredPair
from ssd_serve.errors import SettingsError
from ssd_serve.plan.simulation import Costs, Guesses, Simulated, Way, simulate
from ssd_serve.verifier.planning.cost import Reading
from ssd_serve.verifier.planning.governor import Governor

_ROUNDS, _MIN_ROUNDS = 240, 40
_GOVERNED, _COUNTED = 8000, 2000
"""Rounds until a governor has settled, and those at the end that are counted."""


@dataclass(frozen=True, slots=True)
class Question:
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
class Decision:
    """One acceptance at one load: what each layout gives, and which one the governor settles on."""

    acceptance: float
    requests: int
    expected: Mapping[Way, Simulated]
    gains: Mapping[Way, float]
    """Tokens as the time that plain rounds should take for them, over the time spent."""
    taken: Way
    share: float
    """Of the governor's last rounds that ran in the layout that it took; the others are trials."""


def explain(pair: MeasuredPair, question: Question) -> list[Decision]:
    """Every acceptance at every load."""
    return [
        _decide(pair, acceptance, requests, question.context)
        for acceptance in question.acceptances
        for requests in question.requests
    ]


def govern(
    ways: Sequence[Way], rounds: Mapping[Way, Sequence[tuple[int, float]]], requests: int, plain_s: float
) -> tuple[Way, float]:
    """Show a governor rounds (tokens, seconds) of the layout that it asks for; what it ran most at the end,
    and its share."""
    governor = Governor(tuple(ways))
    supply = {way: cycle(each) for way, each in rounds.items()}
    ran: list[Way] = []
    for _ in range(_GOVERNED):
        way = governor.choose(requests)
        tokens, seconds = next(supply[way])
        governor.observe(tokens / requests * plain_s, seconds, plain_s)
        ran.append(way)
    last = ran[-_COUNTED:]
    taken = max(ways, key=last.count)
    return taken, last.count(taken) / len(last)


def _decide(pair: MeasuredPair, acceptance: float, requests: int, context: int) -> Decision:
    reading = Reading(requests * context, requests * context)
    plain_s = pair.costs[Way.OFF].first_seconds(requests, reading)
    count = max(_MIN_ROUNDS, _ROUNDS // requests)
    expected: dict[Way, Simulated] = {}
    for way in pair.ways:
        draft_s = 0.0 if way is Way.OFF else pair.draft_s(way)
        costs = Costs(pair.costs[way], pair.host, draft_s, pair.limits, context)
        expected[way] = simulate(way, Guesses(acceptance), costs, requests, count)
    gains = {way: each.tokens_per_s * plain_s / requests for way, each in expected.items()}
    rounds = {way: each.rounds for way, each in expected.items()}
    taken, share = govern(pair.ways, rounds, requests, plain_s)
    return Decision(acceptance, requests, expected, gains, taken, share)
