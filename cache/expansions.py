"""Expansions as they travel: which node was expanded, and its ranked candidates, in flat buffers.

An expanded node is named by its parent and the token that leads to it, so that a receiver can find it among
candidates that nobody has looked at yet. Most of what comes is never looked at: a receiver checks a whole
message at once, and reads the candidates of a node when it wants them. Knows messages and buffers, not trees.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ssd_serve.messages import Growth
from ssd_serve.seeds import mix

ROOT_STEP = -1
"""Stands for the token of a root, which is named itself."""


class Expansion(NamedTuple):
    """Candidates of one node, best first, with conditional log-probabilities."""

    parent: int
    step: int
    tokens: list[int]
    log_probabilities: list[float]


class Packed(NamedTuple):
    """An expansion of a message that was checked: `size` candidates from the `start`th on, not yet read."""

    name: int
    parent: int
    step: int
    size: int
    start: int
    growth: Growth

    def read(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The candidates, best first, and their conditional log-probabilities."""
        tokens = struct.unpack_from(f"<{self.size}i", self.growth.tokens, 4 * self.start)
        return tokens, struct.unpack_from(f"<{self.size}f", self.growth.log_probabilities, 4 * self.start)


def pack(
    request: int, epoch: int, sequence: int, expansions: Sequence[Expansion], source: str, snapshot: bool
) -> Growth:
    """One growth message."""
    counts = [len(each.tokens) for each in expansions]
    tokens = [token for each in expansions for token in each.tokens]
    values = [value for each in expansions for value in each.log_probabilities]
    return Growth(
        request=request,
        epoch=epoch,
        sequence=sequence,
        parents=np.array([each.parent for each in expansions], dtype="<u8").tobytes(),
        steps=np.array([each.step for each in expansions], dtype="<i4").tobytes(),
        counts=np.array(counts, dtype="<u2").tobytes(),
        tokens=np.array(tokens, dtype="<i4").tobytes(),
        log_probabilities=np.array(values, dtype="<f4").tobytes(),
        source=source,
        snapshot=snapshot,
    )


def unpack(growth: Growth, vocabulary: int) -> list[Packed] | None:
    """The expansions of a message, or None when its buffers do not fit each other or name impossible
    tokens."""
    count, edges = len(growth.parents) // 8, len(growth.tokens) // 4
    sizes = (len(growth.parents), len(growth.steps), len(growth.counts))
    if sizes != (8 * count, 4 * count, 2 * count):
        return None
    if (len(growth.tokens), len(growth.log_probabilities)) != (4 * edges, 4 * edges):
        return None
    counts = struct.unpack(f"<{count}H", growth.counts)
    # As unsigned numbers, negative tokens are too large.
    if sum(counts) != edges or (edges and np.frombuffer(growth.tokens, "<u4").max() >= vocabulary):
        return None
    if not np.isfinite(np.frombuffer(growth.log_probabilities, "<f4")).all():
        return None
    parents = struct.unpack(f"<{count}Q", growth.parents)
    steps = struct.unpack(f"<{count}i", growth.steps)
    found: list[Packed] = []
    start = 0
    for parent, step, length in zip(parents, steps, counts, strict=True):
        name = parent if step == ROOT_STEP else mix(parent, step)
        found.append(Packed(name, parent, step, length, start, growth))
        start += length
    return found
