"""`ssd serve` with several drafters, and `ssd draft` for two servers: kills, moves, reconnects."""

import os
import re
import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.end_to_end.tiny_pair import write_model, write_pair
from tests.servers import await_health, free_port
from tests.waiting import until

KEY = "a key for the tests, long stop"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    other = target.with_name("other-draft")
    write_model(other, seed=1, noise=0.01)
    return {"target": target, "draft": draft, "other": other}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with serving(folders, tmp_path_factory.mktemp("plain"), SSD_MODE="ar") as (_, url):
        return complete_all(url)


@contextmanager
def started(command: Sequence[str], folder: Path, settings: dict[str, str]) -> Generator[int]:
    environment = {**os.environ, "SSD_DTYPE": "fp32", "SSD_LOG_LEVEL": "info", **settings}
    with (folder / f"log-{command[0]}").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ssd_serve", *command], env=environment, stdout=log, stderr=log
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def serving(folders: dict[str, Path], folder: Path, **settings: str) -> Generator[tuple[int, str]]:
    port = free_port()
    always = {
        "SSD_TARGET": str(folders["target"]),
        "SSD_DRAFT": str(folders["draft"]),
        "SSD_MODE": "ssd",
        "SSD_PORT": str(port),
        "SSD_BUDGET": "16",
        "SSD_RUN_DIR": str(folder / "run"),
        "SSD_SPECULATION_MAY_STOP": "false",
        "SSD_CLUSTER_KEY": KEY,
    }
    with started(["serve"], folder, {**always, **settings}) as pid:
        url = f"http://127.0.0.1:{port}"
        await_health(url)
        yield pid, url


def complete(url: str, number: int) -> str:
    body = {"prompt": f"def f{number}(", "max_tokens": 80, "seed": number, "temperature": 0.8}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def complete_all(url: str) -> list[str]:
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda number: complete(url, number), range(6)))


class StopFlag:
    """Set by `close`, so that the loop ends even if a test fails."""

    def __init__(self) -> None:
        self.is_set = False

    def close(self) -> None:
        self.is_set = True


def complete_repeatedly(url: str, stop: StopFlag) -> list[list[str]]:
    """Repeat the requests until stopped; statistics come only once a second."""
    texts = [complete_all(url)]
    while not stop.is_set:
        texts.append(complete_all(url))
    return texts


def metric(url: str, name: str) -> float:
    """Return the sum over all labels."""
    page = httpx.get(f"{url}/metrics", timeout=30.0, verify=False).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))


def workers(pid: int) -> dict[str, psutil.Process]:
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error, IndexError):
            found[child.cmdline()[0].strip().removeprefix("ssd: ")] = child
    return found


def test_two_draft_models_in_one_process(
    folders: dict[str, Path], expected: list[str], tmp_path: Path
) -> None:
    drafts = f"{folders['draft']},{folders['other']}"
    with serving(folders, tmp_path, SSD_DRAFT=drafts, SSD_DRAFTERS="1") as (pid, url):
        assert {name for name in workers(pid) if name.startswith("drafter")} == {"drafter-0"}
        until(lambda: metric(url, "ssd_drafters_alive") == 2)
        assert complete_all(url) == expected
        assert metric(url, "ssd_spec_decode_num_accepted_tokens_total") > 0


def test_one_of_two_drafters_killed(folders: dict[str, Path], expected: list[str], tmp_path: Path) -> None:
    with serving(folders, tmp_path, SSD_DRAFTERS="2") as (pid, url):
        assert {"drafter-0", "drafter-1"} <= set(workers(pid))
        until(lambda: metric(url, "ssd_drafters_alive") == 2)
        with ThreadPoolExecutor(1) as pool, closing(StopFlag()) as stop:
            texts = pool.submit(complete_repeatedly, url, stop)
            until(lambda: metric(url, "ssd_drafter_requests") > 3)
            workers(pid)["drafter-1"].kill()
            until(lambda: metric(url, "ssd_drafter_restarts_total") == 1)
            until(lambda: metric(url, "ssd_drafter_moves_total") > 0)
            stop.close()
            assert texts.result() == [expected] * len(texts.result())
        assert metric(url, "ssd_drafters_alive") == 2
        accepted = metric(url, "ssd_spec_decode_num_accepted_tokens_total")

        def accepts_more() -> bool:
            assert complete_all(url) == expected
            return metric(url, "ssd_spec_decode_num_accepted_tokens_total") > accepted

        until(accepts_more)


def test_two_draft_models_in_two_processes(
    folders: dict[str, Path], expected: list[str], tmp_path: Path
) -> None:
    both = f"{folders['draft']},{folders['other']}"
    with serving(folders, tmp_path, SSD_DRAFT=both) as (_, url):
        until(lambda: metric(url, "ssd_drafters_alive") == 2)
        assert complete_all(url) == expected
        until(lambda: metric(url, "ssd_spec_decode_num_accepted_tokens_total") > 0)
        assert metric(url, "ssd_drafter_moves_total") == 0


def test_drafter_of_two_servers_survives_a_restart_of_one(
    folders: dict[str, Path], expected: list[str], tmp_path: Path
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    remote = {"SSD_DRAFTERS": "0", "SSD_DRAFT": ""}
    drafting = {
        "SSD_TARGET": str(folders["target"]),
        "SSD_DRAFT": str(folders["draft"]),
        "SSD_CLUSTER_KEY": KEY,
    }
    connect = [word for address in addresses for word in ("--connect", address)]
    with started(["draft", *connect], tmp_path, drafting):
        with serving(folders, first, SSD_DRAFTER_ADDRESS=addresses[0], **remote) as (_, url):
            with serving(folders, second, SSD_DRAFTER_ADDRESS=addresses[1], **remote) as (_, other):
                assert complete_all(url) == expected
                assert complete_all(other) == expected
                until(lambda: [metric(each, "ssd_drafters_alive") for each in (url, other)] == [1, 1])
            assert complete_all(url) == expected  # the other has gone
        with serving(folders, first, SSD_DRAFTER_ADDRESS=addresses[0], **remote) as (_, url):
            until(lambda: metric(url, "ssd_drafters_alive") == 1)
            assert complete_all(url) == expected
            until(lambda: metric(url, "ssd_spec_decode_num_accepted_tokens_total") > 0)
