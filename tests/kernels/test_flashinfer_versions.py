"""The right FlashInfer is chosen, and wrong versions are refused by name."""

import importlib.metadata

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.flashinfer import installation
from ssd_serve.kernels.flashinfer.installation import choose
from tests.kernels.flashinfer_signatures import ALL, PORT, Recorded

RECORDED = pytest.mark.parametrize("recorded", ALL, ids=str)


@RECORDED
def test_the_package_that_fits_torch_is_chosen(recorded: Recorded) -> None:
    rocm = recorded.name == PORT.name
    assert choose({recorded.name: recorded.version}, rocm=rocm) == (recorded.name, recorded.version)


def test_what_to_install_is_said() -> None:
    with pytest.raises(UserError, match=r"pip install 'ssd-serve\[flashinfer\]'$"):
        choose({}, rocm=False)
    with pytest.raises(UserError, match=r"amd-flashinfer: install 0\.5\.3\+amd\.2 or later$"):
        choose({}, rocm=True)


def test_the_other_package_does_not_do() -> None:
    with pytest.raises(UserError, match=r"needs the package amd-flashinfer.*is for the other kind of GPU"):
        choose({"flashinfer-python": "0.7.2"}, rocm=True)
    with pytest.raises(UserError, match=r"needs the package flashinfer-python.*is for the other kind of GPU"):
        choose({"amd-flashinfer": "0.5.3+amd.2"}, rocm=False)


@pytest.mark.parametrize(("rocm", "wanted"), [(True, "amd-flashinfer"), (False, "flashinfer-python")])
def test_both_packages_overwrite_each_other(rocm: bool, wanted: str) -> None:
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
def test_upstream_that_nobody_read_is_refused(version: str) -> None:
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
