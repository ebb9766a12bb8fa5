"""Tests of drafter connections and their pool under any sequence of events.

Once all messages are sent, the working drafters hold exactly the open requests, with their current tokens.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Close,
    Growth,
    Message,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.base.logs import get_logger
from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.verifier.control.decision import SpeculationMode
from ssd_serve.verifier.drafters.connection import DrafterConnection, SyncState
from ssd_serve.verifier.drafters.pool import DrafterPool
from ssd_serve.verifier.request import Request, create_request, shared_state
from tests.examples import examples
from tests.fakes import GROWTH, HELLO, VOCABULARY, ScriptedSource, core_of
from tests.verifier.drafter_factory import make_request

NUMBERS = range(3)


class Far:
    """Drafter behind a channel that holds at most `capacity` messages."""

    def __init__(self, drafters: DrafterPool, capacity: int, name: str, synchronous: bool = False) -> None:
        mine, self._its = memory_pair(capacity=capacity)
        self.source = ScriptedSource()
        self.core = core_of(self.source, GROWTH, ends=())
        drafters.connect(mine, synchronous)
        self._its.send(replace(HELLO, name=name))

    def die(self) -> None:
        self._its.close()

    def work(self) -> None:
        """Handle received messages, send the replies, and run one draft step."""
        for message in self._its.receive():
            if isinstance(message, Open | Outcome | Close | Resync | Pause):
                for answer in self.core.handle(message):
                    self._its.send(answer)
        growth: list[Growth] = self.core.step()
        for each in growth:
            self._its.send(each)


class World:
    def __init__(self, capacity: int, beside: int = 1) -> None:
        self.drafters = DrafterPool(HELLO, clock=lambda: 0.0)
        self.open: dict[int, Request] = {}
        self.begun = 0
        self.capacity = capacity
        self.far = {
            SpeculationMode.ASYNC: [Far(self.drafters, capacity, f"d{place}") for place in range(beside)]
        }

    def act(self, action: str, number: int, count: int) -> None:
        request = self.open.get(number)
        if action == "begin" and request is None:
            self.begun += 1
            submit = Submit(number, (1, 2, number), SamplingParameters(max_tokens=4000, ignore_eos=True), 7)
            self.open[number] = create_request(submit, shared_state(submit, ()), GROWTH.nodes, VOCABULARY)
            self.drafters.open(self.open[number])
        elif action == "commit" and request is not None and request.replica is not None:
            for token in range(count):  # rounds of two tokens; the first follows the tree where it has one
                children = request.replica.tree.root.tokens
                tokens = (children[0] if children else token, (token + number) % VOCABULARY)
                request.tokens.extend(tokens)
                request.replica.advance(tokens)
                self.drafters.send_outcome(request)
        elif action == "end" and request is not None:
            self.drafters.close(self.open.pop(number))
        elif action == "set aside" and request is not None:  # as for a preempted request
            self.drafters.close(request)
            request.replica = None
            self.drafters.open(request)
        elif action == "use":
            self.drafters.set_mode(tuple(SpeculationMode)[number])
        elif action == "join" and SpeculationMode.SYNC not in self.far:
            self.far[SpeculationMode.SYNC] = [Far(self.drafters, self.capacity, "inline", synchronous=True)]
        elif action == "die":
            beside = self.far[SpeculationMode.ASYNC]
            place = number % len(beside)
            beside[place].die()
            beside[place] = Far(self.drafters, self.capacity, f"d{place}")
        elif action == "work":
            for far in [each for several in self.far.values() for each in several]:
                far.work()
        elif action == "drain":
            self.drafters.flush()
            self.drafters.drain(self.open)

    def settle(self, mode: SpeculationMode) -> None:
        self.drafters.set_mode(mode)
        for _ in range(12 * self.begun + 20):
            self.act("drain", 0, 0)
            self.act("work", 0, 0)


ACTIONS = ("begin", "commit", "commit", "end", "set aside", "use", "join", "die", "work", "drain")


@settings(max_examples=examples(250))
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2), st.sampled_from((1, 2, 40))), max_size=40
    ),
    capacity=st.sampled_from((3, 4, 1000)),
    beside=st.integers(1, 3),
)
def test_one_working_drafter_has_each_open_request_in_the_end(
    actions: list[tuple[str, int, int]], capacity: int, beside: int
) -> None:
    world = World(capacity, beside)
    for action, number, count in [*actions, ("join", 0, 0)]:
        world.act(action, number, count)
    for mode in (SpeculationMode.ASYNC, SpeculationMode.SYNC, SpeculationMode.ASYNC):
        world.settle(mode)
        known = [each for far in world.far[mode] for each in far.source.committed.items()]
        assert sorted(number for number, _ in known) == sorted(world.open)
        for number, tokens in known:
            request = world.open[number]
            assert tokens == request.tokens
            assert request.replica is not None
            assert request.replica.tree.root.expanded


@pytest.mark.parametrize("mode", list(SpeculationMode))
def test_paused_drafter_closes_ended_requests(mode: SpeculationMode) -> None:
    world = World(1000)
    world.act("join", 0, 0)
    for number in NUMBERS:
        world.act("begin", number, 0)
    for settled in (SpeculationMode.ASYNC, SpeculationMode.SYNC):
        world.settle(settled)
    world.drafters.set_mode(mode)
    for number in NUMBERS:
        world.act("end", number, 0)
    world.settle(mode)
    assert [len(far.core.requests) for several in world.far.values() for far in several] == [0, 0]


class Ear:
    closed, pending = False, 0

    def __init__(self) -> None:
        self.room = 3
        self.texts: dict[int, tuple[int, list[int]]] = {}
        """Epoch and tokens that the drafter knows, by request number."""
        self.paused = False

    def send(self, message: Message) -> bool:
        if not self.room:
            return False
        self.room -= 1
        if isinstance(message, Open):
            self.texts[message.request] = message.epoch, [*message.prompt, *message.output]
        elif isinstance(message, Outcome):
            epoch, text = self.texts[message.request]
            assert (message.epoch, message.position) == (epoch, len(text)), "a gap"
            text.extend(message.tokens)
        elif isinstance(message, Close):
            self.texts.pop(message.request, None)
        elif isinstance(message, Pause):
            self.paused = message.paused
        return True

    post = send

    def flush(self) -> bool:
        return True

    def receive(self) -> list[Message]:
        return []

    def wait(self, timeout_s: float) -> bool:
        return timeout_s < 0

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.closed = True


class Desk:
    def __init__(self) -> None:
        self.ear = Ear()
        self.link = DrafterConnection(self.ear, lambda: 0.0)
        self.link.join(HELLO, HELLO, get_logger("verifier", "error"))
        self.requests = [make_request(number) for number in NUMBERS]
        self.given: dict[int, Request] = {}
        for request in self.requests:
            request.open()

    def act(self, event: str, number: int, count: int) -> None:
        request = self.requests[number]
        given = number in self.given
        if event == "give" and not given:
            self.given[number] = request
            self.link.open(request)
        elif event == "take" and given:
            self.link.close(self.given.pop(number))
        elif event == "begin again":
            request.open()
            if given:
                self.link.open(request)
        elif event == "commit":
            assert request.replica is not None
            tokens = tuple(token % VOCABULARY for token in range(count))
            request.tokens.extend(tokens)
            request.replica.advance(tokens)
            if given:
                self.link.send_outcome(request)
        elif event == "resync" and given:
            self.link.resync(request)
        elif event == "pause":
            self.link.pause(number > 0)
        elif event == "catch up":
            self.link.send_pending()
        elif event == "room":
            self.ear.room += count

    def check(self, number: int) -> None:
        request, state = self.given.get(number), self.link.state_of(number)
        known = self.ear.texts.get(number)
        if request is None:
            assert state is SyncState.CLOSING or (state is None and known is None)
        elif state is SyncState.CURRENT:
            assert known is not None
            epoch, text = known
            missing = len(request.tokens) - len(text)
            assert epoch == request.epoch
            assert text == request.tokens[: len(text)]
            assert missing == 0 or (self.link.paused and missing < 64)
        elif state is SyncState.UNKNOWN:
            assert known is None
            assert self.link.paused
        else:
            assert state is SyncState.STALE


EVENTS = ("give", "take", "begin again", "commit", "commit", "resync", "pause", "catch up", "room")


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.tuples(st.sampled_from(EVENTS), st.sampled_from(NUMBERS), st.sampled_from((1, 2, 70))), min_size=15
    )
)
def test_each_request_is_in_one_state_which_is_what_the_drafter_knows(
    events: list[tuple[str, int, int]],
) -> None:
    desk = Desk()
    for event in events:
        desk.act(*event)
        for number in NUMBERS:
            desk.check(number)
    desk.ear.room = 1000
    desk.link.send_pending()
    desk.link.pause(paused=False)
    assert desk.ear.texts == {
        number: (request.epoch, list(request.tokens)) for number, request in desk.given.items()
    }
    assert not desk.ear.paused
    assert {desk.link.state_of(number) for number in desk.given} <= {SyncState.CURRENT}
