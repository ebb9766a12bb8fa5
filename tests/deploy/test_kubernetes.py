"""Tests of the Kubernetes manifests, the Helm chart and the systemd unit: schemas, and servers that run."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import variable_name
from ssd_serve.base.version import __version__
from tests.deploy.containers import CPU_FOR_GPU, Network
from tests.deploy.files import DEPLOY, read_objects, read_yaml
from tests.deploy.helm import CHART, render
from tests.end_to_end.tiny_pair import write_pair
from tests.servers import await_health, complete

VARIANTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "nvidia": {"device": "nvidia", "secret": "keys", "cache": {"enabled": False}},
    "amd": {"device": "amd", "secret": "keys", "drafter": {"enabled": True}, "supplementalGroups": [44, 109]},
    "monitored": {"secret": "keys", "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
}
OTHER_VARIABLES = {"HF_TOKEN"}


def values(variant: str) -> dict[str, Any]:
    found: dict[str, Any] = read_yaml("helm/ssd-serve/values.yaml")
    for name, value in VARIANTS[variant].items():
        found[name] = {**found[name], **value} if isinstance(value, dict) else value
    return found


def manifest(name: str) -> str:
    if name in VARIANTS:
        return render(values(name))
    return (DEPLOY / f"kubernetes/{name}.yaml").read_text(encoding="utf-8")


def objects(name: str) -> list[dict[str, Any]]:
    return read_objects(manifest(name))


def deployments(name: str) -> list[dict[str, Any]]:
    return [each for each in objects(name) if each["kind"] == "Deployment"]


ALL = ["two-gpus", "split", *VARIANTS]


@pytest.mark.parametrize("version", ["1.28", "1.37"])
@pytest.mark.parametrize("name", ALL)
def test_objects_are_valid_for_kubernetes(name: str, version: str, tmp_path: Path) -> None:
    # A ServiceMonitor is a resource of the Prometheus operator.
    known = [each for each in objects(name) if each["kind"] != "ServiceMonitor"]
    (tmp_path / "all.yaml").write_text("\n---\n".join(map(json.dumps, known)), encoding="utf-8")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "--kubernetes-version", version]
    done = subprocess.run([*command, str(tmp_path / "all.yaml")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}; pip install -e '.[dev]' has the checker"


@pytest.mark.parametrize("name", ALL)
def test_pods_know_the_settings_and_wait_for_the_drain(name: str) -> None:
    known = {variable_name(field) for field in Settings.model_fields} | OTHER_VARIABLES
    for deployment in deployments(name):
        spec = deployment["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert {each["name"] for each in container["env"]} <= known
        for each in container["env"]:
            assert ("KEY" in each["name"] or "TOKEN" in each["name"]) == ("valueFrom" in each)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["enableServiceLinks"] is False
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            each["name"] for each in spec["volumes"]
        }
        claims = {
            each["metadata"]["name"] for each in objects(name) if each["kind"] == "PersistentVolumeClaim"
        }
        wanted = {each.get("persistentVolumeClaim", {}).get("claimName") for each in spec["volumes"]}
        assert wanted <= claims | {None}
        if "livenessProbe" in container:
            assert spec["terminationGracePeriodSeconds"] >= Settings().drain_seconds + 10
            assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        selected = deployment["spec"]["selector"]["matchLabels"]
        assert selected.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("name", ["split", "amd"])
def test_drafter_connects_to_the_service_of_the_target(name: str) -> None:
    target, drafter = sorted(
        (each["spec"]["template"] for each in deployments(name)),
        key=lambda each: "args" in each["spec"]["containers"][0],
    )
    (address,) = [word for word in drafter["spec"]["containers"][0]["args"] if word.startswith("tcp://")]
    host, _, port = address.removeprefix("tcp://").partition(":")
    (service,) = [each for each in objects(name) if each["kind"] == "Service" and port in str(each["spec"])]
    assert service["metadata"]["name"] == host
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= target["metadata"]["labels"].items()
    keys = [
        [
            each["valueFrom"]
            for each in pod["spec"]["containers"][0]["env"]
            if each["name"] == "SSD_CLUSTER_KEY"
        ]
        for pod in (target, drafter)
    ]
    assert keys[0] == keys[1] != []
    for pod in (target, drafter):
        assert "HF_TOKEN" in {each["name"] for each in pod["spec"]["containers"][0]["env"]}


def test_values_are_valid_for_their_schema_and_mistakes_are_refused() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    for variant in VARIANTS:
        jsonschema.validate(values(variant), schema)
    for wrong in (
        {"device": "tpu"},
        {"gpus": 2},
        {"settings": {"SSD_HOST": "127.0.0.1"}},
        {"settings": {"TARGET": "smollm2"}},
        {"settings": {"SSD_MAX_RUNNING": 16}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**values("cpu"), **wrong}, schema)


def test_chart_renders_what_its_values_ask_for() -> None:
    assert read_yaml("helm/ssd-serve/Chart.yaml")["appVersion"] == __version__
    for variant in VARIANTS:
        given = values(variant)
        found = [each["kind"] for each in objects(variant)]
        assert ("ServiceMonitor" in found) == given["serviceMonitor"]["enabled"]
        assert found.count("PersistentVolumeClaim") == given["cache"]["enabled"]
        assert found.count("Deployment") == 1 + given["drafter"]["enabled"]
        assert "PodDisruptionBudget" in found
        for deployment in deployments(variant):
            (container,) = deployment["spec"]["template"]["spec"]["containers"]
            assert container["resources"] == given["resources"][given["device"]]


@pytest.mark.skipif(not shutil.which("helm"), reason="helm is not installed")
def test_helm_accepts_the_chart_and_renders_the_same() -> None:
    for command in ("lint", "template"):
        words = ["helm", command, *(["ssd"] if command == "template" else []), str(CHART)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    found = {(each["kind"], each["metadata"]["name"]): each for each in read_objects(done.stdout)}
    assert found == {(each["kind"], each["metadata"]["name"]): each for each in objects("cpu")}


def unit() -> dict[str, str]:
    text = (DEPLOY / "systemd/ssd-serve.service").read_text(encoding="utf-8")
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def test_systemd_unit_waits_for_the_drain_and_does_not_restart_after_mistakes() -> None:
    assert int(unit()["TimeoutStopSec"]) >= Settings().drain_seconds + 10
    assert unit()["RestartPreventExitStatus"].split() == [str(code) for code in range(2, 10)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two-gpus", "split", "cpu", "amd"])
def test_commands_of_pods_start_a_server(name: str, network: Network) -> None:
    """Cores take the places of GPUs, and a tiny pair those of the models."""
    target, draft = write_pair(network.folder / "pair")
    tiny = {"SSD_TARGET": str(target), "SSD_NATIVE_KERNELS": "false"}
    pods = [each["spec"]["template"]["spec"]["containers"][0] for each in deployments(name)]
    for pod in pods:
        given = {each["name"] for each in pod["env"]}
        gpu = {name: value for name, value in CPU_FOR_GPU.items() if name in given}
        network.start_pod(pod, {**tiny, **gpu, **({"SSD_DRAFT": str(draft)} if "SSD_DRAFT" in given else {})})
    await_health(network.url, 240.0)
    if name != "cpu":
        network.await_drafters(1)
    assert complete(network.url)
    assert all(each.process.poll() is None for each in network.started)


@pytest.mark.slow
def test_command_of_the_systemd_unit_starts_a_server(network: Network) -> None:
    program, *arguments = shlex.split(unit()["ExecStart"])
    assert program == "/opt/ssd/bin/ssd"
    variables = dict(pair.split("=", 1) for pair in unit()["Environment"].split())
    network.run([sys.executable, "-m", "ssd_serve", *arguments], {**variables, "SSD_TARGET": "embedded"}, [])
    await_health(network.url, 240.0)
    assert complete(network.url)
