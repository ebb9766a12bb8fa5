"""The modes of the load benchmark: which are compared with one another, and in which order they run."""

from collections.abc import Sequence

AUTO, PLAIN = "auto", "ar"
ALL_DEVICES = "-all-devices"
"""Ends the names of modes in which the target may use the drafter's device as well."""
SAME = ("ar", "sd", "ssd", AUTO)
ALL = (f"ar{ALL_DEVICES}", f"sd{ALL_DEVICES}", "ssd", f"{AUTO}{ALL_DEVICES}")
"""Modes that are compared with one another; the last is judged by the others. SSD always has both devices."""


def turn(names: Sequence[str], index: int) -> list[str]:
    """The names from another one on each time, and every second time backwards."""
    start = index % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if index % 2 else order
