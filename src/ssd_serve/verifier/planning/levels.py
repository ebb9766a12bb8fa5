"""What was found of ways to draft at a level of load: sums of live rounds, which fade. Plain Python; decides
nothing."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ssd_serve.verifier.planning.setback import Pace, Setback

Way = TypeVar("Way")

_MEMORY, _OWN_MEMORY = 1 - 1 / 1536, 1 - 1 / 256
"""What a round still counts after one more of its level, and after one more of its way."""
_SETTLING = 6
"""Rounds after a change that are not counted: a drafter has to catch up, or to fall silent."""


@dataclass(slots=True)
class RoundSum:
    """Rounds of one kind: what plain decoding should take for what they gave, what they took, how many."""

    plain: float = 0.0
    spent: float = 0.0
    rounds: float = 0.0

    def fade(self) -> None:
        """Another round of the level has passed."""
        self.plain *= _MEMORY
        self.spent *= _MEMORY
        self.rounds *= _MEMORY

    def add(self, plain: float, spent: float) -> None:
        """One more round of the kind."""
        if self.rounds > 8:  # a descheduled process is not a slow way to decode
            spent = min(spent, 4 * plain / self.gain)
        self.plain = _OWN_MEMORY * self.plain + plain
        self.spent = _OWN_MEMORY * self.spent + spent
        self.rounds += 1

    def doubt(self, rounds: float, slower: float = 1.0) -> None:
        """Let it weigh no more than so many rounds, which would take `slower` times as long."""
        share = min(1.0, rounds / self.rounds) if self.rounds else 0.0
        self.plain *= share
        self.spent *= share * slower
        self.rounds *= share

    @property
    def gain(self) -> float:
        """As a multiple of plain decoding; 0: unknown."""
        return self.plain / self.spent if self.spent else 0.0


@dataclass(slots=True)
class LoadLevel(Generic[Way]):
    """Which way runs at the level, and what each has given there."""

    running: Way
    decoding: dict[Way, RoundSum]
    """In plain rounds."""
    prompts: dict[Way, RoundSum]
    """Rounds that read prompts, in seconds."""
    rounds: int = 0
    """Since the last change."""
    tries: bool = False
    """Whether another way was the best so far, when that was last looked at."""
    prior: float = 1.0
    decoding_s: float = 0.0
    prompts_s: float = 0.0
    """What plain decoding should take for recent rounds of each kind, whichever way ran."""
    foreseen: dict[Way, float] = field(default_factory=dict)
    """What ways should give by measured step times."""
    forecast: dict[Way, float] = field(default_factory=dict)
    """The same, corrected by what they gave of it at other levels."""
    pace: Pace = field(default_factory=Pace)
    setbacks: dict[Way, Setback] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """Whether rounds count: the last change was a while ago."""
        return self.rounds >= _SETTLING

    @property
    def prompts_share(self) -> float:
        """Of what plain decoding should take."""
        return self.prompts_s / ((self.prompts_s + self.decoding_s) or 1.0)

    def begin(self, way: Way, settled: bool = False) -> None:
        """Run another way from now on, `settled` if it runs already."""
        self.running, self.rounds, self.pace = way, _SETTLING if settled else 0, Pace()
        self.tries = False

    def share(self, plain_s: float, prompts: bool) -> None:
        """A round, for which plain decoding should take so long, has read prompts or not."""
        self.decoding_s = _OWN_MEMORY * self.decoding_s + plain_s * (not prompts)
        self.prompts_s = _OWN_MEMORY * self.prompts_s + plain_s * prompts

    def age(self) -> None:
        """A round that only decodes passes."""
        self.rounds += 1
        self.prior *= _MEMORY
        for rounds in self.decoding.values():
            rounds.fade()
