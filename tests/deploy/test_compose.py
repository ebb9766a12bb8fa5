"""compose.yaml keeps to the specification, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from ssd_serve.settings import Settings, resolve, variable_name
from tests.deploy.files import DEPLOY, KINDS, environment, read_yaml, services

OURS = [f"ssd-{kind}" for kind in KINDS]
BESIDE = ["prometheus", "grafana"]


def check(path: Path) -> "subprocess.CompletedProcess[str]":
    """Against the schema of the Compose specification."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_keeps_to_the_compose_specification() -> None:
    done = check(DEPLOY / "compose.yaml")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}; pip install -e '.[dev]' has the checker"


def test_the_check_of_the_specification_can_fail(tmp_path: Path) -> None:
    wrong = read_yaml("compose.yaml")
    wrong["services"]["ssd-cpu"]["stop_grace_periods"] = "45s"
    (tmp_path / "compose.yaml").write_text(yaml.safe_dump(wrong), encoding="utf-8")
    done = check(tmp_path / "compose.yaml")
    assert done.returncode == 1
    assert "stop_grace_periods" in done.stdout


def test_each_profile_has_one_server_and_what_watches_it() -> None:
    for kind in KINDS:
        started = [name for name, service in services().items() if kind in service["profiles"]]
        assert started == [f"ssd-{kind}", *BESIDE]


@pytest.mark.parametrize("name", OURS)
def test_a_server_is_built_from_its_dockerfile(name: str) -> None:
    service = services()[name]
    dockerfile = DEPLOY.parent / service["build"]["dockerfile"]
    assert (DEPLOY / service["build"]["context"]).resolve() == DEPLOY.parent
    assert dockerfile.is_file()
    # The image brings its own; compose takes it over unless it is told otherwise.
    assert "HEALTHCHECK" in dockerfile.read_text()
    assert "healthcheck" not in service


@pytest.mark.parametrize("name", OURS)
def test_variables_of_a_server_are_settings_with_possible_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = services()[name]
    known = {variable_name(field) for field in Settings.model_fields}
    given = {each for each in service["environment"] if each.startswith("SSD_")}
    assert given <= known
    for variable, value in environment(service).items():
        monkeypatch.setenv(variable, value)
    settings = resolve({})
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    assert settings.target == "embedded" if name == "ssd-cpu" else settings.draft_device == "cuda:1"


def test_variables_of_compose_alone_do_not_look_like_settings() -> None:
    """The server refuses SSD_ variables that it does not know, and .env is given to it whole."""
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    names = set(re.findall(r"\$\{(SSD_\w+)", text))
    assert names <= {variable_name(field) for field in Settings.model_fields}


@pytest.mark.parametrize("name", OURS)
def test_a_server_is_killed_only_after_its_drain(name: str) -> None:
    assert int(services()[name]["stop_grace_period"].removesuffix("s")) >= Settings().drain_seconds + 10


@pytest.mark.parametrize("name", [*OURS, *BESIDE])
def test_ports_are_published_on_loopback(name: str) -> None:
    for port in services()[name]["ports"]:
        assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", [*OURS, *BESIDE])
def test_mounted_files_exist_and_volumes_are_declared(name: str) -> None:
    declared: dict[str, Any] = read_yaml("compose.yaml")["volumes"]
    for mount in services()[name]["volumes"]:
        source, _, rest = mount.partition(":")
        if source.startswith("."):
            assert (DEPLOY / source).exists()
            assert rest.endswith(":ro")
        else:
            assert source in declared


@pytest.mark.parametrize("name", BESIDE)
def test_what_watches_has_a_fixed_version_and_a_healthcheck(name: str) -> None:
    service = services()[name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
    assert service["healthcheck"]["test"][0] == "CMD"


def test_prometheus_reads_the_server_and_the_rules_that_are_mounted() -> None:
    config = read_yaml("prometheus.yaml")
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["ssd:8000"]
    for name in OURS:
        assert services()[name]["networks"]["default"]["aliases"] == ["ssd"]
    mounted = {mount.split(":")[1] for mount in services()["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= mounted


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    mounts = dict(mount.split(":")[:2] for mount in services()["grafana"]["volumes"])
    provider = read_yaml("grafana/provisioning/dashboards/files.yaml")["providers"][0]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/ssd-serve.json"
    source = read_yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    dashboard = (DEPLOY / "grafana/dashboards/ssd-serve.json").read_text(encoding="utf-8")
    assert set(re.findall(r'"type": "prometheus", "uid": "(\w+)"', dashboard)) == {source["uid"]}


def test_no_secret_has_a_value_in_a_file() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.suffix in {".yaml", ".json", ".example", ".Dockerfile"}:
            text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
            assert not re.search(r"(?i)(token|password|secret|api_?key)\s*[=:] *[\"']?[\w$]", text), path
    assert yaml.safe_load((DEPLOY / "compose.yaml").read_text())["x-inside"]["HF_TOKEN"] is None
