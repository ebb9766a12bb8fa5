"""Stop strings in a growing text, at a cost per character that depends on neither their number nor length.

An Aho-Corasick automaton: a state is the longest end of the text that is the beginning of a stop string.
"""

from collections import deque


class StopStrings:
    """The automaton of some stop strings: built once a request, read by all its choices."""

    def __init__(self, strings: tuple[str, ...] = ()) -> None:
        self.strings = strings
        self.next: list[dict[str, int]] = [{}]
        """Of each state, where a character makes a longer beginning of it. State 0 is no beginning."""
        self.back: list[int] = [0]
        """Of each state, the state of its longest end that is a beginning too."""
        self.length: list[int] = [0]
        """Of each state, its characters."""
        self.complete: list[str | None] = [None]
        """Of each state, the longest stop string that it ends with."""
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self.next[state].get(character)
            if following is None:
                following = self.next[state][character] = len(self.next)
                self.next.append({})
                self.back.append(0)
                self.length.append(self.length[state] + 1)
                self.complete.append(None)
            state = following
        self.complete[state] = string

    def _link(self) -> None:
        """Shorter states first: the end of a state is shorter than the state."""
        waiting = deque(self.next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self.next[state].items():
                waiting.append(following)
                end = self.step(self.back[state], character)
                self.back[following] = end
                self.complete[following] = self.complete[following] or self.complete[end]

    def step(self, state: int, character: str) -> int:
        """The state after one more character. Each step back undoes an earlier one forward."""
        while state and character not in self.next[state]:
            state = self.back[state]
        return self.next[state].get(character, 0)


class StopScanner:
    """Finds the first stop string in a growing text, and holds back what might become one.

    The stop string that is complete first wins; of two that end together, the longer one.
    """

    def __init__(self, stops: StopStrings, include_stop: bool) -> None:
        self._stops = stops
        self._include = include_stop
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return what may be shown now and the stop string that was completed, if any."""
        stops, state = self._stops, self._state
        for place, character in enumerate(text, 1):
            state = stops.step(state, character)
            stop = stops.complete[state]
            if stop is not None:
                found = self.release() + text[:place]
                return found if self._include else found[: len(found) - len(stop)], stop
        buffer = self._held + text
        shown = len(buffer) - stops.length[state]
        self._state, self._held = state, buffer[shown:]
        return buffer[:shown], None

    def release(self) -> str:
        """Give up what is held back: the text ends here."""
        held, self._held, self._state = self._held, "", 0
        return held
