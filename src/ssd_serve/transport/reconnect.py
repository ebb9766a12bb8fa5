"""Connecting in the background, again and again: whoever dials goes on with other work meanwhile.

Knows addresses and pauses; not what is said, nor why a connection ended.
"""

import threading
import time
from collections.abc import Callable

from ssd_serve.base.errors import SsdError
from ssd_serve.base.logs import Logger
from ssd_serve.transport.channel import TRUSTED, Channel, Intake
from ssd_serve.transport.listener import connect

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_PATIENCE_S = 30.0
"""A verifier that loads its model greets nobody meanwhile."""


class Dial:
    """Connections to one address, one after the other. Ask `answer` until it gives the next."""

    def __init__(
        self,
        address: str,
        log: Logger,
        reach: Callable[[str], Channel] | None = None,
        key: str = "",
        longest_pause_s: float = _LONGEST_PAUSE_S,
        intake: Intake = TRUSTED,
    ) -> None:
        """`key`: what both ends of a TCP connection know. `reach` connects, or raises after a while."""
        self._longest_pause_s = longest_pause_s
        self.address = address
        self._log = log
        self._reach = reach or (lambda address: connect(address, _PATIENCE_S, key=key, intake=intake))
        self._pause_s = 0.0
        self._thread: threading.Thread | None = None
        self._answer: Channel | None = None
        self._failing = False

    def answer(self) -> Channel | None:
        """The next connection, once there is one. Does not wait."""
        if self._thread is None:
            thread = threading.Thread(target=self._dial, name="dial", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError):  # the system has no thread now: asked again soon
                return None
            self._thread = thread
        if self._thread.is_alive():
            return None
        self._thread = None
        answer, self._answer = self._answer, None
        return answer

    def good(self) -> None:
        """The connection serves: when it ends, the next is tried at once."""
        self._pause_s = 0.0

    def bad(self) -> None:
        """The connection is of no use now: the next is tried after the longest pause."""
        self._pause_s = self._longest_pause_s

    def _dial(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), self._longest_pause_s)
        try:
            self._answer = self._reach(self.address)
            self._failing = False
        except SsdError as error:
            if not self._failing:
                self._log.warning("waiting for a verifier", address=self.address, why=str(error))
            self._failing = True
