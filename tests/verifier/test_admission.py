"""Tests of drafter admission: limits, temporary bans, and isolation of other drafters."""

from collections import Counter
from typing import cast

import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Growth,
    Heartbeat,
    Message,
    Open,
    Outcome,
    Refusal,
    Resync,
)
from ssd_serve.base.errors import PairMismatchError, ProtocolError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.names import LONGEST_LABEL, as_label, is_label
from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.transport.channel import Channel
from ssd_serve.verifier.drafters.admission import OTHERS, OTHERS_BIT, BanList, DrafterAuthorizer, SourceBits
from tests.fakes import HELLO, FakeClock
from tests.verifier.drafter_factory import OTHER, DrafterHarness, growth, of

ELSEWHERE = "10.0.0.7"


def test_bans_grow_to_a_limit_end_and_are_forgotten() -> None:
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


def test_no_more_bans_are_remembered_than_there_is_room_for() -> None:
    bans = BanList(FakeClock())
    for number in range(3000):
        bans.ban(str(number))
    assert len(bans) <= 1024
    assert bans.is_banned("2999")


def make_admission(*sources: str) -> DrafterAuthorizer:
    admission = DrafterAuthorizer(HELLO, FakeClock())
    admission.restrict(sources)
    return admission


@pytest.mark.parametrize(
    "change",
    [
        {"name": "x" * (LONGEST_LABEL + 1)},
        {"name": "two\nlines"},
        {"source": "\u00e9" * LONGEST_LABEL},
        {"step_ms": float("nan")},
        {"step_ms": float("inf")},
        {"step_ms": -1.0},
        {"step_ms": 1e-300},
        {"prefill_ms": float("nan")},
        {"prefill_ms": -1.0},
        {"prefill_ms": 1e300},
    ],
)
def test_names_and_figures_are_checked(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        make_admission().check(replace(HELLO, **change), remote=False, sources=())


def test_strangers_draft_with_the_models_that_were_named() -> None:
    admission = make_admission("A", "B")
    admission.check(replace(HELLO, source="A"), remote=True, sources=())
    admission.check(replace(HELLO, source="C"), remote=False, sources=())
    with pytest.raises(PairMismatchError, match="drafts with A, B"):
        admission.check(replace(HELLO, source="C"), remote=True, sources=())


def test_where_no_model_was_named_there_are_four_at_most() -> None:
    admission, sources = make_admission(), list[str]()
    for source in "abcd":
        admission.check(replace(HELLO, source=source), remote=True, sources=sources)
        sources.append(source)
    admission.check(replace(HELLO, source="a"), remote=True, sources=sources)
    with pytest.raises(PairMismatchError, match="4 other draft models"):
        admission.check(replace(HELLO, source="e"), remote=True, sources=sources)


def test_an_address_has_only_so_many_drafters_and_tries() -> None:
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


def test_figures_have_room_for_so_many_names() -> None:
    admission = make_admission()
    assert [admission.register("a"), admission.register("a")] == [False, True]
    for number in range(1000):
        admission.register(f"name {number}")
    assert admission.label("a") == "a"
    assert admission.label("name 999") == OTHERS


def test_a_long_model_name_becomes_a_label_that_stays_its_own() -> None:
    assert as_label("owner/model") == "owner/model"
    paths = ["/" + "x" * 300 + end for end in ("/a", "/b")]
    assert len({as_label(path) for path in paths}) == 2
    assert all(is_label(as_label(path)) for path in paths)


class Hostile(DrafterHarness):
    """Harness with one valid local drafter; `strange` connects remote drafters."""

    def __init__(self) -> None:
        super().__init__()
        self.honest = self.join()

    def strange(self, *messages: Message, peer: str = ELSEWHERE) -> MemoryChannel:
        mine, its = memory_pair(capacity=100_000)
        self.drafters.admit(mine, peer, remote=True)
        for message in messages:
            its.send(message)
        self.drain()
        return its

    def still_works(self) -> bool:
        self.honest.receive()
        self.commit(0, 5)
        return len(of(Outcome, self.honest.receive())) == 1


STRANGE = replace(HELLO, name="strange", source="another model")


@pytest.mark.parametrize(
    "offence",
    [
        Heartbeat(step_ms=float("nan")),
        Heartbeat(nodes=-1),
        Growth(0, 1, 0, b"123", b"", b"", b"", b""),
        Growth(0, 1, 0, bytes(8), bytes(4), bytes(2), b"", b""),
        Outcome(0, 1, 1, (1,), 1),
        Open(0, 1, (1,), (), SamplingParameters(), 1, 1),
    ],
)
def test_drafter_that_breaks_a_rule_is_banned_with_a_reason(offence: Message) -> None:
    harness = Hostile()
    its = harness.strange(STRANGE, offence)
    assert len(of(Refusal, its.receive())) == 1
    assert its.closed
    assert harness.drafters.num_joined == 1
    assert harness.still_works()
    assert harness.strange(STRANGE).closed
    harness.strange(STRANGE, peer="10.0.0.8")
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


def test_good_behaviour_is_rewarded() -> None:
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
    harness = Hostile()
    silent = harness.strange()
    harness.clock.now += 9.0
    harness.drafters.heartbeat()
    harness.drain()
    assert not silent.closed
    harness.clock.now += 2.0
    harness.drafters.heartbeat()
    harness.drain()
    assert silent.closed
    assert len(harness.drafters.channels) == 1


def test_a_mismatch_is_refused_but_no_offence() -> None:
    harness = Hostile()
    its = harness.strange(replace(STRANGE, tokenizer="other"))
    assert len(of(Refusal, its.receive())) == 1
    harness.strange(STRANGE)
    assert harness.drafters.num_joined == 2


def test_a_stranger_cannot_have_the_name_of_an_own_drafter() -> None:
    harness = Hostile()
    harness.clock.now += 60.0  # the local drafter has been silent for a minute
    its = harness.strange(replace(STRANGE, name=HELLO.name, instance=9))
    assert len(of(Refusal, its.receive())) == 1
    assert harness.drafters.num_joined == 1
    taken = harness.strange(replace(STRANGE, name=OTHER.name))
    harness.join(OTHER)
    assert taken.closed
    assert harness.drafters.num_joined == 2


class Failing:
    def __init__(self, inner: MemoryChannel, what: str, error: BaseException) -> None:
        self._inner, self._what, self._error = inner, what, error
        self.broken = False

    def __getattr__(self, name: str) -> object:
        return self._fail if self.broken and name == self._what else getattr(self._inner, name)

    def _fail(self, *_arguments: object) -> None:
        raise self._error


@pytest.mark.parametrize("what", ["receive", "send", "post", "flush", "close"])
@pytest.mark.parametrize("error", [RecursionError(), MemoryError(), OSError(24, "files"), KeyError("x")])
def test_whatever_fails_about_a_link_ends_that_link_alone(what: str, error: Exception) -> None:
    harness = Hostile()
    mine, its = memory_pair()
    channel = Failing(mine, what, error)
    harness.drafters.connect(cast(Channel, channel), remote=True, peer=ELSEWHERE)
    its.send(STRANGE)
    harness.drain()
    assert harness.drafters.num_joined == 2
    channel.broken = True
    if what == "close":
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
    harness = Hostile()
    request = harness.requests[0]
    its = harness.strange(STRANGE)
    taken: list[int] = []
    flood = [growth(request, sequence) for sequence in range(10_000)]
    for each in flood:
        its.send(each)
    for _ in range(30):
        before = harness.drafters.expansions
        harness.drain()
        taken.append(harness.drafters.expansions - before)
        assert harness.still_works()
    assert 0 < max(taken) <= 1024
    assert sum(taken) == 10_000
    assert harness.drafters.num_joined == 2


def test_drafter_with_too_many_ignored_messages_is_banned() -> None:
    harness = Hostile()
    its = harness.strange(STRANGE)
    for number in range(30_000):
        its.send(replace(growth(harness.requests[0]), request=number + 100))
    for _ in range(40):
        harness.drain()
    assert its.closed
    assert harness.drafters.num_joined == 1


def test_growth_of_a_request_that_another_one_drafts_is_not_taken() -> None:
    harness = Hostile()
    request = harness.requests[0]
    assert request.replica is not None
    its = harness.strange(replace(STRANGE, source=HELLO.source))
    its.send(growth(request))
    harness.drain()
    assert len(request.replica.tree) == 0
    harness.honest.send(growth(request))
    harness.drain()
    assert len(request.replica.tree) == 2


def test_a_resync_of_a_request_that_is_not_its_own_changes_nothing() -> None:
    harness = Hostile()
    its = harness.strange(replace(STRANGE, source=HELLO.source))
    its.receive()
    harness.honest.receive()
    its.send(Resync(0, harness.requests[0].epoch))
    harness.drain()
    assert its.receive() == []
    assert harness.honest.receive() == []


def named(bits: SourceBits, bit: int) -> str:
    return bits.names[bit.bit_length() - 1]


def test_a_source_keeps_its_bit_and_its_name() -> None:
    bits = SourceBits()
    one, two = bits.bit("one"), bits.bit("two", remote=True)
    assert (named(bits, one), named(bits, two)) == ("one", "two")
    assert (bits.bit("one", remote=True), bits.bit("two")) == (one, two)
    assert one & two == 0
    assert named(bits, bits.bit("")) == "unnamed"


def test_strangers_never_take_all_the_room() -> None:
    bits = SourceBits()
    theirs = {bits.bit(f"stranger {number}", remote=True) for number in range(1000)}
    assert OTHERS_BIT in theirs
    assert named(bits, OTHERS_BIT) == OTHERS
    assert named(bits, bits.bit("own")) == "own"
    ours = [bits.bit(f"own {number}") for number in range(1000)]
    assert len(bits.names) == 17
    assert ours[-1] == OTHERS_BIT
