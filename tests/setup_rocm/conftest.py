"""A pretended machine for each test."""

from pathlib import Path

import pytest

from tests.setup_rocm.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A ROCm image of PyTorch on an MI300X, before the script has run."""
    return Machine(tmp_path).build()
