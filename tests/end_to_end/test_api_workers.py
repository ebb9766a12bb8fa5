"""A server whose answers come from several processes: who answers, what a death costs, how it ends."""

import json
import os
import signal
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ssd_serve.bench.metrics_page import by_label
from tests.servers import Server, children, free_port, gone, running
from tests.waiting import until

WORKERS = {"0", "api-1", "api-2"}
ASK: dict[str, object] = {"prompt": "def read(", "max_tokens": 48, "seed": 5, "temperature": 1.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    port = free_port()
    environment = {
        **os.environ,
        "SSD_API_WORKERS": "3",
        "SSD_PORT": str(port),
        "SSD_DTYPE": "fp32",
        "SSD_DRAIN_SECONDS": "20",
    }
    folder = tmp_path_factory.mktemp("server")
    with running([sys.executable, "-m", "ssd_serve", "serve"], environment, folder, port) as found:
        until(lambda: answering(found[1]) == WORKERS, 60.0)
        yield found


def answering(url: str) -> set[str]:
    """Who has answered so far."""
    page = httpx.get(f"{url}/metrics", timeout=30.0).text
    return set(by_label(page, "ssd_e2e_request_latency_seconds_count", "api_worker"))


def text(url: str, **body: object) -> str:
    """Of a new connection, which any of the processes may take."""
    answer = httpx.post(f"{url}/v1/completions", json={**ASK, **body}, timeout=60.0)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def streamed(url: str, **body: object) -> str:
    """The text of a stream that ends well."""
    parts: list[str] = []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**ASK, **body, "stream": True}, timeout=60.0
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                parts += [choice["text"] for choice in event["choices"]]
    return "".join(parts)


def test_all_processes_answer_and_what_dies_comes_back(server: Server) -> None:
    process, url, log = server
    expected = text(url)
    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(lambda _: streamed(url), range(36))) == {expected}
        page = httpx.get(f"{url}/metrics").text
        by_process = by_label(page, "ssd_request_success_total", "api_worker")
        assert by_process.keys() == WORKERS, log.read_text()
        assert sum(by_process.values()) == 37

        # The engine dies while all of them stream: the texts go on as they would have.
        running_on = [pool.submit(streamed, url, max_tokens=200) for _ in range(12)]
        until(lambda: httpx.get(f"{url}/load").json()["server_load"] >= 12, 30.0)
        children(process)["ssd: verifier"].kill()
        assert len({each.result(120) for each in running_on}) == 1

        # A worker dies: its clients alone lose their connections, and it comes back.
        victim = children(process)["ssd: api-1"]
        victim.kill()
        until(lambda: "ssd: api-1" in children(process) and answering(url) == WORKERS, 60.0)
        assert children(process)["ssd: api-1"].pid != victim.pid
        assert set(pool.map(lambda _: streamed(url), range(12))) == {expected}


def test_running_answers_end_well_when_the_server_is_told_to_stop(server: Server) -> None:
    process, url, log = server
    left, died = list(children(process).values()), log.read_text().count("process died")
    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(streamed, url, max_tokens=100) for _ in range(9)]
        until(lambda: httpx.get(f"{url}/load").json()["server_load"] >= 9, 30.0)
        process.send_signal(signal.SIGTERM)
        assert len({each.result(60) for each in asked}) == 1
    assert process.wait(30) == 0, log.read_text()
    assert log.read_text().count("process died") == died
    assert gone(left)
