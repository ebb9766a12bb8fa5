"""The sdist has no links, and a wheel built from the sdist serves outside of the repository."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import httpx
import pytest

from tests.servers import children, complete, free_port, running

ROOT = Path(__file__).parents[2]
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "tests", "__pycache__", "*.egg-info")
PAGE_FILES = ("index.html", "app.js", "base.css", "icon.svg", "vendor/marked.js", "vendor/LICENSES.txt")
SDIST = "from setuptools import build_meta; build_meta.build_sdist('..')"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, because setuptools writes folders into the sources and packs their contents."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = shutil.copytree(ROOT, folder / "sources", symlinks=True, ignore=NOT_SOURCES)
    run([sys.executable, "-c", SDIST], sources)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        # A checkout or file system without links would have text files in their places.
        assert not [member.name for member in packed if member.issym() or member.islnk()]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    run([*PIP, "wheel", *offline, "--wheel-dir", str(folder), str(archive)], folder)
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, folder.glob("ssd_serve-*"))], folder)
    shutil.rmtree(sources)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a folder that comes first in PYTHONPATH."""
    folder = tmp_path_factory.mktemp("site")
    run([*PIP, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)], folder)
    return folder


def elsewhere(**variables: str) -> dict[str, str]:
    """Return an environment without the repository's path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run the command in a folder and return its output."""
    environment = elsewhere(**variables)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_wheel_has_the_package_and_its_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ssd_serve"}
    for part in ("server", "verifier", "bench", "recipes"):
        assert f"ssd_serve/{part}/__init__.py" in names
    assert [name for name in names if name.startswith("ssd_serve/models/embedded/target/")]
    assert {f"ssd_serve/server/page/static/{file}" for file in PAGE_FILES} <= set(names)
    assert [name for name in names if name.startswith("ssd_serve/kernels/native/") and name.endswith(".c")]


@pytest.mark.slow
def test_wheel_names_its_authors_and_the_licences_of_code_page_and_weights(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [each for each in packed.namelist() if each.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(packed.read(name))
        licences = [
            packed.read(f"{Path(name).parent}/licenses/{file}")
            for file in metadata.get_all("License-File", [])
        ]
    assert all(licences)
    fields = (
        "Author",
        "Maintainer",
        "License-Expression",
        "Keywords",
        "Classifier",
        "Summary",
        "Requires-Python",
    )
    for field in fields:
        assert metadata[field], field
    files = metadata.get_all("License-File", [])
    assert {"LICENSE", "NOTICE", "src/ssd_serve/server/page/static/vendor/LICENSES.txt"} <= set(files)
    weights = {path.parent.name for path in (ROOT / "src/ssd_serve/models/embedded").glob("*/README.md")}
    assert weights == {Path(file).parent.name for file in files if "models/embedded/" in file} != set()


@pytest.mark.slow
def test_installed_wheel_serves(installed: Path, tmp_path: Path) -> None:
    where = "import ssd_serve; print(ssd_serve.__file__)"
    found = run([sys.executable, "-c", where], tmp_path, PYTHONPATH=str(installed)).strip()
    assert found == str(installed / "ssd_serve" / "__init__.py")
    port = free_port()
    settings = {"SSD_MODE": "ssd", "SSD_PORT": str(port), "SSD_RUN_DIR": str(tmp_path / "run")}
    environment = elsewhere(PYTHONPATH=str(installed), **settings)
    with running([sys.executable, "-m", "ssd_serve", "serve"], environment, tmp_path, port) as server:
        process, url, log = server
        assert set(children(process)) == {"ssd: verifier", "ssd: drafter-0"}
        assert complete(url).strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


@pytest.mark.slow
def test_command_of_the_wheel_serves_the_default_model(installed: Path, tmp_path: Path) -> None:
    """The weights come from a package index or the cache of `SSD_CACHE_DIR`, as for a user."""
    port = free_port()
    environment = elsewhere(PYTHONPATH=str(installed), SSD_TARGET="", SSD_PORT=str(port))
    command = [sys.executable, str(installed / "bin/ssd"), "serve", "smollm2"]
    with running(command, environment, tmp_path, port) as (process, url, _):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "smollm2"
        assert complete(url).strip()
        page = httpx.get(url)
        assert (page.status_code, page.headers["content-type"].partition(";")[0]) == (200, "text/html")
        assert process.poll() is None
