"""Waits for other processes and threads."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return once the condition holds; fail the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds:.0f} s"
        time.sleep(0.02)
