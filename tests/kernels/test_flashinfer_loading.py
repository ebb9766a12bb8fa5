"""Loading finds, checks and imports FlashInfer, in the order that its import needs."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.flashinfer import factory
from ssd_serve.kernels.flashinfer.factory import load_package
from tests.kernels.flashinfer_signatures import PORT, UPSTREAM, Recorded

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("recorded", "architecture"), [(UPSTREAM, "9.0"), (PORT, "gfx942")], ids=str)
def test_the_folder_is_chosen_before_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Recorded, architecture: str
) -> None:
    for name in ("FLASHINFER_WORKSPACE_BASE", "FLASHINFER_ROCM_ARCH_LIST", "FLASHINFER_CUDA_ARCH_LIST"):
        monkeypatch.setenv(name, "")
    on_rocm = recorded is PORT
    (tmp_path / "flashinfer.py").write_text(
        "import os\n"
        "from tests.kernels.flashinfer_double import Doubles\n"
        "from tests.kernels import flashinfer_signatures as recorded\n"
        f"BatchPrefillWithPagedKVCacheWrapper = Doubles(recorded.{'PORT' if on_rocm else 'UPSTREAM'})\n"
        "seen = os.environ['FLASHINFER_WORKSPACE_BASE']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.version, "hip", "7.2" if on_rocm else None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(factory, "architecture", lambda device: architecture)
    monkeypatch.setattr(factory, "installed_versions", lambda: {recorded.name: recorded.version})
    package = load_package(GPU, tmp_path / "kernels")
    module = sys.modules["flashinfer"]
    monkeypatch.delitem(sys.modules, "flashinfer")
    assert (package.name, package.version) == (recorded.name, recorded.version)
    assert package.make is module.BatchPrefillWithPagedKVCacheWrapper
    assert Path(module.seen).parent == tmp_path / "kernels"
    assert module.seen == os.environ["FLASHINFER_WORKSPACE_BASE"]
    assert architecture in (os.environ["FLASHINFER_ROCM_ARCH_LIST"], os.environ["FLASHINFER_CUDA_ARCH_LIST"])


def test_nothing_is_touched_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "installed_versions", dict)
    before = dict(os.environ)
    with pytest.raises(UserError, match="needs the package"):
        load_package(GPU, tmp_path / "kernels")
    assert dict(os.environ) == before
    assert not (tmp_path / "kernels").exists()


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a GPU, not cpu"):
        load_package(torch.device("cpu"), tmp_path)
