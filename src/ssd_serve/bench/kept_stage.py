"""A stage of `ssd bench modes` whose runs are kept in a journal, within a time that is given.

A comparison takes the same way through the same runs again: those that are known are told, the others are
run. Knows ways and prompts by their names.
"""

from collections.abc import Sequence

from ssd_serve.bench.journal import Journal, TimeGiven, name_of
from ssd_serve.bench.modes import Entry, ModesStage, Share
from ssd_serve.bench.prompts import Prompt
from ssd_serve.bench.timed_request import TimedRequest


class KeptStage:
    """The same stage to those who use it."""

    def __init__(self, stage: ModesStage, journal: Journal[TimedRequest], given: TimeGiven) -> None:
        self.setting, self.fan_out = stage.setting, stage.fan_out
        self.beside: Share = stage.beside
        self.alone: Sequence[Share] = stage.alone
        self._stage = stage
        self._journal = journal
        self._given = given

    def run(self, entry: Entry, prompt: Prompt, temperature: float) -> TimedRequest:
        """What is known of this run, or what it gives now."""
        key = f"{temperature:g} {entry.way.label} {entry.share} {name_of(prompt)}"
        known = self._journal.next(key)
        if known is not None:
            return known
        self._given.require()
        found = self._stage.run(entry, prompt, temperature)
        self._journal.add(key, found)
        return found
