"""Tests of replicas on a real Ray Serve: equal answers, replacement of dead ones, streams during an update."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ssd_serve.bench.emulated import emulating
from tests.deploy.files import ROOT, by_default, deploying, environment, read_yaml, services
from tests.servers import await_health, free_port

pytestmark = pytest.mark.slow
# As slow as a large model, so that a stream lasts while something happens.
SETTINGS = {
    "model_wrapper": emulating("mi300x-70b-1b"),
    "native_kernels": False,
    "dtype": "fp32",
    "drain_seconds": 5,
}
WISH = {"prompt": "def f(", "seed": 3, "temperature": 0.8}
FLAGS = ["--seed", "3", "--temperature", "0.8", "--max-tokens", "32", "--json"]


@dataclass(frozen=True)
class Fleet:
    """A running Ray node, as in the service `ray-head-cpu`, and the deployed Serve config."""

    process: "subprocess.Popen[bytes]"
    environment: dict[str, str]
    ports: dict[str, str]
    url: str
    config: Path

    def deploy(self, import_path: str = "", **settings: Any) -> None:
        serving = read_yaml("serve.yaml")
        serving["http_options"]["port"] = int(self.url.rpartition(":")[2])
        application = serving["applications"][0]
        application["import_path"] = import_path or application["import_path"]
        application["args"] = {**SETTINGS, **settings}
        application["deployments"][0]["ray_actor_options"] = {"num_cpus": 1}
        application["deployments"][0]["autoscaling_config"]["min_replicas"] = 2
        application["deployments"][0]["health_check_timeout_s"] = 3.0
        self.config.write_text(yaml.safe_dump(serving), encoding="utf-8")
        command = [self._here(word) for word in deploying(services()["ray-serve-cpu"])]
        subprocess.run(command, env=self.environment, check=True, capture_output=True)

    @contextmanager
    def redeployed(self) -> Generator[None]:
        """Run the whole service `ray-serve-cpu`, with a check every second."""
        service = services()["ray-serve-cpu"]
        (script,) = service["command"]
        command = [*service["entrypoint"], self._here(script).replace("sleep 60", "sleep 1")]
        process = subprocess.Popen(command, env=self.environment, start_new_session=True)
        try:
            # It deploys once before the first check.
            until(lambda: any(child.name() == "sleep" for child in psutil.Process(process.pid).children()))
            yield
        finally:
            kill(process)

    def shut_down(self) -> None:
        command = ["serve", "shutdown", "--yes", "--address", self._here("http://127.0.0.1:8265")]
        subprocess.run(command, env=self.environment, check=True, capture_output=True)

    def _here(self, text: str) -> str:
        text = text.replace("http://127.0.0.1:8265", f"http://127.0.0.1:{self.ports['--dashboard-port']}")
        return text.replace("/opt/serve.yaml", str(self.config))

    def healthy(self) -> bool:
        return healthy("ray-head-cpu", self.ports, self.environment)

    def nodes(self) -> int:
        command = ["ray", "status", f"--address=127.0.0.1:{self.ports['--port']}"]
        done = subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True)
        active = done.stdout.partition("Pending:")[0]
        return len(re.findall(r"^ 1 node_", active, re.MULTILINE))

    def verifiers(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error, IndexError):
                found += [child] if child.cmdline()[0].strip() == "ssd: verifier" else []
        return found

    def answered(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for sample in self._samples():
            if sample.name == "ssd_engine_up":
                counts[sample.labels["replica"]] += 0
            if sample.name == "ssd_request_success_total":
                counts[sample.labels["replica"]] += int(sample.value)
        return counts

    def drafters(self) -> list[float]:
        return [sample.value for sample in self._samples() if sample.name == "ssd_drafters_alive"]

    def _samples(self) -> list[Sample]:
        page = httpx.get(f"{self.url}/metrics", timeout=30.0, verify=False).raise_for_status().text
        return [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def stream(self, tokens: int = 32) -> str:
        """Return the text of a stream, or a description of its error."""
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
    # The paths of Ray's sockets would be too long there.
    with tempfile.TemporaryDirectory(prefix="ray") as ray:
        given = environment(services()["ray-head-cpu"])
        variables = {
            **os.environ,
            **{name: value.replace("/cache", str(folder)) for name, value in given.items()},
            "SSD_TARGET": "embedded",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "PYTHONPATH": str(ROOT / "src"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        options = ["--num-cpus=8", f"--temp-dir={ray}"]
        with running_node("ray-head-cpu", "6379", options, variables, folder / "log") as (process, ports):
            url = f"http://127.0.0.1:{free_port()}"
            started = Fleet(process, variables, ports, url, folder / "serve.yaml")
            started.deploy(mode="ssd")
            await_health(url, 150.0)
            yield started


@contextmanager
def running_node(
    name: str, head_port: str, options: list[str], variables: dict[str, str], log: Path
) -> "Generator[tuple[subprocess.Popen[bytes], dict[str, str]]]":
    """Start a healthy Ray node, and yield its process and ports.

    A node that ends early is started again with other ports: another process may have taken one of them.
    """
    for _ in range(3):
        command, ports = node(name, head_port)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *options], env=variables, stdout=file, stderr=file, start_new_session=True
            )
        try:
            until(partial(over_or_healthy, process, name, ports, variables))
            if process.poll() is None:
                yield process, ports
                return
        finally:
            kill(process)
    raise AssertionError(f"{name} ended:\n{log.read_text(encoding='utf-8')}")


def kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    everything = psutil.Process(process.pid).children(recursive=True)
    for each in (psutil.Process(process.pid), *everything):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(everything, timeout=10)


def over_or_healthy(
    process: "subprocess.Popen[bytes]", name: str, ports: dict[str, str], variables: dict[str, str]
) -> bool:
    return process.poll() is not None or healthy(name, ports, variables)


def healthy(name: str, ports: dict[str, str], variables: dict[str, str]) -> bool:
    check, *words = services()[name]["healthcheck"]["test"]
    assert check == "CMD"
    command = [word.replace("52365", ports["--dashboard-agent-listen-port"]) for word in words]
    return subprocess.run(command, env=variables, check=False, capture_output=True).returncode == 0


def node(name: str, head_port: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of a small Ray node, and its free ports by option."""
    service = services()[name]
    command: list[str] = [*service["entrypoint"], *map(by_default, service["command"])]
    options = [word.partition("=")[0] for word in command]
    # Workers may take any port.
    ports = {name: str(free_port()) for name in options if name.endswith("port") and "worker" not in name}
    command = [
        f"{name}={ports[name]}" if name in ports else word
        for name, word in zip(options, command, strict=True)
    ]
    command = [word.replace(":6379", f":{head_port}") for word in command if "worker-port" not in word]
    return [*command, "--object-store-memory=80000000"], ports


