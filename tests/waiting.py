"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return as soon as it is so; the test fails where it is not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"in vain for {seconds:.0f} s"
        time.sleep(0.02)
