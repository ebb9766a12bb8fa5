"""Tests of `TargetServer.unharmed` itself."""

import os
import signal
import time

import pytest

from tests.hostile.target_server import TargetServer


def test_idle_attacker_causes_no_harm(server: TargetServer) -> None:
    with server.unharmed() as harm, server.connect():
        time.sleep(0.5)
    assert harm.answers >= 1


def test_frozen_server_is_detected(server: TargetServer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError), server.unharmed(longest_gap_s=0.5):  # noqa: PT012
        time.sleep(0.3)
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(server.process.pid, signal.SIGCONT)
    capsys.readouterr()  # keeps this gap out of the summary


def test_leaked_connection_is_detected(server: TargetServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.hostile.target_server._RELEASED_WITHIN_S", 0.5)
    attackers = []
    try:
        with pytest.raises(AssertionError), server.unharmed():  # noqa: PT012
            attackers += [server.connect() for _ in range(8)]
            time.sleep(0.3)
    finally:
        for attacker in attackers:
            attacker.close()
