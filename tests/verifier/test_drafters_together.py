"""Tests of several drafters: assignment, takeover and names."""

from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Close,
    Heartbeat,
    Open,
    Outcome,
    Refusal,
)
from tests.fakes import HELLO
from tests.verifier.drafter_factory import OTHER, DrafterHarness, growth, of


def test_late_drafter_alone_receives_the_current_tokens() -> None:
    harness = DrafterHarness()
    first = harness.join()
    harness.commit(0, 4)
    first.receive()
    second = harness.join(replace(OTHER, source="another model"))
    replica = harness.requests[0].replica
    assert replica is not None
    opened = {message.request: message for message in second.receive() if isinstance(message, Open)}
    assert (opened[0].epoch, opened[0].root) == (harness.requests[0].epoch, replica.tree.root.name)
    assert first.receive() == []


def test_drafters_of_one_model_share_the_requests() -> None:
    harness = DrafterHarness()
    first, second = harness.join(), harness.join(OTHER)
    assert harness.drafters.num_requests == {"d0": 2, "d1": 0}
    harness.end_round()
    assert harness.drafters.num_requests == {"d0": 1, "d1": 1}
    assert harness.drafters.moves == 1
    (closed,) = of(Close, first.receive())
    (opened,) = of(Open, second.receive())
    assert isinstance(closed, Close)
    assert isinstance(opened, Open)
    assert (closed.request, closed.epoch) == (opened.request, opened.epoch) == (1, 1)
    harness.commit(0, 4)
    harness.commit(1, 5)
    assert [len(of(Outcome, its.receive())) for its in (first, second)] == [1, 1]
    for _ in range(5):
        harness.end_round()
    assert harness.drafters.moves == 1


def test_the_requests_of_a_drafter_that_leaves_go_to_the_others_at_once() -> None:
    harness = DrafterHarness()
    first, second = harness.join(), harness.join(OTHER)
    harness.end_round()
    second.receive()
    request = harness.requests[0]
    assert request.replica is not None
    first.send(growth(request))
    first.close()
    harness.drain()
    assert [message.request for message in second.receive() if isinstance(message, Open)] == [0]
    assert harness.drafters.num_requests == {"d1": 2}
    assert request.epoch == 1
    assert len(request.replica.tree) == 2  # the draft tree is kept
    harness.join()
    harness.end_round()
    assert harness.drafters.num_requests == {"d1": 1, "d0": 1}


def test_the_requests_of_a_drafter_that_lags_go_to_the_others() -> None:
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
    assert harness.drafters.num_requests == {"d0": 0, "d1": 2}  # requests do not move back at once
    harness.clock.now += 2.1
    second.send(Heartbeat(step_ms=1.0))
    harness.end_round()
    assert harness.drafters.num_requests == {"d0": 1, "d1": 1}


def test_a_drafter_that_comes_back_replaces_what_is_left_of_it() -> None:
    harness = DrafterHarness()
    lost = harness.join()
    harness.join()
    harness.drain()
    assert lost.closed
    assert harness.drafters.num_requests == {"d0": 2}
    assert (harness.drafters.num_joined, harness.drafters.rejoins) == (1, 1)


def test_a_drafter_that_hangs_is_there_and_does_not_answer() -> None:
    harness = DrafterHarness()
    its = harness.join()
    harness.clock.now += 9.0
    harness.drafters.heartbeat()
    assert (harness.drafters.num_async, harness.drafters.num_responsive) == (1, 1)
    harness.clock.now += 2.0
    harness.drafters.heartbeat()
    assert (harness.drafters.num_async, harness.drafters.num_responsive) == (1, 0)
    its.send(Heartbeat(step_ms=1.0))
    harness.drain()
    harness.drafters.heartbeat()
    assert harness.drafters.num_responsive == 1


def test_second_drafter_of_a_name_is_refused_until_the_first_is_silent() -> None:
    harness = DrafterHarness()
    first = harness.join()
    first.receive()
    other = replace(HELLO, instance=HELLO.instance + 1)
    (refusal,) = of(Refusal, harness.join(other).receive())
    assert isinstance(refusal, Refusal)
    assert "joined as d0: give each a name of its own" in refusal.message
    assert harness.drafters.num_requests == {"d0": 2}
    assert not first.closed
    harness.clock.now += 2.1
    harness.join(other)
    harness.drain()
    assert first.closed
    assert (harness.drafters.num_joined, harness.drafters.num_requests) == (1, {"d0": 2})
