"""Faults of a real server lose no token: killed and hanging processes, lost messages, slow clients."""

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ssd_serve.base.draft_messages import Close, Hello, Message
from ssd_serve.base.engine_config import EMBEDDED, Mode
from ssd_serve.base.settings import Settings
from ssd_serve.bench.emulated import emulating
from ssd_serve.transport.channel import SocketChannel
from ssd_serve.transport.listener import Listener, connect
from tests.chaos.faults import (
    MESSAGE_FAULTS,
    PROCESS_FAULTS,
    SERVER_KILLED,
    ClientStream,
    Fault,
    FaultOutcome,
    client_streams,
    compare,
    inject,
    message_proxy,
    run_streams,
)
from tests.chaos.message_proxy import MessageProxy
from tests.chaos.processes import served
from tests.end_to_end.tiny_pair import write_pair
from tests.fakes import HELLO
from tests.message_faults import FaultRates


def server_settings(folder: Path) -> Settings:
    target, draft = write_pair(folder / "pair")
    return Settings(
        target=str(target),
        draft=str(draft),
        dtype="fp32",
        budget=2,
        mode=Mode.SSD,
        drain_seconds=0,
        speculation_may_stop=False,
        model_wrapper=emulating("mi300x-70b-1b*2"),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_faults_lose_no_token_and_the_server_recovers(tmp_path: Path) -> None:
    """One server meets all faults, one after the other."""
    settings = server_settings(tmp_path)
    with served(settings, tmp_path) as server:
        undisturbed = client_streams(server.url, 2, 100)
        asyncio.run(run_streams(server.url, undisturbed))

        def injected(fault: Fault, proxy: MessageProxy | None) -> FaultOutcome:
            clients = [each.fresh() for each in undisturbed]
            outcome = asyncio.run(inject(settings, server, proxy, fault, undisturbed, clients))
            assert outcome.harmless, (fault.name, outcome)
            assert outcome.speculates, (fault.name, outcome)
            assert outcome.longest_wait_s < 60.0, (fault.name, outcome)
            return outcome

        for fault in PROCESS_FAULTS:
            outcome = injected(fault, None)
            assert outcome.more["engine_restarts"] == ("verifier" in fault.name), (fault.name, outcome)
            if "drafter" in fault.name:
                assert outcome.longest_wait_s < 3.0, (fault.name, "no request waits for a drafter")
            if fault.name == "clients that read slowly":
                assert (outcome.more["clients"], outcome.more["whole_answers"]) == (4, 4)
        assert "the verifier process has sent no heartbeat for" in (tmp_path / "log").read_text()
        with closing(message_proxy(server)) as proxy:
            for fault in MESSAGE_FAULTS:
                outcome = injected(fault, proxy)
                assert outcome.more["messages_changed"] > 0, fault.name
                assert outcome.longest_wait_s < 10.0, (fault.name, outcome)
            pids, connections = server.pids(), proxy.connections
            proxy.send_garbage()
            injected(PROCESS_FAULTS[0], None)
            assert proxy.connections > connections, "the drafter has reconnected"
            assert server.pids() == pids


@pytest.mark.slow
def test_request_continues_on_another_server_after_a_kill(tmp_path: Path) -> None:
    settings = server_settings(tmp_path)
    with served(settings, tmp_path) as server:
        undisturbed = client_streams(server.url, 2, 60)
        asyncio.run(run_streams(server.url, undisturbed))
        clients = [each.fresh() for each in undisturbed]
        killed = asyncio.run(inject(settings, server, None, SERVER_KILLED, undisturbed, clients))
    assert killed.lost > 0
    assert all(each.error for each in clients)
    with served(settings, tmp_path) as server:
        asyncio.run(run_streams(server.url, clients))
    again = compare(settings, undisturbed, clients, 0.0)
    assert (again.lost, again.wrong, again.errors) == (0, 0, ())


def received(*tokens: int, every_s: float = 0.1) -> ClientStream:
    times = [10.0 + every_s * index for index in range(len(tokens))]
    return ClientStream((5, 6, 7), 3, 1.0, 4, list(tokens), times)


@pytest.mark.parametrize(
    ("texts", "lost", "wrong"),
    [
        ([received(1, 2, 3, 4), received(5, 6, 7, 8)], 0, 0),
        ([received(1, 2, 3, 4), received(5)], 3, 0),
        ([received(), received(5, 6, 7, 8)], 4, 0),
        ([received(1, 2, 2, 3), received(5, 6, 7, 8, 9)], 0, 2),
    ],
)
def test_comparison_counts_lost_tokens_and_wrong_texts(
    texts: list[ClientStream], lost: int, wrong: int
) -> None:
    whole = [received(1, 2, 3, 4), received(5, 6, 7, 8)]
    outcome = compare(Settings(target=EMBEDDED), whole, texts, 0.0)
    assert (outcome.lost, outcome.wrong) == (lost, wrong)
    assert outcome.harmless == (not lost and not wrong)


def test_longest_wait_includes_a_gap_that_began_before_the_fault() -> None:
    one = ClientStream((1,), 0, 0.0, 4, [1, 2, 3, 4], [10.0, 15.0, 15.5, 17.0])
    assert one.longest_wait(16.0) == 1.5
    assert one.longest_wait(12.0) == 5.0
    assert one.longest_wait(20.0) == 0.0


@contextmanager
def proxied(folder: Path) -> Generator[tuple[SocketChannel, SocketChannel, MessageProxy]]:
    """Yield a drafter's end, the verifier's end, and the proxy between them."""
    address = folder / "drafter.sock"
    listener = Listener.unix(str(address))
    proxy = MessageProxy(address)
    drafter = connect(str(address))
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
    deadline = time.monotonic() + 30.0
    while not enough(found) and time.monotonic() < deadline:
        channel.wait(0.05)
        found += channel.receive()
    return found


def test_proxy_relays_everything_until_faults_are_used(tmp_path: Path) -> None:
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


def test_proxy_drops_messages_except_the_handshake(tmp_path: Path) -> None:
    with proxied(tmp_path) as (drafter, verifier, proxy):
        proxy.use(FaultRates(drop=1.0))
        drafter.send(Close(1, 1))
        drafter.send(HELLO)
        assert [type(one) for one in gathered(verifier, lambda found: bool(found))] == [Hello]
        proxy.use(None)
        drafter.send(Close(2, 1))
        assert gathered(verifier, lambda found: bool(found)) == [Close(2, 1)]
