"""How much of its time a request has a layout's drafts, which begin when its text has been read.

What a layout gave was measured on requests whose prompts its drafters read, and is less by that already: only
what they read beyond it, or for fewer tokens, counts against a change of the layout. Plain Python; knows no
drafters and no requests.
"""

from ssd_serve.verifier.planning.layout import Layout

_MEMORY = 1 / 256
"""As long as the governor remembers a layout's own rounds."""


class LateStart:
    """Compares what is left of requests with whole ones. Of both it is told what plain decoding takes for
    them, `plain_s`, and for how long drafters read first, `read_s`."""

    def __init__(self) -> None:
        self._measured: dict[Layout, float] = {}

    def observe(self, layout: Layout, plain_s: float, read_s: float) -> None:
        """The layout was measured in a round of requests that are so long from beginning to end."""
        share = _drafted(plain_s, read_s)
        known = self._measured.setdefault(layout, share)
        self._measured[layout] += _MEMORY * (share - known)

    def lasting(self, layout: Layout, plain_s: float, read_s: float) -> float:
        """The share of what was measured that the layout gives where it begins now, with so much left: at
        most 1. All of the reading counts before anything was measured."""
        return min(1.0, _drafted(plain_s, read_s) / max(self._measured.get(layout, 1.0), 1e-9))


def _drafted(plain_s: float, read_s: float) -> float:
    return plain_s / (plain_s + read_s) if read_s else 1.0
