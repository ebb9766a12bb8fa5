"""The verifier's side of its drafters: joins, queues, epochs, silence."""

import msgspec
import pytest
from msgspec.structs import replace

from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.cluster.memory_channel import MemoryChannel, memory_pair
from ssd_serve.errors import PairMismatchError
from ssd_serve.messages import (
    Close,
    Growth,
    Heartbeat,
    Hello,
    Message,
    Open,
    Outcome,
    Refusal,
    Resync,
    SamplingParameters,
    Submit,
)
from ssd_serve.verifier.drafters import Drafters, check_hello
from ssd_serve.verifier.request import Request, accept
from tests.fakes import HELLO, VOCABULARY

OTHER = replace(HELLO, name="d1")


class Clock:
    """A time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class House:
    """Drafters under test, some requests, and the far ends of the channels."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.drafters = Drafters(HELLO, self.clock)
        self.requests = {number: make_request(number) for number in range(2)}

    def join(self, hello: Hello = HELLO, capacity: int = 100, synchronous: bool = False) -> MemoryChannel:
        mine, its = memory_pair(capacity=capacity)
        self.drafters.connect(mine, synchronous)
        its.send(hello)
        self.drain()
        return its

    def drain(self) -> int:
        return self.drafters.drain(self.requests)

    def end_round(self) -> None:
        self.drafters.flush()
        self.drain()

    def commit(self, number: int, *tokens: int) -> None:
        request = self.requests[number]
        request.tokens.extend(tokens)
        assert request.replica is not None
        request.replica.advance(tokens)
        self.drafters.outcome(request, tokens, request.replica.tree.root.name)


def make_request(number: int) -> Request:
    submit = Submit(number, (1, 2, 3), SamplingParameters(max_tokens=50), 7)
    return accept(submit, (0,), None, 64, VOCABULARY)


def of(kind: type[Message], messages: list[Message]) -> list[Message]:
    return [message for message in messages if isinstance(message, kind)]


def growth(request: Request, sequence: int = 0, epoch: int | None = None) -> Growth:
    assert request.replica is not None
    expansion = Expansion(request.replica.tree.root.name, ROOT_STEP, [1, 2], [-0.5, -1.0])
    return pack(request.number, epoch or request.epoch, sequence, [expansion], "d0", snapshot=False)


def test_who_joins_is_told_of_every_running_request() -> None:
    house = House()
    its = house.join()
    heard = its.receive()
    assert heard[0] == HELLO
    assert [message.request for message in heard[1:] if isinstance(message, Open)] == [0, 1]
    assert house.drafters.alive == 1
    assert house.drafters.step_s == pytest.approx(HELLO.step_ms / 1e3)


def test_a_drafter_inline_does_not_hide_that_the_other_has_left() -> None:
    house = House()
    house.join(synchronous=True)
    its = house.join()
    assert (house.drafters.alive, house.drafters.beside, house.drafters.rejoins) == (2, 1, 0)
    its.close()
    house.drain()
    assert (house.drafters.alive, house.drafters.beside) == (1, 0)
    house.join()
    assert (house.drafters.beside, house.drafters.rejoins) == (1, 1)


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
    house = House()
    its = house.join(theirs)
    refusals = of(Refusal, its.receive())
    assert len(refusals) == 1
    assert isinstance(refusals[0], Refusal)
    assert word in refusals[0].message
    assert its.closed
    assert house.drafters.alive == 0
    assert house.drafters.channels == []


def test_a_hello_of_another_version_is_read_far_enough_to_be_refused() -> None:
    """Another version may lack fields that this one has, and have others."""
    house = House()
    body = msgspec.msgpack.encode({"type": "Hello", "protocol": 999, "colour": "red"})
    its = house.join(msgspec.msgpack.decode(body, type=Hello))
    (refusal,) = of(Refusal, its.receive())
    assert isinstance(refusal, Refusal)
    assert f"verifier {HELLO.protocol}, drafter 999" in refusal.message
    assert "install the same version" in refusal.message


def test_growth_is_drained_into_the_replica_of_its_epoch() -> None:
    house = House()
    its = house.join()
    request = house.requests[0]
    assert request.replica is not None
    its.send(growth(request, epoch=request.epoch + 1))
    house.drain()
    assert len(request.replica.tree) == 0
    its.send(growth(request))
    its.send(replace(growth(request), request=99))
    assert house.drain() == 2
    assert len(request.replica.tree) == 2


