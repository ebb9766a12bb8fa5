"""Body of a worker process, and its program: its name, configuration, lifeline, device, role and exit code."""

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import setproctitle

from ssd_serve.base.devices import parse_device, pin
from ssd_serve.base.engine_config import EngineConfig, config_from_json
from ssd_serve.base.errors import DeviceHangError, ProtocolError, SsdError
from ssd_serve.cluster.health import ORPHANED, PARENTS_SIGNALS, start_pulse
from ssd_serve.transport.listener import Listener
from ssd_serve.transport.rank_sockets import RankFiles

_PR_SET_PDEATHSIG = 1


def enter_worker(name: str, stdin: io.FileIO | None = None) -> tuple[EngineConfig, Callable[[], None]]:
    """Set the process title, read the configuration, and exit with the parent from now on. Also returns the
    function to call when the worker has loaded."""
    setproctitle.setproctitle(f"ssd: {name}")
    # Ctrl-C, a closed terminal and `kill -TERM -GROUP` reach every process; the parent alone knows what
    # they mean.
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    _die_with_parent()
    # Unbuffered: a buffer's lock, held by the lifeline thread, would be in the way when the process ends.
    stream = stdin if stdin is not None else io.FileIO(0, closefd=False)
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise ProtocolError("a worker is started by `ssd serve`, which sends settings on stdin")
    config = config_from_json(line)
    threading.Thread(target=_follow_lifeline, args=(stream,), name="lifeline", daemon=True).start()
    if config.run_dir is None:
        return config, lambda: None
    return config, start_pulse(RankFiles(config.run_dir).pulse, name)


def run_worker(role: str, arguments: Sequence[str]) -> int:
    """Run the body of a worker process with the arguments of its command; returns its exit code."""
    name = {"verifier": "verifier", "rank": f"rank-{arguments[0]}"}.get(role, arguments[0])
    bodies: dict[str, Callable[..., int]] = {
        "verifier": _run_verifier,
        "rank": _run_rank,
        "drafter": _run_drafter,
    }
    try:
        return bodies[role](name, *arguments)
    except SsdError as error:
        return leave_worker(name, error)


def _run_verifier(name: str, server_socket: str, drafter_socket: str, ranks_folder: str) -> int:
    config, _ = enter_worker(name)
    pin(parse_device(config.rank_device(0)))
    from ssd_serve.verifier.process import run

    servers, joining = Listener.unix(server_socket), Listener.unix(drafter_socket)
    return run(config, servers, joining, RankFiles(Path(ranks_folder)))


def _run_rank(name: str, rank: str, ranks_folder: str) -> int:
    config, _ = enter_worker(name)
    pin(parse_device(config.rank_device(int(rank))))
    from ssd_serve.verifier.ranks import run

    run(config, int(rank), RankFiles(Path(ranks_folder)))
    return ORPHANED


def _run_drafter(name: str, _name: str, drafter_socket: str) -> int:
    config, on_loaded = enter_worker(name)
    if config.draft_device is not None:
        pin(parse_device(config.draft_device))
    from ssd_serve.drafter.process import run

    return run(config, name, [drafter_socket], on_loaded=on_loaded)


def leave_worker(name: str, error: SsdError) -> int:
    """Write the error to stderr and return its exit code. With a GPU that hangs the process ends here, since the
    driver would wait for it when the interpreter ends."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"ssd: {name}: {error}\n")
        sys.stderr.flush()
    if isinstance(error, DeviceHangError):
        os._exit(error.exit_code)
    return error.exit_code


def _follow_lifeline(stream: io.FileIO) -> None:
    """Leave at once when the parent closes the pipe or dies. Nothing here needs tidying up: a worker holds
    no state that outlives it."""
    with contextlib.suppress(OSError, ValueError):
        while stream.read(4096):
            pass
    os._exit(ORPHANED)


def _die_with_parent() -> None:
    """Ask Linux to kill this process with its parent, also when no thread of it could run. Best effort."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], sys.argv[2:]))
