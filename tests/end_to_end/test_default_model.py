"""The default model as a laptop serves it."""

import os
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve.base.engine_config import DEFAULT_MODEL, EngineConfig
from ssd_serve.models.hub import find_model
from tests.servers import free_port, running

MOST_BYTES = 600_000_000
_SETTLE_S = 2.0


@pytest.mark.slow
def test_all_processes_stay_within_600_mb_after_start(tmp_path: Path) -> None:
    model = find_model(EngineConfig(), DEFAULT_MODEL, "target")  # downloads it the first time
    port = free_port()
    command = [sys.executable, "-m", "ssd_serve", "serve", str(model), "--port", str(port)]
    with running(command, os.environ, tmp_path, port) as (process, _, _):
        time.sleep(_SETTLE_S)
        server = psutil.Process(process.pid)
        sizes = {
            each.cmdline()[0].strip(): each.memory_info().rss
            for each in (server, *server.children(recursive=True))
        }
        server.terminate()
        server.wait(30)
    assert "ssd: verifier" in sizes
    assert sum(sizes.values()) <= MOST_BYTES, sizes
