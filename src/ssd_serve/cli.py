"""The command line `ssd`."""


def main() -> int:
    """Placeholder of the first commit: says what is not built."""
    print("ssd: not built yet")
    return 1
