"""The server that hostile tests share; those that need other settings open one of their own."""

from collections.abc import Generator

import pytest

from tests.hostile.victim import Victim, open_victim


@pytest.fixture(scope="session")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Generator[Victim]:
    """A server with default limits, for one test process."""
    with open_victim(tmp_path_factory.mktemp("victim")) as found:
        yield found
