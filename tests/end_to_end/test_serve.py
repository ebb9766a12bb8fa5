"""`ssd serve` as a whole: 503 while loading, answers, killed processes, clean shutdown."""

import http.server
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from ssd_serve.base.errors import HubError
from tests.end_to_end.tiny_pair import write_pair
from tests.servers import Server, await_health, children, complete, free_port, gone, started


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@contextmanager
def serving(pair: tuple[Path, Path], folder: Path) -> Generator[Server]:
    port = free_port()
    environment = {
        **os.environ,
        "SSD_TARGET": str(pair[0]),
        "SSD_DRAFT": str(pair[1]),
        "SSD_MODE": "ssd",
        "SSD_PORT": str(port),
        "SSD_RUN_DIR": str(folder / "run"),
        "SSD_BUDGET": "8",
        "SSD_DTYPE": "fp32",
    }
    command = [sys.executable, "-m", "ssd_serve", "serve"]
    with started(command, environment, folder, port) as server:
        yield server


def draft_tokens_with_a_stop_string(url: str, text: str) -> object:
    """Return the verified nodes of the same request with a stop string from its text."""
    body = {"prompt": "def f(", "max_tokens": 24, "seed": 3, "temperature": 0.8, "stop": text[8:11]}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert text.startswith(answer["choices"][0]["text"])
    return answer["metrics"]["speculative_decoding"]["num_draft_tokens"]


def test_server_survives_its_drafter_and_shuts_down_cleanly(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with serving(pair, tmp_path) as (process, url, log):
        assert 503 in await_health(url)
        workers = children(process)
        assert set(workers) == {"ssd: verifier", "ssd: drafter-0"}
        text = complete(url)
        assert draft_tokens_with_a_stop_string(url, text) is not None
        workers["ssd: drafter-0"].suspend()
        assert complete(url) == text
        workers["ssd: drafter-0"].kill()
        assert complete(url) == text
        deadline = time.monotonic() + 30
        while set(children(process)) != {"ssd: verifier", "ssd: drafter-0"}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert complete(url) == text
        everything = list(children(process).values())
        before = log.read_text()
        # Signals the whole group, as a terminal does.
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert gone(everything)
        assert log.read_text().removeprefix(before).splitlines()[:-1] == []
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_while_loading_shuts_down_cleanly(
    pair: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    with serving(pair, tmp_path) as (process, url, log):
        deadline = time.monotonic() + 60
        while "ssd: verifier" not in children(process):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        everything = list(children(process).values())
        assert httpx.get(f"{url}/health", timeout=30.0).status_code == 503
        os.killpg(process.pid, number)
        assert process.wait(60) in (0, 128 + number), log.read_text()
        assert gone(everything)
        assert "Traceback" not in log.read_text()
    assert list((tmp_path / "run").iterdir()) == []


@contextmanager
def hanging_hub() -> Generator[tuple[str, threading.Event]]:
    """Yield the address of a hub that answers 404 once the event is set."""
    answer = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer.wait(60.0)
            self.send_error(404)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as hub:
        hub.daemon_threads = True
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{hub.server_port}", answer
        answer.set()
        hub.shutdown()


def test_health_is_503_during_download_and_a_hub_error_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    model = Path("some/model")
    with hanging_hub() as (hub, answer):
        monkeypatch.setenv("HF_ENDPOINT", hub)
        with serving((model, model), tmp_path) as (process, url, log):
            statuses: set[int] = set()
            deadline = time.monotonic() + 60
            while not statuses:
                assert time.monotonic() < deadline, log.read_text()
                with suppress(httpx.TransportError):
                    statuses.add(httpx.get(f"{url}/health", timeout=30.0, verify=False).status_code)
            assert statuses == {503}
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as slow:
                slow.sendall(b"GET /hea")
                answer.set()
                assert process.wait(60) == HubError.exit_code, log.read_text()
            assert "the hub does not show some/model" in log.read_text().splitlines()[-1]
