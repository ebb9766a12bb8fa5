"""Continuous batching: which requests work in the next round, and with which KV slots.

Plain Python: no tensors, no trees' contents, no sampling. Tree rows are given slots last, from what no
running request needs; memory is reclaimed from the prefix cache first and by preempting the youngest request
last.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.cache.prefix import PrefixCache
from ssd_serve.cache.slots import SlotPool
from ssd_serve.verifier.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler, from the settings."""

    max_running: int
    max_waiting: int
    prefill_chunk: int


@dataclass(frozen=True, slots=True)
class Part:
    """One request's pending tokens in a round: the next `len(slots)` of them, written to `slots`."""

    request: Request
    slots: tuple[int, ...]

    @property
    def final(self) -> bool:
        """Whether the last of these tokens is the root, whose choice is wanted."""
        return len(self.slots) == self.request.pending


class Scheduler:
    """Owns the queue, the running requests and their slots. `prefix` None: no reuse between requests."""

    def __init__(self, pool: SlotPool, prefix: PrefixCache | None, limits: Limits) -> None:
        self.pool = pool
        self.prefix = prefix
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._limits = limits

    def full(self) -> bool:
        """Whether another request would overfill the queue."""
        return len(self.waiting) >= self._limits.max_waiting and len(self.running) >= self._limits.max_running

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Move waiting requests to the running ones while memory for their whole text so far is at hand."""
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self._limits.max_running:
            request = self.waiting[0]
            reserved = sum(each.pending for each in self.running) + len(self.running)
            if self._reclaimable() < len(request.tokens) + reserved + 1 and self.running:
                break
            self.waiting.popleft()
            self._reuse_prefix(request)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def plan(self) -> tuple[list[Part], list[Request]]:
        """The parts of the next round, oldest request first, and the requests that had to be preempted."""
        parts: list[Part] = []
        preempted: list[Request] = []
        left = self._limits.prefill_chunk
        for request in list(self.running):
            if request in preempted:
                continue
            count = min(request.pending, max(left, 1) if request.decoding else left)
            if count == 0:
                continue
            slots = self._allocate(request, count, preempted)
            if slots is None:
                continue
            if not request.decoding:
                left -= count
            parts.append(Part(request, tuple(slots)))
        return parts, preempted

    def tree_slots(self, parts: Sequence[Part], wanted: Sequence[int]) -> list[list[int]]:
        """Slots for the tree rows of each part, at most `wanted[i]`, leaving one for each running request."""
        found: list[list[int]] = []
        for part, count in zip(parts, wanted, strict=True):
            spare = max(0, self.pool.available - len(self.running))
            taken = self.pool.allocate(min(count, spare), near=part.slots[-1]) if min(count, spare) else []
            found.append(taken or [])
        return found

    def remove(self, request: Request) -> None:
        """Forget a request, finished or aborted; its committed slots stay reusable as a prefix."""
        if request in self.running:
            self.running.remove(request)
            self._give_up(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _allocate(self, request: Request, count: int, preempted: list[Request]) -> list[int] | None:
        near = request.slots.last()
        while True:
            slots = self.pool.allocate(count, near=near)
            if slots is not None:
                return slots
            if self.prefix is not None and self.prefix.evict(count - self.pool.available):
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is request:
                return None

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; its text so far is read again later, so nothing is lost."""
        self.running.remove(request)
        self._give_up(request)
        self.waiting.appendleft(request)
        request.tally.preemptions += 1
        self.preemptions += 1

    def _give_up(self, request: Request) -> None:
        """Hand the committed slots to the prefix cache, or back to the pool."""
        committed = len(request.slots)
        slots = request.slots.take()
        if self.prefix is None:
            self.pool.free(slots)
            return
        if committed:
            self.prefix.insert(request.tokens[:committed], slots)
        if request.handle is not None:
            self.prefix.unlock(request.handle)
        request.handle = None

    def _reuse_prefix(self, request: Request) -> None:
        if self.prefix is None:
            return
        slots, request.handle = self.prefix.match(request.tokens)
        request.slots.extend(slots)
        request.tally.cached_prompt_tokens = max(request.tally.cached_prompt_tokens, len(slots))

    def _reclaimable(self) -> int:
        return self.pool.available + (self.prefix.evictable if self.prefix is not None else 0)
