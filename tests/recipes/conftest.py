"""A tiny library of Python files, a tiny target, and the workspace made of both."""

from pathlib import Path

import pytest

from ssd_serve.recipes.data import Workspace, load_tokenizer, read_sources, split_texts
from tests.end_to_end.tiny_pair import write_model


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    for index in range(40):
        lines = [f"def function_{index}_{line}(x):\n    return x + {index * line}\n\n" for line in range(12)]
        (folder / f"module_{index}.py").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "target"
    write_model(folder, seed=1, noise=0.0, layers=2)
    return folder


@pytest.fixture
def workspace(tmp_path: Path, library: Path, target: Path) -> Workspace:
    workspace = Workspace(tmp_path / "work")
    workspace.prepare(split_texts(read_sources(library)), load_tokenizer(target), 100)
    return workspace
