"""A server with everything that must stay secret, in a cache folder that everybody may write to."""

import os
import time
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
PLANTED = "planted by somebody else"
SECRETS = (OPERATOR, ANNA, BEN, MALLORY, METRICS, HUB_TOKEN, CLUSTER_KEY)
KEYS = f"""
anna {ANNA}
ben {BEN}
mallory {MALLORY} requests_per_minute=30 tokens_per_minute=3000
"""


@dataclass(frozen=True)
class Guarded:
    """A server with keys, its file of them, its cache folder, and where its metrics are."""

    server: TargetServer
    file: Path
    shared: Path
    metrics: str

    def post(self, key: str, body: object, path: str = COMPLETIONS) -> httpx.Response:
        return httpx.post(f"{self.server.url}{path}", json=body, headers=bearer(key), timeout=120.0)

    def rewrite(self, text: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o600)
        os.replace(new, self.file)

    def opens(self, key: str) -> bool:
        answer = httpx.get(f"{self.server.url}/v1/models", headers=bearer(key), timeout=30.0)
        assert answer.status_code in (200, 401)
        return answer.status_code == 200

    def await_key(self, key: str, opens: bool) -> None:
        deadline = time.monotonic() + 20.0
        while self.opens(key) != opens:
            assert time.monotonic() < deadline, self.server.log
            time.sleep(0.1)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}".strip()}


@contextmanager
def open_guarded(folder: Path, shared: Path) -> Generator[Guarded]:
    """At the level that logs most; `shared` is its cache folder."""
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
