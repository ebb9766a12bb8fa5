"""compose.yaml keeps to the specification, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from ssd_serve.base.settings import SECRETS, Settings
from ssd_serve.base.settings_sources import resolve, variable_name
from tests.deploy.files import DEPLOY, KINDS, by_default, deploying, environment, read_yaml, services

OURS = [f"{name}-{kind}" for name in ("ssd", "target") for kind in KINDS]
"""Servers."""
DRAFTERS = [f"drafter-{kind}" for kind in KINDS]
NODES = [f"ray-{name}-{kind}" for name in ("head", "worker") for kind in KINDS]
BESIDE = ["prometheus", "grafana"]
BESIDE_RAY = ["prometheus-ray", "grafana-ray"]
BUILT = [*OURS, *DRAFTERS, *NODES, *(f"ray-serve-{kind}" for kind in KINDS)]
NOT_OURS = {"HF_HOME", "HF_TOKEN", "HIP_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"}


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


@pytest.mark.parametrize("kind", KINDS)
def test_each_profile_has_its_services_and_what_watches_them(kind: str) -> None:
    for profile, expected in {
        kind: [f"ssd-{kind}", *BESIDE],
        f"{kind}-split": [f"target-{kind}", f"drafter-{kind}", *BESIDE],
        f"{kind}-ray": [f"ray-head-{kind}", f"ray-serve-{kind}", *BESIDE_RAY],
        f"{kind}-ray-worker": [f"ray-worker-{kind}"],
    }.items():
        assert [name for name, each in services().items() if profile in each["profiles"]] == expected


@pytest.mark.parametrize("name", BUILT)
def test_a_service_is_built_from_its_dockerfile(name: str) -> None:
    service = services()[name]
    kind = name.rpartition("-")[2]
    assert service["image"] == f"ssd-serve:{kind}"
    assert service["build"]["dockerfile"] == f"deploy/{kind}.Dockerfile"
    assert (DEPLOY / service["build"]["context"]).resolve() == DEPLOY.parent
    assert service["cap_drop"] == ["ALL"]
    # The image brings a healthcheck for a server; compose takes it over unless it is told otherwise.
    assert "HEALTHCHECK" in (DEPLOY / f"{kind}.Dockerfile").read_text()
    assert ("healthcheck" in service) == (name not in OURS)


@pytest.mark.parametrize("name", BUILT)
def test_every_compose_variable_is_known(name: str) -> None:
    known = {variable_name(field) for field in Settings.model_fields}
    given = {each for each in services()[name]["environment"] if not each.startswith("RAY_")}
    assert given <= known | NOT_OURS


@pytest.mark.parametrize("name", OURS)
def test_variables_of_a_server_are_settings_with_possible_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment(services()[name]).items():
        monkeypatch.setenv(variable, value)
    settings = resolve({})
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    if name.endswith("cpu"):
        assert settings.target == "embedded"
    else:
        assert (settings.target_device, settings.tensor_parallel) == ("cuda:0-3", 4)
        assert settings.draft_device == ("cuda:4" if name.startswith("ssd") else None)


@pytest.mark.parametrize("kind", KINDS)
def test_target_and_drafter_meet_and_keep_to_their_devices(kind: str) -> None:
    target, drafter = (services()[f"{name}-{kind}"] for name in ("target", "drafter"))
    inside = environment(target)
    assert inside["SSD_DRAFTERS"] == "0"
    (port,) = re.findall(r"^tcp://0\.0\.0\.0:(\d+)$", inside["SSD_DRAFTER_ADDRESS"])
    (alias,) = target["networks"]["default"]["aliases"]
    assert drafter["command"] == ["draft", "--connect", f"tcp://{alias}:{port}", "--alive-file", "/tmp/alive"]
    # Not published: only the private network has it, and only who knows the key.
    assert not any(port in each for each in target["ports"])
    for service in (target, drafter):
        assert service["environment"]["SSD_CLUSTER_KEY"] is None
    assert own_devices(target).isdisjoint(own_devices(drafter))
    assert len(own_devices(drafter)) == 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_has_no_power_over_the_target(name: str) -> None:
    drafter, target = services()[name], services()[name.replace("drafter", "target")]
    given = drafter["environment"]
    for secret in SECRETS - {"cluster_key", "hf_token"}:  # it joins, and it downloads its model itself
        assert given[variable_name(secret)] == ""  # whatever .env says
    assert not sources(drafter) & sources(target)


def sources(service: dict[str, Any]) -> set[str]:
    return {mount.partition(":")[0] for mount in service["volumes"]}


def own_devices(service: dict[str, Any]) -> set[str]:
    """Cores or GPUs of a container, as the host counts them."""
    if "cpuset" in service:
        return set(by_default(service["cpuset"]).split(","))
    if "deploy" in service:
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        return set(device["device_ids"])
    return set(by_default(service["environment"]["HIP_VISIBLE_DEVICES"]).split(","))


@pytest.mark.parametrize("name", NODES)
def test_a_ray_node_keeps_to_its_ports_and_asks_for_the_token(name: str) -> None:
    node = services()[name]
    words = [by_default(word).partition("=") for word in node["command"]]
    options = {option: value for option, _, value in words if value}
    ports = [
        int(value) for option, value in options.items() if option.endswith("port") and "worker" not in option
    ]
    workers = range(int(options["--min-worker-port"]), int(options["--max-worker-port"]) + 1)
    assert len(ports) == len(set(ports)) >= 6
    assert not set(ports) & set(workers)
    assert node["environment"]["RAY_AUTH_MODE"] == "token"
    assert node["environment"]["RAY_AUTH_TOKEN"] is None
    assert options.get("--dashboard-host", "127.0.0.1") == "127.0.0.1"
    other = services()[name.replace("worker", "head")]
    assert set(node["command"][3:]) <= set(other["command"]) or name.startswith("ray-head")


@pytest.mark.parametrize("part", ["head", "worker", "serve"])
def test_nodes_with_gpus_run_what_nodes_without_run(part: str) -> None:
    """The tests start the latter."""
    alone, *others = (services()[f"ray-{part}-{kind}"] for kind in KINDS)
    for other in others:
        for field in ("command", "healthcheck", "network_mode"):
            assert other[field] == alone[field]
        # Of NVIDIA's GPUs Ray knows by itself.
        gpus = ["--num-gpus=${RAY_GPUS:-8}"] if other["image"] == "ssd-serve:rocm" and part != "serve" else []
        assert other["entrypoint"] == [*alone["entrypoint"], *gpus]


@pytest.mark.parametrize("kind", ["rocm", "cuda"])
def test_replicas_on_a_ray_cluster_do_not_share_named_devices(kind: str) -> None:
    for part in ("head", "worker"):
        given = services()[f"ray-{part}-{kind}"]["environment"]
        names = ("SSD_LAUNCHER", "SSD_TARGET_DEVICE", "SSD_DRAFT_DEVICE")
        assert [given[name] for name in names] == ["ray", "", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_compose_head_deploys_serve_yaml(kind: str) -> None:
    service = services()[f"ray-serve-{kind}"]
    source, target, mode = service["volumes"][0].split(":")
    assert (DEPLOY / source).is_file()
    assert mode == "ro"
    (script,) = service["command"]
    words = deploying(service)
    assert words[:2] == ["serve", "deploy"]
    assert script.count(words[3]) == 2
    assert words[-1] == target
    assert service["depends_on"] == {f"ray-head-{kind}": {"condition": "service_healthy"}}
    head = {
        word.partition("=")[0]: word.partition("=")[2] for word in services()[f"ray-head-{kind}"]["command"]
    }
    assert words[3] == f"http://{head['--dashboard-host']}:{head['--dashboard-port']}"


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


@pytest.mark.parametrize("name", [*OURS, *BESIDE, *BESIDE_RAY])
def test_mounted_files_exist_and_volumes_are_declared(name: str) -> None:
    declared: dict[str, Any] = read_yaml("compose.yaml")["volumes"]
    for mount in services()[name]["volumes"]:
        source, _, rest = mount.partition(":")
        if source.startswith("."):
            assert (DEPLOY / source).exists()
            assert rest.endswith(":ro")
        else:
            assert source in declared


@pytest.mark.parametrize("name", [*BESIDE, *BESIDE_RAY])
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


def test_what_watches_a_ray_head_finds_the_proxy_and_listens_on_loopback() -> None:
    prometheus, grafana = (services()[name] for name in BESIDE_RAY)
    for service, name in ((prometheus, "ssd"), (grafana, "prometheus")):
        assert (service["network_mode"], service["extra_hosts"]) == ("host", [f"{name}:127.0.0.1"])
        assert "ports" not in service
    assert prometheus["command"] == [
        *services()["prometheus"]["command"],
        "--web.listen-address=127.0.0.1:9090",
    ]
    listening = {"GF_SERVER_HTTP_ADDR": "127.0.0.1"}
    assert grafana["environment"] == {**services()["grafana"]["environment"], **listening}
    assert read_yaml("serve.yaml")["http_options"]["port"] == 8000


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
