"""Tests of the Dockerfiles without a container engine."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY, KINDS, ROOT, read_dockerfile


@pytest.mark.parametrize("kind", KINDS)
def test_hadolint_finds_nothing(kind: str) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint, "it comes with the extra dev: pip install -e '.[dev]'"
    command = [hadolint, str(DEPLOY / f"{kind}.Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_image_runs_without_root_and_keeps_caches_in_a_volume(kind: str) -> None:
    image = read_dockerfile(kind).of_the_image()
    assert image.all("USER") == ["10001"]
    assert image.instructions.index(("USER", "10001")) > max(
        index for index, (word, _) in enumerate(image.instructions) if word in ("RUN", "COPY")
    )
    assert image.all("VOLUME") == ["/cache"]
    variables = image.environment()
    assert {name for name, value in variables.items() if value.startswith("/cache/")} >= {
        "SSD_CACHE_DIR",
        "HF_HOME",
    }


def test_images_have_the_same_interface() -> None:
    images = [read_dockerfile(kind).of_the_image() for kind in KINDS]
    for word in ("USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"):
        assert len({tuple(image.all(word)) for image in images}) == 1, word
        assert images[0].all(word)


@pytest.mark.parametrize("kind", KINDS)
def test_base_images_have_a_version(kind: str) -> None:
    froms = [line.split() for line in read_dockerfile(kind).all("FROM")]
    stages = {words[2] for words in froms if len(words) == 3}
    for words in froms:
        _, _, tag = words[0].partition(":")
        assert words[0] in stages or re.search(r"\d+\.\d+", tag), words


@pytest.mark.parametrize("kind", KINDS)
def test_copied_files_exist_and_are_in_the_build_context(kind: str) -> None:
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in read_dockerfile(kind).all("COPY"):
        sources = [word for word in line.split()[:-1] if not word.startswith("--")]
        for source in sources if "--from" not in line else []:
            assert (ROOT / source).exists()
            assert source == "." or f"!{source}" in sent


def test_constraints_are_installed() -> None:
    for kind in ("cpu", "cuda"):
        (install,) = [line for line in read_dockerfile(kind).all("RUN") if " -c constraints.txt " in line]
        assert ("--extra-index-url https://download.pytorch.org/whl/cpu" in install) == (kind == "cpu")


def test_rocm_image_is_that_of_its_constraints_file() -> None:
    constraints = (ROOT / "constraints-rocm.txt").read_text(encoding="utf-8")
    base = re.search(r"^# image: (\S+)$", constraints, re.MULTILINE)
    versions = dict(re.findall(r"^(torch|amd-flashinfer)==(\S+)$", constraints, re.MULTILINE))
    image = read_dockerfile("rocm")
    assert base
    assert image.all("FROM") == [base[1]]
    assert any("./setup_rocm.sh --image" in line for line in image.all("RUN"))
    folder = f"/cache/rocm/torch-{versions['torch']}_flashinfer-{versions['amd-flashinfer']}"
    assert image.environment()["FLASHINFER_WORKSPACE_BASE"] == folder
