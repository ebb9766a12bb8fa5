"""Admission of drafters: which may join, how many, and which are banned.

Local drafters were started by this server's launcher; all others are remote and know the cluster's key. A
drafter that breaks a rule is banned: a remote one by its address, a local one by its name. The ban lasts a
second at first, then twice as long each time. Knows names, addresses, numbers and times, but no channels.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from ssd_serve.base.draft_messages import (
    Growth,
    Heartbeat,
    Hello,
    Refusal,
    Resync,
    SharedMemoryRead,
)
from ssd_serve.base.errors import PairMismatchError, ProtocolError
from ssd_serve.base.names import LONGEST_LABEL, is_label
from ssd_serve.models.interface import listed
from ssd_serve.transport.channel import ReceiveLimits

FROM_DRAFTERS = ReceiveLimits(
    2 << 20, 128 << 10, Hello | Growth | Resync | SharedMemoryRead | Refusal | Heartbeat
)
"""Limits of messages from drafters; the largest frame is a snapshot of the largest tree."""
MAX_REMOTE = 64
_MAX_PER_ADDRESS = 32
_MAX_LOCAL = 128
_MAX_CONNECTIONS_PER_MINUTE = 120
_MAX_SOURCES = 4
"""Most draft models of remote drafters: each request is drafted once for each of them."""
_MAX_NAMES = 256
_SLOWEST_STEP_MS, _FASTEST_STEP_MS = 60_000.0, 1e-3
_LARGEST_COUNT = 2**53
OTHERS = "others"
"""Label of drafters and sources beyond the number of names that metrics keep."""
OTHERS_BIT = 1
"""Bit of every draft source without a bit of its own."""
_MAX_SOURCE_BITS, _MAX_REMOTE_SOURCE_BITS = 16, 8
_UNNAMED = "unnamed"


class BanList:
    """Banned names with the end of each ban. Bans that ended long ago are forgotten."""

    FIRST_S, LONGEST_S, REMEMBERED_S = 1.0, 300.0, 900.0
    _MOST = 1024

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bans: dict[str, tuple[int, float]] = {}  # number of bans, end of the last one

    def __len__(self) -> int:
        return len(self._bans)

    def is_banned(self, name: str) -> bool:
        ban = self._bans.get(name)
        return ban is not None and self._clock() < ban[1]

    def ban(self, name: str) -> float:
        """Ban a name that broke a rule; returns the seconds of the ban."""
        now = self._clock()
        self._bans = {each: ban for each, ban in self._bans.items() if now < ban[1] + self.REMEMBERED_S}
        times, _ = self._bans.pop(name, (0, 0.0))
        if len(self._bans) >= self._MOST:
            del self._bans[min(self._bans, key=lambda each: self._bans[each][1])]
        seconds = min(self.LONGEST_S, self.FIRST_S * 2.0 ** min(times, 30))
        self._bans[name] = times + 1, now + seconds
        return seconds

    def unban(self, name: str) -> None:
        self._bans.pop(name, None)


class SourceBits:
    """Bits of the draft sources that have joined since start, so that a set of sources is one number.

    Names come from remote drafters too: a few are kept for good, later ones share `OTHERS_BIT`.
    """

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}

    @property
    def names(self) -> Sequence[str]:
        """Names in the order of their bits."""
        return (OTHERS, *self._bits)

    def bit(self, source: str, remote: bool = False) -> int:
        """Return the bit of a source. Some bits are reserved for local drafters."""
        name = source or _UNNAMED
        known = self._bits.get(name)
        if known is not None:
            return known
        if len(self._bits) >= (_MAX_REMOTE_SOURCE_BITS if remote else _MAX_SOURCE_BITS):
            return OTHERS_BIT
        return self._bits.setdefault(name, 2 << len(self._bits))


class DrafterAuthorizer:
    """Checks connections and `Hello` messages of drafters against `hello`, the verifier's own."""

    def __init__(self, hello: Hello, clock: Callable[[], float] = time.monotonic) -> None:
        self._hello = hello
        self.sources: frozenset[str] = frozenset()
        """Draft models of remote drafters that may join; empty: any."""
        self.features: tuple[int, ...] = ()
        """Layers of the target with outputs that drafters may read."""
        self._names: set[str] = set()
        self._clock = clock
        self._connected_at: deque[tuple[float, str]] = deque()
        self.bans = BanList(clock)
        """Bans of addresses of remote drafters, and of names of local ones."""

    def block_reason(self, peer: str, remote: bool, peers: Counter[str]) -> str:
        """Return why a new connection from this address is closed at once; empty if it is not.

        `peers`: present connections of the same kind (remote or local), by address.
        """
        if not remote:
            return "too many drafters" if peers.total() >= _MAX_LOCAL else ""
        if peer:
            if self.bans.is_banned(peer):
                return "the address is banned"
            if self._connects_too_often(peer):
                return f"the address connects too often and is banned for {self.bans.ban(peer):.0f} s"
        most = _MAX_PER_ADDRESS if peer else MAX_REMOTE
        return "too many drafters" if peers.total() >= MAX_REMOTE or peers[peer] >= most else ""

    def _connects_too_often(self, peer: str) -> bool:
        now = self._clock()
        self._connected_at.append((now, peer))
        while (
            self._connected_at[0][0] < now - 60.0 or len(self._connected_at) > 8 * _MAX_CONNECTIONS_PER_MINUTE
        ):
            self._connected_at.popleft()
        return sum(other == peer for _, other in self._connected_at) > _MAX_CONNECTIONS_PER_MINUTE

    def check(self, theirs: Hello, remote: bool, sources: Collection[str]) -> None:
        """Raise `PairMismatchError` or `ProtocolError` unless this drafter may join.

        `sources`: draft models of the drafters that have joined.
        """
        check_hello(self._hello, theirs)
        if not is_label(theirs.name) or not is_label(theirs.source):
            raise ProtocolError(f"names and draft models are at most {LONGEST_LABEL} printable bytes")
        check_step_ms(theirs.step_ms)
        if not 0 <= theirs.prefill_ms <= _SLOWEST_STEP_MS:  # False for NaN too
            raise ProtocolError(f"the prefill of a token cannot take {theirs.prefill_ms:g} ms")
        if not set(theirs.features) <= set(self.features) or len({*theirs.features}) < len(theirs.features):
            given = listed(self.features) if self.features else "none"
            raise PairMismatchError(
                f"the draft reads outputs of layers {listed(theirs.features)}, this server gives "
                f"{given}: name the same draft there and here (SSD_DRAFT)"
            )
        if remote and self.sources and theirs.source not in self.sources:
            raise PairMismatchError(
                f"this server drafts with {', '.join(sorted(self.sources))} (SSD_DRAFT), not with "
                f"{theirs.source!r}: name the draft model alike, or name it there too"
            )
        if remote and theirs.source not in sources and len(sources) >= _MAX_SOURCES:
            raise PairMismatchError(f"drafters of {_MAX_SOURCES} other draft models have joined already")

    def register(self, name: str) -> bool:
        """Remember a drafter's name, up to a number of names; returns whether it had joined before."""
        if name in self._names:
            return True
        if len(self._names) < _MAX_NAMES:
            self._names.add(name)
        return False

    def label(self, name: str) -> str:
        """Return the name that metrics show for a drafter."""
        return name if name in self._names else OTHERS


def check_hello(mine: Hello, theirs: Hello) -> None:
    """Raise `PairMismatchError`, with the difference and a remedy, unless the two can work together."""
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


def check_step_ms(step_ms: float) -> None:
    """Raise `ProtocolError` unless a draft step can take so long; 0 means unknown."""
    if step_ms != 0 and not _FASTEST_STEP_MS <= step_ms <= _SLOWEST_STEP_MS:  # False for NaN too
        raise ProtocolError(f"a draft step cannot take {step_ms:g} ms")


def check_heartbeat(beat: Heartbeat) -> None:
    """Raise `ProtocolError` if the measurements of a heartbeat are impossible."""
    check_step_ms(beat.step_ms)
    if not 0 <= beat.nodes <= _LARGEST_COUNT:
        raise ProtocolError("a drafter's figures are impossible")
