"""A tiny library to train on and the workspace made of it."""

from pathlib import Path

import pytest

from ssd_serve.recipes.workspace import Workspace

ENTRIES = 300


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small modules that differ."""
    folder = tmp_path_factory.mktemp("library")
    for index in range(40):
        lines = [f"def function_{index}_{line}(x):\n    return x + {index * line}\n\n" for line in range(12)]
        (folder / f"module_{index}.py").write_text("".join(lines))
    return folder


@pytest.fixture
def workspace(tmp_path: Path, library: Path) -> Workspace:
    """A prepared workspace with a tokenizer of `ENTRIES` entries."""
    workspace = Workspace(tmp_path / "work")
    workspace.prepare(library, ENTRIES, context=256, held_out_share=0.15)
    return workspace
