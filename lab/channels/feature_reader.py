"""The drafter of `python -m lab.channels`, in a process of its own: it reads features and guesses nothing.

A script: an address, the layers to read, and how many rows are read until it ends; prints what it took. Each
row that was read is kept once, as a head keeps what it makes of it.
"""

import json
import sys
import time
from collections.abc import Sequence

import torch

from ssd_serve.cache.vectors import VectorTable
from ssd_serve.cluster.channels.channel import TRUSTED
from ssd_serve.cluster.channels.reconnect import Dial
from ssd_serve.draft_messages import (
    NOISE_SCHEME,
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
)
from ssd_serve.drafter.build import CoreParts, build_core
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.contract import Found, NodeRequest
from ssd_serve.drafter.verifier_connection import FROM_VERIFIERS, VerifierConnection
from ssd_serve.logs import get_logger
from ssd_serve.messages import SamplingParameters

VOCABULARY = 1000
CONTEXT = 1 << 20
_PATIENCE_S = 1.0


def hello_of(layers: Sequence[int]) -> Hello:
    """What both ends say."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        noise=NOISE_SCHEME,
        vocabulary=VOCABULARY,
        context=CONTEXT,
        name="reader",
        source="reader",
        features=tuple(layers),
    )


class _Reading:
    """A source that keeps the rows of the last message of each request, and notes when they came."""

    exceptional_step = False

    def __init__(self) -> None:
        self.opens = 0
        """How often requests began, or began again."""
        self._ends: dict[int, int] = {}
        self.arrived: list[tuple[int, int, float]] = []
        """Request, the position behind its last row, and when it came."""
        self._tables: dict[int, VectorTable] = {}

    @property
    def rows(self) -> int:
        """How many positions it has read, of all requests; what comes twice counts once."""
        return sum(self._ends.values())

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        del tokens, parameters, seed
        self._tables[request] = VectorTable()
        self.opens += 1

    def read(self, request: int, position: int, features: torch.Tensor) -> None:
        table = self._tables[request]
        table.begin(position)
        table.extend(features)
        self._ends[request] = max(self._ends.get(request, 0), table.end)
        self.arrived.append((request, table.end, time.monotonic()))

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        pass

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> Sequence[Found]:
        del scales
        return [None] * len(picks)

    def close(self, request: int) -> None:
        self._tables.pop(request, None)


def main(address: str, layers: str, rows: int, shared: bool) -> int:
    """Read so many rows, or as many as come."""
    torch.set_num_threads(1)
    source, log = _Reading(), get_logger("reader", "info")
    limits = GrowthLimits(1, 1, 1, 1, context=CONTEXT)
    core = build_core(CoreParts(guesses=source, limits=limits, ends=(), name="reader"))
    hello = hello_of([int(layer) for layer in layers.split(",")])
    dial = Dial(address, log, intake=FROM_VERIFIERS if shared else TRUSTED)
    verifier = VerifierConnection(core, hello, log, dial=dial)
    spent_s, heard_at = 0.0, time.monotonic()
    while source.rows < rows:
        if verifier.channel is not None:
            verifier.channel.wait(_PATIENCE_S)
        began, before = time.thread_time(), source.rows
        verifier.hear()
        spent_s += time.thread_time() - began
        if source.rows > before:
            heard_at = time.monotonic()
            verifier.beat(Heartbeat())  # a drafter says what it has grown
        elif source.rows and time.monotonic() - heard_at > _PATIENCE_S:
            break
    if verifier.channel is not None:
        verifier.channel.close()  # the verifier sees that all is there
    found = {"cpu_s": spent_s, "rows": source.rows, "opens": source.opens, "arrived": source.arrived}
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "shared"))
