"""Tests of the text assembler: stop strings, held-back prefixes, multi-byte characters."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.models.text.tokenizer import DetokenizeStream
from ssd_serve.server.text import StopStrings, TextAssembler, TextRules
from tests.server.fakes import END, ByteDetokenizer
from tests.server.stops_reference import reference

TEXTS = st.text(alphabet="abé🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=4), max_size=4).map(tuple)


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
