"""Rank 0 and the others: whole messages of any size, a lost peer is noticed on both sides."""

import socket
import struct
import threading
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from ssd_serve.base.errors import ProtocolError, RankLostError
from ssd_serve.transport.listener import Listener
from ssd_serve.transport.rank_sockets import Follower, Leader, RankFiles


@contextmanager
def met(tmp_path: Path, ranks: int) -> Generator[tuple[Leader, list[Follower]]]:
    files = RankFiles(tmp_path)
    with closing(Listener.unix(files.socket)) as listener, ExitStack() as stack:
        # The order of arrival is not that of the ranks.
        followers = {
            rank: Follower.connect(files.socket, rank, rank * 1000) for rank in reversed(range(1, ranks))
        }
        for follower in followers.values():
            stack.callback(follower.close)
        leader = stack.enter_context(closing(Leader.accept_all(listener, ranks)))
        yield leader, [followers[rank] for rank in range(1, ranks)]


def test_every_rank_receives_all_messages_in_order(tmp_path: Path) -> None:
    messages = [b"", b"a", bytes(range(256)) * 20_000]  # the last one is larger than a socket's buffer
    heard: dict[int, list[bytearray | None]] = {}

    def hear(rank: int, follower: Follower) -> None:
        heard[rank] = [follower.receive() for _ in range(len(messages) + 1)]

    with met(tmp_path, 4) as (leader, followers):
        threads = [threading.Thread(target=hear, args=each) for each in enumerate(followers)]
        for thread in threads:
            thread.start()
        for message in messages:
            leader.broadcast(message)
        leader.close()
        for thread in threads:
            thread.join(10)
    assert all(each == [*messages, None] for each in heard.values())
    assert len(heard) == 3


def test_rank_0_knows_the_least_free_memory(tmp_path: Path) -> None:
    with met(tmp_path, 4) as (leader, _):
        assert leader.min_free == 1000


def test_rank_0_waits_until_all_are_ready(tmp_path: Path) -> None:
    with met(tmp_path, 3) as (leader, followers):
        begun = threading.Event()

        def say_late() -> None:
            begun.set()
            followers[0].send_ready()

        followers[1].send_ready()
        timer = threading.Timer(0.2, say_late)
        timer.start()
        leader.wait_ready()
        assert begun.is_set(), "rank 0 went on before the last one was ready"
        timer.join()


def test_lost_rank_is_an_error_of_rank_0(tmp_path: Path) -> None:
    with met(tmp_path, 3) as (leader, followers):
        followers[1].close()
        followers[0].send_ready()
        with pytest.raises(RankLostError, match="rank 2 of the target has ended while it was loading"):
            leader.wait_ready()
        with pytest.raises(RankLostError, match="rank 2 of the target is gone"):
            leader.broadcast(b"batch")


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    with (
        closing(Listener.unix(files.socket)) as listener,
        closing(Follower.connect(files.socket, 2, 0)),
        pytest.raises(RankLostError, match="rank 1, 3 of the target did not come"),
    ):
        Leader.accept_all(listener, 4, timeout_s=0.3)


def test_an_unknown_process_is_refused(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    with (
        closing(Listener.unix(files.socket)) as listener,
        closing(Follower.connect(files.socket, 9, 0)),
        pytest.raises(ProtocolError, match="no rank of this target"),
    ):
        Leader.accept_all(listener, 3, timeout_s=1.0)


def test_an_invalid_message_length_allocates_nothing(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    with closing(Listener.unix(files.socket)) as listener, socket.socket(socket.AF_UNIX) as liar:
        liar.connect(str(files.socket))
        liar.sendall(struct.pack("<Q", 1 << 60))
        with pytest.raises(ProtocolError, match="no rank of this target"):
            Leader.accept_all(listener, 2, timeout_s=5.0)
