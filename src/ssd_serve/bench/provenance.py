"""Where a result comes from: the code and the command that measured it, when, and on what machine.

Taken before and after a measurement and put into every result file. Knows git's command line, not what was
measured.
"""

import hashlib
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from ssd_serve.base.settings import SECRETS
from ssd_serve.base.settings_sources import flag_name, origins, resolve
from ssd_serve.bench.machine import copy_speed, hardware, load_averages, usable_cores, versions

ROOT = Path(__file__).resolve().parents[1]
"""Of a clone; in an installed package, the package itself."""
_GUESSING = ("cache", "drafter", "sampling", "verifier", "models")
_TIMES = ("bench/device_tables.py", "src/ssd_serve/app/plan/device_tables.py")
DRAFTING = (*_GUESSING, *_TIMES, "recipes/ballast.py", "bench/prompts.py", "bench/workload.py")
"""Paths of what decides how many guesses are right in the time that there is, and on which texts."""
ENGINE = (
    *DRAFTING,
    *("kernels", "cluster", "bench/rig.py", "bench/emulated.py", "bench/device_tables.py"),
    *(f"src/ssd_serve/app/plan/{name}.py" for name in ("device_tables", "forwards")),
    *(f"src/ssd_serve/{name}.py" for name in ("memory", "messages", "draft_messages", "engine_settings")),
)
"""Paths of what decides how fast an engine is."""
SERVER = (*ENGINE, "server", "bench/completions.py")
"""The same of a server with its front end."""


@dataclass(frozen=True, slots=True)
class Start:
    """How it was before a measurement."""

    measures: tuple[str, ...]
    """Paths of the code that is measured, from the root of a clone."""
    command: str
    commit: str
    code: str
    dirty: bool
    environment: dict[str, str]
    started: datetime
    clock: float
    cores: tuple[int, ...]
    load: list[float]
    copy_gb_per_s: float

    @classmethod
    def here(cls, program: str, argv: Sequence[str], measures: Sequence[str], root: Path = ROOT) -> "Start":
        """Look at the clone in `root` and at the machine. Takes a fraction of a second."""
        commit = commit_of(root)
        code = code_of(root, "HEAD", measures) if commit else ""
        cores = usable_cores()
        return cls(
            measures=tuple(measures),
            command=" ".join([program, *told_arguments(argv)]),
            commit=commit,
            code=code,
            # Where git cannot read the commit, it cannot say that nothing differs from it either.
            dirty=bool(commit and (not code or _git(root, "status", "--porcelain", "--", *measures))),
            environment=_environment(),
            started=datetime.now(timezone.utc),
            clock=time.monotonic(),
            cores=cores,
            load=load_averages(),
            copy_gb_per_s=copy_speed(cores),
        )

    def provenance(self) -> dict[str, object]:
        """The last fields of a result file, when everything is measured."""
        return {
            "provenance": {
                "commit": self.commit,
                "dirty": self.dirty,
                "measures": list(self.measures),
                "code": self.code,
                "command": self.command,
                "environment": self.environment,
                "started": self.started.isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - self.clock, 1),
                "cores": len(self.cores),
                "load_averages": {"before": self.load, "after": load_averages()},
                "copy_gb_per_s": {"before": self.copy_gb_per_s, "after": copy_speed(self.cores)},
            },
            "hardware": hardware(),
            "versions": versions(),
        }


def commit_of(root: Path) -> str:
    """The commit of this project's clone in `root`; nothing for an installed package."""
    if not (root / ".git").exists():  # whatever repository an installed package lies in is not its own
        return ""
    return _git(root, "rev-parse", "HEAD")


def code_of(root: Path, commit: str, paths: Sequence[str], without: str = "") -> str:
    """What the paths hold in a commit, as a name: the same content has the same one in any history. Nothing
    below the folder `without` counts."""
    listed = _git(root, "ls-tree", "-r", commit, "--", *paths)
    if without:
        listed = "\n".join(line for line in listed.splitlines() if f"\t{without}/" not in line)
    return hashlib.sha256(listed.encode()).hexdigest()[:16] if listed else ""


def code_here(paths: Sequence[str]) -> str:
    """The same of what runs here: that of its clone, or an installed package's version."""
    return code_of(ROOT, "HEAD", paths) if commit_of(ROOT) else version("ssd-serve")


def commits_since(root: Path, commit: str, paths: Sequence[str]) -> int:
    """How many commits have changed the paths since this one; 0 where it is not in the history of HEAD."""
    if not _git(root, "merge-base", commit, "HEAD"):
        return 0
    return int(_git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *paths) or 0)


def told_arguments(argv: Sequence[str]) -> list[str]:
    """A command's words without secrets and without the folders of this machine."""
    secret = {flag_name(name) for name in SECRETS}
    told: list[str] = []
    for place, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if place and argv[place - 1] in secret:
            told.append("****")
        elif equals and flag in secret:
            told.append(f"{flag}=****")
        elif equals and flag.startswith("-"):
            told.append(f"{flag}={_without_folder(value)}")
        else:
            told.append(_without_folder(word))
    return told


def _without_folder(word: str) -> str:
    return Path(word).name if word.startswith("/") else word


def _environment() -> dict[str, str]:
    """Settings that came from variables."""
    rows = origins(resolve({}), {})
    return {row.variable: _without_folder(row.shown) for row in rows if row.origin == "variable"}


def _git(root: Path, *words: str) -> str:
    """What git prints; nothing where there is no git, or it does not know what was asked for."""
    try:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
