"""Replicas on a real Ray Serve: both answer alike, a dead engine is replaced, streams outlive an update."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.files import ROOT, read_yaml
from tests.end_to_end.test_serve import await_health, free_port

pytestmark = pytest.mark.slow
# As slow as a large model, so that a stream lasts while something happens.
SETTINGS = {"emulate": "mi300x-70b-1b", "native_kernels": False, "dtype": "fp32"}
WISH = {"prompt": "def f(", "seed": 3, "temperature": 0.8}
FLAGS = ["--seed", "3", "--temperature", "0.8", "--max-tokens", "32", "--json"]


@dataclass(frozen=True)
class Fleet:
    """A Serve that runs, and the file that it was told to run."""

    process: "subprocess.Popen[str]"
    url: str
    config: Path

    def tell(self, **settings: Any) -> None:
        """Let it run the project's Serve config with a free port, tiny replicas and these settings."""
        serving = read_yaml("serve.yaml")
        serving["http_options"]["port"] = int(self.url.rpartition(":")[2])
        application = serving["applications"][0]
        application["args"] = {**SETTINGS, **settings}
        application["deployments"][0]["ray_actor_options"] = {"num_cpus": 1}
        self.config.write_text(yaml.safe_dump(serving), encoding="utf-8")
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self.config}\n")
        self.process.stdin.flush()

    def verifiers(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error, IndexError):
                found += [child] if child.cmdline()[0].strip() == "ssd: verifier" else []
        return found

    def answered(self) -> Counter[str]:
        """How many requests each replica has ended."""
        page = httpx.get(f"{self.url}/metrics", timeout=30.0).text
        counts: Counter[str] = Counter()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "ssd_engine_up":
                    counts[sample.labels["replica"]] += 0
                if sample.name == "ssd_request_success_total":
                    counts[sample.labels["replica"]] += int(sample.value)
        return counts

    def stream(self, tokens: int = 32) -> str:
        """The text of a stream, whose events must come one by one and end well."""
        body = {**WISH, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        text, end = "", ""
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60.0) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code}: {answer.read().decode()}"
            for line in answer.iter_lines():
                end = line.removeprefix("data: ") or end
                if end.startswith("{") and line:
                    text += "".join(choice["text"] for choice in json.loads(end).get("choices", []))
        return text if end == "[DONE]" else f"cut off after {text!r}"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Generator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.deploy.serve_run"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    started = Fleet(process, f"http://127.0.0.1:{free_port()}", folder / "serve.yaml")
    everything: list[psutil.Process] = []
    try:
        started.tell(mode="ssd")
        await_health(started.url, 150.0)
        yield started
    finally:
        everything = psutil.Process(process.pid).children(recursive=True)
        assert process.stdin is not None
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()
        for each in psutil.wait_procs(everything, timeout=10)[1]:
            each.kill()


def until(what: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def both_are_there(fleet: Fleet) -> bool:
    return len(fleet.answered()) == 2


@pytest.fixture(scope="module")
def generated() -> str:
    """What `ssd generate` says without speculation."""
    command = [sys.executable, "-m", "ssd_serve", "generate", str(WISH["prompt"]), *FLAGS]
    environment = {**os.environ, "SSD_MODE": "ar", "SSD_DTYPE": "fp32", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    text: str = json.loads(done.stdout)["text"]
    return text


def test_both_replicas_answer_with_the_text_of_ssd_generate(fleet: Fleet, generated: str) -> None:
    until(lambda: both_are_there(fleet))
    with ThreadPoolExecutor(8) as crowd:
        texts = list(crowd.map(lambda _: fleet.stream(), range(8)))
    assert set(texts) == {generated}
    counts = fleet.answered()
    assert len(counts) == 2
    assert min(counts.values()) > 0


def test_a_dead_engine_is_replaced_while_the_other_replica_answers(fleet: Fleet, generated: str) -> None:
    until(lambda: both_are_there(fleet))
    before = set(fleet.answered())
    fleet.verifiers()[0].kill()
    until(lambda: len(fleet.verifiers()) < 2)
    # The replica tells its requests and leaves; then there is only the other one.
    until(lambda: len(fleet.answered()) == 1)
    (left,) = fleet.answered()
    assert left in before
    assert {fleet.stream() for _ in range(4)} == {generated}
    until(lambda: both_are_there(fleet))
    assert len(set(fleet.answered()) - before) == 1


def test_a_stream_outlives_an_update_of_all_replicas(fleet: Fleet) -> None:
    until(lambda: both_are_there(fleet))
    before = set(fleet.answered())
    texts: list[str] = []
    streaming = threading.Thread(target=lambda: texts.append(fleet.stream(500)))
    streaming.start()
    fleet.tell(mode="ar")
    streaming.join()
    until(lambda: both_are_there(fleet) and not before & set(fleet.answered()))
    assert texts == [fleet.stream(500)]
    assert len(texts[0]) > 500
