"""The first and the last things that every worker process does: name, settings, lifeline, device, exit code.

Knows which function each role runs, and nothing of what it does.
"""

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import setproctitle

from ssd_serve.base.devices import parse_device, pin
from ssd_serve.base.engine_config import EngineConfig, config_from_json
from ssd_serve.base.errors import DeviceHangError, ProtocolError, SsdError
from ssd_serve.cluster.health import start_pulse
from ssd_serve.cluster.process import ORPHANED, PARENTS_SIGNALS
from ssd_serve.transport.listener import Listener
from ssd_serve.transport.rank_sockets import RankFiles

_PR_SET_PDEATHSIG = 1


def enter_worker(name: str, stdin: io.FileIO | None = None) -> tuple[EngineConfig, Callable[[], None]]:
    """Become the worker `name`: set the process title, read the configuration, end with
    the parent. Also returns the function to call when it has loaded."""
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


def run_verifier(server_socket: str, drafter_socket: str, ranks_folder: str) -> int:
    """Body of the verifier process; returns its exit code."""
    config, _ = enter_worker("verifier")
    pin(parse_device(config.rank_device(0)))
    from ssd_serve.verifier.process import run

    servers, joining = Listener.unix(server_socket), Listener.unix(drafter_socket)
    return run(config, servers, joining, RankFiles(Path(ranks_folder)))


def run_rank(rank: int, ranks_folder: str) -> int:
    """Body of the process of another rank of the target than the verifier's; returns its exit code."""
    config, _ = enter_worker(f"rank-{rank}")
    pin(parse_device(config.rank_device(rank)))
    from ssd_serve.verifier.ranks import run

    run(config, rank, RankFiles(Path(ranks_folder)))
    return ORPHANED


def run_drafter(name: str, drafter_socket: str) -> int:
    """Body of a drafter process; returns its exit code."""
    config, on_loaded = enter_worker(name)
    if config.draft_device is not None:
        pin(parse_device(config.draft_device))
    from ssd_serve.drafter.process import run

    return run(config, name, [drafter_socket], on_loaded=on_loaded)


def leave_worker(name: str, error: SsdError) -> int:
    """Say why the worker cannot go on, in one sentence; returns the exit code. Not with a GPU that hangs: its
    driver would wait for it when the interpreter ends, so that the process ends here."""
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
