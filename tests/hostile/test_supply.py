"""What a broken drafter, another user of the machine, or whoever made a model could get hold of."""

import os
import re
from collections.abc import Generator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from ssd_serve.kernels.native.build import NativeError, build
from tests.hostile.victim import Victim, open_victim

API_KEY, HUB_TOKEN, CLUSTER_KEY = "sesame-of-the-api", "sesame-of-the-hub", "sesame-of-the-cluster"
PLANTED = "planted by somebody else"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that everybody may write to, with a library of the right name in it."""
    folder = tmp_path_factory.mktemp("shared") / "cache"
    folder.mkdir()
    try:
        name = build(folder.parent / "mine").name
    except NativeError:
        pytest.skip("no C compiler")
    (folder / name).write_text(PLANTED)
    (folder / "native.lock").symlink_to(folder / "precious")
    (folder / "precious").write_text("precious")
    folder.chmod(0o777)
    return folder


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Generator[Victim]:
    """A server with secrets, whose cache folder is open to all."""
    with open_victim(
        tmp_path_factory.mktemp("guarded"),
        key=API_KEY,
        SSD_HF_TOKEN=HUB_TOKEN,
        HF_TOKEN=HUB_TOKEN,
        SSD_CLUSTER_KEY=CLUSTER_KEY,
        SSD_METRICS_KEY=API_KEY,
        SSD_CACHE_DIR=str(shared),
        TMPDIR=str(shared.parent),
    ) as found:
        yield found


def test_no_worker_has_a_secret_in_its_environment_or_on_its_command_line(guarded: Victim) -> None:
    with guarded.unharmed():
        workers = guarded.workers()
        assert {"ssd: verifier", "ssd: drafter-0"} <= set(workers)
        for child in psutil.Process(guarded.process.pid).children(recursive=True):
            for file in ("environ", "cmdline"):
                assert b"sesame" not in Path(f"/proc/{child.pid}/{file}").read_bytes(), child.cmdline()
    assert "sesame" not in guarded.log


def test_a_library_that_somebody_planted_is_not_loaded(guarded: Victim, shared: Path) -> None:
    with guarded.unharmed():
        for child in guarded.workers().values():
            maps = Path(f"/proc/{child.pid}/maps").read_text()
            assert str(shared) + "/" not in maps
            assert "/native-" in maps  # a compiled one is
    assert len(re.findall(f"others may write to {shared}", guarded.log)) == 1
    (planted,) = shared.glob("native-*.so")
    assert planted.read_text() == PLANTED
    assert (shared / "precious").read_text() == "precious"
    assert len(list(shared.iterdir())) == 3  # nothing was written there


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return os.mkdir, (self._folder,)


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_a_hostile_checkpoint_runs_nothing(tmp_path: Path, allowed: str) -> None:
    from ssd_serve.models.hub import embedded_folder

    folder = tmp_path / "evil"
    folder.mkdir()
    for file in embedded_folder("target").iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    torch.save({"a": Evil(tmp_path / "owned")}, folder / "pytorch_model.bin")
    with open_victim(
        tmp_path, await_ready=False, SSD_TARGET=str(folder), SSD_MODE="ar", SSD_ALLOW_PICKLE=allowed
    ) as victim:
        assert victim.process.wait(60) == 6, victim.log
        assert ("SSD_ALLOW_PICKLE=1" if allowed == "0" else "damaged") in victim.log
    assert not (tmp_path / "owned").exists()
