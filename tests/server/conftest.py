"""Fixtures of the server tests: the asyncio backend, and an engine client with engines that can crash."""

from collections.abc import AsyncGenerator

import pytest

from tests.server.crashing_engine import CrashingEngine


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def crashing() -> AsyncGenerator[CrashingEngine, None]:
    found = CrashingEngine()
    yield found
    found.close()
