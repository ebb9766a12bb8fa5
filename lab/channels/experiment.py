"""`python -m lab.channels`: a message of 2 kB there and back by each way that processes speak, and what it
takes to start an engine with either launcher.

Every peer is a process of its own on this machine. Knows channels and launchers, not what engines compute.
"""

import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from ssd_serve.bench.tables import text_table
from ssd_serve.cluster.channels.listener import connect
from ssd_serve.cluster.engines import start_engine
from ssd_serve.cluster.ray.cluster import ray_cluster
from ssd_serve.draft_messages import Growth
from ssd_serve.errors import SsdError
from ssd_serve.llm.engine_access import await_ready
from ssd_serve.logs import get_logger
from ssd_serve.settings import Settings

MESSAGE_BYTES = 2048
_PEER = Path(__file__).with_name("peer.py")
_WARM_UP = 50
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class ChannelsPlan:
    """How often everything is measured."""

    messages: int = 2000
    starts: int = 3


def run_channels(settings: Settings, plan: ChannelsPlan, say: Callable[[str], None]) -> dict[str, object]:
    """Microseconds there and back, seconds until an engine is connected and ready, MiB of Ray itself."""
    round_trips = measured_sockets(plan.messages)
    say(str(round_trips))
    with ray_cluster(settings) as cluster:
        handle = cluster.ray.remote(_echo()).options(num_cpus=1).remote()
        data = bytes(MESSAGE_BYTES)
        round_trips["ray actor call"] = _measured(
            lambda: cluster.ray.get(handle.echo.remote(data)), plan.messages
        )
    say(f"ray actor call: {round_trips['ray actor call']}")
    starts: dict[str, object] = {}
    for launcher in ("local", "ray"):
        own = settings.model_copy(update={"launcher": launcher, "log_level": "error"})
        found = [_start(own) for _ in range(plan.starts)]
        starts[launcher] = {
            name: round(statistics.median(each[name] for each in found), 2) for name in found[0]
        }
        say(f"{launcher}: {starts[launcher]}")
    return {
        "benchmark": "channels",
        "message_bytes": MESSAGE_BYTES,
        "messages": plan.messages,
        "round_trips_us": round_trips,
        "starts": starts,
    }


def measured_sockets(messages: int) -> dict[str, dict[str, float]]:
    """Microseconds there and back, by kind of socket."""
    found: dict[str, dict[str, float]] = {}
    for name, address in (("unix socket", "unix"), ("tcp, encrypted", "tcp")):
        with _echoing(address) as once:
            found[name] = _measured(once, messages)
    return found


def table(result: Mapping[str, Any]) -> str:
    """As text for a terminal."""
    trips = ((name, row["p50"], row["p99"]) for name, row in result["round_trips_us"].items())
    starts = (
        (name, row["connected_s"], row["ready_s"], row["own_mib"]) for name, row in result["starts"].items()
    )
    return (
        f"2 kB there and back, in us\n{text_table(('way', 'p50', 'p99'), trips)}\n\n"
        "start of an engine, and what the launcher's own processes take\n"
        + text_table(("launcher", "connected s", "ready s", "MiB"), starts)
    )


def _measured(once: Callable[[], object], messages: int) -> dict[str, float]:
    """Quantiles in microseconds, after a warm-up."""
    for _ in range(min(_WARM_UP, messages)):
        once()
    took: list[float] = []
    for _ in range(messages):
        began = time.perf_counter()
        once()
        took.append(1e6 * (time.perf_counter() - began))
    return {f"p{percent}": round(float(np.percentile(took, percent)), 1) for percent in (50, 99)}


def _echo() -> type:
    """An actor that gives back what it gets. A local class: Ray sends its code, and workers need no `lab`."""

    class Echo:
        def echo(self, data: bytes) -> bytes:
            return data

    return Echo


@contextmanager
def _echoing(address: str) -> Generator[Callable[[], object]]:
    """What sends one message and waits for it to come back."""
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        place = str(Path(folder, "s")) if address == "unix" else address
        command = [sys.executable, str(_PEER), place]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
            if peer.stdin is None or peer.stdout is None:
                raise SsdError("the process that answers has no pipes")
            peer.stdin.write(key + "\n")
            peer.stdin.flush()
            channel = connect(peer.stdout.readline().strip(), key=key)
            message = Growth(1, 0, 0, bytes(MESSAGE_BYTES - 64), b"", b"", b"", b"")

            def once() -> object:
                channel.send(message)
                while channel.wait(_PATIENCE_S):
                    found = channel.receive()
                    if found or channel.closed:
                        return found
                raise SsdError("the process that answers is silent")

            try:
                yield once
            finally:
                channel.close()
                peer.wait(_PATIENCE_S)


def _start(settings: Settings) -> dict[str, float]:
    """Start and end one engine."""
    began = time.perf_counter()
    with start_engine(settings, get_logger("bench", "error")) as engine:
        channel = engine.connect()
        connected_s = time.perf_counter() - began
        await_ready(engine, channel, lambda _text: None)
        ready_s = time.perf_counter() - began
        own = _own_mib(set(engine.pids().values()))
        engine.expect_end()
        channel.close()
    return {"connected_s": connected_s, "ready_s": ready_s, "own_mib": own}


def _own_mib(workers: set[int]) -> float:
    """Memory of what the launcher has started beside the engine's workers; shared pages count in parts."""
    others = [child for child in psutil.Process().children(recursive=True) if child.pid not in workers]
    return sum(map(_pss, others)) / (1 << 20)


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0  # it has ended meanwhile
