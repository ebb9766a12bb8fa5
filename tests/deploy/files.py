"""Readers of files in deploy/: compose files, Dockerfiles, Prometheus expressions."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KINDS = ("cpu", "rocm", "cuda")
COMPOSE = {"cpu": "compose.cpu.yaml", "rocm": "compose.amd.yaml", "cuda": "compose.nvidia.yaml"}
"""The file of each image."""
COMPOSE_RAY = "compose.ray.yaml"
_LISTS = {"profiles", "ports", "volumes", "devices", "group_add", "extra_hosts"}
"""Lists that `extends` joins; it replaces commands and tests."""


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def read_objects(text: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML stream."""
    return [each for each in yaml.safe_load_all(text) if each]


def read_compose(name: str) -> dict[str, Any]:
    """Return the services and volumes of a compose file, with what it includes, and what its services extend."""
    file = read_yaml(name)
    found = {part: dict(file.get(part, {})) for part in ("services", "volumes")}
    for service, each in found["services"].items():
        if "extends" in each:
            base = read_yaml(each["extends"]["file"])["services"][each["extends"]["service"]]
            own = {field: value for field, value in each.items() if field != "extends"}
            found["services"][service] = _merged(base, own)
    for other in file.get("include", ()):
        included = read_compose(other)
        for part, entries in found.items():
            assert not set(entries) & set(included[part]), "compose refuses names that are there twice"
            entries.update(included[part])
    return found


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    found = {**base, **own}
    for field in set(base) & set(own):
        if isinstance(own[field], dict):
            found[field] = _merged(base[field], own[field])
        elif field in _LISTS:
            found[field] = [*base[field], *own[field]]
    return found


def services() -> dict[str, Any]:
    """Return the services of all compose files, those of a file for one kind as `name-kind`."""
    found: dict[str, Any] = read_compose(COMPOSE_RAY)["services"]
    for kind, file in COMPOSE.items():
        found |= {f"{name}-{kind}": service for name, service in read_compose(file)["services"].items()}
    return found


def deploying(service: dict[str, Any]) -> list[str]:
    """Return the command with which a service `ray-serve-*` deploys its config to Ray Serve."""
    (script,) = service["command"]
    found = re.search(r"tell\(\) \{ (.*); \}", script)
    assert found
    return shlex.split(found[1])


def environment(service: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a service if neither the shell nor .env sets any; `NAME:` then passes none."""
    given: dict[str, str | None] = service.get("environment", {})
    return {name: by_default(value) for name, value in given.items() if value is not None}


def by_default(text: str) -> str:
    """Expand `${NAME:-value}` for a NAME that is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@dataclass(frozen=True)
class Dockerfile:
    """Instructions in order: the keyword, and its arguments on one line."""

    instructions: tuple[tuple[str, str], ...]

    def all(self, word: str) -> list[str]:
        return [rest for each, rest in self.instructions if each == word]

    def of_the_image(self) -> "Dockerfile":
        """Return the last stage."""
        starts = [index for index, (word, _) in enumerate(self.instructions) if word == "FROM"]
        return Dockerfile(self.instructions[starts[-1] :])

    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for line in self.all("ENV") for pair in line.split())

    def command(self) -> list[str]:
        (entrypoint,), (arguments,) = self.all("ENTRYPOINT"), self.all("CMD")
        return [*json.loads(entrypoint), *json.loads(arguments)]

    def healthcheck(self) -> list[str]:
        (line,) = self.all("HEALTHCHECK")
        found: list[str] = json.loads(line.partition(" CMD ")[2])
        return found


def read_dockerfile(kind: str) -> Dockerfile:
    text = (DEPLOY / f"{kind}.Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    words = [line.partition(" ") for line in lines if line]
    return Dockerfile(tuple((word, rest) for word, _, rest in words))


def alert_expressions() -> list[str]:
    return [rule["expr"] for group in read_yaml("alerts.yaml")["groups"] for rule in group["rules"]]


def dashboard_panels() -> list[dict[str, Any]]:
    """Return the panels without rows."""
    text = (DEPLOY / "grafana/dashboards/ssd-serve.json").read_text(encoding="utf-8")
    return [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]
