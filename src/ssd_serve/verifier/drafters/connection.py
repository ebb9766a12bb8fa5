"""Connection of one drafter, and the state of each of its requests.

Each request is in one state, and `_sync` sends the message that the state requires.

    state     the drafter knows                              required message.
    UNKNOWN   nothing: the request began during a pause      Open.
    CURRENT   the first `length` tokens of this epoch        Outcome, if there are more tokens.
    STALE     an old state                                   Open, once the queue has space.
    CLOSING   a state of a request that ended                Close, once the queue has space.

Events change the state.

    open      a new request: UNKNOWN; any other: STALE.
    resync    STALE.
    sent      Open, Outcome: CURRENT, or STALE if it did not fit; Close: removed, if it did fit.
    close     UNKNOWN: removed; any other: CLOSING.

A working drafter receives outcomes at once. A paused one receives Close and Open of requests that it knows,
and outcomes only when many tokens have been committed, or when it continues. Sends never block: `send_pending`
sends the rest later. Knows its channel and messages, but no other drafters and no use of the drafts.
"""

import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from ssd_serve.base.draft_messages import (
    Close,
    DrafterMessage,
    Heartbeat,
    Hello,
    Message,
    Outcome,
    Pause,
    SharedMemoryRead,
)
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.logs import Logger
from ssd_serve.transport.channel import Channel
from ssd_serve.verifier.drafters.admission import OTHERS_BIT, check_heartbeat
from ssd_serve.verifier.drafters.assignment import DrafterGroup
from ssd_serve.verifier.drafters.features import FeatureSender, FeatureStore
from ssd_serve.verifier.request import Request

_SILENT_STEPS, _SILENT_EXTRA_S = 3, 0.020
"""A drafter is responsive until it has been silent for 3 of its steps + 20 ms after a request for drafts."""
_LAGGING_S, _LAGGING_STEPS = 1.0, 20
"""A drafter lags once it has been silent for 1 s + 20 of its steps; a long prompt alone takes less."""
_RECOVERED_S = 2.0
"""A drafter that lagged must keep up for this time; otherwise its requests would move back and forth."""
_MAX_IGNORED_PER_S = 20_000
"""Most messages a second without effect; a request that ends leaves some hundreds of them in flight."""
_RESYNCS, _RESYNC_S = 8, 8.0
"""Maximum `Resync` messages of one request that are answered in this number of seconds."""
_BATCHED_TOKENS = 64
"""Tokens of a request that a paused drafter receives together, as one cheap prefill chunk."""


class SyncState(Enum):
    """State of a drafter's knowledge of a request; see the module's table."""

    UNKNOWN = auto()
    CURRENT = auto()
    STALE = auto()
    CLOSING = auto()


@dataclass(slots=True, eq=False)
class _RequestSync:
    request: Request
    state: SyncState = SyncState.UNKNOWN
    length: int = 0
    """Tokens that the drafter knows, or that the request had when it was opened during a pause."""
    grown_from: int = 0
    """Tokens below which the drafter has grown a tree, at least."""
    features_end: int = 0
    """Position behind the last one with sent features."""
    resyncs: deque[float] = field(default_factory=lambda: deque[float](maxlen=_RESYNCS))
    """Times of the latest answers to `Resync`."""


class Liveness:
    """Tracks whether an asynchronous drafter answers; a synchronous one counts as responsive."""

    def __init__(self, clock: Callable[[], float], synchronous: bool) -> None:
        self.step_s = 0.0
        self._clock = clock
        self._synchronous = synchronous
        self.last_received_at = self._ignored_since = clock()
        self._ignored = 0
        self._requested_at = 0.0
        self._lagged_at = -math.inf

    @property
    def silent_s(self) -> float:
        """Seconds since the last message."""
        return self._clock() - self.last_received_at

    @property
    def _unanswered_s(self) -> float:
        return self._clock() - self._requested_at if self.last_received_at < self._requested_at else 0.0

    @property
    def is_responsive(self) -> bool:
        return self._synchronous or self._unanswered_s < _SILENT_STEPS * self.step_s + _SILENT_EXTRA_S

    def is_lagging(self, queue_full: bool) -> bool:
        """Return whether the drafter does not keep up, or did not lately."""
        now = self._clock()
        if queue_full or self._unanswered_s > _LAGGING_S + _LAGGING_STEPS * self.step_s:
            self._lagged_at = now
        return not self._synchronous and now - self._lagged_at < _RECOVERED_S

    def on_request(self) -> None:
        """Note a message that the drafter should answer, unless an earlier one is still unanswered."""
        if self.last_received_at >= self._requested_at:
            self._requested_at = self._clock()

    def on_message(self, message: Message) -> None:
        """Note a message. `SharedMemoryRead` is no answer to an outcome."""
        if isinstance(message, SharedMemoryRead):
            return
        self.last_received_at = self._clock()
        if isinstance(message, Heartbeat):
            check_heartbeat(message)
            self.on_ignored()
            if message.step_ms > 0:
                self.step_s = message.step_ms / 1e3

    def on_ignored(self) -> None:
        """Count the last message as one without effect. Raises `ProtocolError` if there are too many."""
        if self.last_received_at - self._ignored_since >= 1.0:
            self._ignored_since, self._ignored = self.last_received_at, 0
        self._ignored += 1
        if self._ignored > _MAX_IGNORED_PER_S:
            raise ProtocolError(f"it sends more than {_MAX_IGNORED_PER_S} messages a second without effect")


