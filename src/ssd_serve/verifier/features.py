"""Stores features that the target has computed of committed tokens, for drafters that read them.

Rows are kept by KV slot, like the keys and values of the token. So a drafter that joins late or was paused
misses no rows, and a cached prefix keeps its rows. If the table is full, new rows replace the oldest, and a
reader then begins behind those. Knows slots, walks and tensors, but not the readers.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd_serve.cache.slots import SlotTable
from ssd_serve.cache.vectors import as_bytes
from ssd_serve.models.interface import feature_name
from ssd_serve.verifier.request import Request
from ssd_serve.verifier.round import InFlight, Walk

_NOWHERE = -1


class FeatureStore:
    """Outputs of some `layers` of the target, or `FINAL`, for as many KV `slots`. Keeps at most `limit`
    bytes, but always the rows of one round."""

    def __init__(self, layers: Sequence[int], limit: int, slots: int) -> None:
        self.layers = tuple(layers)
        self._limit = limit
        self._rows = torch.empty((0, 0))  # [places, layers * hidden]
        self._places = np.full(slots, _NOWHERE, dtype=np.int64)  # where a slot's row is
        self._owners = np.zeros(0, dtype=np.int64)  # [places], slot of the row
        self._next = 0

    def width(self, layers: Sequence[int]) -> int:
        """Numbers of one token, of these layers; 0 while nothing was computed."""
        return self._rows.shape[1] // len(self.layers) * len(layers)

    def take(self, flight: InFlight, walks: Sequence[Walk]) -> None:
        """Keep the rows of a round's committed tokens."""
        rows: list[int] = []
        slots: list[int] = []
        start = 0
        for walk in walks:
            request = walk.work.chunk.request
            request.features = request.features or RequestFeatures(self, request)
            fed = len(walk.work.chunk.slots)
            rows += [*range(start, start + fed), *(start + fed + index for index in walk.accepted)]
            slots += [*walk.work.chunk.slots, *walk.kept]
            start += walk.work.rows
        found = [flight.result.features[feature_name(layer)] for layer in self.layers]
        chosen = torch.tensor(rows, device=found[0].device)
        features = torch.cat([each.index_select(0, chosen) for each in found], dim=-1)
        self.keep(np.array(slots, dtype=np.int64), features.to("cpu", torch.bfloat16))

    def first(self, slots: SlotTable, start: int) -> int:
        """Return the first position >= `start` from which on the rows of all slots are present. It is the
        number of slots if the last row is missing."""
        missing = np.flatnonzero(~self._are_there(slots.view()[start:]))
        return start + (int(missing[-1]) + 1 if len(missing) else 0)

    def rows(self, slots: SlotTable, start: int, count: int) -> torch.Tensor:
        """Return the rows of `count` positions, which must be present: bfloat16 [count, layers * hidden]."""
        places = self._places[slots.view()[start : start + count]]
        return self._rows.index_select(0, torch.from_numpy(places))

    def write(self, slots: SlotTable, start: int, count: int, into: memoryview) -> None:
        """Write the same rows into a buffer, without a copy in between."""
        places = self._places[slots.view()[start : start + count]]
        rows = torch.frombuffer(into, dtype=self._rows.dtype).view(count, -1)
        torch.index_select(self._rows, 0, torch.from_numpy(places), out=rows)

    def only(self, layers: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """Select some of the layers: [count, width of those]."""
        if tuple(layers) == self.layers:
            return rows
        places = [self.layers.index(layer) for layer in layers]
        count, width = rows.shape
        return rows.view(count, len(self.layers), width // len(self.layers))[:, places].flatten(1)

    def keep(self, slots: npt.NDArray[np.int64], rows: torch.Tensor) -> None:
        """Rows [tokens, width] of these slots."""
        if not len(slots):
            return
        if len(slots) > len(self._owners):
            self._make_room(rows)
        count, places = len(self._owners), self._places[slots]
        # With places for all slots each keeps its place; with fewer the oldest rows are replaced first.
        whole = count == len(self._places)
        new = np.flatnonzero(~self._are_there(slots)) if whole else np.arange(len(slots))
        places[new] = (self._next + np.arange(len(new))) % count
        self._next += len(new)
        self._owners[places] = slots
        self._places[slots] = places
        self._rows[torch.from_numpy(places)] = rows

    def _are_there(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        if not len(self._owners):
            return np.zeros(len(slots), dtype=np.bool_)
        places = self._places[slots]
        there: npt.NDArray[np.bool_] = (places != _NOWHERE) & (self._owners[places] == slots)
        return there

    def _make_room(self, rows: torch.Tensor) -> None:
        """Allocate a table for rows of this width, and for at least this number of rows; drop all kept rows."""
        most = max(len(rows), self._limit // (rows.shape[1] * rows.element_size()))
        count = min(most, len(self._places))
        self._rows = rows.new_empty((count, rows.shape[1]))  # pages are allocated when they are written
        self._owners = np.full(count, _NOWHERE, dtype=np.int64)
        self._places.fill(_NOWHERE)
        self._next = 0


class RequestFeatures:
    """`TokenFeatures` of one request."""

    def __init__(self, store: FeatureStore, request: Request) -> None:
        self._store = store
        self._request = request

    @property
    def end(self) -> int:
        return len(self._request.slots)

    def first(self, start: int) -> int:
        return self._store.first(self._request.slots, start)

    def width(self, layers: Sequence[int]) -> int:
        return self._store.width(layers)

    def rows(self, start: int, count: int, layers: Sequence[int]) -> bytes:
        return as_bytes(self._store.only(layers, self._store.rows(self._request.slots, start, count)))

    def write(self, start: int, count: int, layers: Sequence[int], into: memoryview) -> None:
        if tuple(layers) == self._store.layers:
            self._store.write(self._request.slots, start, count, into)
        else:
            into[:] = self.rows(start, count, layers)
