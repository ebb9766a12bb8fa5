"""The verifier's side of its drafters: who of them works, what they are told, and when they are waited for.

Every request is drafted by one drafter of each team (`Homes`); replicas merge what comes by the names of
nodes (`Reception`). Drafters may die, stall, flood or talk nonsense: whatever fails about a link ends that
link alone (`Links`), and the worst that follows is a round without nodes. Knows channels and messages, not
how drafts are made, and no tensors.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ssd_serve.transport.channel import Channel
from ssd_serve.transport.channel import poll
from ssd_serve.base.draft_messages import Heartbeat, Hello
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.logs import Logger, get_logger
from ssd_serve.verifier.drafts.admission import Admission
from ssd_serve.verifier.drafts.homes import Homes, Requests
from ssd_serve.verifier.drafts.link import Link
from ssd_serve.verifier.drafts.links import Links
from ssd_serve.verifier.drafts.reception import Reception
from ssd_serve.verifier.control.decision import SpeculationMode
from ssd_serve.verifier.request import Request

_HEARTBEAT_S = 2.0
_ANSWERS_S = 10.0
"""Longer than a drafter reads at a prompt without a heartbeat."""
_HELLO_S = 10.0
"""For whoever has connected to say who it is."""
_GOOD_S = 60.0
"""Whoever has behaved for so long is not remembered for what was before."""

class Drafters:
    """A list of drafters. `hello` is what they must agree with."""

    def __init__(
        self,
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
        log: Logger | None = None,
    ) -> None:
        log = log or get_logger("verifier")
        self._clock = clock
        self.admission = Admission(hello, clock)
        self._links = Links(self.admission, clock, log)
        self._homes = Homes(self._links)
        self._reception = Reception(hello, self.admission, self._links, self._homes, log, self._pause)
        self._beat_at = 0.0
        self._layout: SpeculationMode | None = None
        self._round_over = False
        self._silent: set[int] = set()

    @property
    def alive(self) -> int:
        """Number of drafters that have joined."""
        return sum(link.here for link in self._links)

    @property
    def beside(self) -> int:
        """Those of them that have a device of their own: a process that can die and come back."""
        return len(self._links.beside)

    @property
    def answering(self) -> int:
        """Those of them that had said something lately at the last `beat`: who is stopped stays connected."""
        return sum(link.number not in self._silent for link in self._links.beside)

    @property
    def requests(self) -> dict[str, int]:
        """How many requests each drafter with a device of its own has, by its name."""
        counted: Counter[str] = Counter()
        for link in self._links.beside:
            counted[self.admission.label(link.name)] += self._homes.count(link)
        return dict(counted)

    @property
    def sources(self) -> Sequence[str]:
        """What drafters have guessed with, in the order of their bits."""
        return self._reception.sources.names

    @property
    def rejoins(self) -> int:
        """Of drafters with a device of their own that had been here before."""
        return self._reception.rejoins

    @property
    def moves(self) -> int:
        """Requests that went from one drafter to another."""
        return self._homes.moves

    @property
    def expansions(self) -> int:
        """Nodes that drafters have said to have expanded."""
        return self._reception.expansions

    @property
    def working(self) -> bool:
        """Whether nodes may be expected: a drafter has joined, and drafting is not switched off."""
        return any(link.working for link in self._links)

    @property
    def layout(self) -> SpeculationMode:
        """Who drafts: as `use` has said, else as they are here."""
        if self._layout is not None:
            return self._layout
        working = [link.synchronous for link in self._links if link.working]
        if not working:
            return SpeculationMode.PLAIN
        return SpeculationMode.SYNC if all(working) else SpeculationMode.ASYNC

    @property
    def channels(self) -> list[Channel]:
        """What a caller may wait on."""
        return [link.channel for link in self._links]

    @property
    def step_s(self) -> float:
        """Seconds of the fastest working drafter's step; 0 when unknown."""
        return _fastest(link for link in self._links if link.working)

    @property
    def instant_sources(self) -> int:
        """Those for which nobody waits, as bits."""
        bits = 0
        for link in self._links:
            bits |= link.source_bit * link.instant
        return bits

    def step_of(self, layout: SpeculationMode) -> float:
        """The same of those that work in a layout, whether they pause or not."""
        return _fastest(self._of(layout))

    def unread_s(self, layout: SpeculationMode) -> float:
        """Seconds for which those that work in a layout would read before they could draft, as far as that is
        known."""
        return max((link.unread * link.prefill_s_per_token for link in self._of(layout)), default=0.0)

    def prefill_s_per_token(self, layout: SpeculationMode) -> float:
        """Seconds that those that work in a layout take to read a token of some text, which they share out;
        0: unknown."""
        reading = [link.prefill_s_per_token for link in self._of(layout) if link.prefill_s_per_token]
        return max(reading, default=0.0) / max(1, len(reading))

    def admit(self, channel: Channel, peer: str, stranger: bool) -> None:
        """Somebody from this address has connected, a stranger where drafters of other places do. It may try
        to join, or not even that."""
        if self._links.keeps_out(peer, stranger):
            channel.close()
        else:
            self.connect(channel, stranger=stranger, peer=peer if stranger else "")

    def connect(
        self, channel: Channel, synchronous: bool = False, stranger: bool = False, peer: str = ""
    ) -> None:
        """A new drafter has connected; it joins when its `Hello` has been checked."""
        self._pause(self._links.add(channel, synchronous, stranger, peer))

    def use(self, layout: SpeculationMode) -> None:
        """Let the drafters of this layout work, and the others pause."""
        self._layout = layout
        for link in self._links:
            self._pause(link)

    def open(self, request: Request) -> None:
        """Start drafting for a request, if it may have drafts, or start again at its current tokens, under a
        new epoch."""
        request.open()
        if request.drafted:
            self._homes.open(request)

    def outcome(self, request: Request) -> None:
        """Publish what a round committed, with the next `flush`; call after the request's tokens were
        extended and its replica has moved."""
        for link in self._homes.of(request.number):
            self._links.attempt(link, link.outcome, request)

    def read(self, request: Request) -> None:
        """The target has computed more of a prompt, which some drafters may read."""
        for link in self._homes.of(request.number):
            self._links.attempt(link, link.read, request)

    def flush(self) -> None:
        """The end of a round: send its outcomes together."""
        self._round_over = True
        for link in self._links:
            self._links.attempt(link, link.flush)

    def close(self, request: Request) -> None:
        """Stop drafting for a request."""
        self._homes.close(request)

    def drain(self, requests: Requests) -> int:
        """Take the messages that wait, as many as a round has time for; growth goes into the replicas.
        Returns the number of growth messages."""
        grown = self._reception.drain(requests)
        if self._round_over:
            self._round_over = False
            self._homes.balance(requests)
        return grown

    def wait(self, timeout_s: float) -> bool:
        """Wait until a drafter says something."""
        return self._await([link for link in self._links if not link.paused], timeout_s)

    def listen(self, timeout_s: float) -> bool:
        """Wait until a drafter with a device of its own says something; False when there is none."""
        return self._await([link for link in self._links if not link.synchronous], timeout_s)

    def worth_waiting(self) -> bool:
        """Whether a drafter works that may say more, and was not silent for too long after it was asked."""
        return any(link.worth_waiting and not link.instant for link in self._links)

    def beat(self) -> None:
        """Send heartbeats when they are due, and see who sends none. """
        now = self._clock()
        self._silent = {link.number for link in self._links.beside if link.liveness.silent_s > _ANSWERS_S}
        for link in self._links:
            if not link.joined and not link.synchronous and now - link.since > _HELLO_S:
                self._links.fail(link, ProtocolError(f"it did not say who it is in {_HELLO_S:.0f} s"))
            elif link.joined and not link.behaves and now - link.since > _GOOD_S:
                link.behaves = True
                self.admission.forgive(link.peer, link.name)
        if now - self._beat_at >= _HEARTBEAT_S:
            self._beat_at = now
            for link in self._links:
                if link.joined:
                    self._links.attempt(link, link.channel.send, Heartbeat())

    def _of(self, layout: SpeculationMode) -> list[Link]:
        synchronous = layout is SpeculationMode.SYNC
        return [link for link in self._links if link.here and link.synchronous is synchronous]

    def _await(self, links: Sequence[Link], timeout_s: float) -> bool:
        if any(link.inbox for link in links):
            return True
        return bool(poll([link.channel for link in links], timeout_s))

    def _pause(self, link: Link) -> None:
        """Let it work or pause, as the layout asks."""
        layouts = {SpeculationMode.SYNC if link.synchronous else SpeculationMode.ASYNC}
        if link.instant:
            layouts = {SpeculationMode.SYNC, SpeculationMode.ASYNC}
        self._links.attempt(link, link.pause, self._layout is not None and self._layout not in layouts)


def _fastest(links: Iterable[Link]) -> float:
    steps = (link.liveness.step_s for link in links)
    return min((step for step in steps if step > 0), default=0.0)
