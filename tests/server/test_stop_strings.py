"""Tests of stop strings and of the text assembler: equal to slow references at any split, in bounded steps."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.models.text.tokenizer import DetokenizeStream
from ssd_serve.server.limits import MAX_STOP_CHARACTERS, MAX_STOPS
from ssd_serve.server.text import StopScanner, StopStrings, TextAssembler, TextRules
from tests.server.fakes import END, ByteDetokenizer

TEXTS = st.text(alphabet="abé🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=6), max_size=5).map(tuple)


def reference(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


class SlowScanner:
    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._stops = stops
        self._include = include_stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        buffer = self._held + text
        _, stop = found = reference(buffer, self._stops, self._include)
        if stop is not None:
            return found
        keep = max(
            (
                length
                for stop in self._stops
                for length in range(min(len(stop) - 1, len(buffer)) + 1)
                if buffer.endswith(stop[:length])
            ),
            default=0,
        )
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def release(self) -> str:
        held, self._held = self._held, ""
        return held


@given(st.lists(TEXTS, max_size=8), STOPS, st.booleans())
def test_stop_scanner_equals_slow_reference(parts: list[str], stops: tuple[str, ...], include: bool) -> None:
    fast, slow = StopScanner(StopStrings(stops), include), SlowScanner(stops, include)
    for part in parts:
        shown, stopped = fast.feed(part)
        assert (shown, stopped) == slow.feed(part)
        if stopped is not None:
            return
    assert fast.release() == slow.release()


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


@given(TEXTS, STOPS, st.booleans())
def test_detokenizer_holds_back_incomplete_characters(
    text: str, stops: tuple[str, ...], include: bool
) -> None:
    rules = TextRules(stops=StopStrings(stops), include_stop=include)
    assembler = TextAssembler(ByteDetokenizer(skip_special_tokens=True), rules)
    shown = ""
    for byte in text.encode():
        shown += assembler.push(byte)
        if assembler.stopped_by is not None:
            break
    shown += assembler.finish()
    expected, stop = reference(text, stops, include)
    assert (shown, assembler.stopped_by) == (expected, stop)
    if stop is not None:
        upto = len(reference(text, stops, include=True)[0].encode())
        assert assembler.tokens == upto


def assembler(**rules: object) -> TextAssembler:
    made = TextRules(**{"stop_token_set": frozenset({END}), **rules})  # type: ignore[arg-type]
    return TextAssembler(ByteDetokenizer(skip_special_tokens=False), made)


def test_held_back_stop_prefix_is_released_at_end() -> None:
    text = assembler(stops=StopStrings(("stop",)))
    assert [text.push(byte) for byte in b"a sto"] == ["a", " ", "", "", ""]
    assert text.finish() == "sto"


def test_min_tokens_ignores_early_stop_strings() -> None:
    text = assembler(stops=StopStrings(("a",)), min_tokens=2)
    assert "".join(text.push(byte) for byte in b"aab") == "aab"
    assert text.push(ord("a")) == ""
    assert text.stopped_by == "a"


def test_stop_token_text_is_held_until_engine_reports_end() -> None:
    ended, went_on = assembler(), assembler()
    for text in (ended, went_on):
        assert text.push(END) == ""
    assert ended.finish(stop_token=END) == ""
    assert went_on.push(ord("x")) == "<end>x"
    assert went_on.finish() == ""


def test_stop_string_in_held_token_excludes_next_token() -> None:
    text = assembler(stops=StopStrings(("end",)))
    text.push(END)
    assert text.push(ord("x")) == "<"
    assert (text.stopped_by, text.tokens) == ("end", 1)


def test_first_word_after_prompt_keeps_leading_space() -> None:
    words = [" Once", " upon", " a", " time"]

    def decode(ids: Sequence[int]) -> str:
        # sentencepiece strips the leading space of each decoded text.
        return "".join(words[i] for i in ids).removeprefix(" ")

    text = TextAssembler(DetokenizeStream(decode, [0, 1]), TextRules())
    assert text.push(2) + text.push(3) + text.finish() == " a time"
