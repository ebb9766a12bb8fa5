"""The verifier's side of its drafters: joins, queues, epochs, silence."""

import msgspec
import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Close,
    Heartbeat,
    Hello,
    Open,
    Outcome,
    Refusal,
    Resync,
)
from ssd_serve.base.errors import PairMismatchError
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.verifier.drafters.admission import check_hello
from tests.fakes import HELLO
from tests.verifier.drafter_factory import OTHER, DrafterHarness, growth, of


def test_joining_drafter_receives_every_running_request() -> None:
    harness = DrafterHarness()
    its = harness.join()
    heard = its.receive()
    assert heard[0] == HELLO
    assert [message.request for message in heard[1:] if isinstance(message, Open)] == [0, 1]
    assert harness.drafters.num_joined == 1
    assert harness.drafters.step_s == pytest.approx(HELLO.step_ms / 1e3)


def test_a_drafter_inline_does_not_hide_that_the_other_has_left() -> None:
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
def test_a_mismatch_is_refused_clearly(change: dict[str, object], word: str) -> None:
    theirs = replace(HELLO, **change)
    with pytest.raises(PairMismatchError, match=word):
        check_hello(HELLO, theirs)
    harness = DrafterHarness()
    its = harness.join(theirs)
    refusals = of(Refusal, its.receive())
    assert len(refusals) == 1
    assert isinstance(refusals[0], Refusal)
    assert word in refusals[0].message
    assert its.closed
    assert harness.drafters.num_joined == 0
    assert harness.drafters.channels == []


def test_a_hello_of_another_version_is_read_far_enough_to_be_refused() -> None:
    """Another version may lack fields that this one has, and have others."""
    harness = DrafterHarness()
    body = msgspec.msgpack.encode({"type": "Hello", "protocol": 999, "colour": "red"})
    its = harness.join(msgspec.msgpack.decode(body, type=Hello))
    (refusal,) = of(Refusal, its.receive())
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


def test_a_gap_in_growth_is_answered_by_asking_for_a_snapshot() -> None:
    harness = DrafterHarness()
    its = harness.join()
    its.receive()
    its.send(growth(harness.requests[0], sequence=3))
    harness.drain()
    assert its.receive() == [Resync(0, harness.requests[0].epoch)]


def test_resync_is_answered_up_to_a_rate() -> None:
    harness = DrafterHarness()
    its = harness.join()
    its.receive()
    harness.commit(0, 8, 9)
    epoch = harness.requests[0].epoch
    its.receive()
    other = harness.join(replace(OTHER, source="another model"))
    other.receive()
    for _ in range(3):
        for _ in range(50):
            its.send(Resync(0, epoch))
        harness.drain()
        heard = its.receive()
        assert len(heard) == 8
        for opened in heard:
            assert isinstance(opened, Open)
            assert (opened.epoch, opened.prompt, opened.output) == (epoch, (1, 2, 3), (8, 9))
        harness.clock.now += 8.0
    assert other.receive() == [], "other drafters keep their trees"


def test_outcome_has_position_tokens_and_root() -> None:
    harness = DrafterHarness()
    its = harness.join()
    its.receive()
    harness.commit(1, 8, 9)
    (outcome,) = its.receive()
    replica = harness.requests[1].replica
    assert replica is not None
    assert outcome == Outcome(1, harness.requests[1].epoch, 3, (8, 9), replica.tree.root.name)


def test_behind_a_full_queue_waits_one_open() -> None:
    harness = DrafterHarness()
    its = harness.join(capacity=4)  # its hello's answer and two openings stand in it
    for token in range(1, 9):
        harness.commit(0, token)
    assert len(of(Outcome, its.receive())) == 1
    harness.commit(0, 9)  # there is room again, but what came before is missing
    assert its.receive() == []
    harness.drain()
    opened = of(Open, its.receive())
    assert len(opened) == 1
    assert isinstance(opened[0], Open)
    assert opened[0].output == tuple(range(1, 10))
    assert opened[0].epoch == harness.requests[0].epoch
    harness.commit(0, 20)
    assert len(of(Outcome, its.receive())) == 1


def test_a_full_queue_of_one_drafter_does_not_reach_the_other() -> None:
    harness = DrafterHarness()
    stuck, well = harness.join(capacity=3), harness.join(replace(OTHER, source="another model"))
    well.receive()
    harness.commit(0, 5)
    assert len(of(Outcome, well.receive())) == 1
    assert of(Outcome, stuck.receive()) == []


def test_a_close_that_did_not_fit_is_said_later() -> None:
    harness = DrafterHarness()
    its = harness.join(capacity=3)
    request = harness.requests.pop(0)
    harness.drafters.close(request)
    assert of(Close, its.receive()) == []
    harness.drain()
    assert its.receive() == [Close(0, request.epoch)]
    harness.drain()
    assert its.receive() == []


def test_a_silent_drafter_is_not_waited_for() -> None:
    harness = DrafterHarness()
    its = harness.join()
    harness.clock.now += 1.0
    harness.commit(0, 5)
    assert harness.drafters.worth_waiting()
    harness.clock.now += 0.022
    assert harness.drafters.worth_waiting()
    harness.clock.now += 0.002  # 3 of its steps of 1 ms + 20 ms
    assert not harness.drafters.worth_waiting()
    its.send(Heartbeat(step_ms=5.0))
    harness.drain()
    assert harness.drafters.worth_waiting()
    assert harness.drafters.step_s == pytest.approx(0.005)


def test_asking_again_does_not_excuse_silence() -> None:
    harness = DrafterHarness()
    harness.join()
    for token in range(1, 5):
        harness.clock.now += 0.01
        harness.commit(0, token)
    assert not harness.drafters.worth_waiting()


def test_synchronous_drafter_is_always_responsive() -> None:
    harness = DrafterHarness()
    assert not harness.drafters.worth_waiting()
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


def test_heartbeats_come_when_due() -> None:
    harness = DrafterHarness()
    its = harness.join()
    its.receive()
    for _ in range(5):
        harness.drafters.heartbeat()
        harness.clock.now += 1.0
    assert its.receive() == [Heartbeat()] * 3
