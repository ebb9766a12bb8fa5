"""From tokens to text: stop strings at any split, held back beginnings, characters of several bytes.

The reference reads the whole text at once, a character at a time: the first stop string that is complete
ends it. However tokens are grouped, the result must be the same.
"""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.models.detokenize import DetokenizeStream
from ssd_serve.server.text import StopScanner, TextAssembler, TextRules
from tests.server.fakes import END, ByteDetokenizer

TEXTS = st.text(alphabet="abé🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=4), max_size=4).map(tuple)


def reference(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.lists(TEXTS, max_size=8), STOPS, st.booleans())
def test_any_split_of_a_text_gives_the_same(parts: list[str], stops: tuple[str, ...], include: bool) -> None:
    scanner = StopScanner(stops, include)
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
def test_what_was_shown_is_never_taken_back(text: str, stops: tuple[str, ...]) -> None:
    final, _ = reference(text, stops, include=False)
    scanner = StopScanner(stops, include_stop=False)
    shown = ""
    for character in text:
        new, stopped = scanner.feed(character)
        shown += new
        assert final.startswith(shown)
        if stopped is not None:
            break


@given(TEXTS, STOPS, st.booleans())
def test_bytes_of_characters_arrive_singly(text: str, stops: tuple[str, ...], include: bool) -> None:
    rules = TextRules(stops=stops, include_stop=include)
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
    made = TextRules(**{"ending_tokens": frozenset({END}), **rules})  # type: ignore[arg-type]
    return TextAssembler(ByteDetokenizer(skip_special_tokens=False), made)


def test_a_held_back_beginning_is_shown_at_the_end() -> None:
    text = assembler(stops=("stop",))
    assert [text.push(byte) for byte in b"a sto"] == ["a", " ", "", "", ""]
    assert text.finish() == "sto"


def test_the_first_stop_string_to_be_complete_wins_and_the_longer_of_a_tie() -> None:
    assert StopScanner(("abc", "b"), include_stop=False).feed("xabc") == ("xa", "b")
    assert StopScanner(("c", "abc"), include_stop=False).feed("xabc") == ("x", "abc")


def test_stop_strings_among_the_first_min_tokens_do_not_count() -> None:
    text = assembler(stops=("a",), min_tokens=2)
    assert "".join(text.push(byte) for byte in b"aab") == "aab"
    assert text.push(ord("a")) == ""
    assert text.stopped_by == "a"


def test_an_end_token_is_held_until_the_engine_says_that_it_ended_the_text() -> None:
    ended, went_on = assembler(), assembler()
    for text in (ended, went_on):
        assert text.push(END) == ""
    assert ended.finish(stop_token=END) == ""
    assert went_on.push(ord("x")) == "<end>x"
    assert went_on.finish() == ""


def test_a_stop_string_inside_a_held_token_leaves_the_next_one_uncounted() -> None:
    text = assembler(stops=("end",))
    text.push(END)
    assert text.push(ord("x")) == "<"
    assert (text.stopped_by, text.tokens) == ("end", 1)


def test_the_first_word_after_the_prompt_keeps_its_space() -> None:
    words = [" Once", " upon", " a", " time"]

    def decode(ids: Sequence[int]) -> str:
        # As sentencepiece does, at the start of whatever it is given.
        return "".join(words[i] for i in ids).removeprefix(" ")

    text = TextAssembler(DetokenizeStream(decode, [0, 1]), TextRules())
    assert text.push(2) + text.push(3) + text.finish() == " a time"
