"""What drafters say, and what follows: joins, growth into replicas, and where a request stands for who asks.

Each drafter has credit for so much work a drain; what comes faster waits in its socket. Knows messages and
replicas; not what trees are for.
"""

from collections.abc import Callable

from ssd_serve.base.draft_messages import (
    Growth,
    Heartbeat,
    Hello,
    Message,
    SharedMemoryRead,
    Refusal,
    Resync,
)
from ssd_serve.base.errors import PairMismatchError, ProtocolError
from ssd_serve.base.logs import Logger
from ssd_serve.verifier.drafts.admission import Admission
from ssd_serve.verifier.drafts.homes import Homes, Requests
from ssd_serve.verifier.drafts.link import Link
from ssd_serve.verifier.drafts.links import Links
from ssd_serve.verifier.drafts.source_bits import SourceBits

_WORK_A_DRAIN, _MIN_WORK = 2048, 32
"""Messages and expansions that one drain takes, of all drafters and of each at least: some milliseconds."""
_CANDIDATES_A_WORK = 16
_HERE_S = 2.0
"""Who has said something since then holds its name; drafters beat four times as often."""


class Reception:
    """Hears drafters, which must agree with `hello`, and answers them."""

    def __init__(
        self,
        hello: Hello,
        admission: Admission,
        links: Links,
        homes: Homes,
        log: Logger,
        joined: Callable[[Link], object],
    ) -> None:
        """`joined` is called with whoever has joined, before it is given requests."""
        self._joined = joined
        self._hello = hello
        self._admission = admission
        self._links = links
        self._homes = homes
        self._log = log
        self.sources = SourceBits()
        self.rejoins = 0
        """Of drafters with a device of their own that had been here before."""
        self.expansions = 0
        """Nodes that drafters have said to have expanded."""

    def drain(self, requests: Requests) -> int:
        """Take the messages that wait, as many as a round has time for, and let go who has left. Returns the
        number of growth messages."""
        grown = 0
        share = max(_MIN_WORK, _WORK_A_DRAIN // max(1, len(self._links)))
        for link in list(self._links):
            link.earn(share)
            grown += self._links.attempt(link, self._hear, link, requests) or 0
            if link.failed or (link.channel.closed and not link.inbox):
                self._links.remove(link)
                self._homes.leave(link, requests)
            else:
                self._links.attempt(link, link.catch_up)
        return grown

    def _hear(self, link: Link, requests: Requests) -> int:
        grown, inbox = 0, link.inbox
        if not inbox:
            inbox.extend(link.channel.receive())
        while inbox and link.credit > 0:
            grown += self._take(link, inbox.popleft(), requests)
        if not inbox and link.channel.closed:
            inbox.extend(link.channel.receive())  # says why, if it was nonsense
        return grown

    def _take(self, link: Link, message: Message, requests: Requests) -> int:
        link.liveness.heard(message)
        link.credit -= 1
        if isinstance(message, Growth) and link.joined:
            self._grow(link, message, requests)
            return 1
        if isinstance(message, Hello) and not link.joined:
            self._join(link, message, requests)
        elif isinstance(message, Refusal):
            self._links.hang_up(link, message.message)
        elif not link.joined:
            link.liveness.said_nothing()  # who has not been checked yet is not listened to
        elif isinstance(message, Resync):
            request = requests.get(message.request)
            if (
                request is None
                or message.epoch != request.epoch
                or not self._homes.drafts(link, message.request)
            ):
                link.liveness.said_nothing()
            else:
                link.resync(request)
        elif isinstance(message, SharedMemoryRead):
            link.pieces_read(message.total)
        elif not isinstance(message, Heartbeat | Hello):
            raise ProtocolError(f"a drafter says nothing like {type(message).__name__}")
        return 0

    def _grow(self, link: Link, growth: Growth, requests: Requests) -> None:
        """Of requests that are another drafter's nothing is taken, but for the end of what was on its way."""
        expansions = len(growth.parents) // 8
        self.expansions += expansions
        link.credit -= expansions + len(growth.tokens) // (4 * _CANDIDATES_A_WORK)
        request = requests.get(growth.request)
        replica = request.replica if request is not None else None
        if replica is None or not self._homes.drafts(link, growth.request):
            link.liveness.said_nothing()
            return
        if not expansions or growth.epoch != replica.epoch:
            link.liveness.said_nothing()
        if replica.apply(growth, link.number, link.source_bit):
            link.grew(growth.request)
        else:
            link.channel.send(Resync(growth.request, growth.epoch))
        link.credit -= replica.merged // _CANDIDATES_A_WORK

    def _join(self, link: Link, hello: Hello, requests: Requests) -> None:
        self._admission.check(hello, link.stranger, self._homes.sources)
        if not link.synchronous:
            if not link.peer and self._admission.names.banned(hello.name):
                link.failed = True
                return
            for other in self._links.beside:
                if other.name == hello.name:
                    _replace(other, link, hello)
            self.rejoins += self._admission.knows(hello.name)
        link.join(self._hello, hello, self._log)
        link.source_bit = self.sources.bit(link.source, link.stranger)
        self._joined(link)
        self._log.info("drafter joined", name=link.name, step_ms=round(hello.step_ms, 2))
        self._homes.join(link, requests)


def _replace(other: Link, link: Link, hello: Hello) -> None:
    """A name comes again: of the same drafter, whose old connection was not seen to end, or of another one.
    This server's own drafters come before strangers."""
    same = other.instance == hello.instance or other.liveness.silent_s >= _HERE_S
    if link.stranger > other.stranger or (link.stranger == other.stranger and not same):
        raise PairMismatchError(
            f"another drafter has joined as {hello.name}: give each a name of its own (--name)"
        )
    other.failed = True
    other.channel.close()