def test_nobody_is_heard_before_the_check() -> None:
    house = House()
    mine, its = memory_pair()
    house.drafters.connect(mine)
    for request in house.requests.values():
        house.drafters.open(request)
    its.send(growth(house.requests[0]))
    its.send(Resync(0, house.requests[0].epoch))
    house.drain()
    replica = house.requests[0].replica
    assert replica is not None
    assert len(replica.tree) == 0
    assert its.receive() == []


def test_a_gap_in_growth_is_answered_by_asking_for_a_snapshot() -> None:
    house = House()
    its = house.join()
    its.receive()
    its.send(growth(house.requests[0], sequence=3))
    house.drain()
    assert its.receive() == [Resync(0, house.requests[0].epoch)]


def test_a_resync_is_answered_by_a_new_epoch_with_the_tokens_so_far_once() -> None:
    house = House()
    its = house.join()
    its.receive()
    house.commit(0, 8, 9)
    epoch = house.requests[0].epoch
    its.receive()
    its.send(Resync(0, epoch))
    its.send(Resync(0, epoch))
    house.drain()
    (opened,) = its.receive()
    assert isinstance(opened, Open)
    assert (opened.epoch, opened.prompt, opened.output) == (epoch + 1, (1, 2, 3), (8, 9))


def test_an_outcome_says_where_it_stands() -> None:
    house = House()
    its = house.join()
    its.receive()
    house.commit(1, 8, 9)
    (outcome,) = its.receive()
    replica = house.requests[1].replica
    assert replica is not None
    assert outcome == Outcome(1, house.requests[1].epoch, 3, (8, 9), replica.tree.root.name)


def test_behind_a_full_queue_waits_one_open() -> None:
    house = House()
    its = house.join(capacity=4)  # its hello's answer and two openings stand in it
    for token in range(1, 9):
        house.commit(0, token)
    assert len(of(Outcome, its.receive())) == 1
    house.commit(0, 9)  # there is room again, but what came before is missing
    assert its.receive() == []
    house.drain()
    opened = of(Open, its.receive())
    assert len(opened) == 1
    assert isinstance(opened[0], Open)
    assert opened[0].output == tuple(range(1, 10))
    assert opened[0].epoch == house.requests[0].epoch
    house.commit(0, 20)
    assert len(of(Outcome, its.receive())) == 1


def test_a_full_queue_of_one_drafter_does_not_reach_the_other() -> None:
    house = House()
    stuck, well = house.join(capacity=3), house.join(replace(OTHER, source="another model"))
    well.receive()
    house.commit(0, 5)
    assert len(of(Outcome, well.receive())) == 1
    assert of(Outcome, stuck.receive()) == []


def test_a_close_that_did_not_fit_is_said_later() -> None:
    house = House()
    its = house.join(capacity=3)
    request = house.requests.pop(0)
    house.drafters.close(request)
    assert of(Close, its.receive()) == []
    house.drain()
    assert its.receive() == [Close(0, request.epoch)]
    house.drain()
    assert its.receive() == []


def test_a_silent_drafter_is_not_waited_for() -> None:
    house = House()
    its = house.join()
    house.clock.now += 1.0
    house.commit(0, 5)
    assert house.drafters.worth_waiting()
    house.clock.now += 0.022
    assert house.drafters.worth_waiting()
    house.clock.now += 0.002  # 3 of its steps of 1 ms + 20 ms
    assert not house.drafters.worth_waiting()
    its.send(Heartbeat(step_ms=5.0))
    house.drain()
    assert house.drafters.worth_waiting()
    assert house.drafters.step_s == pytest.approx(0.005)


def test_asking_again_does_not_excuse_silence() -> None:
    house = House()
    house.join()
    for token in range(1, 5):
        house.clock.now += 0.01
        house.commit(0, token)
    assert not house.drafters.worth_waiting()


def test_a_synchronous_drafter_is_never_silent_and_nobody_is_not_waited_for() -> None:
    house = House()
    assert not house.drafters.worth_waiting()
    house.join(synchronous=True)
    house.commit(0, 5)
    house.clock.now += 1000.0
    assert house.drafters.worth_waiting()


def test_who_talks_nonsense_or_leaves_is_forgotten() -> None:
    house = House()
    first, second, third = (house.join(replace(HELLO, name=name)) for name in ("a", "b", "c"))
    first.send_raw(b"\xff" * 64)
    second.close()
    third.send(Refusal("I leave"))
    house.drain()
    assert house.drafters.channels == []
    assert house.drafters.alive == 0
    house.commit(0, 5)


def test_heartbeats_come_when_due() -> None:
    house = House()
    its = house.join()
    its.receive()
    for _ in range(5):
        house.drafters.beat()
        house.clock.now += 1.0
    assert its.receive() == [Heartbeat()] * 3


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
