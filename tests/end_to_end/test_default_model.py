"""The default model as a laptop serves it; skipped where its package is not installed."""

import os
import sys
import time
from pathlib import Path
from typing import cast

import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve.base.engine_config import DEFAULT_MODEL
from ssd_serve.base.settings import Settings
from ssd_serve.models.short_names import BUILT_IN, PackagedModel
from tests.servers import free_port, running

MOST_BYTES = 600_000_000
_SETTLE_S = 2.0


@pytest.mark.slow
def test_all_processes_stay_within_600_mb_after_start(tmp_path: Path) -> None:
    packaged = cast(PackagedModel, BUILT_IN[DEFAULT_MODEL])
    cache = Settings().cache_dir.expanduser()
    model = packaged.installed(cache / "packages" / packaged.package)
    if model is None:
        pytest.skip(f"{packaged.package} is not installed")
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
