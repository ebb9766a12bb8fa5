"""Tests of the drafter pool: joins, epochs, pauses, silence, and requests that move between drafters."""

import msgspec
import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Heartbeat,
    Hello,
    Open,
    Outcome,
    Pause,
    Refusal,
    Resync,
)
from ssd_serve.base.errors import PairMismatchError
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.verifier.drafters.admission import check_hello
from ssd_serve.verifier.drafters.pool import SpeculationMode
from tests.fakes import HELLO
from tests.verifier.drafter_factory import OTHER, DrafterHarness, growth, make_request, of


def test_joining_drafter_receives_every_running_request() -> None:
    harness = DrafterHarness()
    received = harness.join().receive()
    assert received[0] == HELLO
    assert [message.request for message in received[1:] if isinstance(message, Open)] == [0, 1]
    assert harness.drafters.num_joined == 1
    assert harness.drafters.step_s == pytest.approx(HELLO.step_ms / 1e3)


def test_synchronous_drafter_does_not_count_as_process() -> None:
    harness = DrafterHarness()
    harness.join(synchronous=True)
    its = harness.join()
    assert (harness.drafters.num_joined, harness.drafters.num_async, harness.drafters.rejoins) == (2, 1, 0)
    its.close()
    harness.drain()
    assert (harness.drafters.num_joined, harness.drafters.num_async) == (1, 0)
    harness.join()
    assert (harness.drafters.num_async, harness.drafters.rejoins) == (1, 1)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"protocol": 999}, "protocol versions"),
        ({"noise": "other"}, "noise schemes"),
        ({"tokenizer": "other"}, "tokenizer differs"),
    ],
)
def test_mismatched_hello_is_refused_with_the_difference(change: dict[str, object], word: str) -> None:
    theirs = replace(HELLO, **change)
    with pytest.raises(PairMismatchError, match=word):
        check_hello(HELLO, theirs)
    harness = DrafterHarness()
    its = harness.join(theirs)
    (refusal,) = of(Refusal, its.receive())
    assert isinstance(refusal, Refusal)
    assert word in refusal.message
    assert its.closed
    assert harness.drafters.channels == []


def test_hello_with_fields_of_another_version_is_refused() -> None:
    harness = DrafterHarness()
    body = msgspec.msgpack.encode({"type": "Hello", "protocol": 999, "colour": "red"})
    (refusal,) = of(Refusal, harness.join(msgspec.msgpack.decode(body, type=Hello)).receive())
    assert isinstance(refusal, Refusal)
    assert f"verifier {HELLO.protocol}, drafter 999" in refusal.message
    assert "install the same version" in refusal.message


def test_growth_is_drained_into_the_replica_of_its_epoch() -> None:
    harness = DrafterHarness()
    its = harness.join()
    request = harness.requests[0]
    assert request.replica is not None
    its.send(growth(request, epoch=request.epoch + 1))
    harness.drain()
    assert len(request.replica.tree) == 0
    its.send(growth(request))
    its.send(replace(growth(request), request=99))
    assert harness.drain() == 2
    assert len(request.replica.tree) == 2


def test_messages_before_hello_are_ignored() -> None:
    harness = DrafterHarness()
    mine, its = memory_pair()
    harness.drafters.connect(mine)
    for request in harness.requests.values():
        harness.drafters.open(request)
    its.send(growth(harness.requests[0]))
    its.send(Resync(0, harness.requests[0].epoch))
    harness.drain()
    replica = harness.requests[0].replica
    assert replica is not None
    assert len(replica.tree) == 0
    assert its.receive() == []


def test_gap_in_growth_is_answered_by_resync() -> None:
    harness = DrafterHarness()
    its = harness.join()
    its.receive()
    its.send(growth(harness.requests[0], sequence=3))
    harness.drain()
    assert its.receive() == [Resync(0, harness.requests[0].epoch)]


def test_resync_is_answered_up_to_a_rate() -> None:
    harness = DrafterHarness()
    its = harness.join()
    harness.commit(0, 8, 9)
    epoch = harness.requests[0].epoch
    other = harness.join(replace(OTHER, source="another model"))
    its.receive()
    other.receive()
    for _ in range(2):
        for _ in range(50):
            its.send(Resync(0, epoch))
        harness.drain()
        received = its.receive()
        assert len(received) == 8
        for opened in received:
            assert isinstance(opened, Open)
            assert (opened.epoch, opened.prompt, opened.output) == (epoch, (1, 2, 3), (8, 9))
        harness.clock.now += 8.0
    assert other.receive() == [], "other drafters keep their trees"


