"""How one drafter gets what the target has computed of committed tokens: rows by position, in messages, as
fast as it takes them.

What finds no room waits, so that outcomes, which are small, never wait for it. Knows a channel and rows; not
when they are due.
"""

from ssd_serve.cluster.channels.channel import Channel
from ssd_serve.messages import Features
from ssd_serve.verifier.request import Request, TokenFeatures

_MESSAGE_BYTES, _MESSAGES = 1 << 20, 32
"""Of a message, about; and how many such messages of a request are sent at once."""
_MOST_UNSENT_BYTES = 2 << 20
"""Half of a channel's queue."""


class FeatureSender:
    """Sends rows of the `layers` that the drafter reads."""

    def __init__(self, channel: Channel) -> None:
        self.layers: tuple[int, ...] = ()
        self.behind = False
        """Something found no room and was not sent since."""
        self._channel = channel
        self._unsent = 0
        """Bytes of rows that may still be in the channel's queue."""

    @property
    def has_room(self) -> bool:
        """Whether it is worth sending on."""
        if self._channel.flush():
            self._unsent = 0
        return not self._unsent

    def send(self, request: Request, start: int) -> int:
        """Send a request's rows from a position on; the position behind the last one that was sent. Rows that
        are gone are left out."""
        table = request.features
        if not self.layers or table is None:
            return start
        start = table.first(start)
        most = max(1, _MESSAGE_BYTES // max(1, 2 * table.width(self.layers)))
        for _ in range(_MESSAGES):
            count = min(most, table.end - start)
            if count <= 0:
                return start
            if not self._post(request, table, start, count):
                break
            start += count
        self.behind = self.behind or start < table.end
        return start

    def _post(self, request: Request, table: TokenFeatures, start: int, count: int) -> bool:
        width = table.width(self.layers)
        if self._unsent + 2 * width * count > _MOST_UNSENT_BYTES and not self.has_room:
            return False
        data = table.part(start, count, self.layers)
        if not self._channel.post(Features(request.number, request.epoch, start, width, data)):
            return False
        self._unsent += len(data)
        return True
