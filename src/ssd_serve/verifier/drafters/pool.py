"""The pool of connected drafters: joins, requests and outcomes to them, growth from them, and when to wait.

Each request is drafted by one drafter of each group, of those with the same draft model; replicas merge growth
by the names of nodes. Drafters may die, stall, flood or send malformed messages: a failure of a connection ends
that connection alone, and at worst a round has no nodes. Knows channels and messages, but no tensors, and not
how drafts are made.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import ParamSpec, TypeVar

from ssd_serve.base.draft_messages import (
    Growth,
    Heartbeat,
    Hello,
    Message,
    Refusal,
    Resync,
    SharedMemoryRead,
)
from ssd_serve.base.errors import PairMismatchError, ProtocolError, SsdError, in_a_line
from ssd_serve.base.logs import Logger, RateLimitedLogger, get_logger
from ssd_serve.transport.channel import Channel, poll
from ssd_serve.verifier.drafters.admission import DrafterAuthorizer, SourceBits
from ssd_serve.verifier.drafters.assignment import DrafterGroup, Reassignment
from ssd_serve.verifier.drafters.connection import DrafterConnection
from ssd_serve.verifier.drafters.features import FeatureStore
from ssd_serve.verifier.request import Request

P = ParamSpec("P")
R = TypeVar("R")
Requests = Mapping[int, Request]
"""Open requests by number."""

_HEARTBEAT_S = 2.0
_RESPONSIVE_S = 10.0
"""A drafter is responsive if it sent a message in this time; prefill without a heartbeat takes less."""
_HELLO_S = 10.0
"""Time that a new connection has for its `Hello`."""
_UNBAN_S = 60.0
"""Earlier bans of a drafter are cleared after this time without a violation."""
_WORK_PER_DRAIN, _MIN_WORK = 2048, 32
"""Messages and expansions that one drain takes of all drafters, and of each at least: some milliseconds."""
_CANDIDATES_PER_WORK = 16
_NAME_HELD_S = 2.0
"""A drafter holds its name for so long after its last message; heartbeats come four times as often."""
_LONGEST_REASON = 200


class SpeculationMode(Enum):
    """Mode of drafting: a drafter on its own device, one on the target's device in turns with it, or none."""

    ASYNC = "async"
    SYNC = "sync"
    PLAIN = "off"  # its name in /load and /metrics


