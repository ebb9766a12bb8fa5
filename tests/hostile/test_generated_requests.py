"""Generated requests, valid and invalid by the OpenAPI document, against a real engine."""

import sys
from pathlib import Path

import pytest

from tests.hostile.target_server import FIRST_WRITES_MB, TargetServer
from tests.server.generating import generate_requests

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="schemathesis is not for Python 3.10"),
]


def test_generated_requests_cause_no_harm(server: TargetServer, tmp_path: Path) -> None:
    # Three runs keep 68, then 26, then 14 MiB more, and 10 MiB together after 32,000 other tokens.
    with server.unharmed(kept_mb=FIRST_WRITES_MB):
        generate_requests(server.url, tmp_path, 10, "--phases", "examples,fuzzing,stateful")
