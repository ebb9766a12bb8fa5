"""The port at which drafters of other places join: who does not know the key reads nothing, joins nothing and
keeps nobody out."""

import contextlib
import os
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from ssd_serve.base.draft_messages import Heartbeat
from ssd_serve.base.errors import SettingsError, SsdError
from ssd_serve.transport.framing import FrameWriter
from ssd_serve.transport.listener import connect
from ssd_serve.transport.tls import TlsStream, identity
from tests.hostile.target_server import TargetServer, start_target_server
from tests.servers import free_port
from tests.waiting import until

KEY = "the key of these tests, and of nobody else"
NAME = "a-name-that-nobody-reads"


class Linked:
    """A server that listens for drafters on loopback; it has one of its own."""

    def __init__(self, server: TargetServer, port: int) -> None:
        self.server = server
        self.port = port
        self.address = f"tcp://127.0.0.1:{port}"

    def stranger(self) -> socket.socket:
        """A connection of somebody who has said nothing yet."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20.0)

    def drafters(self) -> float:
        """How many work, as the metrics say."""
        page = httpx.get(f"{self.server.url}/metrics", timeout=10.0).text
        lines = [line for line in page.splitlines() if line.startswith("ssd_drafters_alive")]
        return sum(float(line.split()[-1]) for line in lines)

    def await_drafters(self, count: int, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.drafters() != count:
            assert time.monotonic() < deadline, self.server.log
            time.sleep(0.2)

    def still_lets_in_who_knows_the_key(self) -> None:
        connect(self.address, 20.0, key=KEY).close()


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Generator[Linked]:
    port = free_port()
    folder, address = tmp_path_factory.mktemp("linked"), f"tcp://127.0.0.1:{port}"
    with start_target_server(folder, SSD_DRAFTER_ADDRESS=address, SSD_CLUSTER_KEY=KEY) as server:
        yield Linked(server, port)


def until_hung_up(connection: socket.socket) -> bytes:
    """All that is answered."""
    heard = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            heard += part
    return heard


def hello() -> bytes:
    """The first words of somebody who does everything right."""
    words: list[bytes] = []
    TlsStream(identity(KEY), listening=False).shake(b"", words.append)
    return b"".join(words)


STRANGE = {
    "messages without TLS": bytes(FrameWriter().encode(Heartbeat())) * 40,
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "zeros": bytes(100_000),
    "a frame length of four GiB": b"\xff" * 64,
    "a TLS alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "a hello that is cut in two": hello()[:100] + b"\x00" * 1000,
    "a hello twice": hello() + hello(),
    "a hello, then words in the clear": hello() + bytes(FrameWriter().encode(Heartbeat())),
}


@pytest.mark.parametrize("words", STRANGE.values(), ids=STRANGE.keys())
def test_strange_words_are_hung_up_on(linked: Linked, words: bytes) -> None:
    with linked.server.unharmed(), linked.stranger() as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(words)
        until_hung_up(stranger)
        linked.still_lets_in_who_knows_the_key()


def test_one_who_stops_in_the_middle_of_the_handshake_is_hung_up_on(linked: Linked) -> None:
    with linked.server.unharmed(), linked.stranger() as silent, linked.stranger() as leaving:
        silent.sendall(hello())
        leaving.sendall(hello())
        leaving.shutdown(socket.SHUT_WR)
        until_hung_up(leaving)
        began = time.monotonic()
        until_hung_up(silent)
        assert time.monotonic() - began < 15.0


def test_another_key_is_refused_in_words_and_logged_sparingly(linked: Linked) -> None:
    with linked.server.unharmed():
        for _ in range(30):
            with pytest.raises(SettingsError, match="has another key: set the same SSD_CLUSTER_KEY"):
                connect(linked.address, 10.0, key="another key of these tests")
    refusals = linked.server.log.count("drafter refused")
    assert 1 <= refusals < 10


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_without_the_keys_certificate_is_refused(linked: Linked, version: ssl.TLSVersion) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = version
    with (
        linked.server.unharmed(),
        linked.stranger() as stranger,
        pytest.raises((ssl.SSLError, ConnectionError)),
        context.wrap_socket(stranger) as wrapped,
    ):
        assert wrapped.recv(100)


def test_a_crowd_of_the_silent_keeps_nobody_out(linked: Linked) -> None:
    """More than are greeted, and new ones all the time."""
    over = threading.Event()

    def crowd() -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            held += [linked.stranger() for _ in range(10)]
            while len(held) > 200:
                held.pop(0).close()
            time.sleep(0.05)
        for each in held:
            each.close()

    crowding = threading.Thread(target=crowd)
    with linked.server.unharmed():
        crowding.start()
        time.sleep(1.0)
        for _ in range(5):
            linked.still_lets_in_who_knows_the_key()
        over.set()
        crowding.join()


def test_a_storm_of_hellos_harms_no_stream(linked: Linked) -> None:
    """Each costs the listener a signature, in the loop that also decodes."""
    words, until = hello(), time.monotonic() + 4.0
    sent = 0
    with linked.server.unharmed():
        while time.monotonic() < until:
            with contextlib.ExitStack() as stack:
                for _ in range(40):
                    stack.enter_context(linked.stranger()).sendall(words)
                    sent += 1
                time.sleep(0.05)
        linked.still_lets_in_who_knows_the_key()
    assert sent > 40


class Between:
    """Somebody between a drafter and the server, who passes on and keeps every byte; it may change one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.kept = bytearray()
        self.connections = 0
        self.change = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(10.0)
        self._server.close()

    def _run(self) -> None:
        while not self._over.is_set():
            if select.select([self._server], [], [], 0.1)[0]:
                self.connections += 1
                with (
                    contextlib.suppress(OSError),
                    self._server.accept()[0] as drafter,
                    socket.create_connection(("127.0.0.1", self._port)) as server,
                ):
                    self._pass_on({drafter: server, server: drafter})

    def _pass_on(self, ends: dict[socket.socket, socket.socket]) -> None:
        while not self._over.is_set():
            for end in select.select(list(ends), [], [], 0.1)[0]:
                data = bytearray(end.recv(65536))
                if not data:
                    return
                self.kept += data
                if self.change.is_set():
                    self.change.clear()
                    data[-1] ^= 1
                ends[end].sendall(data)


