"""Tests of paused drafters: outcomes, requests and pauses that are sent later."""

import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import Open, Outcome, Pause
from ssd_serve.verifier.control.decision import SpeculationMode
from tests.fakes import HELLO, VOCABULARY
from tests.verifier.drafter_factory import DrafterHarness, growth, make_request, of


def test_paused_drafters_receive_batched_outcomes() -> None:
    harness = DrafterHarness()
    beside, inline = harness.join(), harness.join(synchronous=True)
    for its in (beside, inline):
        its.receive()
    harness.drafters.set_mode(SpeculationMode.SYNC)
    assert beside.receive() == [Pause(paused=True)]
    assert harness.drafters.working
    for token in (4, 5, 6):
        harness.commit(0, token)
    assert [message.tokens for message in inline.receive() if isinstance(message, Outcome)] == [
        (4,),
        (5,),
        (6,),
    ]
    assert beside.receive() == []
    harness.drafters.set_mode(SpeculationMode.ASYNC)
    heard = beside.receive()
    request = harness.requests[0]
    assert request.replica is not None
    assert heard == [
        Outcome(0, request.epoch, 3, (4, 5, 6), request.replica.tree.root.name),
        Pause(paused=False),
    ]
    assert of(Pause, inline.receive()) == [Pause(paused=True)]
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    assert not harness.drafters.working
    assert not harness.drafters.worth_waiting()
    assert harness.drafters.step_s == 0.0


def test_a_paused_drafter_is_not_left_behind_by_more_than_a_chunk() -> None:
    harness = DrafterHarness()
    its = harness.join()
    its.receive()
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    for token in range(70):
        harness.commit(1, token % VOCABULARY)
    pieces = [len(message.tokens) for message in its.receive() if isinstance(message, Outcome)]
    assert pieces == [64]


def test_held_back_outcomes_of_a_closed_request_are_dropped() -> None:
    harness = DrafterHarness()
    its = harness.join()
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    its.receive()
    for number in (0, 1):
        harness.commit(number, 4)
    harness.drafters.close(harness.requests[0])
    harness.drafters.open(harness.requests[1])
    harness.drafters.set_mode(SpeculationMode.ASYNC)
    assert of(Outcome, its.receive()) == []


def test_request_begun_while_drafting_is_off_opens_when_it_resumes() -> None:
    harness = DrafterHarness()
    harness.requests[2] = make_request(2)
    its = harness.join()
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    its.receive()
    for number in (0, 1, 2):
        harness.drafters.close(harness.requests[number])
        its.receive()
        harness.drafters.open(harness.requests[number])
    for token in range(64):
        harness.commit(0, token % VOCABULARY)
    opened = [message for message in its.receive() if isinstance(message, Open)]
    assert [(each.request, len(each.output)) for each in opened] == [(0, 64)]
    harness.drafters.close(harness.requests[1])
    assert its.receive() == []
    harness.commit(2, 5)
    harness.drafters.set_mode(SpeculationMode.ASYNC)
    heard = its.receive()
    opened = [message for message in heard if isinstance(message, Open)]
    assert [(each.request, each.epoch) for each in opened] == [(2, harness.requests[2].epoch)]
    harness.commit(2, 6)
    assert [message.tokens for message in its.receive() if isinstance(message, Outcome)] == [(6,)]


def test_drafter_that_joins_while_drafting_is_off_receives_pause() -> None:
    harness = DrafterHarness()
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    assert Pause(paused=True) in harness.join().receive()
    assert not harness.drafters.working
    assert harness.drafters.num_joined == 1


def test_paused_drafter_receives_new_requests_late_without_loss_of_trees() -> None:
    harness = DrafterHarness()
    beside, inline = harness.join(), harness.join(synchronous=True)
    harness.drafters.set_mode(SpeculationMode.SYNC)
    request = harness.requests[2] = make_request(2)
    for its in (beside, inline):
        its.receive()
    harness.drafters.open(request)
    assert beside.receive() == []
    assert [message.request for message in inline.receive() if isinstance(message, Open)] == [2]
    harness.commit(2, 4, 5)
    inline.receive()
    harness.drafters.set_mode(SpeculationMode.ASYNC)
    assert of(Open, inline.receive()) == []
    (opened,) = (message for message in beside.receive() if isinstance(message, Open))
    assert request.replica is not None
    assert opened == request.opened()
    assert (opened.output, opened.root) == ((4, 5), request.replica.tree.root.name)
    beside.send(growth(request))
    harness.drain()
    assert len(request.replica.tree) == 2


def test_a_pause_that_did_not_fit_is_said_later() -> None:
    harness = DrafterHarness()
    its = harness.join(capacity=3)  # the reply to its Hello and two Open messages fill it
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    assert of(Pause, its.receive()) == []
    harness.drain()
    assert its.receive() == [Pause(paused=True)]
    harness.drain()
    harness.drafters.set_mode(SpeculationMode.ASYNC)
    assert of(Pause, its.receive()) == [Pause(paused=False)]
    assert its.receive() == []


def test_pending_prefill_counts_unsent_tokens() -> None:
    harness = DrafterHarness()
    harness.join(replace(HELLO, prefill_ms=2.0))
    assert harness.drafters.pending_prefill_s(SpeculationMode.ASYNC) == 0.0
    assert harness.drafters.prefill_s_per_token(SpeculationMode.ASYNC) == pytest.approx(0.002)
    assert harness.drafters.prefill_s_per_token(SpeculationMode.SYNC) == 0.0
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    late = harness.requests[2] = make_request(2)
    harness.drafters.open(late)
    harness.commit(0, 5, 6)
    assert harness.drafters.pending_prefill_s(SpeculationMode.ASYNC) == pytest.approx((3 + 2) * 0.002)
    assert harness.drafters.pending_prefill_s(SpeculationMode.SYNC) == 0.0
    harness.drafters.set_mode(SpeculationMode.ASYNC)
    assert harness.drafters.pending_prefill_s(SpeculationMode.ASYNC) == 0.0
    harness.join(replace(HELLO, name="d1", instance=HELLO.instance + 1, prefill_ms=2.0))
    assert harness.drafters.prefill_s_per_token(SpeculationMode.ASYNC) == pytest.approx(0.001), (
        "each reads half of the texts"
    )


def test_a_drafter_inline_has_read_what_it_has_grown_a_tree_below() -> None:
    harness = DrafterHarness()
    its = harness.join(replace(HELLO, prefill_ms=2.0), synchronous=True)
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    assert harness.drafters.pending_prefill_s(SpeculationMode.SYNC) == pytest.approx((3 + 3) * 0.002)
    harness.drafters.set_mode(SpeculationMode.SYNC)
    its.send(growth(harness.requests[0]))
    harness.drain()
    harness.drafters.set_mode(SpeculationMode.PLAIN)
    assert harness.drafters.pending_prefill_s(SpeculationMode.SYNC) == pytest.approx(3 * 0.002)
    harness.commit(0, 5, 6)
    assert harness.drafters.pending_prefill_s(SpeculationMode.SYNC) == pytest.approx((2 + 3) * 0.002)