def test_full_queue_is_replaced_by_one_open() -> None:
    harness = DrafterHarness()
    its = harness.join(capacity=4)  # the reply to its Hello and two Open messages are in the queue
    for token in range(1, 9):
        harness.commit(0, token)
    assert len(of(Outcome, its.receive())) == 1
    harness.commit(0, 9)
    assert its.receive() == []
    harness.drain()
    (opened,) = of(Open, its.receive())
    assert isinstance(opened, Open)
    assert (opened.output, opened.epoch) == (tuple(range(1, 10)), harness.requests[0].epoch)
    harness.commit(0, 20)
    assert len(of(Outcome, its.receive())) == 1


def test_silent_drafter_is_not_waited_for() -> None:
    harness = DrafterHarness()
    assert not harness.drafters.worth_waiting()
    its = harness.join()
    harness.clock.now += 1.0
    harness.commit(0, 5)
    harness.clock.now += 0.022
    assert harness.drafters.worth_waiting()
    harness.commit(0, 5)  # a later outcome does not extend the time
    harness.clock.now += 0.002  # 3 of its steps of 1 ms + 20 ms
    assert not harness.drafters.worth_waiting()
    its.send(Heartbeat(step_ms=5.0))
    harness.drain()
    assert harness.drafters.worth_waiting()
    assert harness.drafters.step_s == pytest.approx(0.005)


def test_synchronous_drafter_is_always_responsive() -> None:
    harness = DrafterHarness()
    harness.join(synchronous=True)
    harness.commit(0, 5)
    harness.clock.now += 1000.0
    assert harness.drafters.worth_waiting()


def test_malformed_message_or_disconnect_removes_the_drafter() -> None:
    harness = DrafterHarness()
    first, second, third = (harness.join(replace(HELLO, name=name)) for name in ("a", "b", "c"))
    first.send_raw(b"\xff" * 64)
    second.close()
    third.send(Refusal("I leave"))
    harness.drain()
    assert harness.drafters.channels == []
    assert harness.drafters.num_joined == 0
    harness.commit(0, 5)


def test_heartbeats_are_sent_every_two_seconds() -> None:
    harness = DrafterHarness()
    its = harness.join()
    its.receive()
    for _ in range(5):
        harness.drafters.heartbeat()
        harness.clock.now += 1.0
    assert its.receive() == [Heartbeat()] * 3


def test_drafter_without_messages_for_ten_seconds_is_not_responsive() -> None:
    harness = DrafterHarness()
    its = harness.join()
    for seconds, responsive in ((9.0, 1), (2.0, 0)):
        harness.clock.now += seconds
        harness.drafters.heartbeat()
        assert (harness.drafters.num_async, harness.drafters.num_responsive) == (1, responsive)
    its.send(Heartbeat(step_ms=1.0))
    harness.drain()
    harness.drafters.heartbeat()
    assert harness.drafters.num_responsive == 1


def test_requests_of_a_drafter_that_leaves_keep_tree_and_epoch() -> None:
    harness = DrafterHarness()
    first, second = harness.join(), harness.join(OTHER)
    assert harness.drafters.num_requests == {"d0": 2, "d1": 0}
    harness.end_round()
    assert (harness.drafters.num_requests, harness.drafters.moves) == ({"d0": 1, "d1": 1}, 1)
    second.receive()
    request = harness.requests[0]
    assert request.replica is not None
    first.send(growth(request))
    first.close()
    harness.drain()
    assert [message.request for message in second.receive() if isinstance(message, Open)] == [0]
    assert harness.drafters.num_requests == {"d1": 2}
    assert (request.epoch, len(request.replica.tree)) == (1, 2)


def test_requests_of_a_lagging_drafter_move_until_it_has_recovered() -> None:
    harness = DrafterHarness()
    first, second = harness.join(), harness.join(OTHER)
    harness.end_round()
    harness.clock.now += 1.0
    for number in (0, 1):
        harness.commit(number, 4)
    harness.clock.now += 1.1
    second.send(Heartbeat(step_ms=1.0))
    harness.end_round()
    assert harness.drafters.num_requests == {"d0": 0, "d1": 2}
    first.send(Heartbeat(step_ms=1.0))
    harness.clock.now += 0.5
    harness.end_round()
    assert harness.drafters.num_requests == {"d0": 0, "d1": 2}
    harness.clock.now += 2.1
    second.send(Heartbeat(step_ms=1.0))
    harness.end_round()
    assert harness.drafters.num_requests == {"d0": 1, "d1": 1}


