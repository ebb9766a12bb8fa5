"""schemathesis sends what the OpenAPI document allows and what it forbids; it names every answer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_serve.settings import Settings
from tests.server.fakes import say
from tests.server.houses import open_server

pytest.importorskip("schemathesis", reason="schemathesis needs Python 3.11")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
KEY = "a-key-of-some-length"
PATIENCE_S = 500
"""Ten times what it takes on an idle machine."""


def run(url: str, folder: Path, examples: int, *more: str) -> str:
    """All checks, in all phases. A run with the same number of examples sends the same."""
    options = ["--checks", "all", "--seed", "15", "--max-examples", str(examples), "--no-color"]
    # The check of this server knows the rules that are told in words.
    options += ["--exclude-checks", "positive_data_acceptance", "--max-response-time", "20", *more]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *options]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "SCHEMATHESIS_HOOKS": "tests.server.contract_hooks",
    }
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    return ran.stdout


def test_whatever_the_document_allows_or_forbids(tmp_path: Path) -> None:
    with open_server(lambda _: say("abcdefgh", group=4)) as address:
        said = run(address.url, tmp_path, 20)
        seen = {(path, status, kind) for path, _, status, kind in address.contract.seen}
    for phase in ("Examples", "Coverage", "Fuzzing", "Stateful"):
        assert f"✅ {phase}" in said
    for path in ("/v1/completions", "/v1/chat/completions"):
        for answer in ((200, "application/json"), (200, "text/event-stream"), (400, "application/json")):
            assert (path, *answer) in seen, "the requests reached what they were meant for"
    assert {status for _, status, _ in seen} <= {200, 400, 404, 415}


def test_a_key_that_is_missing_or_wrong(tmp_path: Path) -> None:
    with open_server(lambda _: say("ab"), Settings(drain_seconds=1, api_key=KEY)) as address:
        run(
            address.url,
            tmp_path,
            5,
            "--header",
            f"Authorization: Bearer {KEY}",
            "--phases",
            "examples,fuzzing",
        )
        seen = {(path, status) for path, _, status, _ in address.contract.seen}
    refused = {path for path, status in seen if status == 401}
    assert refused >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/metrics"}
    assert not refused & {"/health", "/ping"}