@contextlib.contextmanager
def drafting(address: str, log: Path) -> "Generator[subprocess.Popen[bytes]]":
    """`ssd draft`, a process of its own."""
    environment = {**os.environ, "SSD_DRAFT": "embedded", "SSD_CLUSTER_KEY": KEY, "SSD_DTYPE": "fp32"}
    command = [sys.executable, "-m", "ssd_serve", "draft", "--connect", address, "--name", NAME]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_one_in_between_reads_nothing_and_a_changed_byte_costs_one_link(
    linked: Linked, tmp_path: Path
) -> None:
    between = Between(linked.port)
    with contextlib.closing(between), linked.server.unharmed():
        with drafting(between.address, tmp_path / "log"):
            linked.await_drafters(2)
            answer = linked.server.post("/v1/completions", {"prompt": "def f(", "max_tokens": 32})
            assert answer.status_code == 200
            deadline = time.monotonic() + 20.0
            while len(between.kept) < 4000 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert NAME.encode() not in between.kept, "the first thing that it says"
            for at in (1000, 2000, 3000):
                assert len(set(between.kept[at : at + 1000])) > 150, "bytes that look drawn by chance"
            before = between.connections
            between.change.set()
            until(lambda: between.connections > before)
            linked.await_drafters(2)
        linked.await_drafters(1)


def test_one_in_between_who_has_another_key_is_nobody_to_either(linked: Linked, tmp_path: Path) -> None:
    """It speaks TLS with each of them, and would pass on what they say."""
    liar = identity("the key of somebody else")
    heard: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server, linked.server.unharmed():

        def pretend() -> None:
            with server.accept()[0] as connection:
                try:
                    liar.listening.wrap_socket(connection, server_side=True)
                except (ssl.SSLError, OSError) as error:
                    heard.append(str(error))

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(SettingsError, match="has another key"):
            connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", 10.0, key=KEY)
        pretending.join()
        with pytest.raises(SsdError):
            connect(linked.address, 10.0, key="the key of somebody else")
    assert len(heard) == 1
