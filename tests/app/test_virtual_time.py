"""Virtual time: what happens while what lasts."""

import pytest

from ssd_serve.app.plan.virtual_time import MESSAGE_S, Clock, StepTimes, VirtualChannel
from ssd_serve.base.draft_messages import Close, DrafterMessage, Growth
from tests.fakes import HELLO

GROWTH = Growth(1, 1, 0, b"", b"", b"", b"", b"")


class Scripted:
    """A core that makes `left` steps, and one more for each message."""

    def __init__(self, times: StepTimes, left: int) -> None:
        self.left = left
        self.heard: list[DrafterMessage] = []
        self._times = times

    def handle(self, message: DrafterMessage) -> list[DrafterMessage]:
        self.heard.append(message)
        self.left += 1
        return []

    def step(self) -> list[Growth]:
        if not self.left:
            return []
        self.left -= 1
        self._times.add()
        return [GROWTH]


def make(left: int) -> tuple[Clock, Scripted, VirtualChannel]:
    clock = Clock()
    return clock, *drafter(clock, left)


def drafter(clock: Clock, left: int) -> tuple[Scripted, VirtualChannel]:
    times = StepTimes(0.002)
    core = Scripted(times, left)
    channel = VirtualChannel(clock, core, times, HELLO)
    assert len(channel.receive()) == 1  # its hello
    return core, channel


def test_a_drafter_works_while_the_target_does() -> None:
    clock, core, channel = make(left=100)
    clock.advance(0.020)
    assert channel.steps == 100 - core.left == 10
    assert len(channel.receive()) == 9  # the last message is under way
    clock.advance(0.0201)
    assert len(channel.receive()) == 1


def test_waiting_ends_with_the_first_growth() -> None:
    clock, core, channel = make(left=100)
    assert channel.wait(0.1)
    assert clock.now == 0.002 + MESSAGE_S
    assert core.left == 99


def test_waiting_for_nothing_takes_the_whole_time() -> None:
    clock, _, channel = make(left=0)
    assert not channel.wait(0.0036)
    assert clock.now == 0.004  # rounded up: the caller's own clock is real


def test_a_message_is_heard_after_the_step_in_which_it_arrives() -> None:
    clock, core, channel = make(left=3)
    clock.advance(0.001)
    channel.send(Close(1, 1))
    clock.advance(0.002)
    assert core.heard == []
    clock.advance(0.003)
    assert core.heard == [Close(1, 1)]


def test_an_idle_drafter_hears_a_message_as_soon_as_it_comes() -> None:
    clock, core, channel = make(left=0)
    clock.advance(0.010)
    channel.send(Close(1, 1))
    assert channel.wait(0.1)
    assert core.heard == [Close(1, 1)]
    assert clock.now == pytest.approx(0.010 + MESSAGE_S + 0.002 + MESSAGE_S)
