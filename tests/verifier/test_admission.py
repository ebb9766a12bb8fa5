"""Tests of drafter admission: limits, temporary bans, and isolation of other drafters."""

from collections import Counter
from typing import cast

import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Growth,
    Heartbeat,
    Message,
    Outcome,
    Refusal,
    Resync,
)
from ssd_serve.base.errors import PairMismatchError, ProtocolError
from ssd_serve.base.names import LONGEST_LABEL, as_label, is_label
from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.transport.channel import Channel
from ssd_serve.verifier.drafters.admission import OTHERS, OTHERS_BIT, BanList, DrafterAuthorizer, SourceBits
from tests.fakes import HELLO, FakeClock
from tests.verifier.drafter_factory import OTHER, DrafterHarness, growth, of

ELSEWHERE = "10.0.0.7"


def test_bans_grow_to_a_limit_and_are_forgotten() -> None:
    clock = FakeClock()
    bans = BanList(clock)
    lengths: list[float] = []
    for _ in range(11):
        lengths.append(bans.ban("a"))
        assert bans.is_banned("a")
        assert not bans.is_banned("b")
        clock.now += lengths[-1]
        assert not bans.is_banned("a")
    assert lengths == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    clock.now += BanList.REMEMBERED_S
    assert bans.ban("a") == 1
    bans.ban("a")
    bans.unban("a")
    assert bans.ban("a") == 1
    for number in range(3000):
        bans.ban(str(number))
    assert len(bans) <= 1024
    assert bans.is_banned("2999")


def make_admission(*sources: str) -> DrafterAuthorizer:
    admission = DrafterAuthorizer(HELLO, FakeClock())
    admission.sources = frozenset(sources)
    return admission


@pytest.mark.parametrize(
    "change",
    [
        {"name": "x" * (LONGEST_LABEL + 1)},
        {"name": "two\nlines"},
        {"source": "\u00e9" * LONGEST_LABEL},
        {"step_ms": float("nan")},
        {"step_ms": -1.0},
        {"step_ms": 1e-300},
        {"prefill_ms": float("nan")},
        {"prefill_ms": 1e300},
    ],
)
def test_hello_with_impossible_values_is_an_error(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        make_admission().check(replace(HELLO, **change), remote=False, sources=())


def test_remote_drafters_are_limited_to_the_named_or_to_four_sources() -> None:
    admission = make_admission("A", "B")
    admission.check(replace(HELLO, source="A"), remote=True, sources=())
    admission.check(replace(HELLO, source="C"), remote=False, sources=())
    with pytest.raises(PairMismatchError, match="drafts with A, B"):
        admission.check(replace(HELLO, source="C"), remote=True, sources=())
    admission, joined = make_admission(), ["a", "b", "c", "d"]
    admission.check(replace(HELLO, source="d"), remote=True, sources=joined[:3])
    admission.check(replace(HELLO, source="a"), remote=True, sources=joined)
    with pytest.raises(PairMismatchError, match="4 other draft models"):
        admission.check(replace(HELLO, source="e"), remote=True, sources=joined)


def test_connections_are_limited_by_number_and_rate() -> None:
    admission = make_admission()
    assert admission.block_reason(ELSEWHERE, remote=True, peers=Counter({ELSEWHERE: 31})) == ""
    assert "too many" in admission.block_reason(ELSEWHERE, remote=True, peers=Counter({ELSEWHERE: 32}))
    assert "too many" in admission.block_reason(ELSEWHERE, remote=True, peers=Counter({"a": 32, "b": 32}))
    assert "too many" in admission.block_reason("", remote=False, peers=Counter({"": 128}))
    answers = [admission.block_reason(ELSEWHERE, remote=True, peers=Counter()) for _ in range(200)]
    assert answers[100] == ""
    assert "connects too often" in answers[117]
    assert answers[-1] == "the address is banned"
    assert admission.block_reason("10.0.0.8", remote=True, peers=Counter()) == ""


def test_metrics_label_a_limited_number_of_drafters() -> None:
    admission = make_admission()
    assert [admission.register("a"), admission.register("a")] == [False, True]
    for number in range(1000):
        admission.register(f"name {number}")
    assert admission.label("a") == "a"
    assert admission.label("name 999") == OTHERS


def test_long_model_names_become_distinct_labels() -> None:
    assert as_label("owner/model") == "owner/model"
    paths = ["/" + "x" * 300 + end for end in ("/a", "/b")]
    assert len({as_label(path) for path in paths}) == 2
    assert all(is_label(as_label(path)) for path in paths)


class MixedHarness(DrafterHarness):
    """Harness with one valid local drafter; `remote` connects remote drafters."""

    def __init__(self) -> None:
        super().__init__()
        self.local = self.join()

    def remote(self, *messages: Message, peer: str = ELSEWHERE) -> MemoryChannel:
        mine, its = memory_pair(capacity=100_000)
        self.drafters.admit(mine, peer, remote=True)
        for message in messages:
            its.send(message)
        self.drain()
        return its

    def still_works(self) -> bool:
        self.local.receive()
        self.commit(0, 5)
        return len(of(Outcome, self.local.receive())) == 1


REMOTE = replace(HELLO, name="remote", source="another model")


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(step_ms=float("nan")),
        Heartbeat(nodes=-1),
        Growth(0, 1, 0, bytes(8), bytes(4), bytes(2), b"", b""),
        Outcome(0, 1, 1, (1,), 1),
    ],
)
def test_drafter_that_breaks_a_rule_is_banned_with_a_reason(message: Message) -> None:
    harness = MixedHarness()
    its = harness.remote(REMOTE, message)
    assert len(of(Refusal, its.receive())) == 1
    assert its.closed
    assert harness.drafters.num_joined == 1
    assert harness.still_works()
    assert harness.remote(REMOTE).closed
    harness.remote(REMOTE, peer="10.0.0.8")
    assert harness.drafters.num_joined == 2


