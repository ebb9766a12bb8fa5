"""A server with keys and other secrets, and a world-writable cache folder."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.hostile.target_server import TargetServer, start_target_server
from tests.servers import free_port

COMPLETIONS = "/v1/completions"
OPERATOR, ANNA, BEN, MALLORY, METRICS = ("o" * 32, "a" * 32, "b" * 32, "m" * 32, "p" * 32)
HUB_TOKEN, CLUSTER_KEY = "sesame-of-the-hub", "sesame-of-the-cluster"
PLANTED = "planted by another user"
SECRETS = (OPERATOR, ANNA, BEN, MALLORY, METRICS, HUB_TOKEN, CLUSTER_KEY)
KEYS = f"""
anna {ANNA}
ben {BEN}
mallory {MALLORY} requests_per_minute=30 tokens_per_minute=3000
"""


@dataclass(frozen=True)
class Guarded:
    """A server with its file of keys, its cache folder, and the URL of its metrics."""

    server: TargetServer
    file: Path
    shared: Path
    metrics: str

    def post(self, key: str, body: object, path: str = COMPLETIONS) -> httpx.Response:
        return httpx.post(f"{self.server.url}{path}", json=body, headers=bearer(key), timeout=120.0)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}".strip()}


@contextmanager
def open_guarded(folder: Path, shared: Path) -> Generator[Guarded]:
    """Start a server with log level debug and the cache folder `shared`."""
    file, port = folder / "keys", free_port()
    file.write_text(KEYS)
    file.chmod(0o600)
    with start_target_server(
        folder,
        key=OPERATOR,
        SSD_API_KEYS_FILE=str(file),
        SSD_METRICS_KEY=METRICS,
        SSD_METRICS_PORT=str(port),
        SSD_LOG_LEVEL="debug",
        SSD_HF_TOKEN=HUB_TOKEN,
        HF_TOKEN=HUB_TOKEN,
        SSD_CLUSTER_KEY=CLUSTER_KEY,
        SSD_CACHE_DIR=str(shared),
        TMPDIR=str(shared.parent),
    ) as server:
        yield Guarded(server, file, shared, f"http://{server.host}:{port}/metrics")
