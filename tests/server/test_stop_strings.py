"""Tests of the stop string automaton: equal to the slow scanner at any split, in bounded steps."""

from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.server.limits import MAX_STOP_CHARACTERS, MAX_STOPS
from ssd_serve.server.text import StopScanner, StopStrings
from tests.server.stops_reference import SlowScanner, reference

TEXTS = st.text(alphabet="abé🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=6), max_size=5).map(tuple)


@given(st.lists(TEXTS, max_size=8), STOPS, st.booleans())
def test_stop_scanner_equals_slow_reference(parts: list[str], stops: tuple[str, ...], include: bool) -> None:
    fast, slow = StopScanner(StopStrings(stops), include), SlowScanner(stops, include)
    for part in parts:
        shown, stopped = fast.feed(part)
        assert (shown, stopped) == slow.feed(part)
        if stopped is not None:
            return
    assert fast.release() == slow.release()


@given(st.lists(TEXTS, max_size=8), STOPS, st.booleans())
def test_stop_scanner_is_independent_of_text_splits(
    parts: list[str], stops: tuple[str, ...], include: bool
) -> None:
    scanner = StopScanner(StopStrings(stops), include)
    shown, stopped = "", None
    for part in parts:
        text, stopped = scanner.feed(part)
        shown += text
        if stopped is not None:
            break
    else:
        shown += scanner.release()
    assert (shown, stopped) == reference("".join(parts), stops, include)


@given(TEXTS, STOPS)
def test_stop_scanner_never_retracts_text(text: str, stops: tuple[str, ...]) -> None:
    final, _ = reference(text, stops, include=False)
    scanner = StopScanner(StopStrings(stops), include_stop=False)
    shown = ""
    for character in text:
        new, stopped = scanner.feed(character)
        shown += new
        assert final.startswith(shown)
        if stopped is not None:
            break


@given(STOPS, TEXTS)
def test_choices_share_stop_automaton(stops: tuple[str, ...], text: str) -> None:
    shared = StopStrings(stops)
    first, second = StopScanner(shared, True), StopScanner(shared, True)
    first.feed(text[:3])
    assert second.feed(text) == SlowScanner(stops, True).feed(text)


def test_first_stop_string_wins_and_longer_one_of_a_tie() -> None:
    assert StopScanner(StopStrings(("abc", "b")), include_stop=False).feed("xabc") == ("xa", "b")
    assert StopScanner(StopStrings(("c", "abc")), include_stop=False).feed("xabc") == ("x", "abc")


class CountingStops(StopStrings):
    backs = 0

    def step(self, state: int, character: str) -> int:
        while state and character not in self.next[state]:
            state = self.back[state]
            self.backs += 1
        return self.next[state].get(character, 0)


def test_stop_scanner_worst_case_is_two_steps_per_character() -> None:
    longest = MAX_STOP_CHARACTERS - 1
    stops = CountingStops(tuple("a" * (longest - i) + "b" for i in range(MAX_STOPS)))
    stops.backs = 0  # drops the steps of the construction
    scanner = StopScanner(stops, include_stop=False)
    fed = 0
    for text in ["a" * 8] * 1_000 + [("a" * 400 + "c") * 10] * 2:
        assert scanner.feed(text)[1] is None
        fed += len(text)
    assert stops.backs <= fed
