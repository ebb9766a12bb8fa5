"""Bits of draft sources, so that a set of them is one small number, and the names that figures give them.

Names come from strangers too: a few of them are kept, for good, and what comes after them is one source.
"""

from collections.abc import Sequence

from ssd_serve.verifier.drafts.admission import OTHERS

OTHERS_BIT = 1
"""Stands for every source that there is no name for."""
_MOST, _MOST_OF_STRANGERS = 16, 8
_UNNAMED = "unnamed"


class SourceBits:
    """The sources of all drafters that have joined since start."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}

    @property
    def names(self) -> Sequence[str]:
        """In the order of their bits."""
        return (OTHERS, *self._bits)

    def bit(self, source: str, stranger: bool = False) -> int:
        """The bit of a source; a new one gets its own while there is room. Strangers leave some of it to this
        server's own drafters."""
        name = source or _UNNAMED
        known = self._bits.get(name)
        if known is not None:
            return known
        if len(self._bits) >= (_MOST_OF_STRANGERS if stranger else _MOST):
            return OTHERS_BIT
        return self._bits.setdefault(name, 2 << len(self._bits))
