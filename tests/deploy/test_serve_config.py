"""The Ray Serve configuration, here and on Kubernetes: valid for Ray's schema and the project."""

from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    LoggingConfig,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from ssd_serve.app.replicas import DEPLOYMENT, deployment_options, replica_settings
from tests.deploy.files import DEPLOY, read_yaml

MANIFEST = "kubernetes/rayservice.yaml"


def manifest() -> dict[str, Any]:
    """The objects in it by kind."""
    text = (DEPLOY / MANIFEST).read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def configs() -> list[Any]:
    return [read_yaml("serve.yaml"), yaml.safe_load(manifest()["RayService"]["spec"]["serveConfigV2"])]


def application(config: Any) -> ServeApplicationSchema:
    (only,) = ServeDeploySchema.model_validate(config).applications
    return only


@pytest.mark.parametrize("config", configs())
def test_serve_config_deploys_the_replicas(config: Any) -> None:
    told = application(config)
    assert told.import_path == "ssd_serve.app.replicas:app"
    assert told.deployment_names == [DEPLOYMENT]
    # A proxy that answered with less patience would cut streams off.
    assert ServeDeploySchema.model_validate(config).http_options.request_timeout_s is None


@pytest.mark.parametrize("config", configs())
def test_serve_config_has_no_unknown_keys(config: Any) -> None:
    """Ray's schema accepts unknown keys."""
    (told,) = config["applications"]
    (deployment,) = told["deployments"]
    for keys, model in (
        (config, ServeDeploySchema),
        (config["http_options"], HTTPOptionsSchema),
        (config["logging_config"], LoggingConfig),
        (told, ServeApplicationSchema),
        (deployment, DeploymentSchema),
        (deployment["autoscaling_config"], AutoscalingConfig),
        (deployment.get("ray_actor_options", {}), RayActorOptionsSchema),
    ):
        assert set(keys) <= set(model.model_fields)


@pytest.mark.parametrize("config", configs())
def test_number_of_replicas_has_limits(config: Any) -> None:
    scaling = config["applications"][0]["deployments"][0]["autoscaling_config"]
    # Ray's schema takes any dictionary there.
    assert AutoscalingConfig.model_validate(scaling).min_replicas >= 1
    with pytest.raises(ValidationError, match="max_replicas"):
        AutoscalingConfig.model_validate({**scaling, "min_replicas": scaling["max_replicas"] + 1})
    settings = replica_settings(config["applications"][0]["args"])
    assert scaling["target_ongoing_requests"] < settings.max_running


def test_deployment_options_follow_the_settings() -> None:
    settings = replica_settings({"max_running": 4, "max_waiting": 7, "drain_seconds": 60})
    options = deployment_options(settings)
    # Decoding requests, /health and /metrics; more waiting requests are refused with 429.
    assert options["max_ongoing_requests"] > 4
    assert options["max_queued_requests"] == 7
    assert options["backpressure_config"].status_code == 429
    assert options["graceful_shutdown_timeout_s"] > 60


def test_serve_yaml_listens_on_loopback() -> None:
    assert read_yaml("serve.yaml")["http_options"]["host"] == "127.0.0.1"


def test_network_policy_limits_pods() -> None:
    """A Pod has to listen to the others."""
    policy, pods = manifest()["NetworkPolicy"]["spec"], groups()
    labels = policy["podSelector"]["matchLabels"]
    for pod in pods:
        assert labels.items() <= pod["metadata"]["labels"].items()
    assert [rule.get("ports") for rule in policy["ingress"] if "from" not in rule] == [[{"port": 8000}]]


def groups() -> list[dict[str, Any]]:
    """Templates of the head's and the workers' Pods."""
    cluster = manifest()["RayService"]["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"]["template"], *(each["template"] for each in cluster["workerGroupSpecs"])]


def test_worker_pod_has_the_resources_of_its_replica() -> None:
    (workers,) = manifest()["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    told = configs()[1]["applications"][0]
    scaling, actor = (told["deployments"][0][key] for key in ("autoscaling_config", "ray_actor_options"))
    (container,) = workers["template"]["spec"]["containers"]
    asked = {name: str(int(actor[name.replace("-", "_")])) for name in ("num-cpus", "num-gpus")}
    assert workers["rayStartParams"] == asked
    assert container["resources"]["limits"]["amd.com/gpu"] == asked["num-gpus"]
    assert container["resources"]["requests"]["cpu"] == asked["num-cpus"]
    assert actor["num_gpus"] == told["args"]["tensor_parallel"] + 1
    assert (workers["minReplicas"], workers["maxReplicas"]) == (
        scaling["min_replicas"],
        scaling["max_replicas"],
    )
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > told["args"]["drain_seconds"]


def test_pods_run_without_root_and_mount_their_volumes() -> None:
    claims = {manifest()["PersistentVolumeClaim"]["metadata"]["name"]}
    for pod in groups():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 10001
        (container,) = spec["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert volumes["cache"]["persistentVolumeClaim"]["claimName"] in claims


def test_service_links_are_not_taken_for_settings() -> None:
    """Kubernetes would set SSD_SERVE_SVC_PORT for the service of a RayService with this name."""
    assert manifest()["RayService"]["metadata"]["name"] == "ssd"
    assert [pod["spec"]["enableServiceLinks"] for pod in groups()] == [False, False]


def test_secrets_of_pods_are_references() -> None:
    for pod in groups():
        variables = {each["name"]: each for each in pod["spec"]["containers"][0]["env"]}
        for name in ("SSD_API_KEY", "HF_TOKEN"):
            assert "value" not in variables[name]
            assert variables[name]["valueFrom"]["secretKeyRef"]["name"] == "ssd-secrets"


def test_probes_use_the_health_path_of_the_proxy() -> None:
    (workers,) = groups()[1:]
    (container,) = workers["spec"]["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert probes["readiness"] == {
        "path": "/-/healthz",
        "port": configs()[1]["http_options"]["port"],
    }
    assert probes["startup"] == probes["liveness"]
