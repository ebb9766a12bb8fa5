"""The verifier's side of its drafters: joins, who of them works and for which request, growth drained into
replicas.

Every request is drafted by one drafter of each team: of those that guess with the same model. Replicas merge
what comes by the names of nodes. Drafters may die, stall or talk nonsense: the worst that follows is a round
without nodes. Knows channels and messages, not how drafts are made, and no tensors.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ssd_serve.cluster.channel import Channel
from ssd_serve.cluster.polling import poll
from ssd_serve.errors import PairMismatchError, ProtocolError
from ssd_serve.logs import Logger, get_logger
from ssd_serve.messages import Growth, Heartbeat, Hello, Message, Refusal, Resync
from ssd_serve.verifier.layout import Layout
from ssd_serve.verifier.link import Link
from ssd_serve.verifier.request import Request
from ssd_serve.verifier.teams import Move, Team

_HEARTBEAT_S = 2.0
_ANSWERS_S = 10.0
"""Longer than a drafter reads at a prompt without a heartbeat."""
_HERE_S = 2.0
"""Who has said something since then holds its name; drafters beat four times as often."""


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
        self._links: dict[int, Link] = {}
        self._connected = 0
        self._teams: dict[tuple[bool, str], Team] = {}
        self._beat_at = 0.0
        self._layout: Layout | None = None
        self._known: set[str] = set()
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
        return sum(link.joined for link in self._links.values())

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
        return {link.name: self._teams[_team(link)].requests(link.number) for link in self._beside()}

    @property
    def working(self) -> bool:
        """Whether nodes may be expected: a drafter has joined, and drafting is not switched off."""
        return any(link.working for link in self._links.values())

    @property
    def channels(self) -> list[Channel]:
        """What a caller may wait on."""
        return [link.channel for link in self._links.values()]

    @property
    def step_s(self) -> float:
        """Seconds of the fastest working drafter's step; 0 when unknown."""
        steps = (link.step_s for link in self._links.values() if link.working and link.step_s > 0)
        return min(steps, default=0.0)

    @property
    def overrun_share(self) -> float:
        """Share of the drafters' emulated forwards that took longer than their table says."""
        late, forwards = (sum(link.overruns[index] for link in self._links.values()) for index in range(2))
        return late / forwards if forwards else 0.0

    def connect(self, channel: Channel, synchronous: bool = False) -> None:
        """A new drafter has connected; it joins when its `Hello` has been checked."""
        link = Link(channel, self._clock, synchronous, self._connected)
        self._connected += 1
        self._links[link.number] = link
        link.pause(self._pauses(link))

    def use(self, layout: Layout) -> None:
        """Let the drafters of this layout work, and the others pause."""
        self._layout = layout
        for link in self._links.values():
            link.pause(self._pauses(link))

    def open(self, request: Request) -> None:
        """Start drafting for a request, or start again at its current tokens, under a new epoch."""
        message = request.open()
        for team in self._teams.values():
            home = team.give(request.number)
            if home is not None:
                self._links[home].open(request, message)

    def outcome(self, request: Request, tokens: tuple[int, ...], root: int) -> None:
        """Publish what a round committed, with the next `flush`; call after the request's tokens were
        extended and its replica has moved."""
        for team in self._teams.values():
            home = team.home(request.number)
            if home is not None:
                self._links[home].outcome(request, tokens, root)

    def flush(self) -> None:
        """The end of a round: send its outcomes together."""
        self._round_over = True
        for link in self._links.values():
            link.flush()

    def close(self, request: Request) -> None:
        """Stop drafting for a request."""
        for team in self._teams.values():
            home = team.drop(request.number)
            if home is not None:
                self._links[home].close(request)

    def drain(self, requests: Mapping[int, Request]) -> int:
        """Take every waiting message; growth goes into the replicas. Returns the number of growth
        messages."""
        grown = 0
        for link in list(self._links.values()):
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
                self._leave(link, requests)
            else:
                link.catch_up(requests)
        if self._round_over:
            self._round_over = False
            self._balance(requests)
        return grown

    def wait(self, timeout_s: float) -> bool:
        """Wait until a drafter says something."""
        return bool(self._poll([link.channel for link in self._links.values() if not link.paused], timeout_s))

    def listen(self, timeout_s: float) -> bool:
        """Wait until a drafter with a device of its own says something; False when there is none."""
        return bool(
            self._poll([link.channel for link in self._links.values() if not link.synchronous], timeout_s)
        )

    def worth_waiting(self) -> bool:
        """Whether a drafter works that has not been silent for too long after it was asked."""
        return any(link.worth_waiting for link in self._links.values())

    def beat(self) -> None:
        """Send heartbeats when they are due, and see who sends none. The time is asked for only here and in
        rounds, so that a session can be run again."""
        now = self._clock()
        self._silent = {link.number for link in self._beside() if link.silent_s > _ANSWERS_S}
        if now - self._beat_at >= _HEARTBEAT_S:
            self._beat_at = now
            for link in self._links.values():
                if link.joined:
                    link.channel.send(Heartbeat())

    def _beside(self) -> list[Link]:
        return [link for link in self._links.values() if link.joined and not link.synchronous]

    def _pauses(self, link: Link) -> bool:
        wanted = Layout.INLINE if link.synchronous else Layout.BESIDE
        return self._layout is not None and self._layout is not wanted

    def _take(self, link: Link, message: Message, requests: Mapping[int, Request]) -> int:
        link.heard(message)
        if not link.joined and not isinstance(message, Hello | Refusal):
            return 0  # who has not been checked yet is not listened to
        if isinstance(message, Growth):
            self.expansions += len(message.parents) // 8
            request = requests.get(message.request)
            if request is not None and request.replica is not None and not request.replica.apply(message):
                link.channel.send(Resync(message.request, request.epoch))
            return 1
        if isinstance(message, Hello):
            check_hello(self._hello, message)
            self._join(link, message, requests)
        elif isinstance(message, Resync):
            request = requests.get(message.request)
            mine = self._teams[_team(link)].home(message.request) == link.number
            if request is not None and message.epoch == request.epoch and mine:
                self.open(request)
        elif isinstance(message, Refusal):
            self._log.warning("drafter left", name=link.name, reason=message.message)
            link.channel.close()
        return 0

    def _join(self, link: Link, hello: Hello, requests: Mapping[int, Request]) -> None:
        if link.joined:
            return
        if not link.synchronous:
            for other in self._beside():
                if other.name != hello.name:
                    continue
                if other.instance != hello.instance and other.silent_s < _HERE_S:
                    raise PairMismatchError(
                        f"another drafter has joined as {hello.name}: give each a name of its own (--name)"
                    )
                other.channel.close()  # it has come back before its old connection was seen to end
            self.rejoins += hello.name in self._known
            self._known.add(hello.name)
        link.join(self._hello, hello)
        self._log.info("drafter joined", name=link.name, step_ms=round(hello.step_ms, 2))
        team = self._teams.setdefault(_team(link), Team())
        self._move(team.join(link.number, requests), requests)

    def _leave(self, link: Link, requests: Mapping[int, Request]) -> None:
        link.channel.close()  # our own end too
        del self._links[link.number]
        self._log.warning("drafter left", name=link.name)
        if link.joined:
            team = self._teams[_team(link)]
            self._move(team.leave(link.number), requests)
            if not len(team):
                del self._teams[_team(link)]

    def _balance(self, requests: Mapping[int, Request]) -> None:
        """Let a few requests move where drafters lag, or have more than others."""
        for link in self._links.values():
            if link.joined:
                self._teams[_team(link)].judge(link.number, link.step_s, link.lags())
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
                self._links[move.origin].close(request)
            self._links[move.home].open(request, request.opened())


def _team(link: Link) -> tuple[bool, str]:
    return link.synchronous, link.source


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
