"""The services target-cpu and drafter-cpu as processes: they find each other, and either may go and come."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.deploy.files import environment, read_dockerfile, services
from tests.end_to_end.test_serve import await_health, complete, free_port

IMAGE = read_dockerfile("cpu").of_the_image()


@dataclass
class House:
    """The private network: where the target is, for itself, the drafter and us."""

    folder: Path
    port: int = field(default_factory=free_port)
    meeting: str = field(default_factory=lambda: f"tcp://127.0.0.1:{free_port()}")
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list["subprocess.Popen[bytes]"])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        """Run a service with the image's entrypoint, and its own variables and command."""
        service = services()[name]
        given = {**IMAGE.environment(), **environment(service), "SSD_PORT": str(self.port)}
        given = {each: value.replace("/cache/", f"{self.folder}/") for each, value in given.items()}
        if "SSD_DRAFTER_ADDRESS" in given:
            given["SSD_DRAFTER_ADDRESS"] = self.meeting
        # What .env has: the key; and here no compiler is waited for.
        given |= {"SSD_CLUSTER_KEY": self.key, "SSD_NATIVE_KERNELS": "false"}
        (entrypoint,), (arguments,) = IMAGE.all("ENTRYPOINT"), IMAGE.all("CMD")
        words: list[str] = service.get("command") or json.loads(arguments)
        words = [self.meeting if word.startswith("tcp://") else word for word in words]
        variables = {**os.environ, **given, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        process = subprocess.Popen([*json.loads(entrypoint), *words], env=variables, start_new_session=True)
        self.processes.append(process)
        return process

    def await_drafters(self, count: int) -> None:
        deadline = time.monotonic() + 120
        while f"ssd_drafters_alive {float(count)}" not in httpx.get(f"{self.url}/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    made = House(tmp_path)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_drafter_joins_goes_and_comes_back(house: House) -> None:
    # The drafter first: it waits.
    drafter = house.start("drafter-cpu")
    target = house.start("target-cpu")
    await_health(house.url, 240.0)
    house.await_drafters(1)
    text = complete(house.url)
    drafter.send_signal(signal.SIGTERM)
    assert drafter.wait(15) == 0
    house.await_drafters(0)
    assert complete(house.url) == text
    house.start("drafter-cpu")
    house.await_drafters(1)
    assert complete(house.url) == text
    target.send_signal(signal.SIGTERM)
    assert target.wait(30) == 0
