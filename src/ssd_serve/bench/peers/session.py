"""Asking everybody in turn, from running engines or from the journal, within a time that is given.

Knows the order of asking and what counts as an answer, not which ways there are nor what is made of them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ssd_serve.bench.journal import Journal, TimeGiven, name_of
from ssd_serve.bench.peers.client import Ask, PeerError, Sample
from ssd_serve.bench.peers.fleet import Fleet
from ssd_serve.bench.peers.ways import Way
from ssd_serve.bench.prompts import LOOP, repeated_share
from ssd_serve.bench.rotation import rotate

_SEEDS = 3
"""A sampled text that loops is sampled anew so often; a greedy one is what it is."""
_PATIENCE = 2
"""After so many failures nobody is asked again in the same launch."""
TUNING = 0
"""The number of the launch whose answers only choose shapes; others count from 1."""


class LoopError(PeerError):
    """A text that means nothing, of an engine that works."""


@dataclass(slots=True)
class Session:
    """Answers by way and prompt. `words`: the tokens of a text; `given`: how long may be measured."""

    fleet: Fleet
    journal: Journal[Sample]
    words: Callable[[str], Sequence[int]]
    warm_ups: Mapping[float, Ask]
    say: Callable[[str], None]
    given: TimeGiven
    failures: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    _launch: int = TUNING
    _failed: Counter[Way] = field(default_factory=Counter[Way])

    @property
    def asked(self) -> int:
        """How many answers are new."""
        return self.journal.answers - self.journal.earlier

    def rotation(
        self, launch: int, ways: Sequence[Way], asks: Sequence[Ask]
    ) -> dict[Way, list[Sample | None]]:
        """Every way on every prompt, in turn. A new launch starts all engines anew; None: that way failed."""
        if launch != self._launch:
            self.fleet.close()
            self._launch = launch
            self._failed.clear()
        return rotate(ways, asks, lambda way, ask: self._answer(ways, way, ask))

    def _answer(self, ways: Sequence[Way], way: Way, ask: Ask) -> Sample | None:
        key = _key(self._launch, way, ask)
        known = self.journal.next(key)
        if known is not None or self._failed[way] >= _PATIENCE:
            return known
        self.given.require()
        if not self._started(way, ways):
            return None
        try:
            self.fleet.warm_up(way, self.warm_ups[ask.temperature])
            sample = self._fresh(way, ask)
        except PeerError as error:
            self._failed[way] += not isinstance(error, LoopError)
            self._fail(way, str(error))
            return None
        self.journal.add(key, replace(sample, ids=(), text=""))
        return sample

    def _started(self, way: Way, ways: Sequence[Way]) -> bool:
        """Everybody who can be asked runs before this one is asked."""
        able = [each for each in ways if self._failed[each] < _PATIENCE]
        failed = self.fleet.start(able)
        for each in able:
            if each.server in failed:
                self._failed[each] += 1
                self._fail(each, str(failed[each.server]))
        return way.server not in failed

    def _fresh(self, way: Way, ask: Ask) -> Sample:
        """An answer that does not loop."""
        share = 0.0
        for number in range(_SEEDS if ask.temperature else 1):
            sample = self.fleet.ask(way, replace(ask, seed=ask.seed + number))
            share = repeated_share(sample.ids or self.words(sample.text))
            if share <= LOOP:
                return sample
        raise LoopError(f"the text is a loop ({share:.0%} of it is repeated)")

    def _fail(self, way: Way, reason: str) -> None:
        """A failure of a way is part of the result and ends nothing else."""
        when = f"launch {self._launch}" if self._launch else "tuning"
        self.say(f"  {way.label} failed: {reason}")
        self.failures.append({"way": way.label, "when": when, "reason": reason})


def _key(launch: int, way: Way, ask: Ask) -> str:
    return f"{launch} {way.label} {name_of(ask)}"
