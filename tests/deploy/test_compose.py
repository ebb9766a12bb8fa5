"""Tests of the compose files: the specification, and files, variables and ports that it names."""

import re
import subprocess
import sys
from typing import Any

import pytest

from ssd_serve.app.cli.output import as_env
from ssd_serve.base.settings import SECRETS, Settings
from ssd_serve.base.settings_sources import origins, resolve, variable_name
from tests.deploy.files import (
    COMPOSE,
    COMPOSE_RAY,
    DEPLOY,
    KINDS,
    by_default,
    deploying,
    environment,
    read_compose,
    read_yaml,
    services,
)

SERVERS = [f"{name}-{kind}" for name in ("ssd", "target") for kind in KINDS]
DRAFTERS = [f"drafter-{kind}" for kind in KINDS]
NODES = [f"ray-{name}-{kind}" for name in ("head", "worker") for kind in KINDS]
MONITORS = ("prometheus", "grafana")
MONITORING = [f"{name}-{kind}" for name in MONITORS for kind in KINDS]
FILES = [*COMPOSE.values(), COMPOSE_RAY, "compose.base.yaml", "compose.monitoring.yaml"]
MONITORING_RAY = ["prometheus-ray", "grafana-ray"]
BUILT = [*SERVERS, *DRAFTERS, *NODES, *(f"ray-serve-{kind}" for kind in KINDS)]
OTHER_VARIABLES = {"HF_HOME", "HF_TOKEN", "HIP_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"}


