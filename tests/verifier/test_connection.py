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
from ssd_serve.verifier.drafters.connection import DrafterConnection, SyncState
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.request import Request
from tests.examples import examples
from tests.fakes import GROWTH, HELLO, VOCABULARY, ScriptedSource, core_of
from tests.verifier.drafter_factory import make_request
from tests.verifier.scheduler_factory import request_of

NUMBERS = range(3)


class RemoteDrafter:
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


class PoolHarness:
    def __init__(self, capacity: int, concurrent: int = 1) -> None:
        self.drafters = DrafterPool(HELLO, clock=lambda: 0.0)
        self.open: dict[int, Request] = {}
        self.begun = 0
        self.capacity = capacity
        self.remote = {
            SpeculationMode.ASYNC: [
                RemoteDrafter(self.drafters, capacity, f"d{place}") for place in range(concurrent)
            ]
        }

    def act(self, action: str, number: int, count: int) -> None:
        request = self.open.get(number)
        if action == "begin" and request is None:
            self.begun += 1
            submit = Submit(number, (1, 2, number), SamplingParameters(max_tokens=4000, ignore_eos=True), 7)
            self.open[number] = request_of(submit, tree_nodes=GROWTH.nodes, vocabulary=VOCABULARY)
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
        elif action == "preempt" and request is not None:  # as for a preempted request
            self.drafters.close(request)
            request.replica = None
            self.drafters.open(request)
        elif action == "set mode":
            self.drafters.set_mode(tuple(SpeculationMode)[number])
        elif action == "join" and SpeculationMode.SYNC not in self.remote:
            self.remote[SpeculationMode.SYNC] = [
                RemoteDrafter(self.drafters, self.capacity, "inline", synchronous=True)
            ]
        elif action == "die":
            concurrent = self.remote[SpeculationMode.ASYNC]
            place = number % len(concurrent)
            concurrent[place].die()
            concurrent[place] = RemoteDrafter(self.drafters, self.capacity, f"d{place}")
        elif action == "work":
            for remote in [each for several in self.remote.values() for each in several]:
                remote.work()
        elif action == "drain":
            self.drafters.flush()
            self.drafters.drain(self.open)

    def settle(self, mode: SpeculationMode) -> None:
        self.drafters.set_mode(mode)
        for _ in range(12 * self.begun + 20):
            self.act("drain", 0, 0)
            self.act("work", 0, 0)


ACTIONS = ("begin", "commit", "commit", "end", "preempt", "set mode", "join", "die", "work", "drain")


@settings(max_examples=examples(250))
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2), st.sampled_from((1, 2, 40))), max_size=40
    ),
    capacity=st.sampled_from((3, 4, 1000)),
    concurrent=st.integers(1, 3),
)
def test_each_open_request_has_one_working_drafter(
    actions: list[tuple[str, int, int]], capacity: int, concurrent: int
) -> None:
    harness = PoolHarness(capacity, concurrent)
    for action, number, count in [*actions, ("join", 0, 0)]:
        harness.act(action, number, count)
    for mode in (SpeculationMode.ASYNC, SpeculationMode.SYNC, SpeculationMode.ASYNC):
        harness.settle(mode)
        known = [each for remote in harness.remote[mode] for each in remote.source.committed.items()]
        assert sorted(number for number, _ in known) == sorted(harness.open)
        for number, tokens in known:
            request = harness.open[number]
            assert tokens == request.tokens
            assert request.replica is not None
            assert request.replica.tree.root.expanded


@pytest.mark.parametrize("mode", list(SpeculationMode))
def test_paused_drafter_closes_ended_requests(mode: SpeculationMode) -> None:
    harness = PoolHarness(1000)
    harness.act("join", 0, 0)
    for number in NUMBERS:
        harness.act("begin", number, 0)
    for settled in (SpeculationMode.ASYNC, SpeculationMode.SYNC):
        harness.settle(settled)
    harness.drafters.set_mode(mode)
    for number in NUMBERS:
        harness.act("end", number, 0)
    harness.settle(mode)
    assert [len(remote.core.requests) for several in harness.remote.values() for remote in several] == [0, 0]


class RecordingChannel:
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


class ConnectionHarness:
    def __init__(self) -> None:
        self.channel = RecordingChannel()
        self.connection = DrafterConnection(self.channel, lambda: 0.0)
        self.connection.join(HELLO, HELLO, None, get_logger("verifier", "error"))
        self.requests = [make_request(number) for number in NUMBERS]
        self.assigned: dict[int, Request] = {}
        for request in self.requests:
            request.open()

    def act(self, event: str, number: int, count: int) -> None:
        request = self.requests[number]
        assigned = number in self.assigned
        if event == "assign" and not assigned:
            self.assigned[number] = request
            self.connection.open(request)
        elif event == "remove" and assigned:
            self.connection.close(self.assigned.pop(number))
        elif event == "reopen":
            request.open()
            if assigned:
                self.connection.open(request)
        elif event == "commit":
            assert request.replica is not None
            tokens = tuple(token % VOCABULARY for token in range(count))
            request.tokens.extend(tokens)
            request.replica.advance(tokens)
            if assigned:
                self.connection.send_outcome(request)
        elif event == "resync" and assigned:
            self.connection.resync(request)
        elif event == "pause":
            self.connection.pause(number > 0)
        elif event == "send pending":
            self.connection.send_pending()
        elif event == "drain":
            self.channel.room += count

    def check(self, number: int) -> None:
        request, state = self.assigned.get(number), self.connection.state_of(number)
        known = self.channel.texts.get(number)
        if request is None:
            assert state is SyncState.CLOSING or (state is None and known is None)
        elif state is SyncState.CURRENT:
            assert known is not None
            epoch, text = known
            missing = len(request.tokens) - len(text)
            assert epoch == request.epoch
            assert text == request.tokens[: len(text)]
            assert missing == 0 or (self.connection.paused and missing < 64)
        elif state is SyncState.UNKNOWN:
            assert known is None
            assert self.connection.paused
        else:
            assert state is SyncState.STALE


EVENTS = ("assign", "remove", "reopen", "commit", "commit", "resync", "pause", "send pending", "drain")


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.tuples(st.sampled_from(EVENTS), st.sampled_from(NUMBERS), st.sampled_from((1, 2, 70))), min_size=15
    )
)
def test_sync_state_equals_what_the_drafter_knows(
    events: list[tuple[str, int, int]],
) -> None:
    harness = ConnectionHarness()
    for event in events:
        harness.act(*event)
        for number in NUMBERS:
            harness.check(number)
    harness.channel.room = 1000
    harness.connection.send_pending()
    harness.connection.pause(paused=False)
    assert harness.channel.texts == {
        number: (request.epoch, list(request.tokens)) for number, request in harness.assigned.items()
    }
    assert not harness.channel.paused
    assert {harness.connection.state_of(number) for number in harness.assigned} <= {SyncState.CURRENT}