def test_local_drafter_is_banned_by_name() -> None:
    harness = DrafterHarness()
    harness.join(HELLO).send(Heartbeat(step_ms=-1.0))
    harness.drain()
    again = harness.join(HELLO)
    assert again.closed
    assert again.receive() == [], "a refusal would end its process for good"
    harness.join(OTHER)
    assert harness.drafters.num_joined == 1
    harness.clock.now += 1.0
    harness.join(HELLO)
    assert harness.drafters.num_joined == 2


def test_bans_are_forgiven_after_a_minute_without_violation() -> None:
    harness = DrafterHarness()
    for _ in range(3):
        harness.clock.now += 10.0
        harness.join(HELLO).send(Heartbeat(step_ms=-1.0))
        harness.drain()
    harness.clock.now += 10.0
    its = harness.join(HELLO)
    harness.clock.now += 61.0
    harness.drafters.heartbeat()
    its.send(Heartbeat(step_ms=-1.0))
    harness.drain()
    harness.clock.now += 1.0
    harness.join(HELLO)
    assert harness.drafters.num_joined == 1


def test_connection_without_hello_is_closed() -> None:
    harness = MixedHarness()
    silent = harness.remote()
    harness.clock.now += 9.0
    harness.drafters.heartbeat()
    harness.drain()
    assert not silent.closed
    harness.clock.now += 2.0
    harness.drafters.heartbeat()
    harness.drain()
    assert silent.closed
    assert len(harness.drafters.channels) == 1


def test_mismatch_is_refused_without_a_ban() -> None:
    harness = MixedHarness()
    its = harness.remote(replace(REMOTE, tokenizer="other"))
    assert len(of(Refusal, its.receive())) == 1
    harness.remote(REMOTE)
    assert harness.drafters.num_joined == 2


