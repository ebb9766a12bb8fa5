"""The links to all drafters. Whatever fails about one ends that one alone.

Knows links and what is asked of drafters; no messages and no requests.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from ssd_serve.transport.channel import Channel
from ssd_serve.base.draft_messages import Refusal
from ssd_serve.base.errors import PairMismatchError, SsdError, in_a_line
from ssd_serve.base.logs import Logger, Sparingly
from ssd_serve.verifier.drafts.admission import Admission
from ssd_serve.verifier.drafts.link import Link

P = ParamSpec("P")
R = TypeVar("R")

_LONGEST_REASON = 200


class Links:
    """Drafters that have connected, by the numbers of their links."""

    def __init__(self, admission: Admission, clock: Callable[[], float], log: Logger) -> None:
        self._admission = admission
        self._clock = clock
        self._log = log
        self._refused, self._banned = Sparingly(log), Sparingly(log)
        self._links: dict[int, Link] = {}
        self._connected = 0

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    def __len__(self) -> int:
        return len(self._links)

    def __getitem__(self, number: int) -> Link:
        return self._links[number]

    def __contains__(self, number: object) -> bool:
        return number in self._links

    @property
    def beside(self) -> list[Link]:
        """Of the joined drafters those that have a device of their own."""
        return [link for link in self._links.values() if link.here and not link.synchronous]

    def keeps_out(self, peer: str, stranger: bool) -> bool:
        """Whether who has connected from this address may not even say `Hello`; says why in the log."""
        peers = Counter(link.peer for link in self._links.values() if link.stranger is stranger)
        why = self._admission.keeps_out(peer, stranger, peers)
        if why:
            self._refused.warning("drafter refused", peer=peer or "unix", reason=why)
        return bool(why)

    def add(self, channel: Channel, synchronous: bool, stranger: bool, peer: str) -> Link:
        """Somebody has connected."""
        link = Link(channel, self._clock, synchronous, self._connected, stranger, peer)
        self._connected += 1
        self._links[link.number] = link
        return link

    def remove(self, link: Link) -> None:
        """Let a drafter go that has left or failed."""
        with contextlib.suppress(Exception):
            link.channel.close()  # our own end too
        del self._links[link.number]
        if not link.failed:
            self._log.warning("drafter left", name=link.name)

    def attempt(self, link: Link, action: Callable[P, R], *args: P.args, **named: P.kwargs) -> R | None:
        """Do something with a link. Its failure, whatever it is, ends the link and nothing else; but the
        engine's own inline drafter is no stranger."""
        if link.synchronous:
            return action(*args, **named)
        if link.failed:
            return None
        try:
            return action(*args, **named)
        except Exception as error:
            self.fail(link, error)
            return None

    def fail(self, link: Link, error: Exception) -> None:
        """Say why once, keep it out for a while, and hang up; the next drain lets it go."""
        link.failed = True
        link.inbox.clear()
        reason = (str(error) if isinstance(error, SsdError) else in_a_line(error))[:_LONGEST_REASON]
        if not isinstance(error, PairMismatchError):
            seconds = self._admission.ban(link.peer, link.name)
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

    def hang_up(self, link: Link, reason: str) -> None:
        """A drafter has said that it will not work with this verifier."""
        self._refused.warning("drafter left", name=link.name, reason=reason[:_LONGEST_REASON])
        link.channel.close()
