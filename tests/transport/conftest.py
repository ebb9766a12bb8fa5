"""The listener that tests of the gate and of the handshake have in common."""

from collections.abc import Iterator

import pytest

from tests.transport.tls_peers import Guarded


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    """A listener of this test's own."""
    found = Guarded()
    yield found
    found.listener.close()