def until(what: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with suppress(httpx.TransportError):  # a hanging replica delays all metrics pages
            if what():
                return
        assert time.monotonic() < deadline
        time.sleep(0.2)


def both_are_there(fleet: Fleet) -> bool:
    return len(fleet.answered()) == 2


@pytest.fixture(scope="module")
def generated() -> str:
    command = [sys.executable, "-m", "ssd_serve", "generate", str(WISH["prompt"]), *FLAGS]
    variables = {**os.environ, "SSD_MODE": "ar", "SSD_DTYPE": "fp32", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    text: str = json.loads(done.stdout)["text"]
    return text


@pytest.fixture(scope="module")
def long_text(fleet: Fleet) -> str:
    return fleet.stream(400)


def test_both_replicas_answer_with_the_text_of_ssd_generate(fleet: Fleet, generated: str) -> None:
    until(lambda: both_are_there(fleet))
    with ThreadPoolExecutor(8) as clients:
        texts = list(clients.map(lambda _: fleet.stream(), range(8)))
    assert set(texts) == {generated}
    counts = fleet.answered()
    assert len(counts) == 2
    assert min(counts.values()) > 0
    assert fleet.drafters() == [1.0, 1.0]


def test_deploying_the_same_config_changes_nothing(fleet: Fleet, long_text: str) -> None:
    until(lambda: both_are_there(fleet))
    before = set(fleet.answered())
    with ThreadPoolExecutor(1) as client:
        streaming = client.submit(fleet.stream, 400)
        fleet.deploy(mode="ssd")
        assert streaming.result() == long_text
    time.sleep(2.0)
    assert set(fleet.answered()) == before


def test_stream_survives_engine_death_in_replica(fleet: Fleet, long_text: str) -> None:
    until(lambda: both_are_there(fleet))
    before = set(fleet.answered())
    with ThreadPoolExecutor(1) as client:
        streaming = client.submit(fleet.stream, 400)
        time.sleep(0.5)
        for engine in fleet.verifiers():
            engine.kill()
        assert streaming.result() == long_text
    assert set(fleet.answered()) == before


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_lost_replica_is_replaced_while_the_other_one_answers(
    fleet: Fleet, generated: str, fault: str
) -> None:
    until(lambda: both_are_there(fleet))
    before = set(fleet.answered())
    engine = fleet.verifiers()[0]
    replica = engine.parent()
    assert replica is not None
    if fault == "dies":
        replica.kill()
        assert engine.wait(60) is None  # its processes end with it
    else:
        replica.suspend()
        until(lambda: len(fleet.answered()) > 0)
    # A request to the hanging replica is sent to the other one after a timeout.
    assert {fleet.stream() for _ in range(4)} == {generated}
    until(lambda: both_are_there(fleet))
    assert len(set(fleet.answered()) - before) == 1
    assert engine.wait(60) is None


def test_stream_survives_rolling_update(fleet: Fleet, long_text: str, generated: str) -> None:
    assert environment(services()["ray-head-rocm"])["SSD_LAUNCHER"] == "ray"
    until(lambda: both_are_there(fleet))
    before = set(fleet.answered())
    with ThreadPoolExecutor(1) as client:
        streaming = client.submit(fleet.stream, 400)
        devices = {"launcher": "ray", "target_device": "cpu:0", "draft_device": "cpu:1"}
        fleet.deploy("ssd_serve.replicas:app", mode="ssd", **devices)  # the old import path
        assert streaming.result() == long_text
    until(lambda: both_are_there(fleet) and not before & set(fleet.answered()))
    assert {fleet.stream() for _ in range(4)} == {generated}
    assert fleet.drafters() == [1.0, 1.0]


def test_worker_node_joins_and_leaves_without_processes(fleet: Fleet, tmp_path: Path) -> None:
    name, head_port = "ray-worker-cpu", fleet.ports["--port"]
    assert not healthy(name, node(name, head_port)[1], fleet.environment)
    with running_node(name, head_port, ["--num-cpus=1"], fleet.environment, tmp_path / "log") as (worker, _):
        until(lambda: fleet.nodes() == 2)
        everything = psutil.Process(worker.pid).children(recursive=True)
        worker.send_signal(signal.SIGTERM)
        worker.wait(30)
        assert psutil.wait_procs(everything, timeout=30)[1] == []
        until(lambda: fleet.nodes() == 1)
        assert fleet.healthy()


def test_restarted_head_is_deployed_again(fleet: Fleet, generated: str) -> None:
    with fleet.redeployed():
        fleet.shut_down()
        await_health(fleet.url, 150.0)
        assert fleet.stream() == generated
