"""Services of the compose files as processes of this machine: their commands, variables and healthchecks."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ssd_serve.bench.serve import metric
from tests.deploy.files import ROOT, Dockerfile, environment, read_dockerfile, services
from tests.servers import free_port

CPU_FOR_GPU = {
    "SSD_TARGET_DEVICE": "cpu:0",
    "SSD_TENSOR_PARALLEL": "1",
    "SSD_DRAFT_DEVICE": "cpu:1",
}


@dataclass(frozen=True)
class Container:
    process: "subprocess.Popen[bytes]"
    variables: dict[str, str]
    url: str
    check: list[str]

    def healthcheck(self) -> int:
        return subprocess.run(self.check, env=self.variables, check=False).returncode


@dataclass
class Network:
    folder: Path
    port: int = field(default_factory=free_port)
    meeting: str = field(default_factory=lambda: f"tcp://127.0.0.1:{free_port()}")
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    started: list[Container] = field(default_factory=list[Container])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, name: str, more: Mapping[str, str]) -> Container:
        """Run a service; `more` is what .env would have. Only places and ports are others than inside."""
        service = services()[name]
        image = read_dockerfile(name.rpartition("-")[2]).of_the_image()
        (entrypoint,), (arguments,) = image.all("ENTRYPOINT"), image.all("CMD")
        words: list[str] = [*json.loads(entrypoint), *(service.get("command") or json.loads(arguments))]
        given = {**image.environment(), **environment(service), **more}
        return self.run(words, given, self._check(service, image))

    def start_pod(self, container: Mapping[str, Any], more: Mapping[str, str]) -> Container:
        """Run a container of a Kubernetes manifest, with a key of this network as its Secret."""
        image = read_dockerfile("cuda").of_the_image()
        (entrypoint,), (arguments,) = image.all("ENTRYPOINT"), image.all("CMD")
        given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        words = [*json.loads(entrypoint), *container.get("args", json.loads(arguments))]
        return self.run(words, {**image.environment(), **given, **more}, [])

    def run(self, words: list[str], given: Mapping[str, str], check: list[str]) -> Container:
        """Start a process at the port of this network, with folders of the image inside its folder."""
        here = {each: self._here(value) for each, value in given.items() if value}
        if "SSD_DRAFTER_ADDRESS" in here:
            here["SSD_DRAFTER_ADDRESS"] = self.meeting
        variables = {
            **os.environ,
            **here,
            "SSD_PORT": str(self.port),
            "SSD_CLUSTER_KEY": self.key,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        command = [self._here(word) for word in words]
        process = subprocess.Popen(command, env=variables, start_new_session=True)
        self.started.append(Container(process, variables, self.url, check))
        return self.started[-1]

    def await_drafters(self, count: int) -> None:
        deadline = time.monotonic() + 120
        with httpx.Client(base_url=self.url, verify=False) as http:
            while metric(http.get("/metrics").text, "ssd_drafters_alive") != count:
                assert time.monotonic() < deadline
                time.sleep(0.2)

    def age_signs_of_life(self) -> None:
        long_ago = time.time() - 60.0
        os.utime(self.folder / "alive", (long_ago, long_ago))

    def close(self) -> None:
        for each in self.started:
            each.process.kill()
            each.process.wait()

    def _check(self, service: Mapping[str, Mapping[str, list[str]]], image: Dockerfile) -> list[str]:
        if "healthcheck" in service:
            return [self._here(word) for word in service["healthcheck"]["test"][1:]]
        copied = dict(line.split() for line in image.all("COPY") if len(line.split()) == 2)
        inside = {target: str(ROOT / source) for source, target in copied.items()}
        return [inside.get(word, word) for word in image.healthcheck()]

    def _here(self, text: str) -> str:
        if text.startswith("tcp://"):
            return self.meeting
        return (
            text.replace("/var/cache/", "/cache/")
            .replace("/cache/", f"{self.folder}/")
            .replace("/tmp/alive", f"{self.folder}/alive")
        )
