"""A verifier that dies during streams is replaced, and clients still receive the same texts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from ssd_serve.bench.emulated import emulating
from ssd_serve.bench.serve import metric
from tests.end_to_end.tiny_pair import write_pair
from tests.servers import children, free_port, gone, running

TOKENS = 40
"""Tokens for some two seconds, with forwards of 76 ms."""
Texts = list[dict[int, list[int]]]

REQUESTS: tuple[dict[str, object], ...] = (
    {"prompt": "def f(", "temperature": 0.0},
    {"prompt": "import os\n", "temperature": 0.9, "presence_penalty": 0.4, "logprobs": 1},
    {"prompt": "class Tree:", "temperature": 1.2, "top_p": 0.9, "n": 2},
)


@dataclass(eq=False)
class Client(threading.Thread):
    """Streams one request."""

    url: str
    fields: dict[str, object]
    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    ends: list[str] = field(default_factory=list[str])
    statistics: dict[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        super().__init__()

    def run(self) -> None:
        body = {**self.fields, "max_tokens": TOKENS, "seed": 11, "ignore_eos": True, "stream": True}
        pending = b""
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60.0
        ) as response:
            for data in response.iter_raw():
                *events, pending = (pending + data).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: {"):
                        self._take(json.loads(event.removeprefix(b"data: ")))

    def _take(self, chunk: dict[str, object]) -> None:
        self.statistics = chunk.get("metrics", self.statistics)  # type: ignore[assignment]
        choices: list[dict[str, object]] = chunk.get("choices", [])  # type: ignore[assignment]
        for choice in choices:
            new: list[int] = choice.get("token_ids") or []  # type: ignore[assignment]
            self.tokens.setdefault(choice["index"], []).extend(new)  # type: ignore[arg-type]
            if choice.get("finish_reason"):
                self.ends.append(str(choice["finish_reason"]))


@dataclass(frozen=True)
class Serving:
    """A running server."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def pid(self, name: str) -> int:
        """Wait for the process of this name."""
        deadline = time.monotonic() + 30
        while f"ssd: {name}" not in (found := children(self.process)):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return int(found[f"ssd: {name}"].pid)

    def stream(self, disturb: Callable[[], object] = lambda: None) -> list[Client]:
        """Stream all requests at once; call `disturb` after their first tokens."""
        clients = [Client(self.url, fields) for fields in REQUESTS]
        for client in clients:
            client.start()
        while not all(len(next(iter([*client.tokens.values()]), [])) > 2 for client in clients):
            assert all(client.is_alive() for client in clients), self.log.read_text()
            time.sleep(0.01)
        disturb()
        for client in clients:
            client.join(60)
            assert not client.is_alive(), self.log.read_text()
        return clients

    def metric(self, name: str) -> float:
        return metric(httpx.get(f"{self.url}/metrics").text, name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Serving]:
    """The tiny pair, on emulated devices that are slow enough to be killed during a stream."""
    folder = tmp_path_factory.mktemp("faults")
    target, draft = write_pair(folder / "pair")
    port = free_port()
    environment = {
        **os.environ,
        "SSD_TARGET": str(target),
        "SSD_DRAFT": str(draft),
        "SSD_MODE": "ssd",
        "SSD_PORT": str(port),
        "SSD_RUN_DIR": str(folder / "run"),
        "SSD_MODEL_WRAPPER": emulating("mi300x-70b-1b*4"),
        "SSD_BUDGET": "2",
        "SSD_DTYPE": "fp32",
    }
    with running([sys.executable, "-m", "ssd_serve", "serve"], environment, folder, port) as found:
        yield Serving(*found)


@pytest.fixture(scope="module")
def expected(server: Serving) -> Texts:
    clients = server.stream()
    assert [len(tokens) for client in clients for tokens in client.tokens.values()] == [TOKENS] * 4
    return [client.tokens for client in clients]


def texts(clients: list[Client]) -> Texts:
    assert [end for client in clients for end in client.ends] == ["length"] * 4
    return [client.tokens for client in clients]


def test_killed_verifier_is_replaced_and_streams_continue(server: Serving, expected: Texts) -> None:
    restarts = server.metric("ssd_engine_restarts_total")
    during: list[int] = []

    def disturb() -> None:
        os.kill(server.pid("verifier"), signal.SIGKILL)
        time.sleep(0.3)
        during.append(httpx.get(f"{server.url}/health").status_code)
        body = {"prompt": "def g(", "max_tokens": 2}
        during.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0).status_code)

    clients = server.stream(disturb)
    assert texts(clients) == expected
    assert during == [503, 200], "health tells of the restart, and a new request waits for its end"
    assert server.metric("ssd_engine_restarts_total") == restarts + 1
    assert server.metric("ssd_requests_resumed_total") >= 4
    speculation: dict[str, object] = clients[0].statistics["speculative_decoding"]  # type: ignore[assignment]
    assert speculation["num_tokens"] == TOKENS
    assert speculation["num_draft_tokens"] is None, "no engine knows all of them"


def test_generated_token_ids_continue_a_broken_stream(server: Serving, expected: Texts) -> None:
    for wish, texts in zip(REQUESTS, expected, strict=True):
        had = {choice: tokens[: TOKENS // (2 + choice)] for choice, tokens in sorted(texts.items())}
        client = Client(server.url, {**wish, "generated_token_ids": list(had.values())})
        client.run()
        assert {choice: had[choice] + client.tokens[choice] for choice in had} == texts


def test_verifier_that_cannot_restart_ends_the_server(server: Serving) -> None:
    """The last one of this server."""
    (server.log.parent / "pair" / "target" / "model.safetensors").unlink()
    workers = list(children(server.process).values())
    os.kill(server.pid("verifier"), signal.SIGKILL)
    assert server.process.wait(60) == 6
    assert "model.safetensors" in server.log.read_text()
    assert gone(workers)
