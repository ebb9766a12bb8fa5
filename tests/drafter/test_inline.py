"""Drafters in the verifier's process: a draft step whenever the verifier waits, and lookup on receive."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import Close, Growth, Heartbeat, Hello, Message, Open, Outcome, Resync
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.messages import RequestOptions, SamplingParameters, Submit
from ssd_serve.base.seeds import mix
from ssd_serve.cache.node import Node
from ssd_serve.cache.replica import Replica
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.inline import InlineChannel, LookupChannel
from ssd_serve.drafter.sources.lookup import TokenIndex, branches
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.verifier.drafters.pool import SpeculationMode
from tests.fakes import (
    EOS,
    HELLO,
    VOCABULARY,
    Case,
    FakeModel,
    ScriptedSource,
    core_of,
    make_core,
    make_engine,
    mixed_requests,
    run,
)

LIMITS = GrowthLimits(width=3, fan_out=3, depth=3, nodes=60)
PROMPT = (5, 6, 7, 8, 5, 6)
OPEN = Open(1, 1, (5, 6), (), SamplingParameters(max_tokens=9), 0, root=1)


def inline() -> InlineChannel:
    return InlineChannel(core_of(ScriptedSource(), LIMITS), HELLO)


def test_one_wait_runs_one_draft_step() -> None:
    channel = inline()
    channel.receive()
    channel.send(OPEN)
    steps = 0
    while channel.wait(0.001):
        growth, beat = channel.receive()
        assert isinstance(growth, Growth)
        assert growth.sequence == steps
        assert isinstance(beat, Heartbeat)
        assert beat.step_ms > 0
        steps += 1
    assert steps == channel.steps > 1
    assert channel.receive() == []


def test_warmup_steps_do_not_count_in_the_step_time() -> None:
    source, clock = ScriptedSource(), iter(range(100))
    channel = InlineChannel(core_of(source, LIMITS), HELLO, lambda: float(next(clock)))
    channel.receive()
    channel.send(OPEN)

    def step_ms() -> float:
        assert channel.wait(0.001)
        _, beat = channel.receive()
        assert isinstance(beat, Heartbeat)
        return beat.step_ms

    source.is_warmup_step = True
    assert step_ms() == HELLO.step_ms
    source.is_warmup_step = False
    assert step_ms() > HELLO.step_ms


def test_one_wait_completes_a_long_prefill() -> None:
    source = DraftModel(FakeModel(300), 300, NoiseRows(VOCABULARY, 64), prefill_rows=20)
    channel = InlineChannel(core_of(source, LIMITS), HELLO)
    channel.receive()
    channel.send(Open(1, 1, tuple([5] * 70), (), OPEN.parameters, 9, OPEN.root))
    assert channel.wait(0.001)
    growth, _ = channel.receive()
    assert isinstance(growth, Growth)


def test_wait_returns_at_once_if_messages_are_waiting() -> None:
    channel = inline()
    channel.send(OPEN)
    assert channel.wait(0.001)
    assert channel.steps == 0


def test_send_processes_messages_at_once() -> None:
    channel = inline()
    channel.receive()
    channel.send(Outcome(1, 1, 2, (4,), 0))
    assert channel.receive() == [Resync(1, 1)]
    assert channel.pending == 0
    assert channel.flush()
    assert channel.fileno() < 0


def opening(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 100) -> Open:
    return Open(1, 1, prompt, (), SamplingParameters(temperature=0.0, max_tokens=max_tokens), 0, root=1)


def lookup() -> LookupChannel:
    channel = LookupChannel("ngram", EngineConfig(draft_fan_out=2, draft_depth=2), HELLO, (EOS,))
    (hello,) = channel.receive()
    assert isinstance(hello, Hello)
    assert (hello.name, hello.source, hello.step_ms) == ("ngram", "ngram", 0.0)
    return channel


def growths(channel: LookupChannel) -> list[Growth]:
    return [each for each in channel.receive() if isinstance(each, Growth)]


def grown(channel: LookupChannel) -> list[int]:
    return [len(each.parents) // 8 for each in growths(channel)]


def first_share(channel: LookupChannel) -> float:
    """Probability of the best token below the root."""
    (growth,) = growths(channel)
    return math.exp(float(np.frombuffer(growth.log_probabilities, np.float32)[0]))


def test_the_lookup_channel_replies_once_on_receive() -> None:
    channel = lookup()
    assert not channel.wait(1e9)
    assert channel.send(opening())
    assert channel.wait(0.0)
    (expanded,) = grown(channel)
    assert expanded == 4  # twice the depth of a tree
    assert not channel.wait(0.0)
    assert channel.receive() == []


def test_no_match_sends_no_growth() -> None:
    channel = lookup()
    channel.send(opening((5, 6, 7, 8, 6)))
    assert channel.receive() == []


def test_lookup_continues_below_the_new_root() -> None:
    channel = lookup()
    channel.send(opening())
    grown(channel)
    channel.send(Outcome(1, 1, 6, (7, 8), mix(mix(1, 7), 8)))
    assert grown(channel) == [2]  # two levels more than were there
    channel.send(Outcome(1, 1, 9, (7,), 0))
    assert channel.receive() == [Resync(1, 1)]


def test_replica_of_a_lookup_has_the_matches_below_its_root() -> None:
    """The expansions that are sent complete those that are there, whatever is committed."""
    channel, replica, text = lookup(), Replica(1, 1, 1, 1000, VOCABULARY), list[int](PROMPT)
    channel.send(opening())
    for sent, committed in enumerate([(7, 8), (5,), (9,), (5, 6), (9,), (5, 6), (7,)]):
        for growth in growths(channel):
            assert growth.sequence <= sent
            assert replica.apply(growth)
        match = TokenIndex(text).match(4)
        expected = branches(match, lambda _length: 0.9, 2, 4) if match else []
        assert bool(replica.tree.root.tokens) >= bool(expected)
        for branch in expected:
            node: Node | None = replica.tree.root
            for token in branch.path:
                node = node and replica.tree.child(node, token)
            assert node is None or set(branch.tokens) <= set(node.tokens) or not node.tokens
        replica.advance(committed)
        channel.send(Outcome(1, 1, len(text), committed, replica.tree.root.name))
        text += committed
        assert replica.take_late() == 0


def test_accuracy_is_learnt_from_outcomes_by_temperature() -> None:
    parameters = SamplingParameters(temperature=1.0, max_tokens=100)
    for commit, surer in ((7, True), (9, False)):
        channel = lookup()
        channel.send(opening())
        before = after = first_share(channel)
        for _ in range(20):
            channel.send(Outcome(1, 1, 6, (commit,), 0))
            channel.send(opening())
            after = first_share(channel)
        assert (after > before) is surer
        channel.send(replace(opening(), request=2, parameters=parameters))
        assert first_share(channel) == pytest.approx(before)


def test_draft_tokens_below_an_accepted_path_are_observed_later() -> None:
    channel = LookupChannel("ngram", EngineConfig(draft_fan_out=2), HELLO, (EOS,))
    channel.receive()
    prompt = (11, 12, 13, 14, 15, 16, 11, 12)
    channel.send(opening(prompt))
    (before,) = growths(channel)
    for position, tokens in ((8, (13, 14)), (10, (15, 16))):
        channel.send(Outcome(1, 1, position, tokens, 0))  # without another search
    channel.send(opening(prompt))
    (after,) = growths(channel)
    old, new = (np.frombuffer(each.log_probabilities, np.float32)[:4] for each in (before, after))
    assert (new > old).all()


def test_match_that_cannot_pay_for_its_row_is_not_drafted() -> None:
    for price, found in ((0.2, True), (0.9, False), (9.0, False)):
        config = EngineConfig(draft_fan_out=2, draft_depth=2)
        channel = LookupChannel("ngram", config, HELLO, (EOS,), price=partial(float, price))
        channel.receive()
        channel.send(opening())
        assert bool(grown(channel)) is found
        channel.send(opening((11, 12, 13, 14, 15, 16, 17, 11, 12, 13, 14, 15, 16)))
        assert grown(channel), "a long match is always drafted"


def test_lookup_stops_at_max_tokens() -> None:
    channel = lookup()
    channel.send(opening(max_tokens=3))
    assert grown(channel) == [2]
    channel.send(opening((5, 6, EOS, 8, 5, 6)))
    assert grown(channel) == [1]


def test_own_tokens_win_ties_against_history() -> None:
    channel = LookupChannel("suffix", EngineConfig(draft_depth=1, suffix_shared=100), HELLO, (EOS,))
    channel.receive()
    channel.send(opening((11, 13, 14, 15)))
    channel.send(Close(1, 1))
    for prompt, token in (((13, 14, 18, 13, 14), 18), ((13, 14, 18, 11, 13, 14), 15)):
        channel.send(opening(prompt))
        (growth,) = growths(channel)
        assert np.frombuffer(growth.tokens, np.int32)[0] == token


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
    salts: dict[str, list[bytes]] = {"lookup": [], "inline": []}

    def recording(channel: Any, name: str) -> Any:
        send = channel.send

        def recorded(message: Message) -> bool:
            if isinstance(message, Open):
                salts[name].append(message.salt)
            taken: bool = send(message)
            return taken

        channel.send = recorded
        return channel

    in_process = LookupChannel("suffix", EngineConfig(), HELLO, (EOS,))
    engine.drafters.connect(recording(in_process, "lookup"), synchronous=True)
    with_model = InlineChannel(make_core(Case()), HELLO)
    engine.drafters.connect(recording(with_model, "inline"), synchronous=True)
    engine.drafters.drain({})
    run(
        engine,
        [Submit(1, PROMPT, SamplingParameters(max_tokens=4), 7, options=RequestOptions(salt=b"secret"))],
    )
    assert salts == {"lookup": [b"secret"], "inline": [b""]}


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
    for mode in SpeculationMode:
        engine.drafters.set_mode(mode)
        engine.drafters.drain({})
        assert engine.drafters.working
        assert not engine.drafters.drafting
    assert not engine.drafters.worth_waiting()
    assert engine.drafters.step_s == 0