class DrafterPool:
    """Tracks connected drafters, sends them requests and outcomes, and decides when to wait for them.

    `hello`: what drafters must agree with.
    """

    def __init__(
        self,
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
        log: Logger | None = None,
    ) -> None:
        self._hello = hello
        self._clock = clock
        self._log = log or get_logger("verifier")
        self._log_refused, self._log_banned = RateLimitedLogger(self._log), RateLimitedLogger(self._log)
        self.authorizer = DrafterAuthorizer(hello, clock)
        self.sources = SourceBits()
        self.rejoins = 0
        """Joins of asynchronous drafters that had joined before."""
        self.moves = 0
        """Requests that moved from one drafter to another."""
        self.expansions = 0
        """Expanded nodes that drafters have reported."""
        self.features: FeatureStore | None = None
        self._connections: dict[int, DrafterConnection] = {}
        self._num_connected = 0
        self._groups: dict[tuple[bool, str], DrafterGroup] = {}
        self._heartbeat_at = 0.0
        self._mode: SpeculationMode | None = None
        self._round_over = False
        self._silent: set[int] = set()

    @property
    def num_joined(self) -> int:
        return len(self._active())

    @property
    def num_async(self) -> int:
        """Joined drafters in processes of their own."""
        return len(self._active(synchronous=False))

    @property
    def num_responsive(self) -> int:
        """Asynchronous drafters that were not silent at the last `heartbeat`; a stopped one stays connected."""
        return sum(each.number not in self._silent for each in self._active(synchronous=False))

    @property
    def num_requests(self) -> dict[str, int]:
        """Requests of each asynchronous drafter, by its name."""
        counted: Counter[str] = Counter()
        for each in self._active(synchronous=False):
            count = each.group.num_requests(each.number) if each.group is not None else 0
            counted[self.authorizer.label(each.name)] += count
        return dict(counted)

    @property
    def working(self) -> bool:
        """True if nodes may be expected: a drafter has joined and is not paused."""
        return any(each.working for each in self._connections.values())

    @property
    def drafting(self) -> bool:
        """True if a drafter other than a lookup works."""
        return any(each.working and not each.is_lookup for each in self._connections.values())

    @property
    def mode(self) -> SpeculationMode:
        """The mode that `set_mode` has set, else the one that the joined drafters give."""
        if self._mode is not None:
            return self._mode
        working = [
            each.synchronous for each in self._connections.values() if each.working and not each.is_lookup
        ]
        if not working:
            return SpeculationMode.PLAIN
        return SpeculationMode.SYNC if all(working) else SpeculationMode.ASYNC

    @property
    def channels(self) -> list[Channel]:
        return [each.channel for each in self._connections.values()]

    @property
    def step_s(self) -> float:
        """Seconds of the fastest working drafter's step; 0: unknown."""
        return _fastest(each for each in self._connections.values() if each.working)

    @property
    def lookup_sources(self) -> int:
        """Bits of the sources that answer at once."""
        bits = 0
        for each in self._connections.values():
            bits |= each.source_bit * each.is_lookup
        return bits

    def has(self, mode: SpeculationMode) -> bool:
        """Return whether a drafter of this mode has joined, working or paused; lookups belong to none."""
        return any(not each.is_lookup for each in self._of(mode))

    @property
    def depth(self) -> int:
        """Most tokens below a root that some drafter guesses; 0: no limit."""
        depths = [each.depth for each in self._connections.values() if each.joined and not each.is_lookup]
        return 0 if 0 in depths else max(depths, default=0)

    def step_s_in(self, mode: SpeculationMode) -> float:
        """Seconds of the fastest step among the drafters of a mode, paused or not; 0: unknown."""
        return _fastest(self._of(mode))

    def pending_prefill_s(self, mode: SpeculationMode) -> float:
        """Seconds of prefill before the drafters of a mode could draft, as far as they are known."""
        return max((each.pending_prefill * each.prefill_s_per_token for each in self._of(mode)), default=0.0)

    def offer(self, features: FeatureStore) -> None:
        """Let drafters read these outputs of the target."""
        self.features = features
        self.authorizer.features = features.layers

    def admit(self, channel: Channel, peer: str, remote: bool) -> None:
        """Take a new connection from this address, or close it; `remote`: by the port for remote drafters."""
        peers = Counter(each.peer for each in self._connections.values() if each.remote is remote)
        reason = self.authorizer.block_reason(peer, remote, peers)
        if reason:
            self._log_refused.warning("drafter refused", peer=peer or "unix", reason=reason)
            channel.close()
        else:
            self.connect(channel, remote=remote, peer=peer if remote else "")

    def connect(
        self, channel: Channel, synchronous: bool = False, remote: bool = False, peer: str = ""
    ) -> None:
        """Take a new connection; its drafter joins when its `Hello` has been checked."""
        connection = DrafterConnection(channel, self._clock, synchronous, self._num_connected, remote, peer)
        self._num_connected += 1
        self._connections[connection.number] = connection
        self._update_pause(connection)

    def set_mode(self, mode: SpeculationMode) -> None:
        """Let the drafters of this mode work and pause the others."""
        self._mode = mode
        for each in self._connections.values():
            self._update_pause(each)

    def open(self, request: Request) -> None:
        """Start drafting for a request, or start again at its current tokens, under a new epoch."""
        request.open()
        if not request.drafted:
            return
        for group in self._groups.values():
            group.assign(request.number)
        for drafter in self._drafters_of(request.number):
            self._guard(drafter, drafter.open, request)

    def send_outcome(self, request: Request) -> None:
        """Queue what a round committed for the next `flush`, once tokens and replica of the request moved."""
        for drafter in self._drafters_of(request.number):
            self._guard(drafter, drafter.send_outcome, request)

    def send_features(self, request: Request) -> None:
        """Send features of a prompt chunk that the target has computed."""
        for drafter in self._drafters_of(request.number):
            self._guard(drafter, drafter.send_features, request)

    def flush(self) -> None:
        """End a round: send its outcomes together."""
        self._round_over = True
        for each in self._connections.values():
            self._guard(each, each.channel.flush)

    def close(self, request: Request) -> None:
        """Stop drafting for a request."""
        for group in self._groups.values():
            number = group.remove(request.number)
            if number is not None:
                drafter = self._connections[number]
                self._guard(drafter, drafter.close, request)

    def wait(self, timeout_s: float, in_flight: bool = False) -> bool:
        """Wait for a message of a working drafter, or of an asynchronous one while a forward is `in_flight`."""
        drafters = [
            each
            for each in self._connections.values()
            if not (each.synchronous if in_flight else each.paused)
        ]
        return any(each.inbox for each in drafters) or bool(
            poll([each.channel for each in drafters], timeout_s)
        )

    def worth_waiting(self) -> bool:
        """Return whether a responsive drafter works that may send more nodes."""
        return any(each.worth_waiting and not each.is_lookup for each in self._connections.values())

    def heartbeat(self) -> None:
        """Send heartbeats when they are due, and find silent, late and recovered drafters."""
        now = self._clock()
        self._silent = {
            each.number for each in self._active(synchronous=False) if each.liveness.silent_s > _RESPONSIVE_S
        }
        for each in self._connections.values():
            if not each.joined and not each.synchronous and now - each.since > _HELLO_S:
                self._fail(each, ProtocolError(f"it did not send Hello in {_HELLO_S:.0f} s"))
            elif each.joined and not each.unbanned and now - each.since > _UNBAN_S:
                each.unbanned = True
                self.authorizer.bans.unban(each.peer or each.name)
        if now - self._heartbeat_at >= _HEARTBEAT_S:
            self._heartbeat_at = now
            for each in self._connections.values():
                if each.joined:
                    self._guard(each, each.channel.send, Heartbeat())

    def drain(self, requests: Requests) -> int:
        """Handle waiting messages, as many as a round has time for, and remove connections that ended.

        Growth goes into the replicas of the open `requests`. Returns the number of growth messages.
        """
        grown = 0
        share = max(_MIN_WORK, _WORK_PER_DRAIN // max(1, len(self._connections)))
        for each in list(self._connections.values()):
            each.add_credit(share)
            grown += self._guard(each, self._receive, each, requests) or 0
            if each.failed or (each.channel.closed and not each.inbox):
                self._remove(each, requests)
            else:
                self._guard(each, each.send_pending)
        if self._round_over:
            self._round_over = False
            self._rebalance(requests)
        return grown

    def _receive(self, drafter: DrafterConnection, requests: Requests) -> int:
        grown, inbox = 0, drafter.inbox
        if not inbox:
            inbox.extend(drafter.channel.receive())
        while inbox and drafter.credit > 0:
            grown += self._handle(drafter, inbox.popleft(), requests)
        if not inbox and drafter.channel.closed:
            inbox.extend(drafter.channel.receive())  # raises the protocol error that closed the channel
        return grown

    def _handle(self, drafter: DrafterConnection, message: Message, requests: Requests) -> int:
        """Handle one message; returns the number of growth messages. Until it has joined, a drafter can only
        send `Hello` and `Refusal`."""
        drafter.liveness.on_message(message)
        drafter.credit -= 1
        if isinstance(message, Growth) and drafter.joined:
            self._grow(drafter, message, requests)
            return 1
        if isinstance(message, Hello) and not drafter.joined:
            self._join(drafter, message, requests)
        elif isinstance(message, Refusal):
            self._log_refused.warning(
                "drafter left", name=drafter.name, reason=message.message[:_LONGEST_REASON]
            )
            drafter.channel.close()
        elif not drafter.joined:
            drafter.liveness.on_ignored()
        elif isinstance(message, Resync):
            request = requests.get(message.request)
            if request is None or message.epoch != request.epoch or not _drafts(drafter, message.request):
                drafter.liveness.on_ignored()
            else:
                drafter.resync(request)
        elif isinstance(message, SharedMemoryRead):
            drafter.features.on_read(message.total)
            drafter.liveness.on_ignored()
        elif not isinstance(message, Heartbeat | Hello):
            raise ProtocolError(f"drafters do not send {type(message).__name__}")
        return 0

    def _grow(self, drafter: DrafterConnection, growth: Growth, requests: Requests) -> None:
        """Apply growth to the replica, unless the request is assigned to another drafter."""
        expansions = len(growth.parents) // 8
        self.expansions += expansions
        drafter.credit -= expansions + len(growth.tokens) // (4 * _CANDIDATES_PER_WORK)
        request = requests.get(growth.request)
        replica = request.replica if request is not None else None
        if request is None or replica is None or not _drafts(drafter, growth.request):
            drafter.liveness.on_ignored()
            return
        if request.trace is not None:
            request.trace.on_growth(drafter.source_bit, expansions)
        if not expansions or growth.epoch != replica.epoch:
            drafter.liveness.on_ignored()
        if replica.apply(growth, drafter.number, drafter.source_bit):
            drafter.on_growth(growth.request)
        else:
            drafter.channel.send(Resync(growth.request, growth.epoch))
        drafter.credit -= replica.merged // _CANDIDATES_PER_WORK

    def _join(self, drafter: DrafterConnection, hello: Hello, requests: Requests) -> None:
        sources = {source for synchronous, source in self._groups if not synchronous}
        self.authorizer.check(hello, drafter.remote, sources)
        if not drafter.synchronous:
            if not drafter.peer and self.authorizer.bans.is_banned(hello.name):
                drafter.failed = True
                return
            for other in self._active(synchronous=False):
                if other.name == hello.name:
                    _replace(other, drafter, hello)
            self.rejoins += self.authorizer.register(hello.name)
        drafter.join(self._hello, hello, self.features, self._log)
        drafter.source_bit = self.sources.bit(drafter.source, drafter.remote)
        self._update_pause(drafter)
        self._log.info("drafter joined", name=drafter.name, step_ms=round(hello.step_ms, 2))
        group = drafter.group = self._groups.setdefault(_group_key(drafter), DrafterGroup())
        open_requests = [number for number, request in requests.items() if request.drafted]
        self._reassign(group.join(drafter.number, open_requests), requests)

    def _remove(self, drafter: DrafterConnection, requests: Requests) -> None:
        """Forget a connection that ended or failed; its requests go to other drafters of its group."""
        with contextlib.suppress(Exception):
            drafter.channel.close()
        del self._connections[drafter.number]
        if not drafter.failed:
            self._log.warning("drafter left", name=drafter.name)
        for request in requests.values():
            if request.replica is not None:
                request.replica.restart(drafter.number)
        if drafter.group is not None:
            self._reassign(drafter.group.leave(drafter.number), requests)
            if not len(drafter.group):
                del self._groups[_group_key(drafter)]

    def _rebalance(self, requests: Requests) -> None:
        for each in self._connections.values():
            if each.group is not None:
                each.group.update(each.number, each.liveness.step_s, each.is_lagging())
        for group in self._groups.values():
            self._reassign(group.rebalance(), requests)

    def _reassign(self, moves: Iterable[Reassignment], requests: Requests) -> None:
        """Move requests under the same epoch: each replica keeps its tree and merges the new drafter's."""
        for move in moves:
            request = requests.get(move.request)
            if request is None:
                continue
            self.moves += move.origin is not None
            if move.origin is not None and move.origin in self._connections:
                origin = self._connections[move.origin]
                self._guard(origin, origin.close, request)
            target = self._connections[move.target]
            self._guard(target, target.open, request)

    def _guard(
        self, drafter: DrafterConnection, action: Callable[P, R], *args: P.args, **named: P.kwargs
    ) -> R | None:
        """Run an action on a connection. Any exception ends the connection and nothing else, except for
        synchronous drafters, which are part of this process."""
        if drafter.failed:
            return None
        try:
            return action(*args, **named)
        except Exception as error:
            if drafter.synchronous:
                raise
            self._fail(drafter, error)
            return None

    def _fail(self, drafter: DrafterConnection, error: Exception) -> None:
        """Log why, ban the drafter for a while and close its channel; the next drain removes it."""
        drafter.failed = True
        drafter.inbox.clear()
        reason = (str(error) if isinstance(error, SsdError) else in_a_line(error))[:_LONGEST_REASON]
        if isinstance(error, PairMismatchError):
            self._log_refused.warning("drafter refused", name=drafter.name, peer=drafter.peer, reason=reason)
        else:
            seconds = self.authorizer.bans.ban(drafter.peer or drafter.name)
            self._log_banned.warning(
                "drafter banned", name=drafter.name, peer=drafter.peer, reason=reason, seconds=seconds
            )
        with contextlib.suppress(Exception):
            drafter.channel.send(Refusal(reason))
            drafter.channel.flush()
        with contextlib.suppress(Exception):
            drafter.channel.close()

    def _drafters_of(self, request: int) -> Iterator[DrafterConnection]:
        for group in self._groups.values():
            number = group.drafter_of(request)
            if number is not None:
                yield self._connections[number]

    def _active(self, synchronous: bool | None = None) -> list[DrafterConnection]:
        """Joined connections that have not failed, of one kind or of both."""
        return [
            each
            for each in self._connections.values()
            if each.active and synchronous in (None, each.synchronous)
        ]

    def _of(self, mode: SpeculationMode) -> list[DrafterConnection]:
        return self._active(synchronous=mode is SpeculationMode.SYNC)

    def _update_pause(self, drafter: DrafterConnection) -> None:
        """Let a drafter work or pause, as the mode asks."""
        mode = SpeculationMode.SYNC if drafter.synchronous else SpeculationMode.ASYNC
        pauses = (
            self._mode not in (None, mode) and not drafter.is_lookup
        )  # a lookup costs nothing until it matches
        self._guard(drafter, drafter.pause, pauses)


def _drafts(drafter: DrafterConnection, request: int) -> bool:
    return drafter.group is not None and drafter.group.drafter_of(request) == drafter.number


def _group_key(drafter: DrafterConnection) -> tuple[bool, str]:
    return drafter.synchronous, drafter.source


def _replace(other: DrafterConnection, drafter: DrafterConnection, hello: Hello) -> None:
    """Close `other`, which has a new drafter's name, or refuse the new one with `PairMismatchError`.

    The same drafter replaces its old connection, a local one replaces a remote one, and any replaces one that
    has been silent.
    """
    same = other.instance == hello.instance or other.liveness.silent_s >= _NAME_HELD_S
    if drafter.remote > other.remote or (drafter.remote == other.remote and not same):
        raise PairMismatchError(
            f"another drafter has joined as {hello.name}: give each a name of its own (--name)"
        )
    other.failed = True
    other.channel.close()


def _fastest(drafters: Iterable[DrafterConnection]) -> float:
    steps = (each.liveness.step_s for each in drafters)
    return min((step for step in steps if step > 0), default=0.0)
