"""The fault benchmark's own parts: what counts as lost and wrong, waits, the proxy between two processes."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ssd_serve.base.draft_messages import Close, Hello, Message
from ssd_serve.base.engine_settings import EMBEDDED
from ssd_serve.base.settings import Settings
from ssd_serve.bench.memory_channel import FaultRates
from ssd_serve.transport.channel import SocketChannel
from ssd_serve.transport.listener import Listener, connect
from tests.chaos.faults.client import Heard, Wish, over_before
from tests.chaos.faults.judge import TextVerdict, judge
from tests.chaos.faults.kinds import faults_of, node_lost
from tests.chaos.faults.proxy import MessageFaults
from tests.chaos.faults.report import harmless, table
from tests.fakes import HELLO

WISH = Wish((5, 6, 7), seed=3, temperature=1.0, tokens=4)


def heard(*tokens: int, every_s: float = 0.1) -> Heard:
    times = [10.0 + every_s * index for index in range(len(tokens))]
    return Heard(WISH, list(tokens), times)


def test_a_text_that_was_cut_off_has_lost_tokens_and_is_not_wrong() -> None:
    settings = Settings(target=EMBEDDED)
    whole = [heard(1, 2, 3, 4), heard(5, 6, 7, 8)]
    assert judge(settings, whole, [heard(1, 2, 3, 4), heard(5, 6, 7, 8)]) == TextVerdict(0, 0, 0)
    assert judge(settings, whole, [heard(1, 2, 3, 4), heard(5)]) == TextVerdict(3, 0, 0)
    assert judge(settings, whole, [heard(), heard(5, 6, 7, 8)]) == TextVerdict(4, 0, 0)


def test_a_token_that_differs_or_is_repeated_is_wrong_unless_it_was_nearly_the_other() -> None:
    settings = Settings(target=EMBEDDED)
    whole = [heard(1, 2, 3, 4), heard(5, 6, 7, 8)]
    verdict = judge(settings, whole, [heard(1, 2, 2, 3), heard(5, 6, 7, 8, 9)])
    assert verdict == TextVerdict(0, 2, 0)


def test_a_wait_counts_from_when_the_fault_struck() -> None:
    one = Heard(WISH, [1, 2, 3, 4], [10.0, 15.0, 15.5, 17.0])
    assert one.stall(since=16.0) == (17.0, 1.5)
    assert one.stall(since=12.0) == (15.0, 5.0), "a wait that had begun before counts whole"
    assert one.stall(since=20.0) == (20.0, 0.0)


def test_streams_that_were_over_before_a_fault_was_noticed_show_nothing_of_it() -> None:
    streams = [heard(1, 2, every_s=1.0), heard(1, 2, 3, every_s=1.0)]
    assert over_before(streams, moment=12.5)
    assert not over_before(streams, moment=11.5)


def test_only_what_ends_the_engine_interrupts_streams() -> None:
    faults = (*faults_of("processes"), *faults_of("messages"))
    interrupting = {fault.name for fault in faults if fault.interrupts}
    assert interrupting == {
        "kill -9 of the verifier",
        "SIGSTOP of the verifier",
        "SIGSTOP of the server for 8 s",
    }
    assert node_lost(lambda: None).interrupts


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"wrong": 1}, False),
        ({"lost": 3}, False),
        ({"errors": ["status 500"]}, False),
        ({"errors": ["ReadError"], "whole_s": None}, True),
        ({"lost": 3, "whole_s": None}, False),
        ({"more": {"clients": 4, "whole_answers": 4}}, True),
        ({"more": {"clients": 4, "whole_answers": 3}}, False),
    ],
)
def test_tokens_are_never_lost_and_connections_with_the_server_alone(
    change: dict[str, object], good: bool
) -> None:
    outcome: dict[str, object] = {
        **{"fault": "kill -9", "lost": 0, "wrong": 0, "near_ties": 0, "noticed_s": 0.1, "recovered_s": 3.0},
        **{"whole_s": 4.0, "stall_s": 3.0, "errors": [], "speculates": True, "more": {}},
    }
    result = {"outcomes": [{**outcome, **change}]}
    assert harmless(result) == good
    assert table(result).splitlines()[-1].startswith("| kill -9 | ")


@contextmanager
def proxied(folder: Path) -> Generator[tuple[SocketChannel, SocketChannel, MessageFaults]]:
    """A drafter's end, the verifier's end, and the proxy between them."""
    address = str(folder / "drafter.sock")
    listener = Listener.unix(address)
    proxy = MessageFaults(address)
    drafter = connect(address)
    verifier = listener.await_peer(5.0)
    assert verifier is not None
    try:
        yield drafter, verifier, proxy
    finally:
        proxy.close()
        drafter.close()
        verifier.close()
        listener.close()


def gathered(channel: SocketChannel, enough: Callable[[list[Message]], bool]) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + 5.0
    while not enough(found) and time.monotonic() < deadline:
        channel.wait(0.05)
        found += channel.receive()
    return found


def test_the_proxy_passes_everything_on_until_it_is_told_otherwise(tmp_path: Path) -> None:
    with proxied(tmp_path) as (drafter, verifier, proxy):
        drafter.send(HELLO)
        assert gathered(verifier, lambda found: bool(found)) == [HELLO]
        sent: list[Message] = [Close(number, 1) for number in range(50)]
        for message in sent:
            verifier.send(message)
        assert gathered(drafter, lambda found: len(found) == 50) == sent
        proxy.use(FaultRates(delay=0.7, duplicate=0.3), seed=3)
        for message in sent:
            verifier.send(message)
        late = gathered(drafter, lambda found: {str(one) for one in found} == {str(one) for one in sent})
        assert late != sent
        assert proxy.changed > 20


def test_what_is_dropped_is_gone_but_never_the_greeting(tmp_path: Path) -> None:
    with proxied(tmp_path) as (drafter, verifier, proxy):
        proxy.use(FaultRates(drop=1.0))
        drafter.send(Close(1, 1))
        drafter.send(HELLO)
        assert [type(one) for one in gathered(verifier, lambda found: bool(found))] == [Hello]
        proxy.use(None)
        drafter.send(Close(2, 1))
        assert gathered(verifier, lambda found: bool(found)) == [Close(2, 1)]


def test_without_the_proxy_the_verifier_is_reached_itself(tmp_path: Path) -> None:
    with proxied(tmp_path) as (drafter, verifier, proxy):
        proxy.close()
        assert gathered(drafter, lambda _: drafter.closed) == []
        again = connect(str(tmp_path / "drafter.sock"))
        again.send(HELLO)
        again.close()
        assert verifier.wait(5.0)
