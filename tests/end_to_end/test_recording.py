"""A real server records its session, and `ssd replay` runs it again to the same tokens."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.tiny_pair import write_pair
from tests.servers import free_port, running


@pytest.mark.parametrize(("mode", "drafters"), [("ssd", "2"), ("sd", "1"), ("auto", "1")])
def test_what_a_server_has_recorded_is_run_again(mode: str, drafters: str, tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path / "pair")
    port, record = free_port(), tmp_path / "record"
    environment = {
        **os.environ,
        **{"SSD_TARGET": str(target), "SSD_DRAFT": str(draft), "SSD_MODE": mode, "SSD_DTYPE": "fp32"},
        **{"SSD_PORT": str(port), "SSD_RUN_DIR": str(tmp_path / "run"), "SSD_RECORD": str(record)},
        "SSD_DRAFTERS": drafters,
    }
    ssd = [sys.executable, "-m", "ssd_serve"]
    with running([*ssd, "serve"], environment, tmp_path, port) as (process, url, log):
        for number in range(3):
            body = {"prompt": "def f(", "max_tokens": 24, "seed": number, "temperature": 0.5 * number}
            response = httpx.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=60.0)
            assert response.json()["usage"]["completion_tokens"] == 24
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    replayed = subprocess.run([*ssd, "replay", str(record)], capture_output=True, text=True, timeout=120)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
