"""Everything that the OpenAPI document allows and forbids, against a real engine, beside another client."""

from pathlib import Path

import pytest

from tests.hostile.victim import Victim
from tests.server.generating import generate_requests

pytest.importorskip("schemathesis", reason="schemathesis needs Python 3.11")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_generated_requests_harm_nobody(victim: Victim, tmp_path: Path) -> None:
    with victim.unharmed():
        generate_requests(victim.url, tmp_path, 10, "--phases", "examples,fuzzing,stateful")
