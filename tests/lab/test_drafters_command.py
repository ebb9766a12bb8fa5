"""More drafter processes deliver more, on sockets and cores of this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_two_drafter_processes_deliver_more_than_one(tmp_path: Path) -> None:
    """Forwards are stretched so far that both find time on a core that they share with others."""
    result = tmp_path / "drafters.json"
    sizes = ["--drafters", "1", "--requests", "6", "--tokens", "10"]
    real = ["--real", "1", "2", "--real-table", "mi300x-70b-1b*16"]
    command = [sys.executable, "-m", "lab.drafters", *sizes, *real, "--json", str(result)]
    subprocess.run(command, check=True, capture_output=True)
    one, two = json.loads(result.read_text(encoding="utf-8"))["real"]
    assert (one["drafters"], two["drafters"]) == (1, 2)
    assert max(one["overrun_share"], two["overrun_share"]) < 0.5, "the machine is too slow for the table"
    assert two["expansions_per_s"] > 1.4 * one["expansions_per_s"]
    assert min(one["tokens_per_s"], two["tokens_per_s"]) > 0
