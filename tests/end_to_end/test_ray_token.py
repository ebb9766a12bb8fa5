"""A Ray that the server starts requires its token, and a Ray without a token causes a warning."""

import os
import subprocess
import sys
from pathlib import Path

OF_ITS_OWN = """
import os, subprocess, sys
from ssd_serve.cluster.ray.cluster import ray_cluster
from ssd_serve.cluster.ray.cluster import answers_without_token, warn_without_token
from ssd_serve.base.logs import get_logger
from ssd_serve.base.settings import Settings

with ray_cluster(Settings(launcher="ray")) as cluster:
    address = cluster.ray.get_runtime_context().gcs_address
    warn_without_token(cluster.ray, get_logger("server"))
    print("strangers:", answers_without_token(address))
    print("a task:", cluster.ray.get(cluster.ray.remote(lambda: 6 * 7).remote()))
    for known in (False, True):
        names = {"RAY_AUTH_MODE"} if known else {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
        variables = {name: value for name, value in os.environ.items() if name not in names}
        command = [sys.executable, "-c", sys.argv[1], address]
        joined = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        print("joined:", joined.stdout.decode().splitlines()[-1])
"""
JOINING = """
import sys
from ssd_serve.cluster.ray.cluster import ray_cluster
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings

try:
    with ray_cluster(Settings(ray_address=sys.argv[1])) as cluster:
        print(cluster.ray.get(cluster.ray.remote(num_cpus=0)(lambda: "here").remote()))
except SettingsError as error:
    print(error)
"""


def started(home: Path, **more: str) -> "tuple[list[str], str]":
    """Start a Ray with its own home folder; return the printed lines and the log."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", OF_ITS_OWN, JOINING],
        env={**variables, "HOME": str(home), **more},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("strangers:", "a task:", "joined:"))
    ]
    return lines, done.stderr


def test_own_ray_requires_its_token(tmp_path: Path) -> None:
    (strangers, task, without, with_token), log = started(tmp_path)
    assert strangers == "strangers: False"
    assert task == "a task: 42"
    assert "cannot be used" in without
    assert "set RAY_AUTH_TOKEN to it here too" in without
    assert with_token == "joined: here"
    assert "anybody" not in log
    assert not (tmp_path / ".ray" / "auth_token").exists(), "a token file that others may read"


def test_ray_without_token_causes_a_warning(tmp_path: Path) -> None:
    (strangers, task, without, _), log = started(tmp_path, RAY_AUTH_MODE="disabled")
    assert strangers == "strangers: True"
    assert task == "a task: 42"
    assert without == "joined: here"
    assert "runs code of any client that reaches its ports" in log
    assert "RAY_AUTH_MODE=token" in log
