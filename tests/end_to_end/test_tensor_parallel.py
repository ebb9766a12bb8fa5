"""`ssd serve` with a target on two ranks: the texts of one, also when a rank dies or hangs."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve import LLM, SamplingParams
from tests.end_to_end.tiny_pair import write_pair
from tests.servers import Server, await_health, children, free_port, gone, running

Pair = tuple[Path, Path]
PROMPTS = ("def f(", "import os\n", "class Tree:")
RANKS = {"ssd: verifier", "ssd: rank-1"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@contextmanager
def serving(pair: Pair, folder: Path, mode: str, ranks: int) -> Generator[Server]:
    """A running server that answers; its run dir and log are below the folder."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    environment = {
        **os.environ,
        "SSD_TARGET": str(pair[0]),
        "SSD_DRAFT": str(pair[1]),
        "SSD_MODE": mode,
        "SSD_PORT": str(port),
        "SSD_RUN_DIR": str(folder / "run"),
        "SSD_BUDGET": "8",
        "SSD_DTYPE": "fp32",
        "SSD_KV_MEMORY_MB": "64",
        "SSD_TENSOR_PARALLEL": str(ranks),
    }
    command = [sys.executable, "-m", "ssd_serve", "serve"]
    with running(command, environment, folder, port) as server:
        yield server


def texts(url: str) -> list[str]:
    """Greedy and sampled."""
    found: list[str] = []
    for prompt in PROMPTS:
        for temperature in (0.0, 0.9):
            body = {"prompt": prompt, "max_tokens": 32, "seed": 3, "temperature": temperature}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["choices"][0]["text"])
    return found


def texts_of_one_rank(target: Path) -> list[str]:
    """The same in this process, without drafts."""
    asked = [
        (prompt, SamplingParams(max_tokens=32, seed=3, temperature=temperature))
        for prompt in PROMPTS
        for temperature in (0.0, 0.9)
    ]
    with LLM(str(target), mode="ar", dtype="fp32", budget=8, kv_memory_mb=64) as llm:
        return [llm.generate(prompt, params)[0].text for prompt, params in asked]


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[str]:
    return texts_of_one_rank(pair[0])


@pytest.fixture(scope="module")
def two_ranks(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    with serving(pair, tmp_path_factory.mktemp("two"), "ssd", 2) as server:
        yield server


def test_two_ranks_equal_one_rank(two_ranks: Server, expected: list[str]) -> None:
    process, url, _ = two_ranks
    assert set(children(process)) == RANKS | {"ssd: drafter-0"}
    assert texts(url) == expected


@pytest.mark.parametrize(
    ("worker", "how"),
    [
        ("ssd: rank-1", signal.SIGKILL),
        ("ssd: rank-1", signal.SIGSTOP),
        ("ssd: verifier", signal.SIGSTOP),
    ],
    ids=["rank killed", "rank stopped", "rank 0 stopped"],
)
def test_killed_or_hanging_rank_restarts_the_target(
    two_ranks: Server, worker: str, how: signal.Signals
) -> None:
    process, url, log = two_ranks
    before = children(process)
    body = {"prompt": "def f(", "max_tokens": 480, "ignore_eos": True, "seed": 5}
    expected = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).json()["choices"]
    timer = threading.Timer(0.3, before[worker].send_signal, (how,))
    timer.start()  # in the middle of a text, or soon after: idle ranks must be noticed too
    found = httpx.post(f"{url}/v1/completions", json=body, timeout=90.0).json()["choices"]
    assert found == expected
    timer.join()
    while children(process).get(worker) in (None, before[worker]):
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    await_health(url)
    assert not psutil.wait_procs([before[name] for name in RANKS], timeout=60.0)[1]


def shuts_down_cleanly(server: Server, folder: Path) -> None:
    process, _, log = server
    running, before = children(process), log.read_text()
    # To the whole group, as a terminal or a process manager does.
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    assert gone(list(running.values()))
    assert "Traceback" not in log.read_text().removeprefix(before)
    assert list((folder / "run").iterdir()) == []


def test_two_ranks_shut_down_cleanly_after_faults(two_ranks: Server) -> None:
    shuts_down_cleanly(two_ranks, two_ranks[2].parent)


def test_two_ranks_with_inline_drafts_equal_one_rank(pair: Pair, tmp_path: Path, expected: list[str]) -> None:
    with serving(pair, tmp_path, "sd", 2) as server:
        assert set(children(server[0])) == RANKS
        assert texts(server[1]) == expected
        shuts_down_cleanly(server, tmp_path)


def test_too_many_ranks_are_refused_in_one_sentence(pair: Pair) -> None:
    command = [sys.executable, "-m", "ssd_serve", "generate", "x", "--target", str(pair[0]), "--mode", "ar"]
    done = subprocess.run(
        [*command, "--tensor-parallel", "4"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "4 ranks cannot share 2 attention heads" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("ssd: ") == 1
