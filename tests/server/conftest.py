"""Asynchronous tests run on asyncio; and a crashing whose engines can die."""

from collections.abc import AsyncGenerator

import pytest

from tests.server.crashing_engine import CrashingEngine


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def crashing() -> AsyncGenerator[CrashingEngine, None]:
    """Closed when the test is over."""
    found = CrashingEngine()
    yield found
    found.close()
