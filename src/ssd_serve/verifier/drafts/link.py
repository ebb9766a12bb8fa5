"""One drafter as the verifier sees it, and what it was told of each of its requests.

Every request that a drafter has is in one state, and `_sync` sends what that state owes:

    state     what the drafter knows                        owed
    UNKNOWN   nothing: the request began while it paused    Open
    FOLLOWS   the first `length` tokens of this epoch       Outcome, if there are more
    LOST      something old                                 Open, once the queue has room
    CLOSING   something, of a request that is over          Close, once the queue has room

    open      of a new request: UNKNOWN; of any other: LOST
    resync    LOST
    sent      Open, Outcome: FOLLOWS, or LOST if it did not fit; Close: out of the table, if it did fit
    close     UNKNOWN: out of the table; any other: CLOSING

While the drafter works it is told at once. While it pauses it hears of what is new to it, and of what was
committed, when that is long, or when it goes on. Sends never block: what does not fit is said by `catch_up`.
Knows its channel and messages; no other drafters, and not what drafts are for.
"""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from ssd_serve.transport.channel import Channel
from ssd_serve.base.draft_messages import (
    Close,
    DrafterMessage,
    Hello,
    Message,
    Outcome,
    Pause,
)
from ssd_serve.base.logs import Logger
from ssd_serve.verifier.drafts.feature_sender import FeatureSender
from ssd_serve.verifier.drafts.liveness import Liveness
from ssd_serve.verifier.drafts.source_bits import OTHERS_BIT
from ssd_serve.verifier.drafts.teams import Team
from ssd_serve.verifier.request import Request

_RESYNCS, _RESYNC_S = 8, 8.0
"""A drafter may be told so often in so many seconds where one request stands."""
_HELD_TOKENS = 64
"""Tokens of a request that a paused drafter hears together: one cheap chunk. What begins while it pauses and
ends sooner costs it nothing."""


class Knows(Enum):
    """What a drafter knows of a request; the module says what follows from it."""

    UNKNOWN = auto()
    FOLLOWS = auto()
    LOST = auto()
    CLOSING = auto()


@dataclass(slots=True, eq=False)
class _Told:
    request: Request
    state: Knows = Knows.UNKNOWN
    length: int = 0
    """Tokens that the drafter knows, or that the request had when it began for this drafter."""
    read: int = 0
    """Tokens below which it has grown a tree, at least."""
    featured: int = 0
    """The position behind the last one of which it has features."""
    resyncs: deque[float] = field(default_factory=lambda: deque[float](maxlen=_RESYNCS))
    """When it was last told again because it had asked."""


