"""Which drafters may join and stay: what their `Hello` must say, how many may come, and who is kept out.

Those of this server's own launcher are known; all others are strangers who know the cluster's key. Who breaks
a rule is banned: a stranger by its address, others by their name; for a second at first, then for longer and
longer. Knows names, addresses, figures and times, no channels.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable

from ssd_serve.transport.channel import ReceiveLimits
from ssd_serve.base.draft_messages import (
    Growth,
    Heartbeat,
    Hello,
    SharedMemoryRead,
    Refusal,
    Resync,
)
from ssd_serve.base.errors import PairMismatchError, ProtocolError
from ssd_serve.base.labels import LONGEST_LABEL, is_label
from ssd_serve.models.interface import listed

FROM_DRAFTERS = ReceiveLimits(2 << 20, 128 << 10, Hello | Growth | Resync | SharedMemoryRead | Refusal | Heartbeat)
"""The largest frame is the snapshot of the largest tree."""
MAX_STRANGERS = 64
_MAX_OF_A_PEER = 32
_MAX_OWN = 128
_MAX_CONNECTIONS_A_MINUTE = 120
_MAX_SOURCES = 4
"""Every request is told to a drafter of each draft model."""
_MAX_NAMES = 256
_SLOWEST_STEP_MS, _FASTEST_STEP_MS = 60_000.0, 1e-3
_LARGEST_COUNT = 2**53
OTHERS = "others"
"""What figures call drafters beyond the names that they have room for."""


class Bans:
    """Who is kept out, and until when. What is long past is forgotten."""

    FIRST_S, LONGEST_S, REMEMBERED_S = 1.0, 300.0, 900.0
    _MOST = 1024

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bans: dict[str, tuple[int, float]] = {}
        """How often each was banned, and until when."""

    def __len__(self) -> int:
        return len(self._bans)

    def banned(self, who: str) -> bool:
        """Whether it is kept out now."""
        ban = self._bans.get(who)
        return ban is not None and self._clock() < ban[1]

    def ban(self, who: str) -> float:
        """It has broken a rule: seconds for which it is kept out."""
        now = self._clock()
        self._bans = {name: ban for name, ban in self._bans.items() if now < ban[1] + self.REMEMBERED_S}
        times, _ = self._bans.pop(who, (0, 0.0))
        if len(self._bans) >= self._MOST:
            del self._bans[min(self._bans, key=lambda name: self._bans[name][1])]
        seconds = min(self.LONGEST_S, self.FIRST_S * 2.0 ** min(times, 30))
        self._bans[who] = times + 1, now + seconds
        return seconds

    def forgive(self, who: str) -> None:
        """It has behaved well since."""
        self._bans.pop(who, None)


class Admission:
    """What is asked of drafters. `clock` is the engine's, `outside` that of whoever accepts connections,
    which nobody does where a session is run again."""

    def __init__(
        self, hello: Hello, clock: Callable[[], float], outside: Callable[[], float] = time.monotonic
    ) -> None:
        self._hello = hello
        self._sources: frozenset[str] = frozenset()
        self._features: tuple[int, ...] = ()
        self._names: set[str] = set()
        self._outside = outside
        self._came: deque[tuple[float, str]] = deque()
        self.peers = Bans(outside)
        self.names = Bans(clock)

    def offer(self, features: Iterable[int]) -> None:
        """Drafters may read the outputs of these layers of the target."""
        self._features = tuple(features)

    def restrict(self, sources: Iterable[str]) -> None:
        """Strangers draft with these models only; with any where none is named."""
        self._sources = frozenset(sources)

    def keeps_out(self, peer: str, stranger: bool, peers: Counter[str]) -> str:
        """Why who has connected from this address may not even say `Hello`; empty where it may. `peers`: how
        many of its kind there are, by address."""
        if not stranger:
            return "too many drafters" if peers.total() >= _MAX_OWN else ""
        if peer:
            if self.peers.banned(peer):
                return "it is banned"
            if self._comes_too_often(peer):
                return f"it connects too often, and is banned for {self.peers.ban(peer):.0f} s"
        most = _MAX_OF_A_PEER if peer else MAX_STRANGERS
        return "too many drafters" if peers.total() >= MAX_STRANGERS or peers[peer] >= most else ""

    def _comes_too_often(self, peer: str) -> bool:
        now = self._outside()
        self._came.append((now, peer))
        while self._came[0][0] < now - 60.0 or len(self._came) > 8 * _MAX_CONNECTIONS_A_MINUTE:
            self._came.popleft()
        return sum(other == peer for _, other in self._came) > _MAX_CONNECTIONS_A_MINUTE

    def ban(self, peer: str, name: str) -> float:
        """A drafter has broken a rule: seconds for which it is kept out."""
        return self.peers.ban(peer) if peer else self.names.ban(name)

    def forgive(self, peer: str, name: str) -> None:
        """A drafter has behaved well for a while."""
        self.peers.forgive(peer)
        self.names.forgive(name)

    def check(self, theirs: Hello, stranger: bool, sources: Collection[str]) -> None:
        """Raise unless this drafter may join; `sources`: the draft models of those that have joined."""
        check_hello(self._hello, theirs)
        if not is_label(theirs.name) or not is_label(theirs.source):
            raise ProtocolError(f"names and draft models are at most {LONGEST_LABEL} printable bytes")
        check_step(theirs.step_ms)
        check_text(theirs.prefill_ms)
        if not set(theirs.features) <= set(self._features) or len({*theirs.features}) < len(theirs.features):
            given = listed(self._features) if self._features else "none"
            raise PairMismatchError(
                f"the draft reads outputs of layers {listed(theirs.features)}, this server gives "
                f"{given}: name the same draft there and here (SSD_DRAFT)"
            )
        if stranger and self._sources and theirs.source not in self._sources:
            raise PairMismatchError(
                f"this server drafts with {', '.join(sorted(self._sources))} (SSD_DRAFT), not with "
                f"{theirs.source!r}: name the draft model alike, or name it there too"
            )
        if stranger and theirs.source not in sources and len(sources) >= _MAX_SOURCES:
            raise PairMismatchError(f"drafters of {_MAX_SOURCES} other draft models have joined already")

    def knows(self, name: str) -> bool:
        """Whether a drafter of this name has been here before; it has from now on, while there is room."""
        if name in self._names:
            return True
        if len(self._names) < _MAX_NAMES:
            self._names.add(name)
        return False

    def label(self, name: str) -> str:
        """What figures call it."""
        return name if name in self._names else OTHERS


def check_hello(mine: Hello, theirs: Hello) -> None:
    """Raise `PairMismatchError` with what differs and what to do, unless the two can work together."""
    if mine.protocol != theirs.protocol:
        raise PairMismatchError(
            f"protocol versions differ (verifier {mine.protocol}, drafter {theirs.protocol}): "
            "install the same version of ssd-serve on both sides"
        )
    if mine.noise != theirs.noise:
        raise PairMismatchError(f"noise schemes differ (verifier {mine.noise}, drafter {theirs.noise[:64]})")
    if mine.tokenizer != theirs.tokenizer:
        raise PairMismatchError(
            "the draft model's tokenizer differs from the target's: choose a draft model of the same family, "
            "or name the target there too (--target)"
        )


def check_step(step_ms: float) -> None:
    """Raise `ProtocolError` unless a draft step can take so long; 0 means that nobody knows."""
    if step_ms != 0 and not _FASTEST_STEP_MS <= step_ms <= _SLOWEST_STEP_MS:  # also where it is no number
        raise ProtocolError(f"a draft step cannot take {step_ms:g} ms")


def check_text(prefill_ms: float) -> None:
    """Raise `ProtocolError` unless a token can take so long to read; 0 means that nobody knows."""
    if not 0 <= prefill_ms <= _SLOWEST_STEP_MS:  # also where it is no number
        raise ProtocolError(f"a token cannot take {prefill_ms:g} ms to read")


def check_figures(beat: Heartbeat) -> None:
    """Raise `ProtocolError` unless a drafter can have measured this."""
    check_step(beat.step_ms)
    if not 0 <= beat.nodes <= _LARGEST_COUNT:
        raise ProtocolError("a drafter's figures are impossible")
