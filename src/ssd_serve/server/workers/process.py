"""The process of an API worker: the application of the server, on the same socket, without an engine."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from ssd_serve.transport.channel import Intake, SocketChannel
from ssd_serve.transport.listener import connect
from ssd_serve.cluster.worker import enter_worker
from ssd_serve.base.descriptors import raise_descriptor_limit
from ssd_serve.base.errors import EngineDeadError
from ssd_serve.server.workers.front_messages import Applied, Hired, ToWorker, carried
from ssd_serve.server.http.http_port import listens_alone
from ssd_serve.base.logs import carry_library_logs, get_logger
from ssd_serve.base.memory import settle_memory
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.server.access.hosts import allowed_hosts
from ssd_serve.server.http.request_ids import request_in_logs
from ssd_serve.server.http.serving import ServerThread, build_server
from ssd_serve.server.service import Company
from ssd_serve.server.text.serving_tokenizer import ServingTokenizer
from ssd_serve.server.workers.relayed import RelayedEngine
from ssd_serve.base.settings import Settings

_HIRED_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.1


def run_api(name: str, path: str) -> int:
    """Body of the process; returns its exit code."""
    told, _ = enter_worker(name)
    log = get_logger(name, told.log_level, told.log_format)
    carry_library_logs(log, request_in_logs)
    raise_descriptor_limit()
    channel = connect(path, intake=Intake(kinds=ToWorker, descriptors=True))
    hired, listening = apply_for_work(channel, name)
    settings = Settings.model_validate_json(hired.settings)
    tokenizer = ServingTokenizer()
    tokenizer.arrive(Tokenizer(Path(hired.folder)))
    settle_memory()
    engine = RelayedEngine(channel, hired.first_request)
    server = build_server(
        settings,
        engine,
        tokenizer,
        hosts=allowed_hosts(settings, listens_alone(listening)),
        company=Company(engine.pages, engine.show, hired.salt_secret, tells_engine=False),
    )
    engine.on_closing = server.stop
    with ServerThread(server, [listening]) as answering:
        while not answering.ends_within(_LOOK_EVERY_S):
            pass
    return 0


def apply_for_work(channel: SocketChannel, name: str) -> tuple[Hired, socket.socket]:
    """What the server tells a worker before it can begin, and the socket on which both listen. Waits for it.
    Raises `EngineDeadError` where the server has no use for this process."""
    channel.send(carried(Applied(name)))
    deadline = time.monotonic() + _HIRED_WITHIN_S
    descriptor = -1
    while channel.wait(max(0.0, deadline - time.monotonic())):
        messages = channel.receive()
        given = channel.take_descriptor()
        descriptor = given if given >= 0 else descriptor
        for message in cast(Sequence[ToWorker], messages):
            if isinstance(message, Hired) and descriptor >= 0:
                return message, socket.socket(fileno=descriptor)
        if channel.closed:
            break
    if descriptor >= 0:
        os.close(descriptor)
    raise EngineDeadError("the server has no work for this process")