def test_second_drafter_of_a_name_is_refused_until_the_first_is_silent() -> None:
    harness = DrafterHarness()
    lost = harness.join()
    first = harness.join()  # the same drafter replaces its old connection
    harness.drain()
    assert lost.closed
    assert (harness.drafters.num_joined, harness.drafters.rejoins) == (1, 1)
    other = replace(HELLO, instance=HELLO.instance + 1)
    (refusal,) = of(Refusal, harness.join(other).receive())
    assert isinstance(refusal, Refusal)
    assert "joined as d0: give each a name of its own" in refusal.message
    assert not first.closed
    harness.clock.now += 2.1
    harness.join(other)
    harness.drain()
    assert first.closed
    assert (harness.drafters.num_joined, harness.drafters.num_requests) == (1, {"d0": 2})


def test_paused_drafter_receives_batched_outcomes_when_it_continues() -> None:
    harness = DrafterHarness()
    concurrent, inline = harness.join(), harness.join(synchronous=True)
    for its in (concurrent, inline):
        its.receive()
    harness.drafters.set_mode(SpeculationMode.SYNC)
    assert concurrent.receive() == [Pause(paused=True)]
    assert harness.drafters.working
    for token in (4, 5, 6):
        harness.commit(0, token)
    assert [each.tokens for each in inline.receive() if isinstance(each, Outcome)] == [(4,), (5,), (6,)]
    assert concurrent.receive() == []
    harness.drafters.set_mode(SpeculationMode.ASYNC)
    request = harness.requests[0]
    assert request.replica is not None
    assert concurrent.receive() == [
        Outcome(0, request.epoch, 3, (4, 5, 6), request.replica.tree.root.name),
        Pause(paused=False),
    ]
    assert of(Pause, inline.receive()) == [Pause(paused=True)]
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    assert not harness.drafters.working
    assert not harness.drafters.worth_waiting()
    assert harness.drafters.step_s == 0.0
    assert Pause(paused=True) in harness.join(OTHER).receive()


def test_pending_prefill_counts_unsent_tokens() -> None:
    harness = DrafterHarness()
    harness.join(replace(HELLO, prefill_ms=2.0))
    assert harness.drafters.pending_prefill_s(SpeculationMode.ASYNC) == 0.0
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    late = harness.requests[2] = make_request(2)
    harness.drafters.open(late)
    harness.commit(0, 5, 6)
    assert harness.drafters.pending_prefill_s(SpeculationMode.ASYNC) == pytest.approx((3 + 2) * 0.002)
    assert harness.drafters.pending_prefill_s(SpeculationMode.SYNC) == 0.0
    harness.drafters.set_mode(SpeculationMode.ASYNC)
    assert harness.drafters.pending_prefill_s(SpeculationMode.ASYNC) == 0.0


def test_synchronous_drafter_has_prefilled_the_tokens_above_its_tree() -> None:
    harness = DrafterHarness()
    its = harness.join(replace(HELLO, prefill_ms=2.0), synchronous=True)
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    assert harness.drafters.pending_prefill_s(SpeculationMode.SYNC) == pytest.approx((3 + 3) * 0.002)
    harness.drafters.set_mode(SpeculationMode.SYNC)
    its.send(growth(harness.requests[0]))
    harness.drain()
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    harness.commit(0, 5, 6)
    assert harness.drafters.pending_prefill_s(SpeculationMode.SYNC) == pytest.approx((2 + 3) * 0.002)


def test_pause_that_did_not_fit_is_sent_later() -> None:
    harness = DrafterHarness()
    its = harness.join(capacity=3)  # the reply to its Hello and two Open messages fill the queue
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    assert of(Pause, its.receive()) == []
    harness.drain()
    assert its.receive() == [Pause(paused=True)]
    harness.drain()
    harness.drafters.set_mode(SpeculationMode.ASYNC)
    assert its.receive() == [Pause(paused=False)]
