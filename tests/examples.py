"""Number of hypothesis examples: as set by the test in CI, fewer in the quick suite."""

import os

WHOLE = bool(os.environ.get("CI"))
_SHARE = 4


def examples(count: int) -> int:
    return count if WHOLE else max(1, count // _SHARE)
