"""Several drafters: who has which request, who takes it over, and whose name is whose."""

from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Close,
    Heartbeat,
    Open,
    Outcome,
    Refusal,
)
from tests.fakes import HELLO
from tests.verifier.drafter_house import OTHER, House, growth, of


def test_who_joins_late_hears_where_a_request_stands_and_nobody_else_does() -> None:
    house = House()
    first = house.join()
    house.commit(0, 4)
    first.receive()
    second = house.join(replace(OTHER, source="another model"))
    replica = house.requests[0].replica
    assert replica is not None
    opened = {message.request: message for message in second.receive() if isinstance(message, Open)}
    assert (opened[0].epoch, opened[0].root) == (house.requests[0].epoch, replica.tree.root.name)
    assert first.receive() == []


def test_drafters_of_one_model_share_the_requests() -> None:
    house = House()
    first, second = house.join(), house.join(OTHER)
    assert house.drafters.requests == {"d0": 2, "d1": 0}
    house.end_round()
    assert house.drafters.requests == {"d0": 1, "d1": 1}
    assert house.drafters.moves == 1
    (closed,) = of(Close, first.receive())
    (opened,) = of(Open, second.receive())
    assert isinstance(closed, Close)
    assert isinstance(opened, Open)
    assert (closed.request, closed.epoch) == (opened.request, opened.epoch) == (1, 1)
    house.commit(0, 4)
    house.commit(1, 5)
    assert [len(of(Outcome, its.receive())) for its in (first, second)] == [1, 1]
    for _ in range(5):
        house.end_round()
    assert house.drafters.moves == 1


def test_the_requests_of_a_drafter_that_leaves_go_to_the_others_at_once() -> None:
    house = House()
    first, second = house.join(), house.join(OTHER)
    house.end_round()
    second.receive()
    request = house.requests[0]
    assert request.replica is not None
    first.send(growth(request))
    first.close()
    house.drain()
    assert [message.request for message in second.receive() if isinstance(message, Open)] == [0]
    assert house.drafters.requests == {"d1": 2}
    assert request.epoch == 1
    assert len(request.replica.tree) == 2  # what was drafted is not lost
    house.join()
    house.end_round()
    assert house.drafters.requests == {"d1": 1, "d0": 1}


def test_the_requests_of_a_drafter_that_lags_go_to_the_others() -> None:
    house = House()
    first, second = house.join(), house.join(OTHER)
    house.end_round()
    house.clock.now += 1.0
    for number in (0, 1):
        house.commit(number, 4)
    house.clock.now += 1.1
    second.send(Heartbeat(step_ms=1.0))
    house.end_round()
    assert house.drafters.requests == {"d0": 0, "d1": 2}
    first.send(Heartbeat(step_ms=1.0))
    house.clock.now += 0.5
    house.end_round()
    assert house.drafters.requests == {"d0": 0, "d1": 2}  # not back at once
    house.clock.now += 2.1
    second.send(Heartbeat(step_ms=1.0))
    house.end_round()
    assert house.drafters.requests == {"d0": 1, "d1": 1}


def test_a_drafter_that_comes_back_replaces_what_is_left_of_it() -> None:
    house = House()
    lost = house.join()
    house.join()
    house.drain()
    assert lost.closed
    assert house.drafters.requests == {"d0": 2}
    assert (house.drafters.alive, house.drafters.rejoins) == (1, 1)


def test_a_drafter_that_hangs_is_there_and_does_not_answer() -> None:
    house = House()
    its = house.join()
    house.clock.now += 9.0
    house.drafters.beat()
    assert (house.drafters.beside, house.drafters.answering) == (1, 1)
    house.clock.now += 2.0
    house.drafters.beat()
    assert (house.drafters.beside, house.drafters.answering) == (1, 0)
    its.send(Heartbeat(step_ms=1.0))
    house.drain()
    house.drafters.beat()
    assert house.drafters.answering == 1


def test_another_drafter_of_the_same_name_is_refused_until_the_first_one_falls_silent() -> None:
    house = House()
    first = house.join()
    first.receive()
    other = replace(HELLO, instance=HELLO.instance + 1)
    (refusal,) = of(Refusal, house.join(other).receive())
    assert isinstance(refusal, Refusal)
    assert "joined as d0: give each a name of its own" in refusal.message
    assert house.drafters.requests == {"d0": 2}
    assert not first.closed
    house.clock.now += 2.1
    house.join(other)
    house.drain()
    assert first.closed
    assert (house.drafters.alive, house.drafters.requests) == (1, {"d0": 2})
