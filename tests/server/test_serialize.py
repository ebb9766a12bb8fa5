"""Log-probabilities of long answers are written in slices: the JSON is that of the whole."""

from collections.abc import Callable

import msgspec
import pytest

from ssd_serve.base.messages import TokenLogprobs
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.serialize import chat_logprobs, completion_logprobs, serialize_in_steps
from ssd_serve.server.text import TokenTexts
from tests.server.fakes import ByteTokenizer

TEXTS = TokenTexts(ByteTokenizer)


def finished(work: Steps[dict[str, object]]) -> tuple[dict[str, object], int]:
    pauses = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1


def writer(length: int, chat: bool) -> Callable[[slice], dict[str, object]]:
    tokens = [97 + place % 150 for place in range(length)]
    entries = [TokenLogprobs(-place / 7, ((98, -0.5), (200, -1e9))) for place in range(length)]
    if chat:
        return lambda some: chat_logprobs(TEXTS, tokens[some], entries[some])
    told = [None, *entries[1:]]
    return lambda some: completion_logprobs(TEXTS, tokens[some], told[some], range(length)[some])


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [0, 64, 65, 1000])
def test_serialization_in_short_steps_equals_whole(length: int, chat: bool) -> None:
    write, sizes = writer(length, chat), list[int]()

    def measured(some: slice) -> dict[str, object]:
        sizes.append(some.stop - some.start)
        return write(some)

    sliced, pauses = finished(serialize_in_steps(length, measured))
    assert max(sizes) <= 64
    assert pauses == len(sizes) - 1
    assert msgspec.json.decode(msgspec.json.encode(sliced)) == msgspec.json.decode(
        msgspec.json.encode(write(slice(0, length)))
    )


class TwoSpellings(ByteTokenizer):
    def token_bytes(self, token: int) -> bytes:
        return b"a" if token in (1, 2) else bytes([token])


def test_tokens_of_the_same_text_stay_apart() -> None:
    entry = TokenLogprobs(-2.0, ((2, -1.0), (1, -2.0), (0xF0, -3.0), (0x9F, -4.0)))
    told = completion_logprobs(TokenTexts(TwoSpellings), [1], [entry], [0])
    apart = {"a": -2.0, "token_id:2": -1.0, r"bytes:\xf0": -3.0, r"bytes:\x9f": -4.0}
    assert (told["tokens"], told["top_logprobs"]) == (["a"], [apart])
