"""The verifier's side of its drafters: joins, who of them works and for which request, growth drained into
replicas.

Every request is drafted by one drafter of each team: of those that guess with the same model. Replicas merge
what comes by the names of nodes. Drafters may die, stall, flood or talk nonsense: whatever fails about a link
ends that link alone (`_attempt`), and the worst that follows is a round without nodes. Knows channels and
messages, not how drafts are made, and no tensors.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from ssd_serve.cluster.channels.channel import Channel
from ssd_serve.cluster.channels.polling import poll
from ssd_serve.errors import PairMismatchError, ProtocolError, RecordingError, SsdError, in_a_line
from ssd_serve.logs import Logger, Sparingly, get_logger
from ssd_serve.messages import Growth, Heartbeat, Hello, Message, Refusal, Resync
from ssd_serve.verifier.drafts.admission import Admission
from ssd_serve.verifier.drafts.link import Link
from ssd_serve.verifier.drafts.teams import Move, Team
from ssd_serve.verifier.planning.layout import Layout
from ssd_serve.verifier.request import Request

P = ParamSpec("P")
R = TypeVar("R")

_HEARTBEAT_S = 2.0
_ANSWERS_S = 10.0
"""Longer than a drafter reads at a prompt without a heartbeat."""
_HELLO_S = 10.0
"""For whoever has connected to say who it is."""
_GOOD_S = 60.0
"""Whoever has behaved for so long is not remembered for what was before."""
_WORK_A_DRAIN, _MIN_WORK = 2048, 32
"""Messages and expansions that one drain takes, of all drafters and of each at least: some milliseconds. What
comes faster waits in its socket."""
_CANDIDATES_A_WORK = 16
_LONGEST_REASON = 200
_HERE_S = 2.0
"""Who has said something since then holds its name; drafters beat four times as often."""

Tap = Callable[[Channel, bool, bool, str], Channel]
"""Stands before a channel that has connected, which is told as to `Drafters.connect`."""


def untapped(channel: Channel, synchronous: bool, stranger: bool, peer: str) -> Channel:
    """Nothing stands before it."""
    del synchronous, stranger, peer
    return channel


class Drafters:
    """A list of drafters. `hello` is what they must agree with."""

    def __init__(
        self,
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
        log: Logger | None = None,
        poll: Callable[[Sequence[Channel], float], Sequence[Channel]] = poll,
        tap: Tap = untapped,
    ) -> None:
        """`poll` waits until one of some channels has something to say; `tap` puts something before each."""
        self._hello = hello
        self._clock = clock
        self._poll = poll
        self._tap = tap
        self._log = log or get_logger("verifier")
        self._refused, self._banned = Sparingly(self._log), Sparingly(self._log)
        self.admission = Admission(hello, clock)
        self._links: dict[int, Link] = {}
        self._connected = 0
        self._teams: dict[tuple[bool, str], Team] = {}
        self._beat_at = 0.0
        self._layout: Layout | None = None
        self._round_over = False
        self._silent: set[int] = set()
        self.rejoins = 0
        """Of drafters with a device of their own that had been here before."""
        self.moves = 0
        """Requests that went from one drafter to another."""
        self.expansions = 0
        """Nodes that drafters have said to have expanded."""

    @property
    def alive(self) -> int:
        """Number of drafters that have joined."""
        return sum(link.here for link in self._links.values())

    @property
    def beside(self) -> int:
        """Those of them that have a device of their own: a process that can die and come back."""
        return len(self._beside())

    @property
    def answering(self) -> int:
        """Those of them that had said something lately at the last `beat`: who is stopped stays connected."""
        return sum(link.number not in self._silent for link in self._beside())

    @property
    def requests(self) -> dict[str, int]:
        """How many requests each drafter with a device of its own has, by its name."""
        counted: Counter[str] = Counter()
        for link in self._beside():
            counted[self.admission.label(link.name)] += self._teams[_team(link)].requests(link.number)
        return dict(counted)

    @property
    def working(self) -> bool:
        """Whether nodes may be expected: a drafter has joined, and drafting is not switched off."""
        return any(link.working for link in self._links.values())

    @property
    def layout(self) -> Layout:
        """Who drafts: as `use` has said, else as they are here."""
        if self._layout is not None:
            return self._layout
        working = [link.synchronous for link in self._links.values() if link.working]
        if not working:
            return Layout.OFF
        return Layout.SYNC if all(working) else Layout.ASYNC

    @property
    def channels(self) -> list[Channel]:
        """What a caller may wait on."""
        return [link.channel for link in self._links.values()]

    @property
    def step_s(self) -> float:
        """Seconds of the fastest working drafter's step; 0 when unknown."""
        steps = (link.liveness.step_s for link in self._links.values() if link.working)
        return min((step for step in steps if step > 0), default=0.0)

    @property
    def overrun_share(self) -> float:
        """Share of the drafters' emulated forwards that took longer than their table says."""
        late, forwards = (
            sum(link.liveness.overruns[index] for link in self._links.values()) for index in range(2)
        )
        return late / forwards if forwards else 0.0

    def admit(self, channel: Channel, peer: str, stranger: bool) -> None:
        """Somebody from this address has connected, a stranger where drafters of other places do. It may try
        to join, or not even that."""
        peers = Counter(link.peer for link in self._links.values() if link.stranger is stranger)
        why = self.admission.keeps_out(peer, stranger, peers)
        if why:
            self._refused.warning("drafter refused", peer=peer or "unix", reason=why)
            channel.close()
        else:
            self.connect(channel, stranger=stranger, peer=peer if stranger else "")

    def connect(
        self, channel: Channel, synchronous: bool = False, stranger: bool = False, peer: str = ""
    ) -> None:
        """A new drafter has connected; it joins when its `Hello` has been checked."""
        channel = self._tap(channel, synchronous, stranger, peer)
        link = Link(channel, self._clock, synchronous, self._connected, stranger, peer)
        self._connected += 1
        self._links[link.number] = link
        self._attempt(link, link.pause, self._pauses(link))

    def use(self, layout: Layout) -> None:
        """Let the drafters of this layout work, and the others pause."""
        self._layout = layout
        for link in self._links.values():
            self._attempt(link, link.pause, self._pauses(link))

    def open(self, request: Request) -> None:
        """Start drafting for a request, or start again at its current tokens, under a new epoch."""
        request.open()
        for team in self._teams.values():
            home = team.give(request.number)
            if home is not None:
                link = self._links[home]
                self._attempt(link, link.open, request)

    def outcome(self, request: Request) -> None:
        """Publish what a round committed, with the next `flush`; call after the request's tokens were
        extended and its replica has moved."""
        for team in self._teams.values():
            home = team.home(request.number)
            if home is not None:
                link = self._links[home]
                self._attempt(link, link.outcome, request)

    def flush(self) -> None:
        """The end of a round: send its outcomes together."""
        self._round_over = True
        for link in self._links.values():
            self._attempt(link, link.flush)

    def close(self, request: Request) -> None:
        """Stop drafting for a request."""
        for team in self._teams.values():
            home = team.drop(request.number)
            if home is not None:
                link = self._links[home]
                self._attempt(link, link.close, request)

    def drain(self, requests: Mapping[int, Request]) -> int:
        """Take the messages that wait, as many as a round has time for; growth goes into the replicas.
        Returns the number of growth messages."""
        grown = 0
        share = max(_MIN_WORK, _WORK_A_DRAIN // max(1, len(self._links)))
        for link in list(self._links.values()):
            link.earn(share)
            grown += self._attempt(link, self._hear, link, requests) or 0
            if link.failed or (link.channel.closed and not link.inbox):
                self._leave(link, requests)
            else:
                self._attempt(link, link.catch_up)
        if self._round_over:
            self._round_over = False
            self._balance(requests)
        return grown

    def wait(self, timeout_s: float) -> bool:
        """Wait until a drafter says something."""
        return self._await([link for link in self._links.values() if not link.paused], timeout_s)

    def listen(self, timeout_s: float) -> bool:
        """Wait until a drafter with a device of its own says something; False when there is none."""
        return self._await([link for link in self._links.values() if not link.synchronous], timeout_s)

    def _await(self, links: Sequence[Link], timeout_s: float) -> bool:
        if any(link.inbox for link in links):
            return True
        return bool(self._poll([link.channel for link in links], timeout_s))

    def worth_waiting(self) -> bool:
        """Whether a drafter works that has not been silent for too long after it was asked."""
        return any(link.worth_waiting for link in self._links.values())

    def beat(self) -> None:
        """Send heartbeats when they are due, and see who sends none. The time is asked for only here and in
        rounds, so that a session can be run again."""
        now = self._clock()
        self._silent = {link.number for link in self._beside() if link.liveness.silent_s > _ANSWERS_S}
        for link in self._links.values():
            if not link.joined and not link.synchronous and now - link.since > _HELLO_S:
                self._fail(link, ProtocolError(f"it did not say who it is in {_HELLO_S:.0f} s"))
            elif link.joined and not link.behaves and now - link.since > _GOOD_S:
                link.behaves = True
                self.admission.forgive(link.peer, link.name)
        if now - self._beat_at >= _HEARTBEAT_S:
            self._beat_at = now
            for link in self._links.values():
                if link.joined:
                    self._attempt(link, link.channel.send, Heartbeat())

    def _attempt(self, link: Link, action: Callable[P, R], *args: P.args, **named: P.kwargs) -> R | None:
        """Do something with a link. Its failure, whatever it is, ends the link and nothing else; but the
        engine's own inline drafter is no stranger."""
        if link.synchronous:
            return action(*args, **named)
        if link.failed:
            return None
        try:
            return action(*args, **named)
        except RecordingError:  # a session is run again, and its tape has ended
            raise
        except Exception as error:
            self._fail(link, error)
            return None

    def _fail(self, link: Link, error: Exception) -> None:
        """Say why once, keep it out for a while, and hang up; the next `drain` lets it go."""
        link.failed = True
        link.inbox.clear()
        reason = (str(error) if isinstance(error, SsdError) else in_a_line(error))[:_LONGEST_REASON]
        if not isinstance(error, PairMismatchError):
            seconds = self.admission.ban(link.peer, link.name)
            self._banned.warning(
                "drafter banned", name=link.name, peer=link.peer, reason=reason, seconds=seconds
            )
        else:
            self._refused.warning("drafter refused", name=link.name, peer=link.peer, reason=reason)
        with contextlib.suppress(Exception):
            link.channel.send(Refusal(reason))
            link.channel.flush()
        with contextlib.suppress(Exception):
            link.channel.close()

    def _beside(self) -> list[Link]:
        return [link for link in self._links.values() if link.here and not link.synchronous]

    def _pauses(self, link: Link) -> bool:
        wanted = Layout.SYNC if link.synchronous else Layout.ASYNC
        return self._layout is not None and self._layout is not wanted

    def _hear(self, link: Link, requests: Mapping[int, Request]) -> int:
        grown, inbox = 0, link.inbox
        if not inbox:
            inbox.extend(link.channel.receive())
        while inbox and link.credit > 0:
            grown += self._take(link, inbox.popleft(), requests)
        if not inbox and link.channel.closed:
            inbox.extend(link.channel.receive())  # says why, if it was nonsense
        return grown

    def _take(self, link: Link, message: Message, requests: Mapping[int, Request]) -> int:
        link.liveness.heard(message)
        link.credit -= 1
        if isinstance(message, Growth) and link.joined:
            self._grow(link, message, requests)
            return 1
        if isinstance(message, Hello) and not link.joined:
            self._join(link, message, requests)
        elif isinstance(message, Refusal):
            self._refused.warning("drafter left", name=link.name, reason=message.message[:_LONGEST_REASON])
            link.channel.close()
        elif not link.joined:
            link.liveness.said_nothing()  # who has not been checked yet is not listened to
        elif isinstance(message, Resync):
            request = requests.get(message.request)
            if request is None or message.epoch != request.epoch or not self._drafts(link, message.request):
                link.liveness.said_nothing()
            else:
                link.resync(request)
        elif not isinstance(message, Heartbeat | Hello):
            raise ProtocolError(f"a drafter says nothing like {type(message).__name__}")
        return 0

    def _grow(self, link: Link, growth: Growth, requests: Mapping[int, Request]) -> None:
        """Of requests that are another drafter's nothing is taken, but for the end of what was on its way."""
        expansions = len(growth.parents) // 8
        self.expansions += expansions
        link.credit -= expansions + len(growth.tokens) // (4 * _CANDIDATES_A_WORK)
        request = requests.get(growth.request)
        team = link.team
        if (
            request is None
            or (replica := request.replica) is None
            or team is None
            or team.home(growth.request) != link.number
        ):
            link.liveness.said_nothing()
            return
        if not expansions or growth.epoch != replica.epoch:
            link.liveness.said_nothing()
        if not replica.apply(growth, link.number):
            link.channel.send(Resync(growth.request, growth.epoch))
        link.credit -= replica.merged // _CANDIDATES_A_WORK

    def _drafts(self, link: Link, request: int) -> bool:
        return link.team is not None and link.team.home(request) == link.number

    def _join(self, link: Link, hello: Hello, requests: Mapping[int, Request]) -> None:
        sources = {source for synchronous, source in self._teams if not synchronous}
        self.admission.check(hello, link.stranger, sources)
        if not link.synchronous:
            if not link.peer and self.admission.names.banned(hello.name):
                link.failed = True
                return
            for other in self._beside():
                if other.name == hello.name:
                    self._replace(other, link, hello)
            self.rejoins += self.admission.knows(hello.name)
        link.join(self._hello, hello)
        self._log.info("drafter joined", name=link.name, step_ms=round(hello.step_ms, 2))
        team = link.team = self._teams.setdefault(_team(link), Team())
        self._move(team.join(link.number, requests), requests)

    def _replace(self, other: Link, link: Link, hello: Hello) -> None:
        """A name comes again: of the same drafter, whose old connection was not seen to end, or of another
        one. This server's own drafters come before strangers."""
        same = other.instance == hello.instance or other.liveness.silent_s >= _HERE_S
        if link.stranger > other.stranger or (link.stranger == other.stranger and not same):
            raise PairMismatchError(
                f"another drafter has joined as {hello.name}: give each a name of its own (--name)"
            )
        other.failed = True
        other.channel.close()

    def _leave(self, link: Link, requests: Mapping[int, Request]) -> None:
        with contextlib.suppress(Exception):
            link.channel.close()  # our own end too
        del self._links[link.number]
        if not link.failed:
            self._log.warning("drafter left", name=link.name)
        for request in requests.values():
            if request.replica is not None:
                request.replica.restart(link.number)
        if link.joined:
            team = self._teams[_team(link)]
            self._move(team.leave(link.number), requests)
            if not len(team):
                del self._teams[_team(link)]

    def _balance(self, requests: Mapping[int, Request]) -> None:
        """Let a few requests move where drafters lag, or have more than others."""
        for link in self._links.values():
            if link.joined:
                self._teams[_team(link)].judge(link.number, link.liveness.step_s, link.lags())
        for team in self._teams.values():
            self._move(team.balance(), requests)

    def _move(self, moves: Iterable[Move], requests: Mapping[int, Request]) -> None:
        """Under the same epoch: the replica keeps its tree, and its new drafter's merges with it."""
        for move in moves:
            request = requests.get(move.request)
            if request is None:
                continue
            self.moves += move.origin is not None
            if move.origin in self._links:
                origin = self._links[move.origin]
                self._attempt(origin, origin.close, request)
            home = self._links[move.home]
            self._attempt(home, home.open, request)


def _team(link: Link) -> tuple[bool, str]:
    return link.synchronous, link.source
