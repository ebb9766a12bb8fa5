"""Numbers on the benchmarks' command lines: types for argparse that refuse what makes no sense."""

import argparse


def count(text: str) -> int:
    """At least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def count_or_zero(text: str) -> int:
    """0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def positive(text: str) -> float:
    """Greater than 0, and finite."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be greater than 0, and finite")
    return value


def positive_or_zero(text: str) -> float:
    """0 or more, and finite."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more, and finite")
    return value or 0.0
