"""`python -m tests.clients`: software that others wrote talks to a server of ours.

Each script has an environment of its own with what it needs, and none of our code. One server with the
embedded pair, drafts and all, answers them, one after the other. Knows no protocol.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import ssd_serve.models as models
from ssd_serve.base.errors import UserError
from ssd_serve.bench.tables import text_table
from tests.clients.reference import scores
from tests.servers import free_port, running

SOFTWARE: Mapping[str, Sequence[str]] = {
    "openai": ("openai==3.54.0",),
    "anthropic": ("anthropic==2.12.0",),
    "langchain": ("langchain-openai==1.7.3",),
    "litellm": ("litellm[proxy]==1.106.2",),
    "instructor": ("instructor==1.17.0",),
    "agents": ("openai-agents==0.24.0", "pydantic-ai-slim[openai]==2.68.0"),
    "lmeval": ("lm_eval[api]==0.4.13", "transformers==5.23.0"),
    "guidellm": ("guidellm==0.8.1",),
    "aiperf": ("aiperf==0.13.0",),
    # The exact version of torch has a wheel without GPUs.
    "openwebui": ("open-webui==0.12.4", "torch==2.13.0"),
}
"""What each script is installed with."""
_SCRIPTS = Path(__file__).parent / "scripts"
_PATIENCE_S = 600.0


def run_clients(names: Sequence[str], environments: Path, tell: Callable[[str], None]) -> dict[str, object]:
    """These scripts, or all."""
    unknown = set(names) - set(SOFTWARE)
    if unknown:
        raise UserError(
            f"there is no script for {', '.join(sorted(unknown))}; there are {', '.join(SOFTWARE)}"
        )
    chosen = names or list(SOFTWARE)
    pythons = {name: _environment(environments / name, SOFTWARE[name], tell) for name in chosen}
    (target,) = Path(models.__path__[0]).resolve().glob("embedded/target")
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        expected = Path(folder) / "expected.json"
        expected.write_text(json.dumps([asdict(each) for each in scores(target)]))
        port = free_port()
        # The models' own format: log-probabilities are compared with those of others.
        flags = ["--port", str(port), "--tool-parser", "hermes", "--dtype", "fp32"]
        command = [sys.executable, "-m", "ssd_serve", "serve", *flags]
        with running(command, os.environ, Path(folder), port) as (_, url, _):
            for name, python in pythons.items():
                found.append(_talk(name, python, [url, str(target), str(expected)]))
                tell(_row_text(found[-1]))
    return {"benchmark": "clients", "server": flags[2:], "software": found}


def table(result: Mapping[str, object]) -> str:
    """As text for a terminal."""
    rows = [row for each in _software(result) for row in _rows(each)]
    return text_table(("software", "check", "", "seen"), rows)


def failed(result: Mapping[str, object]) -> bool:
    """Whether anything was not as it should be."""
    return any("failed" in check for each in _software(result) for check in each["checks"])


def _software(result: Mapping[str, object]) -> list[dict[str, list[dict[str, str]]]]:
    software: list[dict[str, list[dict[str, str]]]] = result["software"]  # type: ignore[assignment]
    return software


def _row_text(each: Mapping[str, object]) -> str:
    return text_table(("software", "check", "", "seen"), _rows(each))


def _rows(each: Mapping[str, object]) -> list[tuple[object, ...]]:
    checks: list[dict[str, str]] = each["checks"]  # type: ignore[assignment]
    return [
        (
            each["name"],
            check["check"],
            "FAILED" if "failed" in check else "ok",
            check.get("failed", check.get("seen", "")),
        )
        for check in checks
    ]


def _environment(folder: Path, packages: Sequence[str], tell: Callable[[str], None]) -> Path:
    """The Python of an environment with these packages, made where there is none."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    with suppress(OSError):
        if done.read_text() == " ".join(packages):
            return python
    tell(f"installing {' '.join(packages)}")
    venv.create(folder, with_pip=True, clear=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    subprocess.run(command, check=True)
    done.write_text(" ".join(packages))
    return python


def _talk(name: str, python: Path, argv: Sequence[str]) -> dict[str, object]:
    """What a script says in its last line."""
    command = [str(python), str(_SCRIPTS / f"{name}_client.py"), *argv]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
        told: dict[str, object] = json.loads(said.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        return {"name": name, "versions": {}, "checks": [{"check": "it runs", "failed": repr(error)[-300:]}]}
    return {"name": name, **told}
