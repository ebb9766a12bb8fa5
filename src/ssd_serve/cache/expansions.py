"""The wire format of expansions: the expanded node and its ranked candidates, in flat buffers.

An expanded node is addressed by its parent's name and the token that leads to it, because the receiver may
have no object for it. A receiver validates a whole message at once and reads the candidates of a node on
first access; most are never read. Knows messages and buffers, not trees.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd_serve.base.draft_messages import Growth
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.seeds import mix

MAX_CANDIDATES = 65_536
"""Limit of one message: a snapshot of the largest tree that a setting allows."""
_FLOATS, _SIGNED, _UNSIGNED = np.dtype("<f4"), np.dtype("<i4"), np.dtype("<u4")
_SHARED_BYTES = 2048
"""Messages up to this size are kept whole by their expansions, which costs less than copying parts."""
ROOT_STEP = -1
"""The step of a root. Its expansion carries the root's own name in place of a parent's name."""


class Expansion(NamedTuple):
    """Candidates of one node, best first, with conditional log-probabilities."""

    parent: int
    step: int
    tokens: list[int]
    log_probabilities: list[float]


class PackedExpansion(NamedTuple):
    """An expansion of a validated message: `size` candidates from index `start` on, not yet read."""

    name: int
    parent: int
    step: int
    size: int
    start: int
    tokens: bytes
    log_probabilities: bytes
    fresh: bool = False
    """True for expansions of a block: estimates from nearer by, which replace earlier ones of the same source."""

    def read(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The candidates, best first, and their conditional log-probabilities."""
        tokens, log_probabilities = _candidates(self.size)
        at = 4 * self.start
        return tokens.unpack_from(self.tokens, at), log_probabilities.unpack_from(self.log_probabilities, at)

    def detached(self) -> "PackedExpansion":
        """A copy that does not keep its message in memory."""
        part = slice(4 * self.start, 4 * (self.start + self.size))
        return self._replace(
            start=0, tokens=self.tokens[part], log_probabilities=self.log_probabilities[part]
        )


def pack(
    request: int, epoch: int, sequence: int, expansions: Sequence[Expansion], source: str, snapshot: bool
) -> Growth:
    """Encode expansions as one growth message."""
    tokens = [token for each in expansions for token in each.tokens]
    values = [value for each in expansions for value in each.log_probabilities]
    places = [(each.parent, each.step) for each in expansions]
    counts = [len(each.tokens) for each in expansions]
    arrays = np.array(tokens, dtype=_SIGNED), np.array(values, dtype=_FLOATS)
    return pack_arrays(request, epoch, sequence, places, counts, *arrays, source, snapshot)


def pack_arrays(
    request: int,
    epoch: int,
    sequence: int,
    places: Sequence[tuple[int, int]],
    counts: Sequence[int],
    tokens: npt.NDArray[np.int32],
    log_probabilities: npt.NDArray[np.float32],
    source: str,
    snapshot: bool = False,
    rows: Sequence[int] = (),
) -> Growth:
    """`pack` for arrays of all candidates in order; `places` are parents and steps, `counts` candidates, of rows if
    there are `rows`, which several expansions may share."""
    as_parents, as_steps, as_rows = _places(len(places))
    return Growth(
        request=request,
        epoch=epoch,
        sequence=sequence,
        parents=as_parents.pack(*[parent for parent, _ in places]),
        steps=as_steps.pack(*[step for _, step in places]),
        counts=_places(len(counts))[2].pack(*counts),
        tokens=tokens.astype(_SIGNED, copy=False).tobytes(),
        log_probabilities=log_probabilities.astype(_FLOATS, copy=False).tobytes(),
        source=source,
        snapshot=snapshot,
        rows=as_rows.pack(*rows) if rows else b"",
    )


def unpack(growth: Growth, vocabulary: int) -> list[PackedExpansion] | None:
    """The expansions of a message; None if a token is not in the target's vocabulary.

    Raises `ProtocolError` for buffers of inconsistent lengths, nodes without candidates, more than
    `MAX_CANDIDATES` candidates, rows that do not exist and log-probabilities that are not finite.
    """
    count, edges, sets = len(growth.parents) // 8, len(growth.tokens) // 4, len(growth.counts) // 2
    sizes = (len(growth.parents), len(growth.steps), len(growth.rows or growth.counts), len(growth.counts))
    if sizes != (8 * count, 4 * count, 2 * count, 2 * sets):
        raise ProtocolError("the buffers of a growth message have inconsistent lengths")
    if (len(growth.tokens), len(growth.log_probabilities)) != (4 * edges, 4 * edges):
        raise ProtocolError("the candidates of a growth message have inconsistent lengths")
    if max(count, edges, sets) > MAX_CANDIDATES:
        raise ProtocolError(f"a growth message has more than {MAX_CANDIDATES} candidates")
    as_parents, as_steps, as_rows = _places(count)
    counts = _places(sets)[2].unpack(growth.counts)
    if sum(counts) != edges or 0 in counts:
        raise ProtocolError("a growth message expands nodes without candidates")
    if not np.logical_and.reduce(np.isfinite(np.frombuffer(growth.log_probabilities, _FLOATS))):
        raise ProtocolError("a growth message has log-probabilities that are not finite")
    # Read as unsigned, negative tokens exceed any vocabulary.
    if edges and np.maximum.reduce(np.frombuffer(growth.tokens, _UNSIGNED)) >= vocabulary:
        return None
    parents, steps = as_parents.unpack(growth.parents), as_steps.unpack(growth.steps)
    names = [
        parent if step == ROOT_STEP else mix(parent, step)
        for parent, step in zip(parents, steps, strict=True)
    ]
    starts: Iterable[int] = accumulate(counts, initial=0)
    if growth.rows:
        rows = as_rows.unpack(growth.rows)
        if max(rows) >= sets:
            raise ProtocolError("a growth message names a row of candidates that it does not have")
        all_starts = list(starts)
        counts, starts = tuple([counts[row] for row in rows]), [all_starts[row] for row in rows]
        if sum(counts) > MAX_CANDIDATES:
            raise ProtocolError(f"a growth message has more than {MAX_CANDIDATES} candidates")
    buffers = repeat(growth.tokens), repeat(growth.log_probabilities), repeat(bool(growth.rows))
    found = list(
        map(PackedExpansion._make, zip(names, parents, steps, counts, starts, *buffers, strict=False))
    )
    return (
        found if growth.rows or len(growth.tokens) <= _SHARED_BYTES else [each.detached() for each in found]
    )


@lru_cache(256)
def _candidates(count: int) -> tuple[Struct, Struct]:
    # Cached: building a `Struct` takes longer than using it.
    return Struct(f"<{count}i"), Struct(f"<{count}f")


@lru_cache(256)
def _places(count: int) -> tuple[Struct, Struct, Struct]:
    return Struct(f"<{count}Q"), Struct(f"<{count}i"), Struct(f"<{count}H")
