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
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
def test_serialization_in_steps_equals_whole(length: int, chat: bool) -> None:
    write = writer(length, chat)
    sliced, _ = finished(serialize_in_steps(length, write))
    assert msgspec.json.decode(msgspec.json.encode(sliced)) == msgspec.json.decode(
        msgspec.json.encode(write(slice(0, length)))
    )


def test_serialization_in_steps_yields_to_other_work() -> None:
    asked: list[int] = []
    write = writer(10_000, chat=False)

    def counted(some: slice) -> dict[str, object]:
        asked.append(some.stop - some.start)
        return write(some)

    _, pauses = finished(serialize_in_steps(10_000, counted))
    assert max(asked) <= 64
    assert pauses == len(asked) - 1
