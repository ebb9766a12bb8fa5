"""What may hang or take the interpreter down, tried in a process of its own, which is ended after a while.

Knows processes; not what they try.
"""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of it: why it failed (empty: it did not), and what it printed."""

    failure: str
    printed: str = ""


def tried(program: Sequence[str], timeout_s: float, variables: Mapping[str, str] | None = None) -> Tried:
    """Run it with more environment `variables`; its last line of errors is why it failed. Raises nothing."""
    try:
        process = subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(variables or {})},
        )
    except OSError as error:
        return Tried(f"it could not be tried: {error.strerror}")
    try:
        printed, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        printed = ""
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it even now
            printed, _ = process.communicate(timeout=_GRACE_S)
        return Tried(f"no answer within {timeout_s:g} s", printed)
    if process.returncode == 0:
        return Tried("", printed)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return Tried(lines[-1] if lines else f"it ended with code {process.returncode}", printed)
