"""schemathesis sends what the OpenAPI document allows and what it forbids; it names every answer."""

import sys
from pathlib import Path

import pytest

from ssd_serve.base.settings import Settings
from tests.server.fakes import say
from tests.server.generating import generate_requests
from tests.server.running_server import listening_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="schemathesis is not for Python 3.10"),
]

KEY = "a-key-of-some-length"


def test_schemathesis_requests_conform_to_openapi(tmp_path: Path) -> None:
    with listening_server(lambda _: say("abcdefgh", group=4)) as address:
        said = generate_requests(address.url, tmp_path, 6)
        seen = {(path, status, kind) for path, _, status, kind in address.contract.seen}
    for phase in ("Examples", "Coverage", "Fuzzing", "Stateful"):
        assert f"✅ {phase}" in said
    for path in ("/v1/completions", "/v1/chat/completions"):
        for answer in ((200, "application/json"), (200, "text/event-stream"), (400, "application/json")):
            assert (path, *answer) in seen, "the requests reached what they were meant for"
    assert {status for _, status, _ in seen} <= {200, 400, 404, 413, 415}


def test_schemathesis_checks_api_key(tmp_path: Path) -> None:
    with listening_server(lambda _: say("ab"), Settings(drain_seconds=1, api_key=KEY)) as address:
        generate_requests(
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
