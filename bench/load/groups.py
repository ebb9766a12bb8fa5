"""The modes of the load benchmark, and which of them are compared with one another."""

AUTO, PLAIN = "auto", "ar"
ALL_DEVICES = "-all-devices"
"""Ends the names of modes in which the target may use the drafter's device as well."""
SAME = ("ar", "sd", "ssd", AUTO)
ALL = (f"ar{ALL_DEVICES}", f"sd{ALL_DEVICES}", "ssd", f"{AUTO}{ALL_DEVICES}")
"""Modes that are compared with one another; the last is judged by the others. SSD always has both devices."""
