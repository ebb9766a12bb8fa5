"""The processes that answer HTTP beside the server process: started, watched and started again.

Knows processes; what they say to the server is the hub's business.
"""

import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ssd_serve.transport.listener import Listener
from ssd_serve.cluster.local.process import WorkerPlan, worker_command
from ssd_serve.cluster.supervision.supervisor import Supervisor
from ssd_serve.base.errors import PermissionProblemError
from ssd_serve.base.logs import Logger
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.serving import ServerThread
from ssd_serve.server.service import Company
from ssd_serve.server.workers.hub import Hub
from ssd_serve.server.workers.seat import Post
from ssd_serve.base.settings import Settings


class Crew:
    """Of one server."""

    def __init__(self, engine: EngineClient) -> None:
        self.hub = Hub(engine)
        self._salt_secret = secrets.token_bytes(32)

    @property
    def company(self) -> Company:
        """What the server process knows of the others."""
        return Company(self.hub.pages, self.hub.show, self._salt_secret)

    @contextmanager
    def at_work(
        self, settings: Settings, folder: Path, listening: socket.socket, answering: ServerThread, log: Logger
    ) -> Generator[Supervisor]:
        """Workers that answer on the `listening` socket too, while the server of this process is `answering`.
        They have the target's tokenizer from its `folder`. Where they cannot work, the server ends, and the
        supervisor's `failure` says why."""
        with _private_folder(settings.run_dir) as run_dir, ExitStack() as parts:
            listener = Listener.unix(Path(run_dir, "api.sock"))
            parts.callback(listener.close)
            names = [f"api-{number}" for number in range(1, settings.api_workers)]
            plans = [WorkerPlan(name, worker_command("api", name, listener.address)) for name in names]
            # A pulse would be heard by the engine's supervisor, which knows nothing of them.
            told = settings.model_copy(update={"run_dir": None})
            supervisor = Supervisor(plans, told, log, on_failure=lambda _error: answering.stop())
            post = Post(
                door=listener,
                pids=supervisor.pids,
                kill=_kill,
                expect_end=supervisor.expect_end,
                listening=listening,
                settings=_told_to_workers(settings).model_dump_json().encode(),
                folder=folder,
                salt_secret=self._salt_secret,
            )
            answering.call(lambda: self.hub.offer(post))
            parts.callback(supervisor.stop)
            parts.callback(supervisor.expect_end)
            supervisor.start()
            yield supervisor


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _told_to_workers(settings: Settings) -> Settings:
    """Without secrets that answering HTTP has no use for."""
    return settings.model_copy(update={"hf_token": None, "cluster_key": None})


@contextmanager
def _private_folder(run_dir: Path | None) -> Generator[str]:
    try:
        if run_dir is not None:
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="ssd-api-", dir=run_dir)
    except OSError as error:
        raise PermissionProblemError(
            f"no folder for sockets can be made: {error.strerror}; set SSD_RUN_DIR to one you can write to"
        ) from error
    with made as path:
        yield path
