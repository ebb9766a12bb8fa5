"""One drafter as the verifier sees it: what it was told, what it was not told yet, and how long it is silent.

Sends never block: what does not fit is said later. Knows its channel and messages; no other drafters, and not
what drafts are for.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ssd_serve.cluster.channels.channel import Channel
from ssd_serve.errors import ProtocolError
from ssd_serve.messages import Close, DrafterMessage, Heartbeat, Hello, Message, Open, Outcome, Pause
from ssd_serve.verifier.drafts.admission import check_figures
from ssd_serve.verifier.drafts.teams import Team
from ssd_serve.verifier.request import Request

_SILENT_STEPS = 3
_SILENT_EXTRA_S = 0.020
_LAGGING_S, _LAGGING_STEPS = 1.0, 20
"""So long a silence means that a drafter does not keep up; a long prompt alone takes less."""
_GOOD_S = 2.0
"""For so long who lagged must do well: else its requests would go to and fro."""
_MAX_IDLE_WORDS = 20_000
"""Messages a second that change nothing; a request that ends leaves some hundreds on their way."""
_RESYNCS, _RESYNC_S = 8, 8.0
"""A drafter may be told so often in so many seconds where one request stands."""
_HELD_TOKENS = 64
"""Tokens of a request that a paused drafter hears together: one cheap chunk. What begins while it pauses and
ends sooner costs it nothing."""


@dataclass(slots=True, eq=False)
class _Held:
    """What a paused drafter has not been told yet of a request."""

    request: Request
    tokens: list[int]
    root: int


class Link:
    """One connected drafter; it has joined once its `Hello` was checked. `synchronous`: it works only while
    it is waited for, so its silence means nothing. `stranger`: this server's launcher has not started it.
    `peer`: its address, where it is to be banned by that. `number` is nobody else's."""

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
        self.joined = False
        self.team: Team | None = None
        self.paused = False
        """Nothing is expected of it now; it hears what was committed in larger pieces."""
        self.step_s = 0.0
        self.overruns = (0, 0)
        """Of an emulated device: forwards longer than its table says, and all forwards."""
        self._clock = clock
        self._heard_at = self.since = self._idle_since = clock()
        self._idle_words = 0
        self._resynced: dict[int, deque[float]] = {}
        """When it was last told again of a request because it had asked."""
        self._asked_at = 0.0
        self._lagged_at = -math.inf
        self._told: set[int] = set()
        """Requests that it knows."""
        self._untold: dict[int, tuple[Request, int]] = {}
        """Requests that began while it paused, and their tokens then: it knows nothing of them."""
        self._held: dict[int, _Held] = {}
        self._behind: set[int] = set()
        """Requests whose messages did not fit: they get one `Open` later."""
        self._unpaused = True
        """Whether it was told last that it works."""
        self._unclosed: dict[int, int] = {}
        """Requests whose `Close` did not fit, with its epoch."""

    @property
    def here(self) -> bool:
        """Whether it has joined and has not failed."""
        return self.joined and not self.failed

    @property
    def working(self) -> bool:
        """Whether nodes may be expected of it."""
        return self.here and not self.paused

    @property
    def silent_s(self) -> float:
        """Seconds since it last said anything."""
        return self._clock() - self._heard_at

    @property
    def worth_waiting(self) -> bool:
        """Whether it works and has not been silent for 3 of its steps + 20 ms after it was asked."""
        if not self.working:
            return False
        if self.synchronous or self._heard_at >= self._asked_at:
            return True
        return self._clock() - self._asked_at < _SILENT_STEPS * self.step_s + _SILENT_EXTRA_S

    def lags(self) -> bool:
        """Whether it does not keep up, or did not lately: it is silent for long, or its queue is full."""
        now = self._clock()
        silent_s = now - self._asked_at if self._heard_at < self._asked_at else 0.0
        if self._behind or silent_s > _LAGGING_S + _LAGGING_STEPS * self.step_s:
            self._lagged_at = now
        return not self.synchronous and now - self._lagged_at < _GOOD_S

    def earn(self, share: int) -> None:
        """Another drain has come, with so much work for each link."""
        self.credit = sys.maxsize if self.synchronous else min(share, self.credit + share)

    def heard(self, message: Message) -> None:
        """It has said something."""
        self._heard_at = self._clock()
        if isinstance(message, Heartbeat):
            check_figures(message)
            self.said_nothing()
            if message.step_ms > 0:
                self.step_s = message.step_ms / 1e3
                self.overruns = (message.overruns, message.forwards)

    def said_nothing(self) -> None:
        """Its last message has changed nothing. Raises `ProtocolError` where there are too many of them."""
        if self._heard_at - self._idle_since >= 1.0:
            self._idle_since, self._idle_words = self._heard_at, 0
        self._idle_words += 1
        if self._idle_words > _MAX_IDLE_WORDS:
            raise ProtocolError(f"it sends more than {_MAX_IDLE_WORDS} messages a second that mean nothing")

    def join(self, mine: Hello, theirs: Hello) -> None:
        """Its `Hello` was found to agree: answer."""
        self.name, self.instance, self.source = theirs.name, theirs.instance, theirs.source
        self.joined, self.step_s = True, theirs.step_ms / 1e3
        self.since = self._heard_at
        self.channel.send(mine)
        self._unpaused = True
        self._say_paused()

    def pause(self, paused: bool) -> None:
        """Pause, or go on: with everything that it has not been told."""
        if paused == self.paused:
            return
        self.paused = paused
        for number in list(self._held):
            self._tell(number)
        self._say_paused()
        if not paused:
            for request, _ in list(self._untold.values()):
                self._reopen(request)

    def open(self, request: Request, message: Open) -> None:
        """A request begins, begins again, or comes from another drafter; while this one pauses it is not told
        at once."""
        number = request.number
        self._held.pop(number, None)
        if not self.joined:
            return
        if self.paused and number not in self._told:
            self._untold[number] = request, len(request.tokens)
            return
        self._say_open(request, message)

    def resync(self, request: Request) -> None:
        """It asks where a request of its own stands, and is told, but not as often as it likes. Under the
        same epoch: nodes keep their names, and other drafters their trees."""
        told = self._resynced.setdefault(request.number, deque(maxlen=_RESYNCS))
        if len(told) == _RESYNCS and self._heard_at - told[0] < _RESYNC_S:
            self.said_nothing()
            return
        told.append(self._heard_at)
        self._reopen(request)

    def outcome(self, request: Request, tokens: tuple[int, ...], root: int) -> None:
        """A round committed `tokens`, which the request has already; it is said with the next `flush`."""
        if not self.joined:
            return
        number = request.number
        if number in self._untold:
            if len(request.tokens) - self._untold[number][1] >= _HELD_TOKENS:
                self._reopen(request)
            return
        held = self._held.get(number)
        if held is None:
            held = self._held[number] = _Held(request, [], root)
        held.tokens.extend(tokens)
        held.root = root
        if not self.paused or len(held.tokens) >= _HELD_TOKENS:
            self._tell(number)

    def flush(self) -> None:
        """Send the outcomes of a round together."""
        if self.channel.pending:
            self.channel.flush()

    def close(self, request: Request) -> None:
        """A request has ended, or went to another drafter."""
        number = request.number
        self._resynced.pop(number, None)
        if self._untold.pop(number, None) is not None:
            return
        self._held.pop(number, None)
        self._behind.discard(number)
        self._told.discard(number)
        if self.joined and not self.channel.send(Close(number, request.epoch)):
            self._unclosed[number] = request.epoch

    def catch_up(self, requests: Mapping[int, Request]) -> None:
        """Say what did not fit, once the queue is empty."""
        if not (self._behind or self._unclosed or self._pause_unsaid) or not self.channel.flush():
            return
        self._say_paused()
        for number, epoch in list(self._unclosed.items()):
            if not self.channel.send(Close(number, epoch)):
                return
            del self._unclosed[number]
        for number in list(self._behind):
            request = requests.get(number)
            self._behind.discard(number)
            if request is not None:
                self._reopen(request)

    @property
    def _pause_unsaid(self) -> bool:
        return self.joined and self._unpaused is self.paused

    def _say_paused(self) -> None:
        """Unless it knows."""
        if self._pause_unsaid and self.channel.send(Pause(self.paused)):
            self._unpaused = not self.paused

    def _reopen(self, request: Request) -> None:
        """Tell of a request in the middle of its epoch: other drafters keep their trees."""
        self._held.pop(request.number, None)
        self._say_open(request, request.opened())

    def _say_open(self, request: Request, message: Open) -> None:
        number = message.request
        if request.replica is not None:
            request.replica.restart(self.number)
        self._untold.pop(number, None)
        self._unclosed.pop(number, None)  # a late `Close` must not end what begins now
        self._told.add(number)
        self._send(message, number)

    def _tell(self, number: int) -> None:
        held = self._held.pop(number)
        position = len(held.request.tokens) - len(held.tokens)
        message = Outcome(number, held.request.epoch, position, tuple(held.tokens), held.root)
        self._send(message, number, now=False)

    def _send(self, message: DrafterMessage, number: int, now: bool = True) -> None:
        if self._heard_at >= self._asked_at:
            self._asked_at = self._clock()
        if number in self._behind:
            return
        if not (self.channel.send(message) if now else self.channel.post(message)):
            self._behind.add(number)
