"""Continuous batching: which requests work in the next round, and with which KV slots.

Plain Python: no tensors, no trees' contents, no sampling. Tree rows are given slots last, from what no
running request needs; memory is reclaimed from the prefix cache first and by preempting the youngest request
last.

A prompt is offered to the prefix cache chunk by chunk while it is read. A request that would read the same
tokens beside it waits for them instead: choices of one prompt read it once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.cache.prefix import PrefixCache, common_length
from ssd_serve.cache.slots import SlotPool
from ssd_serve.verifier.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler, from the settings."""

    max_running: int
    max_waiting: int
    prefill_chunk: int
    worth_reusing: int = 16
    """Fewer prompt tokens than this are neither taken from the prefix cache, which scatters a request's
    slots, nor waited for while an older request reads them."""


@dataclass(frozen=True, slots=True)
class Part:
    """One request's pending tokens in a round: the next `len(slots)` of them, written to `slots`."""

    request: Request
    slots: tuple[int, ...]
    final: bool
    """Whether the last of these tokens is the root, whose choice is wanted."""


class Scheduler:
    """Owns the queue, the running requests and their slots. `prefix` None: no reuse between requests."""

    def __init__(self, pool: SlotPool, prefix: PrefixCache | None, limits: Limits) -> None:
        self.pool = pool
        self.prefix = prefix
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._limits = limits

    @property
    def prefill_chunk(self) -> int:
        """Most prompt tokens of a round."""
        return self._limits.prefill_chunk

    def full(self) -> bool:
        """Whether another request would overfill the queue."""
        return len(self.waiting) >= self._limits.max_waiting and len(self.running) >= self._limits.max_running

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Move waiting requests to the running ones while memory for their whole text so far is at hand.

        What running requests have read of their prompts since the last call is offered to them.
        """
        self._share_prompts()
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self._limits.max_running:
            request = self.waiting[0]
            self._borrow(request)
            reserved = sum(each.pending for each in self.running) + len(self.running)
            if self._reclaimable() < request.pending + reserved + 1 and self.running:
                self._give_up(request)
                break
            self.waiting.popleft()
            self._count(request, len(request.tokens), len(request.slots))
            self.running.append(request)
            admitted.append(request)
        return admitted

    @property
    def decoding(self) -> int:
        """Number of running requests whose prompts are read."""
        return sum(request.decoding for request in self.running)

    def plan(self, prompt_rows: int | None = None) -> tuple[list[Part], list[Request]]:
        """The parts of the next round, oldest request first, and the requests that had to be preempted.

        At most `prompt_rows` tokens of prompts are read, and never more than the limits allow.
        """
        parts: list[Part] = []
        preempted: list[Request] = []
        left = self._limits.prefill_chunk if prompt_rows is None else prompt_rows
        for request in list(self.running):
            if request in preempted:
                continue
            if left and not request.decoding and self._may_borrow(request):
                self._count(request, 0, self._borrow(request))
                if self._spared(request, parts) >= self._limits.worth_reusing:
                    continue
            pending = request.pending
            count = min(pending, max(left, 1) if pending == 1 else left)
            if count == 0:
                continue
            slots = self._allocate(request, count, preempted)
            if slots is None:
                continue
            if pending > 1:
                left -= count
            parts.append(Part(request, tuple(slots), final=count == pending))
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
        request.figures.preemptions += 1
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

    def _share_prompts(self) -> None:
        """Offer the prompt tokens that running requests have committed to all others."""
        if self.prefix is None:
            return
        for request in self.running:
            count = min(len(request.slots), request.prompt_length)
            if count > (request.handle.length if request.handle else 0):
                slots: list[int] = request.slots.view()[:count].tolist()
                request.handle = self.prefix.share(request.tokens[:count], slots, request.handle)

    def _may_borrow(self, request: Request) -> bool:
        """Whether cached tokens spare this request anything: one whose prompt is scored needs every row."""
        return self.prefix is not None and not request.unscored

    def _borrow(self, request: Request) -> int:
        """Use what is cached beyond what the request has read itself; returns how many tokens that spares."""
        if self.prefix is None or not self._may_borrow(request):
            return 0
        slots, handle = self.prefix.match(request.tokens)
        found = slots[len(request.slots) :]
        if len(found) < self._limits.worth_reusing:
            self.prefix.unlock(handle)
            return 0
        request.slots.extend(found)
        if request.handle is not None:
            self.prefix.unlock(request.handle)
        request.handle = handle
        return len(found)

    def _count(self, request: Request, asked: int, found: int) -> None:
        """Count tokens that were looked up and found; a text that is read again is no cached prompt."""
        if self.prefix is not None:
            self.prefix.count(asked, found)
        if not request.figures.preemptions:
            request.figures.cached_prompt_tokens += found

    @staticmethod
    def _spared(request: Request, parts: Sequence[Part]) -> int:
        """How many more tokens of this request will be cached once these parts are computed."""
        read = len(request.slots)
        most = read
        for part in parts:
            other = part.request
            end = min(len(other.slots) + len(part.slots), other.prompt_length, len(request.tokens) - 1)
            if end > most:
                most = max(most, common_length(other.tokens[:end], request.tokens))
        return most - read

    def _reclaimable(self) -> int:
        return self.pool.available + (self.prefix.evictable if self.prefix is not None else 0)