def test_remote_drafter_cannot_take_the_name_of_a_local_one() -> None:
    harness = MixedHarness()
    harness.clock.now += 60.0  # the local drafter has been silent for a minute
    its = harness.remote(replace(REMOTE, name=HELLO.name, instance=9))
    assert len(of(Refusal, its.receive())) == 1
    assert harness.drafters.num_joined == 1
    taken = harness.remote(replace(REMOTE, name=OTHER.name))
    harness.join(OTHER)
    assert taken.closed
    assert harness.drafters.num_joined == 2


class FailingChannel:
    def __init__(self, inner: MemoryChannel, method: str, error: BaseException) -> None:
        self._inner, self._method, self._error = inner, method, error
        self.broken = False

    def __getattr__(self, name: str) -> object:
        return self._fail if self.broken and name == self._method else getattr(self._inner, name)

    def _fail(self, *_arguments: object) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("receive", RecursionError()),
        ("send", MemoryError()),
        ("post", OSError(24, "files")),
        ("flush", KeyError("x")),
        ("close", OSError(9, "closed")),
    ],
)
def test_failure_of_a_channel_ends_that_connection_alone(method: str, error: Exception) -> None:
    harness = MixedHarness()
    mine, its = memory_pair()
    channel = FailingChannel(mine, method, error)
    harness.drafters.connect(cast(Channel, channel), remote=True, peer=ELSEWHERE)
    its.send(REMOTE)
    harness.drain()
    assert harness.drafters.num_joined == 2
    channel.broken = True
    if method == "close":
        its.send(Refusal("I leave"))
    for _ in range(3):
        harness.commit(0, 5)
        harness.drafters.open(harness.requests[1])
        harness.clock.now += 3.0
        harness.drafters.heartbeat()
        harness.end_round()
    assert harness.drafters.num_joined == 1
    assert harness.still_works()
    harness.drafters.close(harness.requests[0])


def test_flood_of_messages_is_drained_in_portions() -> None:
    harness = MixedHarness()
    request = harness.requests[0]
    its = harness.remote(REMOTE)
    drained: list[int] = []
    flood = [growth(request, sequence) for sequence in range(10_000)]
    for each in flood:
        its.send(each)
    for _ in range(30):
        before = harness.drafters.expansions
        harness.drain()
        drained.append(harness.drafters.expansions - before)
        assert harness.still_works()
    assert 0 < max(drained) <= 1024
    assert sum(drained) == 10_000
    assert harness.drafters.num_joined == 2


def test_drafter_with_too_many_ignored_messages_is_banned() -> None:
    harness = MixedHarness()
    its = harness.remote(REMOTE)
    for number in range(30_000):
        its.send(replace(growth(harness.requests[0]), request=number + 100))
    for _ in range(40):
        harness.drain()
    assert its.closed
    assert harness.drafters.num_joined == 1


def test_messages_about_requests_of_another_drafter_change_nothing() -> None:
    harness = MixedHarness()
    request = harness.requests[0]
    assert request.replica is not None
    its = harness.remote(replace(REMOTE, source=HELLO.source))
    its.receive()
    harness.local.receive()
    its.send(growth(request))
    its.send(Resync(0, request.epoch))
    harness.drain()
    assert len(request.replica.tree) == 0
    assert its.receive() == harness.local.receive() == []
    harness.local.send(growth(request))
    harness.drain()
    assert len(request.replica.tree) == 2


def test_source_bits_are_kept_and_some_are_reserved_for_local_drafters() -> None:
    bits = SourceBits()

    def named(bit: int) -> str:
        return bits.names[bit.bit_length() - 1]

    one, two = bits.bit("one"), bits.bit("two", remote=True)
    assert (named(one), named(two)) == ("one", "two")
    assert (bits.bit("one", remote=True), bits.bit("two")) == (one, two)
    assert one & two == 0
    assert named(bits.bit("")) == "unnamed"
    remote = {bits.bit(f"remote {number}", remote=True) for number in range(1000)}
    assert OTHERS_BIT in remote
    assert named(OTHERS_BIT) == OTHERS
    assert named(bits.bit("own")) == "own"
    assert [bits.bit(f"own {number}") for number in range(1000)][-1] == OTHERS_BIT
    assert len(bits.names) == 17
