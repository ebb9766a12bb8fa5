"""Smaller rounds after one for which a device had too little memory, for a while.

Knows numbers of rows; no device and no request.
"""

_LASTS = 64
"""Rounds until the bounds double."""
_FIRST_NODES = 8
_MAX_NODES = 512
"""A bound on nodes of a round that binds hardly any."""


class Shortage:
    """The bounds. Tokens do not depend on them: every row's choice is the same in any batch."""

    def __init__(self, prefill_chunk: int) -> None:
        self.count = 0
        """How often memory ran out."""
        self.reason = ""
        """What the device said last."""
        self._largest = prefill_chunk
        self._chunk = prefill_chunk
        self._nodes: int | None = None
        self._rounds = 0

    @property
    def chunk(self) -> int:
        """Most prompt tokens of a round."""
        return self._chunk

    @property
    def nodes(self) -> int | None:
        """Most tree nodes of a round; None: any number."""
        return self._nodes

    def strike(self, prompt_rows: int, reason: str) -> None:
        """Memory ran out in a round with so many prompt tokens."""
        self.count += 1
        self.reason = reason
        self._nodes = self._rounds = 0
        self._chunk = max(1, min(self._chunk, prompt_rows or self._chunk) // 2)

    def passed(self) -> None:
        """A round went well."""
        if self._nodes is None and self._chunk == self._largest:
            return
        self._rounds += 1
        if self._rounds % _LASTS == 0:
            self._chunk = min(2 * self._chunk, self._largest)
            if self._nodes is not None:
                self._nodes = max(2 * self._nodes, _FIRST_NODES)
                self._nodes = self._nodes if self._nodes < _MAX_NODES else None
