"""What is installed from a wheel is whole: it generates and serves with the embedded pair, far from the
repository."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.servers import children, complete, free_port, running

ROOT = Path(__file__).parents[2]
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "tests", "__pycache__", "*.egg-info")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves folders beside the sources, and takes what it finds in them."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = shutil.copytree(ROOT, folder / "sources", symlinks=True, ignore=NOT_SOURCES)
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    run([*PIP, "wheel", *offline, "--wheel-dir", str(folder), str(sources)], folder)
    shutil.rmtree(sources)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that goes before whatever else Python finds."""
    folder = tmp_path_factory.mktemp("site")
    run([*PIP, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)], folder)
    return folder


def elsewhere(**variables: str) -> dict[str, str]:
    """An environment that does not know where the repository is."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def run(command: list[str], folder: Path, **variables: str) -> str:
    """What the command prints; it runs in this folder and must end well."""
    environment = elsewhere(**variables)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_holds_the_product_and_no_experiment(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ssd_serve"}
    assert not [name for name in names if "lab" in Path(name).parts]
    for part in ("server", "verifier", "bench", "recipes"):
        assert f"ssd_serve/{part}/__init__.py" in names
    assert [name for name in names if name.startswith("ssd_serve/models/embedded/target/")]
    assert [name for name in names if name.startswith("ssd_serve/kernels/native/") and name.endswith(".c")]


@pytest.mark.slow
def test_an_installed_wheel_generates_with_the_embedded_pair(installed: Path, tmp_path: Path) -> None:
    where = "import ssd_serve, importlib.util; print(ssd_serve.__file__, importlib.util.find_spec('lab'))"
    found = run([sys.executable, "-c", where], tmp_path, PYTHONPATH=str(installed)).split()
    assert found == [str(installed / "ssd_serve" / "__init__.py"), "None"]
    command = [sys.executable, "-m", "ssd_serve", "generate", "def add(a, b):", "--json"]
    sizes = ["--max-tokens", "12", "--temperature", "0", "--log-level", "error"]
    answer = json.loads(run([*command, *sizes], tmp_path, PYTHONPATH=str(installed)))
    assert answer["text"].strip()


@pytest.mark.slow
def test_an_installed_wheel_serves_the_embedded_pair(installed: Path, tmp_path: Path) -> None:
    port = free_port()
    settings = {"SSD_MODE": "ssd", "SSD_PORT": str(port), "SSD_RUN_DIR": str(tmp_path / "run")}
    environment = elsewhere(PYTHONPATH=str(installed), **settings)
    with running([sys.executable, "-m", "ssd_serve", "serve"], environment, tmp_path, port) as server:
        process, url, log = server
        assert set(children(process)) == {"ssd: verifier", "ssd: drafter-0"}
        assert complete(url).strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
