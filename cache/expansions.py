"""Expansions as they travel: which node was expanded, and its ranked candidates, in flat buffers.

An expanded node is named by its parent and the token that leads to it, so that a receiver can find it among
candidates that nobody has looked at yet. Knows messages and buffers, not trees.
"""

import math
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

    @property
    def name(self) -> int:
        """Name of the expanded node."""
        return self.parent if self.step == ROOT_STEP else mix(self.parent, self.step)


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


def unpack(growth: Growth, vocabulary: int) -> list[Expansion] | None:
    """The expansions of a message, or None when its buffers do not fit each other or name impossible
    tokens."""
    count, edges = len(growth.parents) // 8, len(growth.tokens) // 4
    sizes = (len(growth.parents), len(growth.steps), len(growth.counts))
    if sizes != (8 * count, 4 * count, 2 * count):
        return None
    if (len(growth.tokens), len(growth.log_probabilities)) != (4 * edges, 4 * edges):
        return None
    # Mostly a few dozen numbers: struct is several times faster than arrays are.
    counts = struct.unpack(f"<{count}H", growth.counts)
    tokens = struct.unpack(f"<{edges}i", growth.tokens)
    log_probabilities = struct.unpack(f"<{edges}f", growth.log_probabilities)
    if sum(counts) != edges or (edges and (min(tokens) < 0 or max(tokens) >= vocabulary)):
        return None
    if not math.isfinite(sum(log_probabilities)):  # one that is not finite shows in the sum
        return None
    parents = struct.unpack(f"<{count}Q", growth.parents)
    steps = struct.unpack(f"<{count}i", growth.steps)
    found: list[Expansion] = []
    start = 0
    for parent, step, length in zip(parents, steps, counts, strict=True):
        end = start + length
        found.append(Expansion(parent, step, list(tokens[start:end]), list(log_probabilities[start:end])))
        start = end
    return found
