"""The in-process pair: faithful without faults, deterministic with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.base.draft_messages import Message
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.messages import Abort, Finish
from ssd_serve.bench.memory_channel import faultless, memory_pair
from ssd_serve.transport.channel import poll
from tests.message_faults import FaultRates, scripted, seeded


def test_faultless_pair_delivers_equal_copies() -> None:
    first, second = memory_pair()
    assert first.send(Abort(1))
    assert second.send(Finish(2))
    assert poll([first, second], 0.0) == [first, second]
    assert second.receive() == [Abort(1)]
    assert first.receive() == [Finish(2)]
    assert second.receive() == []
    first.close()
    assert second.closed
    assert not second.send(Abort(1))


def test_scripted_faults_drop_delay_duplicate_and_reorder() -> None:
    first, second = memory_pair(scripted({0: (), 1: (2,), 2: (0, 3)}))
    for number in range(4):
        first.send(Abort(number))
    arrivals = [second.receive() for _ in range(4)]
    assert arrivals == [[Abort(2), Abort(3)], [], [Abort(1)], [Abort(2)]]


@given(st.integers(0, 1000))
def test_the_same_seed_gives_the_same_faults(seed: int) -> None:
    def run() -> list[list[Message]]:
        rates = FaultRates(drop=0.2, duplicate=0.2, delay=0.5, spare=(Finish,))
        first, second = memory_pair(seeded(seed, rates))
        arrivals: list[list[Message]] = []
        for number in range(30):
            first.send(Abort(number))
            first.send(Finish(number))
            arrivals.append(second.receive())
            assert Finish(number) in arrivals[-1]
        return arrivals

    assert run() == run()


def test_a_full_pair_says_no() -> None:
    first, second = memory_pair(capacity=2)
    assert [first.send(Abort(1)) for _ in range(3)] == [True, True, False]
    second.receive()
    assert first.send(Abort(1))


def test_waiting_lets_the_other_side_work() -> None:
    first, second = memory_pair(faultless)
    second.on_wait = lambda: first.send(Abort(1))
    assert poll([second], 1.0) == [second]
    assert second.receive() == [Abort(1)]
    late, receiver = memory_pair(scripted({0: (2,)}))
    late.send(Abort(1))
    assert [receiver.wait(0.1), receiver.wait(0.1)] == [False, True]


def test_nonsense_closes() -> None:
    first, second = memory_pair()
    first.send_raw(b"\x01\x00\x00\x00\xc1")
    with pytest.raises(ProtocolError):
        second.receive()
    assert first.closed


class Timed:
    """Test double of a channel that records its waits and never has a message."""

    pending = False

    def __init__(self) -> None:
        self.waited: list[float] = []

    def fileno(self) -> int:
        return -1

    def wait(self, timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        return False


def test_a_channel_with_a_clock_of_its_own_is_given_the_timeout_to_the_last_bit() -> None:
    """Elapsed real time must not change the timeout: virtual time must not depend on the load."""
    channel = Timed()
    assert poll([channel], 0.003) == []
    assert channel.waited == [0.0, 0.003]
