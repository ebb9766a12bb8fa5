"""Lookup in the verifier's process replies on receive, without a wait."""

from typing import Any

import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Close,
    Growth,
    Hello,
    Message,
    Open,
    Outcome,
    Resync,
)
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.messages import RequestOptions, SamplingParameters, Submit
from ssd_serve.base.seeds import mix
from ssd_serve.drafter.inline import InlineChannel, LookupChannel
from ssd_serve.verifier.drafters.pool import SpeculationMode
from tests.fakes import EOS, HELLO, Case, make_core, make_engine, mixed_requests, run

PROMPT = (5, 6, 7, 8, 5, 6)


def opening(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 100) -> Open:
    return Open(1, 1, prompt, (), SamplingParameters(temperature=0.0, max_tokens=max_tokens), 0, root=1)


def make() -> LookupChannel:
    channel = LookupChannel("ngram", EngineConfig(draft_fan_out=2, draft_depth=2), HELLO, (EOS,))
    (hello,) = channel.receive()
    assert isinstance(hello, Hello)
    assert (hello.name, hello.source, hello.step_ms) == ("ngram", "ngram", 0.0)
    return channel


def grown(channel: LookupChannel) -> list[int]:
    messages = channel.receive()
    return [len(each.parents) // 8 for each in messages if isinstance(each, Growth)]


def test_the_lookup_channel_replies_once_on_receive() -> None:
    channel = make()
    assert not channel.wait(1e9)
    assert channel.send(opening())
    assert channel.wait(0.0)
    (expanded,) = grown(channel)
    assert expanded == 4  # twice the depth of a tree
    assert not channel.wait(0.0)
    assert channel.receive() == []


def test_no_match_sends_no_growth() -> None:
    channel = make()
    channel.send(opening((5, 6, 7, 8)))
    assert channel.receive() == []


def test_lookup_continues_below_the_new_root() -> None:
    channel = make()
    channel.send(opening())
    grown(channel)
    channel.send(Outcome(1, 1, 6, (7, 8), mix(mix(1, 7), 8)))
    assert grown(channel) == [2]  # two levels more than were there
    channel.send(Outcome(1, 1, 9, (7,), 0))
    assert channel.receive() == [Resync(1, 1)]


def test_lookup_stops_at_max_tokens() -> None:
    channel = make()
    channel.send(opening(max_tokens=3))
    assert grown(channel) == [2]
    channel.send(opening((5, 6, EOS, 8, 5, 6)))
    assert grown(channel) == [1]


def test_suffix_searches_finished_requests_and_ngram_does_not() -> None:
    for name, found in (("ngram", []), ("suffix", [2])):
        channel = LookupChannel(name, EngineConfig(draft_depth=1, suffix_shared=100), HELLO, (EOS,))
        channel.receive()
        channel.send(opening((1, 2, 3, 4, 5, 6)))
        channel.send(Close(1, 1))
        channel.receive()
        channel.send(replace(opening((8, 3, 4)), request=2))
        assert grown(channel) == found


def test_only_in_process_drafters_get_the_salt() -> None:
    engine, _ = make_engine(Case())
    told: dict[str, list[bytes]] = {"instant": [], "inline": []}

    def listening(channel: Any, name: str) -> Any:
        send = channel.send

        def heard(message: Message) -> bool:
            if isinstance(message, Open):
                told[name].append(message.salt)
            taken: bool = send(message)
            return taken

        channel.send = heard
        return channel

    instant = LookupChannel("suffix", EngineConfig(), HELLO, (EOS,))
    engine.drafters.connect(listening(instant, "instant"), synchronous=True)
    inline = InlineChannel(make_core(Case()), HELLO)
    engine.drafters.connect(listening(inline, "inline"), synchronous=True)
    engine.drafters.drain({})
    run(
        engine,
        [Submit(1, PROMPT, SamplingParameters(max_tokens=4), 7, options=RequestOptions(salt=b"secret"))],
    )
    assert told == {"instant": [b"secret"], "inline": [b""]}


@pytest.mark.parametrize("count", [1, 6])
def test_lookup_saves_rounds_and_changes_no_text(count: int) -> None:
    case = Case(slots=4096)
    engine, _ = make_engine(case)
    engine.drafters.connect(LookupChannel("ngram", EngineConfig(), HELLO, (EOS,)), synchronous=True)
    outputs = run(engine, mixed_requests(count))
    expected = run(make_engine(case)[0], mixed_requests(count))
    assert {n: each.tokens for n, each in outputs.items()} == {n: each.tokens for n, each in expected.items()}
    assert engine.decision is not None
    assert engine.decision.waited_s == 0


def test_lookup_works_in_every_mode_without_waiting() -> None:
    engine, _ = make_engine(Case())
    engine.drafters.connect(LookupChannel("ngram", EngineConfig(), HELLO, (EOS,)), synchronous=True)
    for layout, works in (
        (SpeculationMode.PLAIN, False),
        (SpeculationMode.ASYNC, True),
        (SpeculationMode.SYNC, True),
    ):
        engine.drafters.set_mode(layout)
        engine.drafters.drain({})
        assert engine.drafters.working is works
    assert not engine.drafters.worth_waiting()
    assert engine.drafters.step_s == 0
