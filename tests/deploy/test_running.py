"""The cpu profile as processes: the image's command with its variables, its healthcheck, and its metrics."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from ssd_serve.app.cli.output import as_env
from ssd_serve.base.settings_sources import origins, resolve
from tests.deploy.containers import Container, Network
from tests.deploy.files import (
    DEPLOY,
    alert_expressions,
    dashboard_panels,
    read_yaml,
    services,
)
from tests.servers import await_health, free_port

pytestmark = pytest.mark.slow

PROMETHEUS = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or shutil.which("wget") is None,
    reason="Prometheus is not installed, or wget, which its image has; no package of Python brings them",
)
NOT_ON_THE_PAGE = {"instance", "replica"}
"""Prometheus adds the first, several servers behind one address the second."""


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Generator[Container]:
    network = Network(tmp_path_factory.mktemp("cache"))
    try:
        yield network.start("ssd-cpu", {})
    finally:
        network.close()


@pytest.fixture(scope="module")
def page(container: Container) -> str:
    """The metrics after a request, with a report of the engine."""
    await_health(container.url, 240.0)
    body = {"prompt": "def f(", "max_tokens": 8}
    httpx.post(f"{container.url}/v1/completions", json=body, timeout=60.0).raise_for_status()
    deadline = time.monotonic() + 30
    while "ssd_layout{" not in (text := httpx.get(f"{container.url}/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return text


def missing(expressions: list[str], page: str) -> list[str]:
    """Metrics that no line of the page begins with, and labels that their lines do not have."""
    found: list[str] = []
    for expression in expressions:
        text = ""
        for name in set(re.findall(r"ssd_\w+", expression)):
            lines = re.findall(rf"^{name}[{{ ].*$", page, re.MULTILINE)
            text += "\n".join(lines)
            found += [] if lines else [name]
        grouped = " ".join(re.findall(r"by \(([\w, ]+)\)", expression))
        labels = set(re.findall(r"\w+", grouped)) | set(re.findall(r"ssd_\w+\{(\w+)=", expression))
        labels |= set(re.findall(r"\{\{(\w+)\}\}", expression))
        found += [label for label in labels - NOT_ON_THE_PAGE if f'{label}="' not in text]
    return found


def test_every_metric_of_the_alerts_exists(page: str) -> None:
    expressions = alert_expressions()
    assert len(expressions) >= 6
    assert missing(expressions, page) == []


def test_every_metric_of_the_dashboard_exists(page: str) -> None:
    targets = [target for panel in dashboard_panels() for target in panel["targets"]]
    assert len(targets) > 20
    # A legend names labels of its own series.
    assert missing([f"{target['expr']} {target['legendFormat']}" for target in targets], page) == []


def test_a_metric_or_label_that_is_not_there_is_found(page: str) -> None:
    assert missing(["ssd_num_requests_dreaming > 0"], page) == ["ssd_num_requests_dreaming"]
    assert missing(["sum by (colour) (ssd_layout)"], page) == ["colour"]


@pytest.fixture(scope="module")
def prometheus(container: Container, tmp_path_factory: pytest.TempPathFactory) -> Generator["Prometheus"]:
    folder = tmp_path_factory.mktemp("prometheus")
    config = read_yaml("prometheus.yaml")
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [container.url.removeprefix("http://")]
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    service, address = services()["prometheus-ray"], f"127.0.0.1:{free_port()}"
    places = {
        "/etc/prometheus": str(folder),
        "127.0.0.1:9090": address,
        "=/prometheus": f"={folder}/data",
    }
    options, check = here(service["command"], places), here(service["healthcheck"]["test"][1:], places)
    assert subprocess.run(check, check=False).returncode != 0, "nobody is there"
    process = subprocess.Popen([str(PROMETHEUS), *options, "--log.level=error"])
    try:
        yield Prometheus(f"http://{address}", check)
    finally:
        process.kill()
        process.wait()


@needs_prometheus
def test_prometheus_reads_it_by_our_configuration(page: str, prometheus: "Prometheus") -> None:
    prometheus.until("ssd_engine_up == 1")
    prometheus.until('up{job="ssd-serve"} == 1')
    assert {rule["health"] for rule in prometheus.rules()} <= {"ok", "unknown"}
    assert len(prometheus.rules()) == len(alert_expressions())
    assert prometheus.query('ALERTS{alertstate="firing"}') == []
    assert subprocess.run(prometheus.check, check=False).returncode == 0


@needs_prometheus
def test_every_query_of_the_dashboard_has_an_answer(container: Container, prometheus: "Prometheus") -> None:
    prometheus.until("count_over_time(ssd_engine_up[1m]) > 1")
    body = {"prompt": "def f(", "max_tokens": 32}
    httpx.post(f"{container.url}/v1/completions", json=body, timeout=60.0).raise_for_status()
    expressions = [target["expr"] for panel in dashboard_panels() for target in panel["targets"]]
    for expression in expressions:
        prometheus.until(expression.replace("$__rate_interval", "1m"))
    for metric in (
        "generation_tokens_total",
        "spec_decode_num_drafts_total",
        "time_to_first_token_seconds_count",
    ):
        prometheus.until(f"sum(rate(ssd_{metric}[1m])) > 0")


def here(words: list[str], places: dict[str, str]) -> list[str]:
    """A command with other places in it."""
    for inside, outside in places.items():
        words = [word.replace(inside, outside) for word in words]
    return words


@dataclass(frozen=True)
class Prometheus:
    url: str
    check: list[str]

    def query(self, expression: str) -> list[object]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=10.0)
        found: list[object] = answer.json()["data"]["result"]
        return found

    def rules(self) -> list[dict[str, str]]:
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=10.0).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def until(self, expression: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with suppress(httpx.TransportError, KeyError, ValueError):  # until it is ready it speaks no JSON
                if self.query(expression):
                    return
            assert time.monotonic() < deadline, expression
            time.sleep(0.2)


def test_the_healthcheck_follows_the_server_and_a_stop_is_tidy(container: Container) -> None:
    await_health(container.url, 240.0)
    assert container.healthcheck() == 0
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(60) == 0
    assert container.healthcheck() == 1


def test_the_volume_keeps_what_later_starts_use_again(container: Container) -> None:
    assert any(Path(container.variables["SSD_CACHE_DIR"]).iterdir())


def test_the_example_of_env_is_what_the_command_prints() -> None:
    expected = as_env(origins(resolve({}), {})) + "\n"
    assert (DEPLOY / ".env.example").read_text(encoding="utf-8").startswith(expected)


def test_the_example_of_env_names_every_variable_of_compose() -> None:
    compose = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    # `${NAME:-default}`, and under `environment` a name whose value is the shell's.
    read = set(re.findall(r"\$\{(\w+)", compose)) | set(
        re.findall(r"^ +([A-Z_]{2,}):$", compose, re.MULTILINE)
    )
    told = re.findall(r"^#(\w+)=", (DEPLOY / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
    assert "GRAFANA_PORT" in read
    assert "HF_TOKEN" in read
    assert read <= set(told)
