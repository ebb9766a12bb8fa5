"""Runs schemathesis against a server, by its command line."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 500
"""Many times what it takes on an idle machine."""


def generate_requests(url: str, folder: Path, examples: int, *more: str) -> str:
    options = ["--checks", "all", "--seed", "15", "--max-examples", str(examples), "--no-color"]
    # The check of `contract_hooks` knows the rules that are told in words.
    options += ["--exclude-checks", "positive_data_acceptance", "--max-response-time", "60"]
    options += ["--request-timeout", "90", *more]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *options]
    # A list that is too long may be too large a body first.
    expected = ", ".join(f'"{status}"' for status in (400, 401, 404, 413, 415))
    rules = f"[checks.negative_data_rejection]\nexpected-statuses = [{expected}]\n"
    (folder / "schemathesis.toml").write_text(rules)
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
