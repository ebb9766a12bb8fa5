"""The target's features of committed tokens: kept by KV slot, and sent to the drafters that read them.

A drafter that joins late or was paused misses no rows, and a cached prefix keeps its rows. If the store is
full, new rows replace the oldest, and a drafter then begins behind those. A drafter on this machine reads rows
from shared memory, others receive messages. Rows that do not fit wait, so that outcomes, which are small,
never wait for them. Knows slots, walks and a channel, but not when to send.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from ssd_serve.base.draft_messages import Features, SharedMemory
from ssd_serve.base.logs import Logger
from ssd_serve.cache.slots import SlotTable
from ssd_serve.cache.vectors import as_bytes
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.models.interface import feature_name
from ssd_serve.transport.channel import Channel, SocketChannel
from ssd_serve.transport.shared_memory import SharedSpan, SharedWriter
from ssd_serve.verifier.request import Request
from ssd_serve.verifier.round import InFlight, Walk

_NOWHERE = -1
_MAX_PENDING_ROWS = 256
"""Rows of rounds that are kept as the target returned them, until a drafter reads some."""
_MESSAGE_BYTES, _MESSAGES = 1 << 20, 32
"""Size of a message of rows, and most messages of one request at once."""
_MAX_UNSENT_BYTES = 2 << 20
"""Most bytes of rows in a channel's queue: half of the queue."""
_SHARED_BYTES = 64 << 20
"""Size of the shared memory, of which only written pages take memory. A round of 32 requests with 4 tokens each
of a large target, with rows of 48 KiB, writes 6 MiB."""


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
        self._pending: list[_Pending] = []
        self._pending_rows = 0

    def width(self, layers: Sequence[int]) -> int:
        """Numbers of one token, of these layers; 0 while nothing was computed."""
        self._settle()
        return self._rows.shape[1] // len(self.layers) * len(layers)

    def take(self, flight: InFlight, walks: Sequence[Walk]) -> None:
        """Keep the rows of a round's committed tokens."""
        rows: list[int] = []
        slots: list[int] = []
        start = 0
        for walk in walks:
            fed = len(walk.work.chunk.slots)
            rows += [*range(start, start + fed), *(start + fed + index for index in walk.accepted)]
            slots += [*walk.work.chunk.slots, *walk.kept]
            start += walk.work.rows
        found = [flight.result.features[feature_name(layer)] for layer in self.layers]
        self._pending.append(_Pending(found, rows, slots))
        self._pending_rows += len(found[0])
        # A device may write the results of the next round to the same place.
        if self._pending_rows > _MAX_PENDING_ROWS or found[0].device.type != "cpu":
            self._settle()

    def _settle(self) -> None:
        """Copy the rows of pending rounds; of a slot that several rounds have written, the last one's."""
        if not self._pending:
            return
        features = torch.cat([each.chosen() for each in self._pending])
        slots = [slot for each in self._pending for slot in each.slots]
        self._pending, self._pending_rows = [], 0
        newest = {slot: index for index, slot in enumerate(slots)}
        if len(newest) < len(slots):
            features = features[list(newest.values())]
        self.keep(np.array(list(newest), dtype=np.int64), features)

    def last_round(self, slots: Sequence[int], layers: Sequence[int]) -> torch.Tensor | None:
        """Return the rows of these slots if the last round has computed them, in this order and of these layers; no
        other round's rows are copied for that."""
        last = self._pending[-1] if self._pending else None
        if last is None or not slots or slots[0] not in last.slots or tuple(layers) != self.layers:
            return None
        start = last.slots.index(slots[0])
        stop = start + len(slots)
        return last.chosen(slice(start, stop)) if last.slots[start:stop] == slots else None

    def first(self, slots: SlotTable, start: int) -> int:
        """Return the first position >= `start` from which on the rows of all slots are present. It is the
        number of slots if the last row is missing."""
        self._settle()
        missing = np.flatnonzero(~self._are_there(slots.view()[start:]))
        return start + (int(missing[-1]) + 1 if len(missing) else 0)

    def rows(self, slots: npt.NDArray[np.integer], layers: Sequence[int]) -> torch.Tensor:
        """Return the rows of these slots, which must be present: bfloat16 [slots, width of the layers]."""
        rows = self._rows.index_select(0, torch.from_numpy(self._places[slots]))
        if tuple(layers) == self.layers:
            return rows
        places = [self.layers.index(layer) for layer in layers]
        return rows.view(len(rows), len(self.layers), -1)[:, places].flatten(1)

    def write(self, slots: npt.NDArray[np.integer], layers: Sequence[int], into: memoryview) -> None:
        """Write the same rows into a buffer, without a copy in between if they are of all layers."""
        if tuple(layers) != self.layers:
            into[:] = as_bytes(self.rows(slots, layers))
            return
        rows = torch.frombuffer(into, dtype=self._rows.dtype).view(len(slots), -1)
        torch.index_select(self._rows, 0, torch.from_numpy(self._places[slots]), out=rows)

    def keep(self, slots: npt.NDArray[np.int64], rows: torch.Tensor) -> None:
        """Rows [tokens, width] of these slots."""
        if not len(slots):
            return
        if len(slots) > len(self._owners):
            self._allocate(rows)
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

    def _allocate(self, rows: torch.Tensor) -> None:
        """Allocate a table for rows of this width, and for at least this number of rows; drop all kept rows."""
        most = max(len(rows), self._limit // (rows.shape[1] * rows.element_size()))
        count = min(most, len(self._places))
        self._rows = rows.new_empty((count, rows.shape[1]))  # pages are allocated when they are written
        self._owners = np.full(count, _NOWHERE, dtype=np.int64)
        self._places.fill(_NOWHERE)
        self._next = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    found: list[torch.Tensor]  # of each layer [rows, hidden]
    rows: list[int]
    """Those of committed tokens."""
    slots: list[int]

    def chosen(self, which: slice = slice(None)) -> torch.Tensor:
        """Return bfloat16 [tokens, layers * hidden]."""
        chosen = torch.tensor(self.rows[which], device=self.found[0].device)
        return torch.cat(self.found, dim=-1).index_select(0, chosen).to("cpu", torch.bfloat16)


class FeatureSender:
    """Sends rows of the `layers` that a drafter reads, through at most `shared_bytes` of shared memory."""

    def __init__(self, channel: Channel, shared_bytes: int = _SHARED_BYTES) -> None:
        self._shared_bytes = shared_bytes
        self._message_bytes = min(_MESSAGE_BYTES, shared_bytes // 8)
        self.behind = False
        """Rows did not fit and were not sent since."""
        self._layers: tuple[int, ...] = ()
        self._store: FeatureStore | None = None
        self._channel = channel
        self._unsent = 0
        """Bytes of rows that may still be in the channel's queue."""
        self._offered: SharedWriter | None = None
        self._shared: SharedWriter | None = None
        """The offered memory, once the drafter has confirmed that it reads it."""

    @property
    def has_room(self) -> bool:
        if self._shared is not None:
            return self._shared.ring.find(self._message_bytes) is not None
        if self._channel.flush():
            self._unsent = 0
        return not self._unsent

    def begin(self, layers: tuple[int, ...], store: FeatureStore | None, log: Logger) -> None:
        """Start sending these layers; offers shared memory to a drafter on this machine."""
        if not layers:
            return
        self._layers, self._store = layers, store
        if not isinstance(self._channel, SocketChannel) or self._channel.peer:
            return
        try:
            offered = SharedWriter(self._shared_bytes)
        except OSError as error:
            log.warning("no shared memory: features are sent through the socket", reason=str(error))
            return
        if self._channel.send_with(SharedMemory(self._shared_bytes), offered.descriptor):
            self._offered = offered
        offered.close()  # our copy of the descriptor: the mapping stays

    def on_read(self, total: int) -> None:
        """Free the first `total` spans, which the drafter has read. Raises `ProtocolError` if impossible."""
        if self._offered is not None:
            self._offered.ring.give_back(total)
            self._shared = self._offered

    def send(self, request: Request, start: int) -> int:
        """Send a request's rows from position `start` on, without those that were evicted.

        Returns the position behind the last row that was sent.
        """
        store, slots = self._store, request.slots
        if store is None or start == len(slots):
            return start
        if isinstance(self._channel, InlineChannel):
            newest = store.last_round(slots.view()[start:].tolist(), self._layers)
            if newest is not None:
                width = newest.shape[1]
                self._channel.give(Features(request.number, request.epoch, start, width, b""), newest)
                return len(slots)
        start, width = store.first(slots, start), store.width(self._layers)
        most = max(1, self._message_bytes // max(1, 2 * width))
        for _ in range(_MESSAGES):
            rows = slots.view()[start : start + most]
            if not len(rows):
                return start
            if not self._post(Features(request.number, request.epoch, start, width, b""), store, rows):
                break
            start += len(rows)
        self.behind = self.behind or start < len(slots)
        return start

    def _post(self, message: Features, store: FeatureStore, slots: npt.NDArray[np.int32]) -> bool:
        """Post the rows of these slots with the message, or in shared memory; return whether they fit."""
        if isinstance(self._channel, InlineChannel):
            return self._channel.give(message, store.rows(slots, self._layers))
        length, memory = 2 * message.width * len(slots), self._shared
        if memory is None:
            if self._unsent + length > _MAX_UNSENT_BYTES and not self.has_room:
                return False
            self._unsent += length
            return self._channel.post(replace(message, data=as_bytes(store.rows(slots, self._layers))))
        offset = memory.ring.find(length)
        if offset is None:
            return False
        place = SharedSpan(offset, length)
        store.write(slots, self._layers, memory.at(place))
        if not self._channel.post(replace(message, shared=place)):
            return False
        memory.ring.take(place)
        return True
