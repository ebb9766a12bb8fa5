"""`ssd serve`: the port, the processes, the HTTP server, and their shutdown.

This module defines the order of start; each part does its own work.
"""

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import setproctitle
from rich.console import Console

from ssd_serve.app.cli.chat_client import show_first_answer
from ssd_serve.base.contention import cores_in_use
from ssd_serve.base.devices import pin_cores
from ssd_serve.base.logs import ProgressLine, carry_library_logs, get_logger
from ssd_serve.base.messages import Ready
from ssd_serve.base.resources import raise_descriptor_limit, settle_memory
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import refuse_empty_keys
from ssd_serve.cluster.launch import RunningEngine, start_engine, usable_machine
from ssd_serve.cluster.placement import find_models
from ssd_serve.kernels.native.library import compile_early
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.server.access.auth import allowed_hosts, exposure_warnings
from ssd_serve.server.banner import show_banner
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.listening import is_loopback, listen_all, max_connections, tls_context
from ssd_serve.server.http.middleware import request_log_fields
from ssd_serve.server.http.serving import HttpServer, ServerThread, build_server, stop_signals
from ssd_serve.server.text import LoadedTokenizer

_LOOK_EVERY_S = 0.1
_FAREWELL_S = 0.5
"""Time from the engine's death to the server's exit, in which running requests receive their errors."""
_LEAVES_WITHIN_S = 20.0
"""Seconds until the process exits even if threads, such as downloads, still run."""


def run_serve(settings: Settings, chat: Callable[[str], None] | None = None) -> int:
    """Serve until a stop signal or the engine's death. Requests get status 503 while the models load.

    `chat` gets the server's address once it is ready, instead of the banner; the server stops when it returns.
    """
    setproctitle.setproctitle("ssd: server")
    for number in stop_signals():
        if number != signal.SIGINT or signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, _leave_tidily)
    log = get_logger("server", settings.log_level, settings.log_format)
    carry_library_logs(log, request_log_fields)
    before, descriptors = raise_descriptor_limit()
    most = max_connections(settings, descriptors)
    log.info("open files", limit=descriptors, before=before, connections=most)
    line = ProgressLine()
    tls_context(settings)  # raises for wrong files before anything is started
    machine = usable_machine(settings)
    compile_early(settings.native_kernels, settings.cache_dir)
    client, tokenizer = EngineClient(), LoadedTokenizer()

    def show(text: str) -> None:
        client.progress = text
        line.show(text)

    refuse_empty_keys()
    with ExitStack() as ports:
        sock, *others = [ports.enter_context(one) for one in listen_all(settings)]
        loopback = is_loopback(sock)
        for warning in exposure_warnings(settings, loopback):
            log.warning(warning, host=settings.host)
        server = build_server(settings, client, tokenizer, hosts=allowed_hosts(settings, loopback))
        with ServerThread(server, [sock, *others]) as answering:
            found = find_models(settings, show, log.warning)
            tokenizer.tokenizer = Tokenizer(found.target)
            settle_memory()
            show("starting")
            with start_engine(settings, log, machine, found.names) as engine:
                # After the workers: they would inherit the binding.
                cores = engine.placement.front_end
                answering.call(partial(pin_cores, cores))
                pin_cores(cores)
                client.target = engine.config.target
                answering.call(partial(client.attach, engine.connect(), engine))
                url = address(sock, settings.tls_certificate is not None)

                def announce(ready: Ready) -> None:
                    if chat is None:
                        chats = bool(tokenizer().chat_template)
                        with contextlib.suppress(OSError):  # a closed terminal, or no free descriptors
                            others = cores_in_use(machine.cores)
                            known = program_name(), chats, others, len(machine.cores)
                            show_banner(Console(), ready, settings, url, *known)
                            if chats and sys.stdout.isatty():
                                show_first_answer(sys.stdout, url, settings.api_key)
                        return
                    signal.signal(signal.SIGINT, signal.default_int_handler)  # an answer is stopped by it
                    chat(url)
                    server.stop()

                with server.capture_signals() if chat is None else contextlib.nullcontext():
                    _watch(server, answering, client, engine, line, announce)
                if engine.supervisor.failure is not None:
                    raise engine.supervisor.failure
    log.info("stopped")
    return 0


def _watch(
    server: HttpServer,
    answering: ServerThread,
    client: EngineClient,
    engine: RunningEngine,
    line: ProgressLine,
    announce: Callable[[Ready], None],
) -> None:
    """Announce that the engine is ready; wait until the server has ended or its engine is dead."""
    announced = False
    while engine.supervisor.failure is None:
        if not announced and client.ready is not None:
            announced = True
            line.clear()
            announce(client.ready)
        elif not announced:
            line.show(client.progress)
        if answering.ends_within(_LOOK_EVERY_S):
            return
    line.clear()
    if not answering.ends_within(_FAREWELL_S):
        server.stop()
        while not answering.ends_within(_LOOK_EVERY_S):
            pass


def program_name() -> str:
    """Return the command that starts this program: `ssd` if it is on the PATH."""
    here = Path(sys.argv[0])
    if here.name != "ssd" or shutil.which("ssd") == str(here):
        return "ssd"
    return os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here)


def address(sock: socket.socket, encrypted: bool = False) -> str:
    """URL of the server for users of this machine."""
    name = sock.getsockname()
    host, port = str(name[0]), int(name[1])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _leave_tidily(number: int, _frame: FrameType | None) -> NoReturn:
    """Handle a signal during start: raise, so that every `finally` block ends workers and closes sockets.

    The signal may arrive twice, from the process group and from a parent: the second one is ignored, except
    for Ctrl-C. Python drops exceptions that a handler raises in a destructor, hence the timer.
    """
    for other in stop_signals():
        if signal.getsignal(other) is _leave_tidily:
            signal.signal(other, signal.default_int_handler if other == signal.SIGINT else signal.SIG_IGN)
    last_resort = threading.Timer(_LEAVES_WITHIN_S, os._exit, (128 + number,))
    last_resort.daemon = True
    last_resort.start()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
