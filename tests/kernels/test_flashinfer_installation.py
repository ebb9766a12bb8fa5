"""Which FlashInfer is used, and its folder of compiled kernels: one for each build, private, never stale."""

import importlib.metadata
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ssd_serve.base.errors import PermissionProblemError, UserError
from ssd_serve.kernels.flashinfer import factory, installation
from ssd_serve.kernels.flashinfer.factory import load_package
from ssd_serve.kernels.flashinfer.installation import Build, choose, clear_stale, use_folder
from tests.kernels import flashinfer_signatures as signatures
from tests.kernels.flashinfer_signatures import ALL, Recorded

UPSTREAM = Build("flashinfer-python", "0.7.2.post1", "2.13.0+cu130", "9.0")
PORT = Build("amd-flashinfer", "0.5.3+amd.2", "2.9.1+rocm7.2", "gfx942")
VARIABLES = ("FLASHINFER_WORKSPACE_BASE", "FLASHINFER_ROCM_ARCH_LIST", "FLASHINFER_CUDA_ARCH_LIST")


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "of somebody else")
        monkeypatch.delenv(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An installed package, written long ago."""
    root = tmp_path / "site-packages" / "flashinfer"
    for name in ("include/attention/prefill.cuh", "csrc_rocm/batch_prefill.cu", "jit/core.py"):
        write(root / name, at=1000)
    return root


def write(path: Path, text: str = "", at: float = 2000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def kernel(folder: Path, name: str, package: Path, *, at: float = 2000) -> Path:
    """A kernel that was compiled from a package."""
    place = folder / ".cache/flashinfer/0.5.3+amd.2/gfx942/cached_ops" / name
    write(place / "build.ninja", f"common_cflags = -fPIC $\n    -isystem {package}/include\n", at)
    write(place / f"{name}.so", at=at)
    return place


def test_a_folder_for_each_combination(tmp_path: Path) -> None:
    builds = [UPSTREAM, PORT, replace(PORT, torch="2.12.0+rocm7.2"), replace(PORT, architecture="gfx950")]
    builds += [replace(PORT, version="0.5.3+amd.3")]
    folders: list[str] = []
    for build in builds:
        assert use_folder(tmp_path, build, None) == []
        folders.append(os.environ["FLASHINFER_WORKSPACE_BASE"])
        assert Path(folders[-1]).parent == tmp_path
        assert Path(folders[-1]).is_dir()
    assert len(set(folders)) == len(builds)
    assert Path(folders[1]).name == "amd_flashinfer-0.5.3_amd.2-torch_2.9.1_rocm7.2-gfx942"


def test_kernel_folder_is_private_to_the_user(tmp_path: Path) -> None:
    use_folder(tmp_path, PORT, None)
    folder = Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
    assert folder.stat().st_mode & 0o777 == 0o700
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionProblemError, match=f"others may write to {tmp_path}"):
        use_folder(tmp_path, PORT, None)


def test_kernels_writable_by_others_are_cleared(tmp_path: Path, package: Path) -> None:
    folder = tmp_path / PORT.folder_name
    planted, sound = kernel(folder, "planted", package), kernel(folder, "sound", package)
    folder.chmod(0o755)
    assert use_folder(tmp_path, PORT, package) == []
    assert (planted / "planted.so").is_file()
    folder.chmod(0o755)
    (planted / "planted.so").chmod(0o666)
    assert use_folder(tmp_path, PORT, package) == ["planted.so"]
    assert not planted.exists()
    assert not sound.exists()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_architecture_is_set_in_each_packages_variable(tmp_path: Path) -> None:
    use_folder(tmp_path, PORT, None)
    assert {name: value for name, value in variables().items() if "ARCH" in name} == {
        "FLASHINFER_ROCM_ARCH_LIST": "gfx942"
    }
    use_folder(tmp_path, UPSTREAM, None)
    assert variables()["FLASHINFER_CUDA_ARCH_LIST"] == "9.0"


def test_kernels_of_this_package_are_kept(tmp_path: Path, package: Path) -> None:
    kept = kernel(tmp_path, "batch_prefill", package)
    assert clear_stale(tmp_path, package) == []
    assert (kept / "batch_prefill.so").exists()


@pytest.mark.parametrize(
    "source", ["include/attention/prefill.cuh", "csrc_rocm/batch_prefill.cu", "jit/core.py"]
)
def test_kernels_older_than_a_source_are_cleared(tmp_path: Path, package: Path, source: str) -> None:
    """The port 0.5.3+amd.2 would keep their build.ninja, with the flags of then."""
    old, new = kernel(tmp_path, "old", package), kernel(tmp_path, "new", package, at=4000)
    write(package / source, at=3000)
    assert clear_stale(tmp_path, package) == ["old"]
    assert not old.exists()
    assert new.exists()


def test_kernels_compiled_from_another_installation_are_cleared(tmp_path: Path, package: Path) -> None:
    kernel(tmp_path, "moved", tmp_path / "elsewhere" / "flashinfer")
    assert clear_stale(tmp_path, package) == ["moved"]


def test_use_folder_clears_stale_kernels(tmp_path: Path, package: Path) -> None:
    use_folder(tmp_path, PORT, package)
    folder = Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
    kernel(folder, "kept", package)
    kernel(folder, "old", package, at=500)
    assert use_folder(tmp_path, PORT, package) == ["old"]


def test_gpus_without_kernels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gfx942 and gfx950 only, this GPU is a gfx90a"):
        use_folder(tmp_path, replace(PORT, architecture="gfx90a"), None)
    assert variables() == {}


@pytest.mark.parametrize(("version", "refused"), [("0.5.3+amd.1", True), ("0.5.3+amd.2", False)])
def test_prebuilt_kernels_of_another_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    found = {"amd-flashinfer-jit-cache": version}
    monkeypatch.setattr(installation, "installed_version", found.get)
    if not refused:
        assert use_folder(tmp_path, PORT, None) == []
        return
    with pytest.raises(UserError, match="pip uninstall amd-flashinfer-jit-cache"):
        use_folder(tmp_path, PORT, None)
    assert use_folder(tmp_path, UPSTREAM, None) == []


def test_a_folder_chosen_after_the_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_folder(tmp_path, PORT, None)
    env: Any = ModuleType("flashinfer.jit.env")
    env.FLASHINFER_BASE_DIR = Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
    monkeypatch.setitem(sys.modules, "flashinfer.jit.env", env)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    assert use_folder(tmp_path, PORT, None) == []  # the same again
    with pytest.raises(UserError, match="imported before its folder"):
        use_folder(tmp_path / "other", PORT, None)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionProblemError, match=str(tmp_path / "file")):
        use_folder(tmp_path / "file", PORT, None)


@pytest.mark.parametrize("recorded", ALL, ids=str)
def test_the_package_that_fits_torch_is_chosen(recorded: Recorded) -> None:
    rocm = recorded.name == "amd-flashinfer"
    assert choose({recorded.name: recorded.version}, rocm=rocm) == (recorded.name, recorded.version)


def test_missing_package_error_names_what_to_install() -> None:
    with pytest.raises(UserError, match=r"pip install 'ssd-serve\[flashinfer\]'$"):
        choose({}, rocm=False)
    with pytest.raises(UserError, match=r"amd-flashinfer: install 0\.5\.3\+amd\.2 or later$"):
        choose({}, rocm=True)


def test_package_for_the_other_kind_of_gpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"needs the package amd-flashinfer.*is for the other kind of GPU"):
        choose({"flashinfer-python": "0.7.2"}, rocm=True)
    with pytest.raises(UserError, match=r"needs the package flashinfer-python.*is for the other kind of GPU"):
        choose({"amd-flashinfer": "0.5.3+amd.2"}, rocm=False)


@pytest.mark.parametrize(("rocm", "wanted"), [(True, "amd-flashinfer"), (False, "flashinfer-python")])
def test_both_packages_installed_is_an_error(rocm: bool, wanted: str) -> None:
    both = {"flashinfer-python": "0.7.2", "amd-flashinfer": "0.5.3+amd.2"}
    with pytest.raises(UserError, match=f"uninstall both, then install {wanted} alone"):
        choose(both, rocm=rocm)


@pytest.mark.parametrize(
    "version",
    [
        "0.5.3+amd.1",
        "0.5.3+amd.1rc1",
        "0.5.3+amd.2rc1",
        "0.3.1+amd.1",
        "0.2.5+amd.2",
        "0.2.5+rocm.1",
        "0.5.2.post9",
    ],
)
def test_ports_with_wrong_kernels_are_refused_by_name(version: str) -> None:
    with pytest.raises(
        UserError, match=r"amd-flashinfer \S+ computes wrong attention.*1\.875.*wrong heads"
    ) as refused:
        choose({"amd-flashinfer": version}, rocm=True)
    assert version in str(refused.value)
    assert str(refused.value).endswith("install 0.5.3+amd.2 or later")


@pytest.mark.parametrize(
    "version",
    ["0.5.3+amd.2", "0.5.3+amd.3rc1", "0.5.3+amd.10", "0.5.3+amd.2.dev7", "0.6.0+amd.1", "0.5.3.post1.dev40"],
)
def test_later_ports_are_accepted(version: str) -> None:
    assert choose({"amd-flashinfer": version}, rocm=True) == ("amd-flashinfer", version)


@pytest.mark.parametrize("version", ["0.7.1", "0.6.15.post2", "0.2.0", "unknown"])
def test_upstream_versions_before_0_7_2_are_refused(version: str) -> None:
    with pytest.raises(UserError, match="is too old"):
        choose({"flashinfer-python": version}, rocm=False)
    assert choose({"flashinfer-python": "0.10.0"}, rocm=False)[1] == "0.10.0"


def test_installed_packages_are_found_by_their_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "flashinfer-python":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installation.installed_versions() == {"flashinfer-python": "1.2.3"}


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("recorded", "architecture"), [(signatures.UPSTREAM, "9.0"), (signatures.PORT, "gfx942")], ids=str
)
def test_the_folder_is_chosen_before_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Recorded, architecture: str
) -> None:
    for name in ("FLASHINFER_WORKSPACE_BASE", "FLASHINFER_ROCM_ARCH_LIST", "FLASHINFER_CUDA_ARCH_LIST"):
        monkeypatch.setenv(name, "")
    on_rocm = recorded is signatures.PORT
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


def test_missing_package_changes_no_environment_or_files(
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
