"""Asynchronous tests run on asyncio; and a house whose engines can die."""

from collections.abc import AsyncGenerator

import pytest

from tests.server.dying_engines import House


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def house() -> AsyncGenerator[House, None]:
    """Closed when the test is over."""
    found = House()
    yield found
    found.close()
