"""Arguments of a Serve config, and the cores of a replica."""

import importlib
import sys
from io import StringIO
from pathlib import Path

import pytest

from ssd_serve.app.replicas import app, check_keys, cores_of, replica_settings, resources
from ssd_serve.base.devices import Machine
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.logs import Logger
from ssd_serve.base.settings import Settings


def test_arguments_override_variables_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_API_KEY", "k")
    settings = replica_settings({"max_running": 4})
    assert (settings.max_running, settings.api_key) == (4, "k")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"targt": "x"}, "'targt' is not a setting"),
        ({"max_running": 0}, "--max-running"),
        ({"port": 9000}, "http_options.port"),
        ({"metrics_port": 9100}, "SSD_METRICS_KEY instead of SSD_METRICS_PORT"),
        ({"api_workers": 2}, "'api_workers' is not a setting; run replicas instead"),
        ({"tls_key": "key.pem"}, "http_options.ssl_keyfile"),
        ({"api_key": "k"}, "'api_key' is a secret.*SSD_API_KEY"),
        ({"hf_token": "t"}, "'hf_token' is a secret.*SSD_HF_TOKEN"),
        ({"cluster_key": "0123456789abcdef"}, "'cluster_key' is a secret.*SSD_CLUSTER_KEY"),
    ],
)
def test_invalid_argument_is_refused_before_start(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        app(arguments)


def test_replica_warns_without_keys_and_refuses_wrong_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = StringIO()
    log = Logger("replica", stream=said)
    check_keys(Settings(), log)
    assert "anyone who reaches this address may use the model" in said.getvalue()
    said.truncate(0)
    check_keys(Settings(api_key="k" * 32), log)
    assert said.getvalue() == ""
    with pytest.raises(SettingsError, match="SSD_API_KEYS_FILE"):
        check_keys(Settings(api_keys_file=tmp_path / "nowhere"), log)
    monkeypatch.setenv("SSD_API_KEY", "")
    with pytest.raises(SettingsError, match="set but empty"):
        check_keys(Settings(), log)


def test_replicas_of_a_machine_compute_on_different_cores() -> None:
    machine = Machine((0, 1, 2, 3, 8), 2)
    assert [cores_of(machine, 2, rank).cores for rank in range(3)] == [(0, 1), (2, 3), (0, 1)]
    assert cores_of(machine, 2, 1).gpus == 2


@pytest.mark.parametrize("count", [0, 3, 9])
def test_replica_gets_all_cores_if_there_are_too_few(count: int) -> None:
    machine = Machine((0, 1, 2, 3), 0)
    assert cores_of(machine, count, 1) == machine


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ({}, {"num_cpus": 2}),
        ({"mode": "ar"}, {"num_cpus": 1}),
        ({"launcher": "ray", "target_device": "cuda:0-3"}, {"num_cpus": 1}),
        ({"tensor_parallel": 2, "drafters": 3}, {"num_cpus": 5}),
        (
            {"tensor_parallel": 4, "target_device": "cuda:0-3", "draft_device": "cuda:4", "draft": "o/draft"},
            {"num_cpus": 6, "num_gpus": 5},
        ),
    ],
)
def test_resources_of_a_replica(arguments: dict[str, object], asked: dict[str, int]) -> None:
    assert resources(replica_settings(arguments)) == asked


def test_old_import_path_warns() -> None:
    sys.modules.pop("ssd_serve.replicas", None)
    with pytest.warns(DeprecationWarning, match=r"ssd_serve\.app\.replicas:app"):
        alias = importlib.import_module("ssd_serve.replicas")
    assert alias.app is app
