"""The verifier's side of its drafters: joins, who of them works, growth drained into replicas.

Drafters may die, stall or talk nonsense: the worst that follows is a round without nodes. Knows channels and
messages, not how drafts are made, and no tensors.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from ssd_serve.cluster.channel import Channel
from ssd_serve.cluster.polling import poll
from ssd_serve.errors import PairMismatchError, ProtocolError
from ssd_serve.logs import Logger, get_logger
from ssd_serve.messages import Growth, Heartbeat, Hello, Message, Refusal, Resync
from ssd_serve.verifier.layout import Layout
from ssd_serve.verifier.link import Link
from ssd_serve.verifier.request import Request

_HEARTBEAT_S = 2.0


class Drafters:
    """A list of drafters. `hello` is what they must agree with."""

    def __init__(
        self,
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
        log: Logger | None = None,
        poll: Callable[[Sequence[Channel], float], Sequence[Channel]] = poll,
    ) -> None:
        """`poll` waits until one of some channels has something to say."""
        self._hello = hello
        self._clock = clock
        self._poll = poll
        self._log = log or get_logger("verifier")
        self._links: list[Link] = []
        self._beat_at = 0.0
        self._layout: Layout | None = None
        self.joins = 0
        """Of drafters with a device of their own, again and again."""

    @property
    def alive(self) -> int:
        """Number of drafters that have joined."""
        return sum(link.joined for link in self._links)

    @property
    def beside(self) -> int:
        """Those of them that have a device of their own: a process that can die and come back."""
        return sum(link.joined and not link.synchronous for link in self._links)

    @property
    def working(self) -> bool:
        """Whether nodes may be expected: a drafter has joined, and drafting is not switched off."""
        return any(link.working for link in self._links)

    @property
    def channels(self) -> list[Channel]:
        """What a caller may wait on."""
        return [link.channel for link in self._links]

    @property
    def step_s(self) -> float:
        """Seconds of the fastest working drafter's step; 0 when unknown."""
        return min((link.step_s for link in self._links if link.working and link.step_s > 0), default=0.0)

    @property
    def overrun_share(self) -> float:
        """Share of the drafters' emulated forwards that took longer than their table says."""
        late, forwards = (sum(link.overruns[index] for link in self._links) for index in range(2))
        return late / forwards if forwards else 0.0

    def connect(self, channel: Channel, synchronous: bool = False) -> None:
        """A new drafter has connected; it joins when its `Hello` has been checked."""
        link = Link(channel, self._clock, synchronous)
        self._links.append(link)
        link.pause(self._pauses(link))

    def use(self, layout: Layout) -> None:
        """Let the drafters of this layout work, and the others pause."""
        self._layout = layout
        for link in self._links:
            link.pause(self._pauses(link))

    def open(self, request: Request) -> None:
        """Start drafting for a request, or start again at its current tokens, under a new epoch."""
        message = request.open()
        for link in self._links:
            link.open(request, message)

    def outcome(self, request: Request, tokens: tuple[int, ...], root: int) -> None:
        """Publish what a round committed, with the next `flush`; call after the request's tokens were
        extended and its replica has moved."""
        for link in self._links:
            link.outcome(request, tokens, root)

    def flush(self) -> None:
        """Send the outcomes of a round together."""
        for link in self._links:
            link.flush()

    def close(self, request: Request) -> None:
        """Stop drafting for a request."""
        for link in self._links:
            link.close(request)

    def drain(self, requests: Mapping[int, Request]) -> int:
        """Take every waiting message; growth goes into the replicas. Returns the number of growth
        messages."""
        grown = 0
        for link in list(self._links):
            try:
                messages = link.channel.receive()
                for message in messages:
                    grown += self._take(link, message, requests)
            except (ProtocolError, PairMismatchError) as error:
                self._log.warning("drafter refused", name=link.name, reason=str(error))
                link.channel.send(Refusal(str(error)))
                link.channel.flush()
                link.channel.close()
            if link.channel.closed:
                link.channel.close()  # our own end too
                self._links.remove(link)
                self._log.warning("drafter left", name=link.name)
            else:
                link.catch_up(requests)
        return grown

    def wait(self, timeout_s: float) -> bool:
        """Wait until a drafter says something."""
        return bool(self._poll([link.channel for link in self._links if not link.paused], timeout_s))

    def listen(self, timeout_s: float) -> bool:
        """Wait until a drafter with a device of its own says something; False when there is none."""
        return bool(self._poll([link.channel for link in self._links if not link.synchronous], timeout_s))

    def worth_waiting(self) -> bool:
        """Whether a drafter works that has not been silent for too long after it was asked."""
        return any(link.worth_waiting for link in self._links)

    def beat(self) -> None:
        """Send heartbeats when they are due."""
        now = self._clock()
        if now - self._beat_at >= _HEARTBEAT_S:
            self._beat_at = now
            for link in self._links:
                if link.joined:
                    link.channel.send(Heartbeat())

    def _pauses(self, link: Link) -> bool:
        wanted = Layout.INLINE if link.synchronous else Layout.BESIDE
        return self._layout is not None and self._layout is not wanted

    def _take(self, link: Link, message: Message, requests: Mapping[int, Request]) -> int:
        link.heard(message)
        if not link.joined and not isinstance(message, Hello | Refusal):
            return 0  # who has not been checked yet is not listened to
        if isinstance(message, Growth):
            request = requests.get(message.request)
            if request is not None and request.replica is not None and not request.replica.apply(message):
                link.channel.send(Resync(message.request, request.epoch))
            return 1
        if isinstance(message, Hello):
            check_hello(self._hello, message)
            link.join(self._hello, message, requests)
            self.joins += not link.synchronous
            self._log.info("drafter joined", name=message.name, step_ms=round(message.step_ms, 2))
        elif isinstance(message, Resync):
            request = requests.get(message.request)
            if request is not None and message.epoch == request.epoch:
                self.open(request)
        elif isinstance(message, Refusal):
            self._log.warning("drafter left", name=link.name, reason=message.message)
            link.channel.close()
        return 0


def check_hello(mine: Hello, theirs: Hello) -> None:
    """Raise `PairMismatchError` with what differs and what to do, unless the two can work together."""
    if mine.protocol != theirs.protocol:
        raise PairMismatchError(
            f"protocol versions differ (verifier {mine.protocol}, drafter {theirs.protocol}): "
            "install the same version of ssd-serve on both sides"
        )
    if mine.noise != theirs.noise:
        raise PairMismatchError(f"noise schemes differ (verifier {mine.noise}, drafter {theirs.noise})")
    if mine.tokenizer != theirs.tokenizer:
        raise PairMismatchError(
            "the draft model's tokenizer differs from the target's: choose a draft model of the same family"
        )
