"""What the target has computed of committed tokens, for drafters that read it.

Each request keeps its rows while there is room, so that a drafter which comes later, or was not listening,
loses nothing; beyond that it begins behind a gap. Prompts that are found in the prefix cache are such gaps:
nothing is computed of them. Knows walks and tensors; not who reads them.
"""

from collections.abc import Sequence

import torch

from ssd_serve.cache.vectors import VectorTable
from ssd_serve.verifier.request import Request
from ssd_serve.verifier.round import InFlight, Walk


class FeatureStore:
    """Outputs of some `layers` of the target, at most `limit` bytes of them."""

    def __init__(self, layers: Sequence[int], limit: int) -> None:
        self.layers = tuple(layers)
        self._limit = limit
        self.kept = 0
        """Bytes that requests keep."""

    def take(self, flight: InFlight, walks: Sequence[Walk]) -> None:
        """Keep the rows of a round's committed tokens with their requests."""
        rows: list[int] = []
        counts: list[int] = []
        start = 0
        for walk in walks:
            fed = len(walk.work.part.slots)
            committed = [*range(start, start + fed), *(start + fed + index for index in walk.accepted)]
            counts.append(len(committed))
            rows += committed
            start += walk.work.rows
        found = [flight.result.features[f"layer.{layer}"] for layer in self.layers]
        chosen = torch.tensor(rows, device=found[0].device)
        features = torch.cat([each.index_select(0, chosen) for each in found], dim=-1)
        kept = features.to("cpu", torch.bfloat16)  # [committed, layers * hidden]
        start = 0
        for walk, count in zip(walks, counts, strict=True):
            request = walk.work.part.request
            self._keep(request, len(request.slots), kept[start : start + count])
            start += count

    def forget(self, request: Request) -> None:
        """A request is over."""
        if request.features is not None:
            self.kept -= request.features.bytes
            request.features = None

    def _keep(self, request: Request, position: int, rows: torch.Tensor) -> None:
        table = request.features
        if table is None:
            table = request.features = VectorTable()
        self.kept -= table.bytes
        if not len(table) or not table.first <= position <= table.end:
            table.begin(position)
        table.extend(rows[table.end - position :])  # what is computed again after a preemption is there
        if self.kept + table.bytes > self._limit:
            table.begin(position)
            table.extend(rows)
        self.kept += table.bytes
