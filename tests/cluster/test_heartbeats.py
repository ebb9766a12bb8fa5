"""Tests of heartbeats: a silent worker is reported, but not by a monitor that was stopped itself."""

import socket
import time
from contextlib import closing
from pathlib import Path

from ssd_serve.cluster.health import LONGEST_SILENCE_S, PulseWatch, start_pulse
from tests.fakes import FakeClock


def beat(path: Path, name: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(name.encode(), str(path))


def silent_after(watch: PulseWatch, clock: FakeClock, seconds: float) -> dict[str, float]:
    """Poll for silent workers several times a second, as the supervisor does."""
    found: dict[str, float] = {}
    for _ in range(round(seconds * 4)):
        clock.now += 0.25
        found = watch.silent()
    return found


def test_worker_is_watched_from_its_first_heartbeat(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "pulse"
    with closing(PulseWatch(path, clock)) as watch:
        assert silent_after(watch, clock, 100) == {}
        beat(path, "rank-1")
        beat(path, "verifier")
        assert silent_after(watch, clock, LONGEST_SILENCE_S - 0.5) == {}
        beat(path, "verifier")
        assert silent_after(watch, clock, 1).keys() == {"rank-1"}


def test_loaded_flag_lasts_until_restart(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "pulse"
    with closing(PulseWatch(path, clock)) as watch:
        on_loaded = start_pulse(path, "drafter-0")
        silent_after(watch, clock, 1)
        assert not watch.has_loaded("drafter-0")
        on_loaded()
        deadline = time.monotonic() + 30.0
        while not watch.has_loaded("drafter-0"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
            assert watch.silent() == {}
        watch.forget("drafter-0")
        assert not watch.has_loaded("drafter-0")


def test_monitor_that_was_stopped_itself_reports_no_silence(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "pulse"
    with closing(PulseWatch(path, clock)) as watch:
        beat(path, "rank-1")
        assert silent_after(watch, clock, 1) == {}
        clock.now += 60  # a suspended terminal
        assert watch.silent() == {}
        assert silent_after(watch, clock, LONGEST_SILENCE_S + 0.5).keys() == {"rank-1"}


def test_heartbeats_survive_a_restart_of_the_monitor(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "pulse"
    start_pulse(path, "rank-3")  # no socket is open yet
    time.sleep(0.1)
    for _ in range(2):
        with closing(PulseWatch(path, clock)) as watch:
            deadline = time.monotonic() + 30
            found: dict[str, float] = {}
            while not found and time.monotonic() < deadline:
                watch.silent()
                found = silent_after(watch, clock, LONGEST_SILENCE_S + 1)
                time.sleep(0.05)
            assert found.keys() == {"rank-3"}
