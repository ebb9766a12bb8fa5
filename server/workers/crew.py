"""The processes that answer HTTP beside the server process: started, watched and started again.

Knows processes; what they say to the server is the hub's business.
"""

import secrets
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ssd_serve.cluster.channels.listener import Listener
from ssd_serve.cluster.local.process import WorkerPlan, worker_command
from ssd_serve.cluster.supervision.supervisor import Supervisor
from ssd_serve.find_models import FoundModels
from ssd_serve.logs import Logger
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.serving import ServerThread
from ssd_serve.server.service import Company
from ssd_serve.server.workers.hub import Hub, Post


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
        self,
        found: FoundModels,
        listening: socket.socket,
        alone: bool,
        cores: tuple[int, ...],
        answering: ServerThread,
        log: Logger,
    ) -> Generator[Supervisor]:
        """Workers that answer on the `listening` socket too, while the server of this process is `answering`.
        Where they cannot, its end is the supervisor's `failure`."""
        settings = found.settings
        with tempfile.TemporaryDirectory(prefix="api-", dir=settings.run_dir) as folder:
            listener = Listener.unix(Path(folder, "api.sock"))
            post = Post(
                workers=listener,
                listening=listening,
                settings=settings.model_dump_json().encode(),
                folder=found.target,
                salt_secret=self._salt_secret,
                cores=cores,
                alone=alone,
            )
            answering.call(lambda: self.hub.offer(post))
            names = [f"api-{number}" for number in range(1, settings.api_workers)]
            plans = [WorkerPlan(name, worker_command("api", name, listener.address)) for name in names]
            # A pulse would be heard by the engine's supervisor, which knows nothing of them.
            told = settings.model_copy(update={"run_dir": None})
            supervisor = Supervisor(plans, told, log, on_failure=lambda _error: answering.stop())
            supervisor.start()
            try:
                yield supervisor
            finally:
                supervisor.expect_end()
                supervisor.stop()
                listener.close()
