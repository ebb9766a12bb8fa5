"""The server of compose.cpu.yaml as a process: command, variables, healthcheck and metrics."""

import re
import signal
import time
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from tests.deploy.containers import Container, Network
from tests.deploy.files import alert_expressions, dashboard_panels
from tests.servers import await_health

pytestmark = pytest.mark.slow

NOT_ON_THE_PAGE = {"instance", "replica"}
"""Prometheus adds the first, several servers behind one address the second."""


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Generator[Container]:
    network = Network(tmp_path_factory.mktemp("cache"))
    try:
        yield network.start("ssd-cpu", {"SSD_TARGET": "embedded"})
    finally:
        network.close()


@pytest.fixture(scope="module")
def page(container: Container) -> str:
    """The metrics after a request, with a report of the engine."""
    await_health(container.url, 240.0)
    body = {"prompt": "def f(", "max_tokens": 8}
    httpx.post(f"{container.url}/v1/completions", json=body, timeout=60.0).raise_for_status()
    deadline = time.monotonic() + 30
    while "ssd_layout{" not in (text := httpx.get(f"{container.url}/metrics", verify=False).text):
        assert time.monotonic() < deadline
        time.sleep(0.2)
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


def test_metrics_of_alerts_exist(page: str) -> None:
    expressions = alert_expressions()
    assert len(expressions) >= 6
    assert missing(expressions, page) == []


def test_metrics_of_the_dashboard_exist(page: str) -> None:
    targets = [target for panel in dashboard_panels() for target in panel["targets"]]
    assert len(targets) > 20
    # A legend names labels of its own series.
    assert missing([f"{target['expr']} {target['legendFormat']}" for target in targets], page) == []


def test_healthcheck_follows_the_server_and_sigterm_ends_it(container: Container) -> None:
    await_health(container.url, 240.0)
    assert container.healthcheck() == 0
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(60) == 0
    assert container.healthcheck() == 1


def test_cache_volume_is_written(container: Container) -> None:
    assert any(Path(container.variables["SSD_CACHE_DIR"]).iterdir())
