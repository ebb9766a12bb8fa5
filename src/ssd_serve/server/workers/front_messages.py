"""Messages between the server process and those that answer HTTP beside it.

`server -> API worker`: ListeningSocket, Hired, Standing, Lost, and the verifier's reports.
`API worker -> server`: Applied, Begun, and what a server asks a verifier for.
MetricsWanted and MetricsPage both ways.

Both ends are of one installation, so that these have no version.
"""

from typing import cast

import msgspec

from ssd_serve.base.draft_messages import Message
from ssd_serve.base.messages import ServerMessage, VerifierReport


class Applied(msgspec.Struct, frozen=True, tag=True):
    """The first word of a worker. Answered by ListeningSocket and Hired."""

    name: str


class ListeningSocket(msgspec.Struct, frozen=True, tag=True):
    """With this message comes the socket on which the server listens."""


class Hired(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a worker has to know before it can begin. Its secrets come this way and no other."""

    settings: bytes
    """As JSON."""
    folder: str
    """Of the target."""
    salt_secret: bytes
    """By which all workers name the same parts of the prefix cache."""
    first_request: int
    """Its requests are numbered from here on."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """From now on the worker listens to what is told of the engine."""


class Standing(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How the engine stands; several times a second."""

    target: str | None
    progress: str
    active: int
    """Requests of all processes that have not ended."""
    silent_s: float
    lost_s: float | None
    dead: str | None
    restarts: int
    resumed: int
    closing: bool
    """No new requests are taken: the server ends."""


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The engine of this request died. Without a `reason` another one goes on with it."""

    request: int
    reason: str | None = None


class MetricsWanted(msgspec.Struct, frozen=True, tag=True):
    """Tell your page of metrics; the server's is that of all."""

    number: int


class MetricsPage(msgspec.Struct, frozen=True, tag=True):
    """The page that `number` asked for."""

    number: int
    text: str


ToWorker = ListeningSocket | Hired | Standing | Lost | MetricsWanted | MetricsPage | VerifierReport
FromWorker = Applied | Begun | MetricsWanted | MetricsPage | ServerMessage


def carried(message: ToWorker | FromWorker) -> Message:
    """The same, for a channel: it carries any message, and its types name those of the engine's processes."""
    return cast(Message, message)
