"""Checks that the scripts of this folder share; each script runs in an environment of its own."""

import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version

BASE_URL = sys.argv[1]
"""Address of the server, without /v1."""
MODEL = "ssd-embedded"
KEY = "sk-no-key-is-needed-here-0123456789abcdef"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    for name, text in (("get_weather", "The weather of a city"), ("get_time", "The time in a city"))
]


def await_program(url: str, seconds: float = 180.0) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10.0):
                return
        except OSError as error:
            if time.monotonic() > until:
                raise TimeoutError(f"no answer from {url}") from error
        time.sleep(0.5)


class Checks:
    """The checks of one script, printed as JSON at its end."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        self._seen: list[dict[str, str]] = []

    @contextmanager
    def check(self, name: str) -> Generator[list[object]]:
        """Run a check; an error is reported, and the next check continues."""
        seen: list[object] = []
        try:
            yield seen
        except Exception as error:
            traceback.print_exc()
            self._seen.append({"check": name, "failed": f"{type(error).__name__}: {error}"[:400]})
        else:
            self._seen.append({"check": name, "seen": "; ".join(map(str, seen))[:200]})

    def report(self) -> int:
        """Print the checks and return the exit code."""
        versions = {name: version(name) for name in self._packages}
        print(json.dumps({"versions": versions, "checks": self._seen}))
        return int(any("failed" in each for each in self._seen))
