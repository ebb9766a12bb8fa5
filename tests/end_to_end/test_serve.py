"""`ssd serve` as one program: 503 while loading, answers, kills of each process, tidy ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.end_to_end.tiny_pair import write_pair

Server = tuple["subprocess.Popen[bytes]", str, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def serving(pair: tuple[Path, Path], folder: Path) -> Generator[Server]:
    """A running server; its run dir and log are below the folder."""
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
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ssd_serve", "serve"],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process, f"http://127.0.0.1:{port}", folder / "log"
    finally:
        process.kill()
        process.wait()


def await_health(url: str, seconds: float = 60.0) -> set[int]:
    """All statuses seen until the first 200."""
    seen: set[int] = set()
    deadline = time.monotonic() + seconds
    while 200 not in seen:
        assert time.monotonic() < deadline, seen
        with suppress(httpx.TransportError):
            seen.add(httpx.get(f"{url}/health", timeout=30.0).status_code)
        time.sleep(0.05)
    return seen


def children(process: "subprocess.Popen[bytes]") -> dict[str, psutil.Process]:
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(process.pid).children():
        # One that was just killed has no command line any more.
        with suppress(psutil.Error, IndexError):
            found[child.cmdline()[0].strip()] = child
    return found


def complete(url: str, tokens: int = 24) -> str:
    body = {"prompt": "def f(", "max_tokens": tokens, "seed": 3, "temperature": 0.8}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def figures_after_a_stop_string(url: str, text: str) -> object:
    """How many nodes were verified for the same request, ended by a stop string from its text."""
    body = {"prompt": "def f(", "max_tokens": 24, "seed": 3, "temperature": 0.8, "stop": text[8:11]}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert text.startswith(answer["choices"][0]["text"])
    return answer["metrics"]["speculative_decoding"]["num_draft_tokens"]


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10.0)
    return not alive


def test_it_serves_survives_its_drafter_and_ends_tidily(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with serving(pair, tmp_path) as (process, url, log):
        assert 503 in await_health(url)
        workers = children(process)
        assert set(workers) == {"ssd: verifier", "ssd: drafter-0"}
        text = complete(url)
        assert figures_after_a_stop_string(url, text) is not None
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
        # To the whole group, as a terminal or a process manager does.
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(15) == 0, log.read_text()
        assert gone(everything)
        assert log.read_text().removeprefix(before).splitlines()[:-1] == []
    assert list((tmp_path / "run").iterdir()) == []


def test_a_killed_server_leaves_nobody(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with serving(pair, tmp_path) as (process, url, _):
        await_health(url)
        workers = list(children(process).values())
        process.kill()
        assert gone(workers)
