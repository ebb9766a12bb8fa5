"""Tests of target and drafter in separate containers: connection, and restarts of either one."""

import signal
import time

import psutil  # type: ignore[import-untyped]
import pytest

from tests.deploy.containers import CPU_FOR_GPU, Container, Network
from tests.end_to_end.tiny_pair import write_pair
from tests.servers import await_health, complete, gone

pytestmark = pytest.mark.slow


@pytest.fixture
def pair(network: Network) -> dict[str, str]:
    """Variables that select a tiny pair, and kernels that are not compiled."""
    target, draft = write_pair(network.folder / "pair")
    return {"SSD_TARGET": str(target), "SSD_DRAFT": str(draft), "SSD_NATIVE_KERNELS": "false"}


def until_healthy(drafter: Container) -> None:
    """Wait for the next heartbeat, which changes the result of the health check."""
    deadline = time.monotonic() + 60.0
    while drafter.healthcheck() != 0:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_remote_drafter_joins_and_rejoins(network: Network, pair: dict[str, str]) -> None:
    # The drafter starts first, and waits.
    drafter = network.start("drafter-cpu", pair)
    target = network.start("target-cpu", pair)
    await_health(network.url, 240.0)
    network.await_drafters(1)
    assert target.healthcheck() == 0
    until_healthy(drafter)
    text = complete(network.url)
    drafter.process.send_signal(signal.SIGTERM)
    assert drafter.process.wait(60) == 0
    network.await_drafters(0)
    assert complete(network.url) == text
    again = network.start("drafter-cpu", pair)
    network.await_drafters(1)
    assert complete(network.url) == text
    target.process.send_signal(signal.SIGTERM)
    assert target.process.wait(60) == 0
    time.sleep(1.0)  # the drafter notices the closed connection
    network.age_signs_of_life()
    time.sleep(1.0)  # with a target it would send two heartbeats in this time
    assert (target.healthcheck(), again.healthcheck()) == (1, 1), "a drafter without a target is of no use"


def test_gpu_services_connect_with_cores_instead_of_gpus(network: Network, pair: dict[str, str]) -> None:
    here = {**pair, **CPU_FOR_GPU, "SSD_LAUNCHER": "local"}
    target = network.start("target-rocm", {**here, "SSD_DRAFT_DEVICE": ""})
    drafter = network.start("drafter-rocm", here)
    await_health(network.url, 240.0)
    network.await_drafters(1)
    assert target.healthcheck() == 0
    until_healthy(drafter)
    assert complete(network.url)


def test_gpu_server_runs_on_ray_with_cores_instead_of_gpus(network: Network, pair: dict[str, str]) -> None:
    server = network.start("ssd-cuda", {**pair, **CPU_FOR_GPU, "SSD_MODE": "ssd", "SSD_LAUNCHER": "ray"})
    await_health(network.url, 240.0)
    network.await_drafters(1)
    assert server.healthcheck() == 0
    assert complete(network.url)
    started = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert gone(started)
    assert server.healthcheck() == 1