class Link:
    """One connected drafter; it has joined once its `Hello` was checked. `synchronous`: it works only while
    it is waited for. `stranger`: this server's launcher has not started it. `peer`: its address, where it is
    to be banned by that. `number` is nobody else's."""

    def __init__(
        self,
        channel: Channel,
        clock: Callable[[], float],
        synchronous: bool = False,
        number: int = 0,
        stranger: bool = False,
        peer: str = "",
    ) -> None:
        self.channel = channel
        self.number = number
        self.synchronous = synchronous
        self.stranger = stranger
        self.peer = peer
        self.liveness = Liveness(clock, synchronous)
        self.since = self.liveness.heard_at
        """When it has connected, or joined."""
        self.failed = False
        """Nothing is expected of it any more."""
        self.behaves = False
        """It has joined a while ago, and was thanked for it."""
        self.inbox: deque[Message] = deque()
        """What has come and was not taken yet: the rest waits in its socket."""
        self.credit = 0
        """Work that may be done for it in this drain; below 0 it owes some of the next ones'."""
        self.name = ""
        self.instance = 0
        self.source = ""
        self.source_bit = OTHERS_BIT
        self.prefill_s_per_token = 0.0
        """Seconds for which it reads a token of a text; 0: unknown."""
        self._features = FeatureSender(channel)
        self.joined = False
        self.team: Team | None = None
        self.paused = False
        """Nothing is expected of it now; it hears what was committed in larger pieces."""
        self._told_paused = False
        self._told: dict[int, _Told] = {}
        self._full = False
        """Something did not fit and was not said since."""

    @property
    def here(self) -> bool:
        """Whether it has joined and has not failed."""
        return self.joined and not self.failed

    @property
    def working(self) -> bool:
        """Whether nodes may be expected of it."""
        return self.here and not self.paused

    @property
    def worth_waiting(self) -> bool:
        """Whether it works and is not silent."""
        return self.working and self.liveness.answers

    @property
    def instant(self) -> bool:
        """Whether it answers as soon as it is asked: nobody waits for it, and it works in any layout that
        drafts."""
        return self.synchronous and self.joined and not self.liveness.step_s

    def knows(self, request: int) -> Knows | None:
        """The state of a request; None for one that this drafter does not have."""
        told = self._told.get(request)
        return told.state if told is not None else None

    @property
    def unread(self) -> int:
        """Tokens of open requests that it would have to read: what it was not told, and of what it was told
        inline, what lies below its trees: it may have paused before it came to that."""
        return sum(
            len(told.request.tokens) - self._has_read(told)
            for told in self._told.values()
            if told.state is not Knows.CLOSING
        )

    def _has_read(self, told: _Told) -> int:
        if told.state is not Knows.FOLLOWS:
            return 0
        return told.read if self.synchronous else told.length

    def grew(self, number: int) -> None:
        """It has grown a tree below what it was told of a request."""
        told = self._told.get(number)
        if told is not None:
            told.read = told.length

    def lags(self) -> bool:
        """Whether it does not keep up, or did not lately."""
        return self.liveness.lags(self._full)

    def earn(self, share: int) -> None:
        """Another drain has come, with so much work for each link."""
        self.credit = sys.maxsize if self.synchronous else min(share, self.credit + share)

    def join(self, mine: Hello, theirs: Hello, log: Logger) -> None:
        """Its `Hello` was found to agree: answer."""
        self.name, self.instance, self.source = theirs.name, theirs.instance, theirs.source
        self.joined, self.liveness.step_s = True, theirs.step_ms / 1e3
        self.prefill_s_per_token = theirs.prefill_ms / 1e3
        self.since = self.liveness.heard_at
        self.channel.send(mine)
        self._features.begin(theirs.features, log)
        self._say_paused()

    def pause(self, paused: bool) -> None:
        """Pause, or go on: with everything that it has not been told."""
        if paused == self.paused:
            return
        self.paused = paused
        if not paused:
            for told in list(self._told.values()):
                self._sync(told)
        self._say_paused()

    def open(self, request: Request) -> None:
        """A request begins, begins again, or comes from another drafter."""
        if not self.joined:
            return
        told = self._told.get(request.number)
        if told is None:
            told = self._told[request.number] = _Told(request, length=len(request.tokens))
        elif told.state is not Knows.UNKNOWN:
            told.request, told.state = request, Knows.LOST
        if not self.paused or told.state is Knows.LOST:
            self._sync(told)

    def resync(self, request: Request) -> None:
        """It asks where a request of its own stands, and is told, but not as often as it likes. Under the
        same epoch: nodes keep their names, and other drafters their trees."""
        told, now = self._told[request.number], self.liveness.heard_at
        if len(told.resyncs) == _RESYNCS and now - told.resyncs[0] < _RESYNC_S:
            self.liveness.said_nothing()
            return
        told.resyncs.append(now)
        told.state = Knows.LOST
        self._sync(told)

    def read(self, request: Request) -> None:
        """The target has computed more of a prompt."""
        told = self._told.get(request.number)
        if told is not None and told.state is Knows.FOLLOWS and not self.paused:
            self._feature(told)

    def pieces_read(self, total: int) -> None:
        """It has read so many pieces of the memory that it shares."""
        self._features.read(total)
        self.liveness.said_nothing()

    def outcome(self, request: Request) -> None:
        """A round has extended the request's tokens and moved its replica; it is said with the next
        `flush`."""
        told = self._told.get(request.number)
        if told is not None and not (self.paused and len(request.tokens) - told.length < _HELD_TOKENS):
            self._sync(told)

    def flush(self) -> None:
        """Send the outcomes of a round together."""
        self.channel.flush()

    def close(self, request: Request) -> None:
        """A request has ended, or went to another drafter."""
        told = self._told.get(request.number)
        if told is None:
            return
        if told.state is Knows.UNKNOWN:
            del self._told[request.number]
            return
        told.state = Knows.CLOSING
        told.resyncs.clear()
        self._sync(told)

    def catch_up(self) -> None:
        """Say what did not fit, once there is room."""
        if self._full and self.channel.flush():
            self._full = False
            self._say_paused()
            for told in list(self._told.values()):
                if told.state in (Knows.LOST, Knows.CLOSING) and not self._full:
                    self._sync(told)
        if self._features.behind and not self.paused and self._features.has_room:
            self._features.behind = False
            for told in self._told.values():
                if told.state is Knows.FOLLOWS:
                    self._feature(told)

    def _sync(self, told: _Told) -> None:
        """Send what the state owes."""
        request, replica = told.request, told.request.replica
        if told.state is Knows.CLOSING:
            if self._fits(self.channel.send, Close(request.number, request.epoch)):
                del self._told[request.number]
            return
        self.liveness.asked()
        if told.state is Knows.LOST and self._full:
            return
        if told.state is not Knows.FOLLOWS:
            opening = request.opened(salted=self.instant)
            if request.replica is not None:
                request.replica.restart(self.number)
            fits = self._fits(self.channel.send, opening)
            told.featured = 0
            if fits:
                self._feature(told)
        elif told.length < len(request.tokens) and replica is not None:
            self._feature(told)
            tokens, root = tuple(request.tokens[told.length :]), replica.tree.root.name
            message = Outcome(request.number, request.epoch, told.length, tokens, root)
            fits = self._fits(self.channel.post, message)
        else:
            return
        told.state = Knows.FOLLOWS if fits else Knows.LOST
        told.length = len(request.tokens)

    def _feature(self, told: _Told) -> None:
        """Send what the drafter may read and has not got; the rest comes with `catch_up`."""
        told.featured = self._features.send(told.request, told.featured)

    def _say_paused(self) -> None:
        """Unless it knows."""
        if not self.joined or self._told_paused == self.paused:
            return
        if self._fits(self.channel.send, Pause(self.paused)):
            self._told_paused = self.paused

    def _fits(self, send: Callable[[DrafterMessage], bool], message: DrafterMessage) -> bool:
        fits = send(message)
        self._full = self._full or not fits
        return fits