class DrafterConnection:
    """A connected drafter; it has joined once its `Hello` was checked.

    `synchronous`: it works only while the verifier waits for it. `remote`: this server's launcher has not
    started it. `peer`: its address, if a ban is by address. `number` is unique.
    """

    def __init__(
        self,
        channel: Channel,
        clock: Callable[[], float],
        synchronous: bool = False,
        number: int = 0,
        remote: bool = False,
        peer: str = "",
    ) -> None:
        self.channel = channel
        self.number = number
        self.synchronous = synchronous
        self.remote = remote
        self.peer = peer
        self.liveness = Liveness(clock, synchronous)
        self.since = self.liveness.last_received_at
        """Time at which it connected, or joined."""
        self.failed = False
        self.unbanned = False
        """True once its earlier bans were forgiven."""
        self.inbox: deque[Message] = deque()
        """Received messages that wait for credit; later ones stay in the socket."""
        self.credit = 0
        """Work that this drain may do for it; a negative credit is repaid by the next ones."""
        self.name = ""
        self.instance = 0
        self.source = ""
        self.source_bit = OTHERS_BIT
        self.prefill_s_per_token, self.depth = 0.0, 0
        """0: unknown."""
        self.joined = False
        self.group: DrafterGroup | None = None
        self.paused = False
        self.features = FeatureSender(channel)
        self._sent_paused = False
        self._requests: dict[int, _RequestSync] = {}
        self._full = False
        """A message did not fit into the queue and was not sent since."""

    @property
    def active(self) -> bool:
        return self.joined and not self.failed

    @property
    def working(self) -> bool:
        """True if nodes may be expected of it."""
        return self.active and not self.paused

    @property
    def worth_waiting(self) -> bool:
        return self.working and self.liveness.is_responsive

    @property
    def is_lookup(self) -> bool:
        """True if it answers at once: rounds do not wait for it, and it works in each mode that drafts."""
        return self.synchronous and self.joined and not self.liveness.step_s

    def state_of(self, request: int) -> SyncState | None:
        """Return the state of a request; None for one that this drafter does not have."""
        sync = self._requests.get(request)
        return sync.state if sync is not None else None

    @property
    def pending_prefill(self) -> int:
        """Tokens of open requests that this drafter must still prefill.

        A synchronous drafter may have paused before it processed what it received, so only tokens above a tree
        that it has grown count as processed.
        """
        return sum(
            len(sync.request.tokens) - self._prefilled(sync)
            for sync in self._requests.values()
            if sync.state is not SyncState.CLOSING
        )

    def _prefilled(self, sync: _RequestSync) -> int:
        if sync.state is not SyncState.CURRENT:
            return 0
        return sync.grown_from if self.synchronous else sync.length

    def on_growth(self, number: int) -> None:
        """Note that a tree below the tokens that were sent has grown."""
        sync = self._requests.get(number)
        if sync is not None:
            sync.grown_from = sync.length

    def is_lagging(self) -> bool:
        return self.liveness.is_lagging(self._full)

    def add_credit(self, share: int) -> None:
        """Begin a drain that has time for `share` units of work of each drafter."""
        self.credit = sys.maxsize if self.synchronous else min(share, self.credit + share)

    def join(self, mine: Hello, theirs: Hello, features: FeatureStore | None, log: Logger) -> None:
        """Answer a `Hello` that was checked."""
        self.name, self.instance, self.source = theirs.name, theirs.instance, theirs.source
        self.joined, self.liveness.step_s = True, theirs.step_ms / 1e3
        self.prefill_s_per_token, self.depth = theirs.prefill_ms / 1e3, theirs.depth
        self.since = self.liveness.last_received_at
        self.channel.send(mine)
        self.features.begin(theirs.features, features, log)
        self._send_paused()

    def pause(self, paused: bool) -> None:
        """Pause, or continue after sending everything that was held back."""
        if paused == self.paused:
            return
        self.paused = paused
        if not paused:
            for sync in list(self._requests.values()):
                self._sync(sync)
        self._send_paused()

    def open(self, request: Request) -> None:
        """Open a request that is new here, has a new epoch, or moved from another drafter."""
        if not self.joined:
            return
        sync = self._requests.get(request.number)
        if sync is None:
            sync = self._requests[request.number] = _RequestSync(request, length=len(request.tokens))
        elif sync.state is not SyncState.UNKNOWN:
            sync.request, sync.state = request, SyncState.STALE
        if not self.paused or sync.state is SyncState.STALE:
            self._sync(sync)

    def resync(self, request: Request) -> None:
        """Answer `Resync` with an `Open` of the same epoch, up to a rate.

        The epoch stays so that nodes keep their names, and other drafters their trees.
        """
        sync, now = self._requests[request.number], self.liveness.last_received_at
        if len(sync.resyncs) == _RESYNCS and now - sync.resyncs[0] < _RESYNC_S:
            self.liveness.on_ignored()
            return
        sync.resyncs.append(now)
        sync.state = SyncState.STALE
        self._sync(sync)

    def send_features(self, request: Request) -> None:
        """Send features of a prompt chunk."""
        sync = self._requests.get(request.number)
        if sync is not None and sync.state is SyncState.CURRENT and not self.paused:
            self._send_features(sync)

    def send_outcome(self, request: Request) -> None:
        """Queue the outcome of a round, after the request's tokens and replica were updated."""
        sync = self._requests.get(request.number)
        if sync is not None and not (self.paused and len(request.tokens) - sync.length < _BATCHED_TOKENS):
            self._sync(sync)

    def close(self, request: Request) -> None:
        """Close a request that ended, or moved to another drafter."""
        sync = self._requests.get(request.number)
        if sync is None:
            return
        if sync.state is SyncState.UNKNOWN:
            del self._requests[request.number]
            return
        sync.state = SyncState.CLOSING
        sync.resyncs.clear()
        self._sync(sync)

    def send_pending(self) -> None:
        """Send what did not fit, as far as it fits now."""
        if self._full and self.channel.flush():
            self._full = False
            self._send_paused()
            for sync in list(self._requests.values()):
                if sync.state in (SyncState.STALE, SyncState.CLOSING) and not self._full:
                    self._sync(sync)
        if self.features.behind and not self.paused and self.features.has_room:
            self.features.behind = False
            for sync in self._requests.values():
                if sync.state is SyncState.CURRENT:
                    self._send_features(sync)

    def _sync(self, sync: _RequestSync) -> None:
        """Send the message that the state requires."""
        request, replica = sync.request, sync.request.replica
        if sync.state is SyncState.CLOSING:
            if self._fits(self.channel.send, Close(request.number, request.epoch)):
                del self._requests[request.number]
            return
        self.liveness.on_request()
        if sync.state is SyncState.STALE and self._full:
            return
        if sync.state is not SyncState.CURRENT:
            opening = request.opened(salted=self.is_lookup)
            if request.replica is not None:
                request.replica.restart(self.number)
            fits = self._fits(self.channel.send, opening)
            sync.features_end = 0
            if fits:
                self._send_features(sync)
        elif sync.length < len(request.tokens) and replica is not None:
            self._send_features(sync)
            tokens, root = tuple(request.tokens[sync.length :]), replica.tree.root.name
            message = Outcome(request.number, request.epoch, sync.length, tokens, root)
            fits = self._fits(self.channel.post, message)
        else:
            return
        sync.state = SyncState.CURRENT if fits else SyncState.STALE
        sync.length = len(request.tokens)

    def _send_features(self, sync: _RequestSync) -> None:
        sync.features_end = self.features.send(sync.request, sync.features_end)

    def _send_paused(self) -> None:
        if not self.joined or self._sent_paused == self.paused:
            return
        if self._fits(self.channel.send, Pause(self.paused)):
            self._sent_paused = self.paused

    def _fits(self, send: Callable[[DrafterMessage], bool], message: DrafterMessage) -> bool:
        fits = send(message)
        self._full = self._full or not fits
        return fits
