"""In which order an engine gets the requests of one that died: at once, or first those it may have died of.

A request that engines in a row had when they died, without giving it a token, is suspect. Suspects are tried
one at a time before anybody else is let in, so that only a request that was alone in an engine is ever blamed
for good. Knows requests, no channel.
"""

from collections import deque
from collections.abc import Mapping

from ssd_serve.server.engine.submitted import Submitted


class Quarantine:
    """Of the running requests that another engine is to go on with. `running` is read, never changed."""

    def __init__(self, running: Mapping[int, Submitted]) -> None:
        self._running = running
        self._suspects = deque(number for number, each in running.items() if each.suspect)
        self._tried: Submitted | None = None
        self.over = False
        """Everybody is let in, also who comes anew."""

    def admitted(self) -> list[Submitted]:
        """Who is to be sent now; ask again whenever the engine has said something."""
        tried = self._tried
        if self.over or (tried is not None and not tried.fed and tried.first.request in self._running):
            return []
        while self._suspects:
            self._tried = self._running.get(self._suspects.popleft())
            if self._tried is not None:
                return [self._tried]
        self.over = True
        return [each for each in self._running.values() if not each.sent]


def interrupt_all(running: Mapping[int, Submitted]) -> None:
    """The engine has died with all of these that were sent to it."""
    alone = sum(each.sent for each in running.values()) == 1
    for each in running.values():
        each.interrupt(alone)
