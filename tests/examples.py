"""How often a property is tried: as often as its test says in CI, a few times in the quick suite."""

import os

WHOLE = bool(os.environ.get("CI"))
"""Whether all examples are wanted; `make test-all` says so."""
_SHARE = 4


def examples(count: int) -> int:
    """Of one test. The quick suite tries others every time, CI always the same."""
    return count if WHOLE else max(1, count // _SHARE)
