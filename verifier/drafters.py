"""The verifier's side of its drafters: joins, sends that never block, growth drained into replicas.

Drafters may die, stall or talk nonsense: the worst that follows is a round without nodes. Knows channels and
messages, not how drafts are made, and no tensors.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ssd_serve.cluster.channel import Channel
from ssd_serve.cluster.polling import poll
from ssd_serve.errors import PairMismatchError, ProtocolError
from ssd_serve.logs import Logger, get_logger
from ssd_serve.messages import (
    Close,
    DrafterMessage,
    Growth,
    Heartbeat,
    Hello,
    Message,
    Open,
    Outcome,
    Pause,
    Refusal,
    Resync,
)
from ssd_serve.verifier.layout import Layout
from ssd_serve.verifier.request import Request

_SILENT_STEPS = 3
_SILENT_EXTRA_S = 0.020
_HEARTBEAT_S = 2.0
_HELD_TOKENS = 64
"""Tokens of a request that drafters hear together while speculation is switched off: one cheap chunk. What
begins then and ends sooner costs them nothing."""


@dataclass(slots=True, eq=False)
class _Held:
    """What a paused drafter has not been told yet of a request."""

    request: Request
    tokens: list[int]
    root: int


@dataclass(slots=True, eq=False)
class Link:
    """One connected drafter.

    `behind` are requests whose messages did not fit: they get one `Open` later. `unclosed` are those whose
    `Close` did not fit, with its epoch.
    """

    channel: Channel
    synchronous: bool = False
    """It works only while it is waited for, so its silence means nothing."""
    name: str = ""
    joined: bool = False
    paused: bool = False
    """Nothing is expected of it now; it hears what was committed in larger pieces."""
    held: dict[int, _Held] = field(default_factory=dict)
    step_s: float = 0.0
    overruns: tuple[int, int] = (0, 0)
    """Of an emulated device: forwards longer than its table says, and all forwards."""
    heard_at: float = 0.0
    asked_at: float = 0.0
    behind: set[int] = field(default_factory=set)
    unclosed: dict[int, int] = field(default_factory=dict)


class Drafters:
    """A list of drafters. `hello` is what they must agree with."""

    def __init__(
        self, hello: Hello, clock: Callable[[], float] = time.monotonic, log: Logger | None = None
    ) -> None:
        self._hello = hello
        self._clock = clock
        self._log = log or get_logger("verifier")
        self._links: list[Link] = []
        self._beat_at = 0.0
        self._layout: Layout | None = None
        self._unopened: dict[int, tuple[Request, int]] = {}
        """What began while speculation was switched off, and its tokens then: no drafter knows of it."""
        self.joins = 0

    @property
    def alive(self) -> int:
        """Number of drafters that have joined."""
        return sum(link.joined for link in self._links)

    @property
    def working(self) -> bool:
        """Whether nodes may be expected: a drafter has joined, and drafting is not switched off."""
        return any(link.joined and not link.paused for link in self._links)

    @property
    def channels(self) -> list[Channel]:
        """What a caller may wait on."""
        return [link.channel for link in self._links]

    @property
    def step_s(self) -> float:
        """Seconds of the fastest working drafter's step; 0 when unknown."""
        known = [link.step_s for link in self._links if link.joined and not link.paused and link.step_s > 0]
        return min(known, default=0.0)

    @property
    def overrun_share(self) -> float:
        """Share of the drafters' emulated forwards that took longer than their table says."""
        late, forwards = (sum(link.overruns[index] for link in self._links) for index in range(2))
        return late / forwards if forwards else 0.0

    def connect(self, channel: Channel, synchronous: bool = False) -> None:
        """A new drafter has connected; it joins when its `Hello` has been checked."""
        link = Link(channel, synchronous, heard_at=self._clock())
        self._links.append(link)
        self._set_paused(link)

    def use(self, layout: Layout) -> None:
        """Let the drafters of this layout work, and the others pause."""
        self._layout = layout
        for link in self._links:
            self._set_paused(link)
        if self.working:
            for request, _ in list(self._unopened.values()):
                self._open(request)

    def _set_paused(self, link: Link) -> None:
        wanted = Layout.INLINE if link.synchronous else Layout.BESIDE
        paused = self._layout is not None and self._layout is not wanted
        if paused == link.paused:
            return
        link.paused = paused
        for number in list(link.held):
            self._tell(link, number)
        if link.joined:
            link.channel.send(Pause(paused))

    def open(self, request: Request) -> None:
        """Start drafting for a request that begins; while nobody drafts, not at once."""
        if self.working or self._layout is None:
            self._open(request)
        else:
            request.open()
            self._unopened[request.number] = request, len(request.tokens)
            for link in self._links:
                link.held.pop(request.number, None)

    def _open(self, request: Request) -> None:
        """Start drafting, or start again at its current tokens, under a new epoch."""
        self._unopened.pop(request.number, None)
        message = request.open()
        for link in self._links:
            link.held.pop(request.number, None)
            if link.joined:
                self._send(link, message, request.number)

    def outcome(self, request: Request, tokens: tuple[int, ...], root: int) -> None:
        """Publish what a round committed, with the next `flush`; call after the request's tokens were
        extended."""
        if request.number in self._unopened:
            _, known = self._unopened[request.number]
            if len(request.tokens) - known >= _HELD_TOKENS:
                self._open(request)
            return
        for link in self._links:
            if not link.joined:
                continue
            held = link.held.get(request.number)
            if held is None:
                held = link.held[request.number] = _Held(request, [], root)
            held.tokens.extend(tokens)
            held.root = root
            if not link.paused or len(held.tokens) >= _HELD_TOKENS:
                self._tell(link, request.number)

    def _tell(self, link: Link, number: int) -> None:
        held = link.held.pop(number)
        position = len(held.request.tokens) - len(held.tokens)
        message = Outcome(number, held.request.epoch, position, tuple(held.tokens), held.root)
        self._send(link, message, number, now=False)

    def flush(self) -> None:
        """Send the outcomes of a round together."""
        for link in self._links:
            if link.channel.pending:
                link.channel.flush()

    def close(self, request: Request) -> None:
        """Stop drafting for a request."""
        if self._unopened.pop(request.number, None) is not None:
            return
        message = Close(request.number, request.epoch)
        for link in self._links:
            link.held.pop(request.number, None)
            link.behind.discard(request.number)
            if link.joined and not link.channel.send(message):
                link.unclosed[message.request] = message.epoch

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
            elif link.behind or link.unclosed:
                self._catch_up(link, requests)
        return grown

    def wait(self, timeout_s: float) -> bool:
        """Wait until a drafter says something."""
        return bool(poll([link.channel for link in self._links if not link.paused], timeout_s))

    def listen(self, timeout_s: float) -> bool:
        """Wait until a drafter with a device of its own says something; False when there is none."""
        return bool(poll([link.channel for link in self._links if not link.synchronous], timeout_s))

    def worth_waiting(self) -> bool:
        """Whether a drafter is there that has not been silent for 3 of its steps + 20 ms after it was
        asked."""
        now = self._clock()
        return any(
            link.joined
            and not link.paused
            and (
                link.synchronous
                or link.heard_at >= link.asked_at
                or now - link.asked_at < _SILENT_STEPS * link.step_s + _SILENT_EXTRA_S
            )
            for link in self._links
        )

    def beat(self) -> None:
        """Send heartbeats when they are due."""
        now = self._clock()
        if now - self._beat_at >= _HEARTBEAT_S:
            self._beat_at = now
            self._send_all(Heartbeat(), None)

    def _take(self, link: Link, message: Message, requests: Mapping[int, Request]) -> int:
        link.heard_at = self._clock()
        if not link.joined and not isinstance(message, Hello | Refusal):
            return 0  # who has not been checked yet is not listened to
        if isinstance(message, Growth):
            request = requests.get(message.request)
            if request is not None and request.replica is not None and not request.replica.apply(message):
                link.channel.send(Resync(message.request, request.epoch))
            return 1
        if isinstance(message, Hello):
            self._join(link, message, requests)
        elif isinstance(message, Heartbeat) and message.step_ms > 0:
            link.step_s = message.step_ms / 1e3
            link.overruns = (message.overruns, message.forwards)
        elif isinstance(message, Resync):
            request = requests.get(message.request)
            if request is not None and message.epoch == request.epoch:
                self._open(request)
        elif isinstance(message, Refusal):
            self._log.warning("drafter left", name=link.name, reason=message.message)
            link.channel.close()
        return 0

    def _join(self, link: Link, hello: Hello, requests: Mapping[int, Request]) -> None:
        check_hello(self._hello, hello)
        link.name, link.joined, link.step_s = hello.name, True, hello.step_ms / 1e3
        self.joins += 1
        link.channel.send(self._hello)
        if link.paused:
            link.channel.send(Pause(paused=True))
        for request in requests.values():
            self._open(request)
        self._log.info("drafter joined", name=hello.name, step_ms=round(hello.step_ms, 2))

    def _catch_up(self, link: Link, requests: Mapping[int, Request]) -> None:
        """Say what did not fit, once the queue is empty: every `Open` costs all drafters their trees."""
        if not link.channel.flush():
            return
        for number, epoch in list(link.unclosed.items()):
            if not link.channel.send(Close(number, epoch)):
                return
            del link.unclosed[number]
        for number in list(link.behind):
            request = requests.get(number)
            link.behind.discard(number)
            if request is not None:
                self._open(request)

    def _send_all(self, message: DrafterMessage, number: int | None) -> None:
        for link in self._links:
            if link.joined:
                self._send(link, message, number)

    def _send(self, link: Link, message: DrafterMessage, number: int | None, now: bool = True) -> None:
        if isinstance(message, Open | Outcome) and link.heard_at >= link.asked_at:
            link.asked_at = self._clock()
        if number is not None and number in link.behind:
            return
        taken = link.channel.send(message) if now else link.channel.post(message)
        if not taken and number is not None:
            link.behind.add(number)


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
