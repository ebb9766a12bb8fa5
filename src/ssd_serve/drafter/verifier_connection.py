"""A drafter's connection to one verifier: handshake, messages, loss and reconnection.

A drafter may serve several verifiers: in its core, request r of verifier p of n has the number r * n + p. A
verifier that breaks the protocol is disconnected, and the others are served on.
"""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Close,
    Features,
    Growth,
    Heartbeat,
    Hello,
    Open,
    Outcome,
    Pause,
    Refusal,
    Resync,
    SharedMemory,
    SharedMemoryRead,
)
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.logs import Logger
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.transport.channel import Channel, ReceiveLimits, SocketChannel
from ssd_serve.transport.listener import Reconnector
from ssd_serve.transport.shared_memory import SharedReader, SharedSpan

VERIFIER_LIMITS = ReceiveLimits(descriptors=True)
"""A verifier on this machine may pass a descriptor of shared memory."""
_MAX_REQUESTS = 4096
"""Open requests of one verifier; it runs at most 1024."""
_LARGEST_NUMBER = 2**48
_LONGEST_REASON = 200


class VerifierConnection:
    """A connection that `dial` makes and renews, or the single connection `channel`."""

    def __init__(
        self,
        core: DrafterCore,
        hello: Hello,
        log: Logger,
        place: tuple[int, int] = (0, 1),
        dial: Reconnector | None = None,
        channel: Channel | None = None,
    ) -> None:
        self.channel = channel
        self.refused = ""
        """The reason why the verifier refuses this drafter."""
        self._logged_refusal = ""
        self.joined = False
        """True while the verifier accepts drafts."""
        self._core = core
        self._hello = hello
        self._log = log
        self._place, self._places = place
        self._dial = dial
        self._paused = False
        self._shared: SharedReader | None = None
        """Memory in which a verifier on this machine writes features."""
        self._sent_read = 0
        if channel is not None:
            channel.send(hello)

    @property
    def gone(self) -> bool:
        """True if the connection is closed and cannot be renewed."""
        return self.channel is None and self._dial is None

    def receive(self) -> None:
        """Connect if possible without waiting, and process the messages that have arrived."""
        if self.channel is None and self._dial is not None:
            self.channel = self._dial.take()
            if self.channel is not None:
                self.channel.send(self._hello)
        if self.channel is None:
            return
        try:
            for message in self.channel.receive():
                self._handle(message)
            self._send_read()
        except ProtocolError as error:
            self._log.warning("verifier broke the protocol", why=str(error))
            self.channel.close()
        if self.channel.closed:
            self._on_lost()

    def send(self, message: Growth | Resync) -> None:
        """Publish growth of one request, or request a resync.

        A full queue drops growth: the verifier sees the gap in the sequence and requests a snapshot.
        """
        if self.channel is None:
            return
        if self._places > 1:
            message = replace(message, request=message.request // self._places)
        self.channel.send(message)

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        if self.channel is not None:
            self.channel.send(heartbeat)

    def _handle(self, message: object) -> None:
        if isinstance(message, Features) and message.shared is not None:
            self._serve(self._copied(message, SharedSpan(*message.shared)))
        elif isinstance(message, SharedMemory):
            self._share(message)
        elif isinstance(message, Open | Outcome | Features | Close | Resync):
            self._serve(message)
        elif isinstance(message, Pause):
            self._paused = message.paused
            self._core.pause(self._requests(), message.paused)
        elif isinstance(message, Hello) and message.protocol != self._hello.protocol:
            self._refuse(
                f"protocol versions differ (verifier {message.protocol}, drafter {self._hello.protocol}): "
                "install the same version of ssd-serve on both sides"
            )
        elif isinstance(message, Hello):
            self.refused, self._logged_refusal, self.joined = "", "", True
            self._log.info("joined", verifier=self._address, step_ms=round(self._hello.step_ms, 2))
            if self._dial is not None:
                self._dial.on_success()
        elif isinstance(message, Refusal):
            self._refuse(message.message)

    def _share(self, message: SharedMemory) -> None:
        """Map the verifier's memory. Without a reply, features come in messages."""
        try:
            descriptor = self.channel.take_descriptor() if isinstance(self.channel, SocketChannel) else -1
            self._shared = SharedReader(descriptor, message.size)
        except OSError as error:
            self._log.warning("no shared memory: features come through the socket", why=str(error))
        else:
            self._sent_read = -1

    def _copied(self, message: Features, place: SharedSpan) -> Features:
        if self._shared is None:
            raise ProtocolError("features refer to shared memory that was not offered")
        return replace(message, data=self._shared.copy(place), shared=None)

    def _send_read(self) -> None:
        """Return memory that the core has read. Sent with the next growth or before the next wait, not
        alone."""
        if self._shared is None or self.channel is None or self._sent_read == self._shared.read:
            return
        if self.channel.post(SharedMemoryRead(self._shared.read)):
            self._sent_read = self._shared.read

    def _refuse(self, why: str) -> None:
        """Close the connection and retry later; logged once for each reason. A verifier that had joined is
        waited for."""
        why = why[:_LONGEST_REASON]
        if why != self._logged_refusal:
            self._log.error("verifier and drafter refuse each other", verifier=self._address, why=why)
        self._logged_refusal = why
        self.refused = "" if self.joined else why
        if self._dial is not None:
            self._dial.on_refusal()
        if self.channel is not None:
            self.channel.close()

    def _serve(self, message: Open | Outcome | Features | Close | Resync) -> None:
        if not 0 <= message.request < _LARGEST_NUMBER or not 0 <= message.epoch < _LARGEST_NUMBER:
            raise ProtocolError("a request number or epoch is out of range")
        if isinstance(message, Open):
            self._check(message)
        if self._places > 1:
            message = replace(message, request=message.request * self._places + self._place)
        if not self._can_read(message):
            if message.request in self._core.requests:
                self._core.forget(message.request)
            return
        for reply in self._core.handle(message):
            if isinstance(reply, Growth | Resync):
                self.send(reply)
        if self._paused and isinstance(message, Open):
            self._core.pause([message.request], paused=True)

    def _can_read(self, message: Open | Outcome | Features | Close | Resync) -> bool:
        """True if the draft model's vocabulary has these tokens; a target's may be larger."""
        tokens: tuple[int, ...] = ()
        if isinstance(message, Open):
            tokens = message.prompt + message.output
        elif isinstance(message, Outcome):
            tokens = message.tokens
        vocabulary = self._hello.vocabulary
        return not tokens or not vocabulary or (min(tokens) >= 0 and max(tokens) < vocabulary)

    def _check(self, message: Open) -> None:
        if not message.prompt or not 0 <= message.seed < 2**64 or not 0 <= message.root < 2**64:
            raise ProtocolError("a request has no prompt, or a seed or name out of range")
        if not math.isfinite(message.parameters.temperature) or message.parameters.temperature < 0:
            raise ProtocolError("a request has an invalid temperature")
        if len(self._requests()) >= _MAX_REQUESTS:
            raise ProtocolError(f"more than {_MAX_REQUESTS} requests are open")

    def _on_lost(self) -> None:
        """Free the requests of a lost verifier; it opens them again when it returns."""
        if self.channel is not None:
            self.channel.close()
        self.channel, self._paused, self.joined, self._shared = None, False, False, None
        self._log.info("verifier left", verifier=self._address)
        for request in self._requests():
            self._core.forget(request)

    def _requests(self) -> Sequence[int]:
        return [number for number in self._core.requests if number % self._places == self._place]

    @property
    def _address(self) -> str:
        return self._dial.address if self._dial is not None else ""
