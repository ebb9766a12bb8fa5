"""Stop strings in a growing text, at a cost per character independent of their number and length.

An Aho-Corasick automaton: a state is the longest suffix of the text that is a prefix of a stop string.
"""

from collections import deque


class StopStrings:
    """The automaton of stop strings, built once per request and shared by its choices."""

    def __init__(self, strings: tuple[str, ...] = ()) -> None:
        self.strings = strings
        self.next: list[dict[str, int]] = [{}]
        """Next state by character, for each state; state 0 is the empty prefix."""
        self.back: list[int] = [0]
        """State of the longest proper suffix that is a prefix, for each state."""
        self.length: list[int] = [0]
        """Length of the prefix, for each state."""
        self.complete: list[str | None] = [None]
        """Longest stop string that ends here, for each state."""
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
        """Set `back` breadth first: a suffix is shorter than its state."""
        waiting = deque(self.next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self.next[state].items():
                waiting.append(following)
                end = self.step(self.back[state], character)
                self.back[following] = end
                self.complete[following] = self.complete[following] or self.complete[end]

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character. Amortized cost is constant."""
        while state and character not in self.next[state]:
            state = self.back[state]
        return self.next[state].get(character, 0)


class StopScanner:
    """Finds the first stop string in a growing text, and holds back possible beginnings of one.

    The stop string that ends first wins; of two with the same end, the longer one.
    """

    def __init__(self, stops: StopStrings, include_stop: bool) -> None:
        self._stops = stops
        self._include = include_stop
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text to show now, and the stop string that was found, if any."""
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
        """Return the text that is held back, at the end of the text."""
        held, self._held, self._state = self._held, "", 0
        return held
