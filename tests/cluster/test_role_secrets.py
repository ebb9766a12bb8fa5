"""Each process gets the secrets of its role: looked at in real workers."""

import json
import os
import sys
import time
from pathlib import Path
from typing import cast

import pytest

from ssd_serve.base.settings import SECRETS, Settings
from ssd_serve.cluster.local.process import WorkerPlan, start_worker
from ssd_serve.cluster.role_secrets import blanked_secrets, hidden_secrets, settings_for, without_secrets

EVERYTHING = {name: f"the secret {name} of 16 and more" for name in SECRETS}
VARIABLES = {f"SSD_{name.upper()}": text for name, text in EVERYTHING.items()} | {
    "HF_TOKEN": "the secret of the hub",
    "HUGGING_FACE_HUB_TOKEN": "the secret of the hub",
    "RAY_AUTH_TOKEN": "the secret of Ray",
    "SSD_API_KEYS_FILE": "/the secret file",
}
HUB = "owner/name"


def all_secrets(**others: object) -> Settings:
    """Settings in which every secret is set."""
    return Settings.model_validate({**EVERYTHING, "api_keys_file": Path("/the secret file"), **others})


def told(settings: Settings) -> set[str]:
    """The secrets that are in settings."""
    assert settings.api_keys_file is None
    return {name for name in SECRETS if getattr(settings, name) is not None}


@pytest.mark.parametrize("name", ["verifier", "rank-1", "drafter-0"])
def test_workers_of_this_machine_get_none(name: str) -> None:
    settings = all_secrets(target=HUB, draft=HUB)  # the models are here before they start
    assert told(settings_for(name, settings)) == set()


def test_a_verifier_whom_others_may_join_gets_their_key() -> None:
    settings = all_secrets(drafter_address="tcp://127.0.0.1:4711")
    assert told(settings_for("verifier", settings)) == {"cluster_key"}
    assert told(settings_for("rank-1", settings)) == set()
    assert told(settings_for("drafter-0", settings)) == set()


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
def test_elsewhere_the_hubs_token_goes_to_those_who_download(
    name: str, target: str, draft: str, secrets: set[str]
) -> None:
    settings = all_secrets(target=target, draft=draft)
    assert told(settings_for(name, settings, elsewhere=True)) == secrets


def test_all_else_is_as_it_was() -> None:
    settings = Settings(target="/t", draft="/d", max_running=3)
    assert settings_for("drafter-0", settings) == settings


def test_no_secret_of_a_later_version_is_forgotten() -> None:
    variables = set(VARIABLES) - {"SSD_API_KEYS_FILE"}
    assert without_secrets({**VARIABLES, "PATH": "/bin", "SSD_DTYPE": "fp32"}) == {"PATH": "/bin"}
    assert variables - {"RAY_AUTH_TOKEN"} <= set(blanked_secrets())  # Ray's own actors need that one
    assert not any(blanked_secrets().values())


def test_what_ray_starts_inherits_no_secret_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in VARIABLES.items():
        monkeypatch.setenv(variable, text)
    before = dict(os.environ)
    with hidden_secrets():
        assert set(before) - set(os.environ) == set(VARIABLES) - {"RAY_AUTH_TOKEN", "SSD_API_KEYS_FILE"}
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["verifier", "rank-1", "drafter-0"])
def test_a_real_worker_sees_no_secret(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_settings_from_a_parent_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in VARIABLES.items():
        monkeypatch.setenv(variable, text)
    line = settings_for("drafter-0", all_secrets()).model_dump_json()
    assert told(Settings.model_validate_json(line)) == set()