@pytest.mark.parametrize("name", FILES)
def test_compose_file_follows_the_specification(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(DEPLOY / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}; pip install -e '.[dev]' has the checker"


@pytest.mark.parametrize("kind", KINDS)
def test_profiles_start_their_services_and_monitoring(kind: str) -> None:
    file = read_compose(COMPOSE[kind])["services"]
    for profile, expected in {
        None: ["ssd"],
        "split": ["target", "drafter"],
        "monitoring": [*MONITORS],
    }.items():
        wanted = [profile] if profile else None
        assert [name for name, each in file.items() if each.get("profiles") == wanted] == expected
    vendor = {"cpu": "cpu", "rocm": "amd", "cuda": "nvidia"}[kind]
    for profile, expected in {
        f"{vendor}-ray": [f"ray-head-{kind}", f"ray-serve-{kind}", *MONITORING_RAY],
        f"{vendor}-ray-worker": [f"ray-worker-{kind}"],
    }.items():
        nodes = read_compose(COMPOSE_RAY)["services"]
        assert [name for name, each in nodes.items() if profile in each["profiles"]] == expected


@pytest.mark.parametrize("name", BUILT)
def test_service_is_built_from_its_dockerfile(name: str) -> None:
    service = services()[name]
    kind = name.rpartition("-")[2]
    assert service["image"] == f"ssd-serve:{kind}"
    assert service["build"]["dockerfile"] == f"deploy/{kind}.Dockerfile"
    assert (DEPLOY / service["build"]["context"]).resolve() == DEPLOY.parent
    assert service["cap_drop"] == ["ALL"]
    # Servers use the health check of the image.
    assert "HEALTHCHECK" in (DEPLOY / f"{kind}.Dockerfile").read_text()
    assert ("healthcheck" in service) == (name not in SERVERS)


@pytest.mark.parametrize("name", BUILT)
def test_every_compose_variable_is_known(name: str) -> None:
    known = {variable_name(field) for field in Settings.model_fields}
    given = {each for each in services()[name]["environment"] if not each.startswith("RAY_")}
    assert given <= known | OTHER_VARIABLES


@pytest.mark.parametrize("name", SERVERS)
def test_server_variables_are_valid_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in environment(services()[name]).items():
        monkeypatch.setenv(variable, value)
    settings = resolve({})
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    # One GPU or none, without a second model.
    assert (settings.target, settings.tensor_parallel) == ("smollm2", 1)
    assert not settings.draft
    assert not settings.draft_device


@pytest.mark.parametrize("kind", KINDS)
def test_target_and_drafter_share_an_address_but_no_device(kind: str) -> None:
    target, drafter = (services()[f"{name}-{kind}"] for name in ("target", "drafter"))
    inside = environment(target)
    assert inside["SSD_DRAFTERS"] == "0"
    (port,) = re.findall(r"^tcp://0\.0\.0\.0:(\d+)$", inside["SSD_DRAFTER_ADDRESS"])
    (alias,) = target["networks"]["default"]["aliases"]
    assert drafter["command"] == ["draft", "--connect", f"tcp://{alias}:{port}", "--alive-file", "/tmp/alive"]
    # Not published: only the private network has it.
    assert not any(port in each for each in target["ports"])
    for service in (target, drafter):
        assert service["environment"]["SSD_CLUSTER_KEY"] is None
    assert own_devices(target).isdisjoint(own_devices(drafter))
    assert len(own_devices(drafter)) == 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_has_no_secrets_or_volumes_of_the_target(name: str) -> None:
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
def test_ray_node_has_fixed_ports_and_requires_the_token(name: str) -> None:
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


@pytest.mark.parametrize("part", ["ssd", "target", "drafter"])
def test_gpu_services_differ_only_in_images_and_devices(part: str) -> None:
    """The processes of one kind run in test_split.py."""
    their_own = ("build", "image", "devices", "group_add", "deploy", "profiles")
    rocm, cuda = (
        {name: value for name, value in services()[f"{part}-{kind}"].items() if name not in their_own}
        for kind in ("rocm", "cuda")
    )
    for service in (rocm, cuda):
        service["environment"] = {**service["environment"], "HIP_VISIBLE_DEVICES": ""}
    assert rocm == cuda


@pytest.mark.parametrize("part", ["head", "worker", "serve"])
def test_gpu_nodes_run_the_commands_of_cpu_nodes(part: str) -> None:
    alone, *others = (services()[f"ray-{part}-{kind}"] for kind in KINDS)
    for other in others:
        for field in ("command", "healthcheck", "network_mode"):
            assert other[field] == alone[field]
        # Ray detects NVIDIA's GPUs.
        gpus = ["--num-gpus=${RAY_GPUS:-1}"] if other["image"] == "ssd-serve:rocm" and part != "serve" else []
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


def test_compose_variables_are_not_taken_for_settings() -> None:
    """The server refuses SSD_ variables that it does not know, and .env is given to it whole."""
    text = "".join((DEPLOY / file).read_text(encoding="utf-8") for file in FILES)
    names = set(re.findall(r"\$\{(SSD_\w+)", text))
    assert names <= {variable_name(field) for field in Settings.model_fields}


@pytest.mark.parametrize("name", SERVERS)
def test_server_is_killed_only_after_its_drain(name: str) -> None:
    assert int(services()[name]["stop_grace_period"].removesuffix("s")) >= Settings().drain_seconds + 10


@pytest.mark.parametrize("name", [*SERVERS, *MONITORING, *MONITORING_RAY])
def test_ports_are_on_loopback_and_mounts_exist(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in services()[name].get("ports", []))
    file = COMPOSE_RAY if name in MONITORING_RAY else COMPOSE[name.rpartition("-")[2]]
    declared: dict[str, Any] = read_compose(file)["volumes"]
    for mount in services()[name]["volumes"]:
        source, _, rest = mount.partition(":")
        if source.startswith("."):
            assert (DEPLOY / source).exists()
            assert rest.endswith(":ro")
        else:
            assert source in declared


@pytest.mark.parametrize("name", [*MONITORING, *MONITORING_RAY])
def test_monitoring_has_fixed_versions_and_health_checks(name: str) -> None:
    service = services()[name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
    assert service["healthcheck"]["test"][0] == "CMD"


def test_prometheus_scrapes_the_server_and_reads_mounted_rules() -> None:
    config = read_yaml("prometheus.yaml")
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["ssd:8000"]
    for name in SERVERS:
        assert services()[name]["networks"]["default"]["aliases"] == ["ssd"]
    mounted = {mount.split(":")[1] for mount in services()["prometheus-cpu"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= mounted


def test_monitoring_of_a_ray_head_uses_loopback() -> None:
    prometheus, grafana = (services()[name] for name in MONITORING_RAY)
    for service, name in ((prometheus, "ssd"), (grafana, "prometheus")):
        assert (service["network_mode"], service["extra_hosts"]) == ("host", [f"{name}:127.0.0.1"])
        assert "ports" not in service
    assert prometheus["command"] == [
        *services()["prometheus-cpu"]["command"],
        "--web.listen-address=127.0.0.1:9090",
    ]
    listening = {"GF_SERVER_HTTP_ADDR": "127.0.0.1"}
    assert grafana["environment"] == {**services()["grafana-cpu"]["environment"], **listening}
    assert read_yaml("serve.yaml")["http_options"]["port"] == 8000


def test_grafana_has_its_source_and_dashboard() -> None:
    mounts = dict(mount.split(":")[:2] for mount in services()["grafana-cpu"]["volumes"])
    provider = read_yaml("grafana/provisioning/dashboards/files.yaml")["providers"][0]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    home = services()["grafana-cpu"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/ssd-serve.json"
    source = read_yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    dashboard = (DEPLOY / "grafana/dashboards/ssd-serve.json").read_text(encoding="utf-8")
    assert set(re.findall(r'"type": "prometheus", "uid": "(\w+)"', dashboard)) == {source["uid"]}


def test_files_contain_no_secrets() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.suffix in {".yaml", ".json", ".example", ".Dockerfile"}:
            text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
            text = re.sub(r"automountServiceAccountToken: false|secret: ssd-cluster", "", text)
            assert not re.search(r"(?i)(token|password|secret|api_?key)\s*[=:] *[\"']?[\w$]", text), path
    assert all(read_yaml(file)["x-inside"]["HF_TOKEN"] is None for file in ("compose.base.yaml", COMPOSE_RAY))


def test_env_example_is_the_output_of_ssd_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSD_TARGET")
    expected = as_env(origins(resolve({}), {})) + "\n"
    assert (DEPLOY / ".env.example").read_text(encoding="utf-8").startswith(expected)


def test_env_example_names_every_variable_of_compose() -> None:
    compose = "".join((DEPLOY / file).read_text(encoding="utf-8") for file in FILES)
    # `${NAME:-default}`, and under `environment` a name whose value is the shell's.
    read = set(re.findall(r"\$\{(\w+)", compose)) | set(
        re.findall(r"^ +([A-Z_]{2,}):$", compose, re.MULTILINE)
    )
    told = re.findall(r"^#(\w+)=", (DEPLOY / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
    assert "GRAFANA_PORT" in read
    assert "HF_TOKEN" in read
    assert read <= set(told)
