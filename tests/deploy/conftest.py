"""Fixtures of tests that start what the manifests' commands start."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.deploy.containers import Network


@pytest.fixture
def network(tmp_path: Path) -> Generator[Network]:
    made = Network(tmp_path)
    try:
        yield made
    finally:
        made.close()
