"""Secrets in workers, planted kernel libraries, and malicious checkpoints."""

import os
import re
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from tests.hostile.guarded import PLANTED, SECRETS, Guarded
from tests.hostile.target_server import start_target_server


def test_workers_have_no_secrets_in_environment_or_command_line(guarded: Guarded) -> None:
    with guarded.server.unharmed():
        workers = guarded.server.workers()
        assert {"ssd: verifier", "ssd: drafter-0"} <= set(workers)
        for child in psutil.Process(guarded.server.process.pid).children(recursive=True):
            for file in ("environ", "cmdline"):
                content = Path(f"/proc/{child.pid}/{file}").read_bytes()
                assert not [secret for secret in SECRETS if secret.encode() in content], child.cmdline()
    assert not [secret for secret in SECRETS if secret in guarded.server.log]


def test_planted_kernel_library_is_not_loaded(guarded: Guarded) -> None:
    if not list(guarded.shared.glob("native-*.so")):
        pytest.skip("no C compiler")
    with guarded.server.unharmed():
        for child in guarded.server.workers().values():
            maps = Path(f"/proc/{child.pid}/maps").read_text()
            assert str(guarded.shared) + "/" not in maps
            assert "/native-" in maps  # the compiled library
    assert len(re.findall(f"others may write to {guarded.shared}", guarded.server.log)) == 1
    (planted,) = guarded.shared.glob("native-*.so")
    assert planted.read_text() == PLANTED
    assert (guarded.shared / "precious").read_text() == "precious"
    assert len(list(guarded.shared.iterdir())) == 3  # nothing was written there


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return os.mkdir, (self._folder,)


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_malicious_pickle_checkpoint_runs_no_code(tmp_path: Path, allowed: str) -> None:
    from ssd_serve.models.hub import embedded_folder

    folder = tmp_path / "evil"
    folder.mkdir()
    for file in embedded_folder("target").iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    torch.save({"a": Evil(tmp_path / "owned")}, folder / "pytorch_model.bin")
    with start_target_server(
        tmp_path, await_ready=False, SSD_TARGET=str(folder), SSD_MODE="ar", SSD_ALLOW_PICKLE=allowed
    ) as server:
        assert server.process.wait(60) == 6, server.log
        assert ("SSD_ALLOW_PICKLE=1" if allowed == "0" else "damaged") in server.log
    assert not (tmp_path / "owned").exists()
