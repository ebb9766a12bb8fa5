"""Each process gets the secrets of its role: looked at in real workers."""

import json
import os
import sys
import time
from pathlib import Path
from typing import cast

import pytest

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.settings import SECRETS, Settings
from ssd_serve.cluster.process import (
    WorkerPlan,
    blanked_secrets,
    config_for,
    hidden_secrets,
    start_worker,
    without_secrets,
)

EVERYTHING = {name: f"the secret {name} of 16 and more" for name in SECRETS}
VARIABLES = {f"SSD_{name.upper()}": text for name, text in EVERYTHING.items()} | {
    "HF_TOKEN": "the secret of the hub",
    "HUGGING_FACE_HUB_TOKEN": "the secret of the hub",
    "RAY_AUTH_TOKEN": "the secret of Ray",
    "SSD_API_KEYS_FILE": "/the secret file",
}
HUB = "owner/name"


def all_secrets(**others: object) -> EngineConfig:
    """A configuration from settings in which every secret is set."""
    named = {**EVERYTHING, "api_keys_file": Path("/the secret file"), **others}
    return Settings.model_validate(named).engine_config()


def secrets_in(config: EngineConfig) -> set[str]:
    return {name for name in SECRETS if getattr(config, name, None) is not None}


@pytest.mark.parametrize("name", ["verifier", "rank-1", "drafter-0"])
def test_workers_of_this_machine_get_none(name: str) -> None:
    config = all_secrets(target=HUB, draft=HUB)  # the models are here before they start
    assert secrets_in(config_for(name, config)) == set()


def test_verifier_with_joining_drafters_gets_cluster_key() -> None:
    config = all_secrets(drafter_address="tcp://127.0.0.1:4711")
    assert secrets_in(config_for("verifier", config)) == {"cluster_key"}
    assert secrets_in(config_for("rank-1", config)) == set()
    assert secrets_in(config_for("drafter-0", config)) == set()


@pytest.mark.parametrize(
    ("name", "target", "draft", "secrets"),
    [
        ("verifier", HUB, "/d", {"cluster_key", "hf_token"}),
        ("verifier", "/t", HUB, {"cluster_key", "hf_token"}),
        ("verifier", "/t", "/d", {"cluster_key"}),
        ("rank-1", HUB, "/d", {"hf_token"}),
        ("rank-1", "/t", HUB, set[str]()),
        ("drafter-0", HUB, "/d", {"cluster_key"}),
        ("drafter-0", "/t", f"{HUB}@main", {"cluster_key", "hf_token"}),
        ("drafter-0", "embedded", "embedded", {"cluster_key"}),
    ],
)
def test_remote_workers_get_hub_token_only_if_they_download(
    name: str, target: str, draft: str, secrets: set[str]
) -> None:
    config = all_secrets(target=target, draft=draft)
    assert secrets_in(config_for(name, config, elsewhere=True)) == secrets


def test_config_without_secrets_is_unchanged() -> None:
    config = Settings(target="/t", draft="/d", max_running=3).engine_config()
    assert config_for("drafter-0", config) == config


def test_environment_of_workers_has_no_secrets() -> None:
    variables = set(VARIABLES) - {"SSD_API_KEYS_FILE"}
    assert without_secrets({**VARIABLES, "PATH": "/bin", "SSD_DTYPE": "fp32"}) == {"PATH": "/bin"}
    assert variables - {"RAY_AUTH_TOKEN"} <= set(blanked_secrets())  # Ray's own actors need that one
    assert not any(blanked_secrets().values())


def test_hidden_secrets_leave_only_those_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in VARIABLES.items():
        monkeypatch.setenv(variable, text)
    before = dict(os.environ)
    with hidden_secrets():
        assert set(before) - set(os.environ) == set(VARIABLES) - {"RAY_AUTH_TOKEN", "SSD_API_KEYS_FILE"}
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["verifier", "rank-1", "drafter-0"])
def test_started_worker_sees_no_secret(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in VARIABLES.items():
        monkeypatch.setenv(variable, text)
    path = tmp_path / "heard"
    script = (
        "import json, os, sys, time; line = sys.stdin.readline(); "
        f"open({str(path)!r} + '.new', 'w').write(json.dumps([dict(os.environ), line])); "
        f"os.rename({str(path)!r} + '.new', {str(path)!r}); time.sleep(60)"
    )
    worker = start_worker(WorkerPlan(name, (sys.executable, "-c", script)), all_secrets())
    try:
        deadline = time.monotonic() + 30.0
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        environment, line = cast(tuple[dict[str, str], str], json.loads(path.read_text()))
        kernels = Path(f"/proc/{worker.pid}/environ")
        seen = [line, json.dumps(environment), kernels.read_text() if kernels.exists() else ""]
    finally:
        worker.kill()
        worker.stop()
    assert environment["PATH"]
    assert not any("the secret" in text for text in seen)
