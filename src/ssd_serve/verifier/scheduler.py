"""Continuous batching: which requests work in the next round, and with which KV slots.

Plain Python: no tensors, no trees' contents, no sampling. Tree rows are given slots last, from what no
running request needs; memory is reclaimed from the prefix cache first and by preempting the youngest request
last.

A prompt is added to the prefix cache chunk by chunk during its prefill. A request that would prefill the same
tokens at the same time waits for them instead: choices of one prompt prefill it once. Tokens are looked up
only once, so that work in a round does not grow with the length of prompts.
"""

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ssd_serve.cache.prefix import PrefixCache
from ssd_serve.cache.slots import SlotPool
from ssd_serve.verifier.request import Request

_MAX_LOOKUP = 1 << 18
"""Tokens of waiting requests that are looked up in a round; of one request always all."""
_TOKENS_PER_ROUND = 1 << 13
"""A request that found no memory is retried after one round per this number of its tokens."""
_urgency = attrgetter("options.priority")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of the scheduler, from the settings."""

    max_running: int
    max_waiting: int
    prefill_chunk: int
    min_reused_tokens: int = 16
    """A shorter cached prefix is not used, since it would scatter a request's slots. Nor does a request wait for
    the prefill of fewer common tokens."""


class ScheduledChunk(NamedTuple):
    """Pending tokens of one request in a round: the next `len(slots)` of them, written to `slots`."""

    request: Request
    slots: tuple[int, ...]
    final: bool
    """True if the last of these tokens is the root, at which the target's choice is sampled."""


class Scheduler:
    """Owns the queue, the running requests and their slots. `prefix` None: no reuse between requests."""

    def __init__(self, pool: SlotPool, prefix: PrefixCache | None, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.prefix = prefix
        self.waiting: deque[Request] = deque()
        """Queue by priority, then by age."""
        self.running: list[Request] = []
        """Running requests in the same order; the last one is preempted first."""
        self.preemptions = 0
        self._limits = limits
        self._refused: Request | None = None
        """The waiting request that memory was last too short for, and rounds until it is looked at again."""
        self._rounds_left = 0

    @property
    def prefill_chunk(self) -> int:
        """Most prompt tokens of a round."""
        return self._limits.prefill_chunk

    def full(self) -> bool:
        """Return whether another request would overfill the queue."""
        return len(self.waiting) >= self._limits.max_waiting and len(self.running) >= self._limits.max_running

    def submit(self, request: Request) -> None:
        """Queue a request, behind those that are as urgent."""
        insort_right(self.waiting, request, key=_urgency)

    def admit(self) -> list[Request]:
        """Move waiting requests to the running ones while there is memory for all their tokens. They may reuse
        what running requests have prefilled."""
        for request in self.running:
            self._share_prefix(request)
        admitted: list[Request] = []
        looked_up = 0
        while self.waiting and len(self.running) < self._limits.max_running and looked_up < _MAX_LOOKUP:
            request = self.waiting[0]
            if self._too_early(request):
                break
            looked_up += len(request.tokens)
            found = self._use_cached(request)
            reserved = sum(each.pending for each in self.running) + len(self.running)
            if self._reclaimable() < request.pending + reserved + 1 and self.running:
                self._release(request)
                self._refused, self._rounds_left = request, len(request.tokens) // _TOKENS_PER_ROUND
                break
            self.waiting.popleft()
            self._count(request, len(request.tokens), found)
            insort_right(self.running, request, key=_urgency)
            admitted.append(request)
        return admitted

    def _too_early(self, request: Request) -> bool:
        if request is not self._refused or not self.running or self._rounds_left <= 0:
            self._refused = None
            return False
        self._rounds_left -= 1
        return True

    @property
    def decoding(self) -> int:
        """Number of running requests with a complete prefill."""
        return sum(request.decoding for request in self.running)

    def plan(self, prefill_tokens: int | None = None) -> tuple[list[ScheduledChunk], list[Request]]:
        """Return the chunks of the next round, in the order of `running`, with at most `prefill_tokens` tokens of
        prompts, and the requests that had to be preempted."""
        chunks: list[ScheduledChunk] = []
        preempted: list[Request] = []
        left = self._limits.prefill_chunk if prefill_tokens is None else prefill_tokens
        for request in list(self.running):
            if request in preempted:
                continue
            pending = request.pending
            if left and pending > 1 and self._may_use_cached(request):
                self._count(request, 0, self._use_cached(request))
                if self._tokens_others_will_cache(request, chunks) >= self._limits.min_reused_tokens:
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
            chunks.append(ScheduledChunk(request, tuple(slots), final=count == pending))
        return chunks, preempted

    def shrink(self, chunks: Sequence[ScheduledChunk], prefill_tokens: int) -> list[ScheduledChunk]:
        """Cut chunks to a total number of prompt tokens, and free the other slots."""
        kept: list[ScheduledChunk] = []
        for chunk in chunks:
            pending = len(chunk.slots)
            count = pending if pending == 1 else min(pending, prefill_tokens)
            self.pool.free(chunk.slots[count:])
            prefill_tokens -= count if pending > 1 else 0
            if count:
                kept.append(
                    ScheduledChunk(chunk.request, chunk.slots[:count], chunk.final and count == pending)
                )
        return kept

    def tree_slots(self, chunks: Sequence[ScheduledChunk], wanted: Sequence[int]) -> list[list[int]]:
        """Slots for the tree rows of each part, at most `wanted[i]`, leaving one for each running request.

        Unused cached prefixes are evicted first, because they fill the pool of a server after a while.
        """
        rows = sum(wanted)
        if self.prefix is not None and rows:
            self.prefix.evict(rows + len(self.running) - self.pool.available)
        found: list[list[int]] = []
        for chunk, count in zip(chunks, wanted, strict=True):
            spare = max(0, self.pool.available - len(self.running))
            taken = self.pool.allocate(min(count, spare), near=chunk.slots[-1]) if min(count, spare) else []
            found.append(taken or [])
        return found

    def remove(self, request: Request) -> None:
        """Forget a request, finished or aborted; its committed slots stay reusable as a prefix."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
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
            last = self.running[-1]
            self._preempt(last)
            preempted.append(last)
            if last is request:
                return None

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        insort_left(self.waiting, request, key=_urgency)
        request.figures.preemptions += 1
        self.preemptions += 1

    def _release(self, request: Request) -> None:
        """Move the committed slots to the prefix cache, or back to the pool."""
        if self.prefix is None:
            self.pool.free(request.slots.take())
            return
        handle, request.handle = request.handle, None
        known, committed = handle.length if handle else 0, len(request.slots)
        slots: list[int] = request.slots.view()[known:].tolist()
        request.slots.clear()
        if handle is not None or slots:
            handle = handle or self.prefix.begin(request.options.salt)
            self.prefix.insert(request.tokens[known:committed], slots, handle)

    def _share_prefix(self, request: Request) -> None:
        """Let others reuse what a request has prefilled: its prompt, or its output too after a preemption."""
        if self.prefix is None:
            return
        known = request.handle.length if request.handle else 0
        decoding = request.decoding
        if decoding and known >= request.prompt_length:
            return
        read = len(request.slots)
        count = min(read, request.prompt_length) if decoding else read
        if count > known:
            if request.handle is None:
                request.handle = self.prefix.begin(request.options.salt)
            slots: list[int] = request.slots.view()[known:count].tolist()
            self.prefix.share(request.handle, request.tokens[known:count], slots)

    def _may_use_cached(self, request: Request) -> bool:
        """Return False for requests with prompt log-probabilities, which need every row."""
        return self.prefix is not None and not request.unscored

    def _use_cached(self, request: Request) -> int:
        """Use cached tokens beyond the request's own slots; return their number."""
        if self.prefix is None or not self._may_use_cached(request):
            return 0
        self._share_prefix(request)
        if request.handle is None:
            request.handle = self.prefix.begin(request.options.salt)
        end = len(request.tokens) - 1
        found = self.prefix.follow(request.handle, request.tokens, end, self._limits.min_reused_tokens)
        request.slots.extend(found)
        return len(found)

    def _count(self, request: Request, asked: int, found: int) -> None:
        """Count tokens that were looked up and found, as cached prompt unless the request was preempted."""
        if self.prefix is not None:
            self.prefix.count(asked, found)
        if not request.figures.preemptions:
            request.figures.cached_prompt_tokens += found

    @staticmethod
    def _tokens_others_will_cache(request: Request, chunks: Sequence[ScheduledChunk]) -> int:
        """Return how many more tokens of this request will be cached once these chunks are computed."""
        read = len(request.slots)
        most = read
        for chunk in chunks:
            other = chunk.request
            end = min(len(other.slots) + len(chunk.slots), other.prompt_length, len(request.tokens) - 1)
            if end > most and other.options.salt == request.options.salt:
                most = max(most, request.common_length(other, end))
        return most - read

    def _reclaimable(self) -> int:
        return self.pool.available + (self.prefix.evictable if self.prefix is not None else 0)


_DOUBLE_AFTER = 64
"""Rounds until the bounds double."""
_FIRST_NODES, _MAX_NODES = 8, 512
"""First bound on nodes, and the one beyond which there is none."""


class OomBackoff:
    """Limits of rounds after a lack of memory. Tokens do not depend on them."""

    def __init__(self, prefill_chunk: int) -> None:
        self.count = 0
        """Number of rounds that ran out of memory."""
        self.reason = ""
        """Latest error of the device."""
        self.chunk = prefill_chunk
        """Most prompt tokens of a round."""
        self.nodes: int | None = None
        """Most tree nodes of a round; None: any number."""
        self._largest = prefill_chunk
        self._rounds = 0

    def on_oom(self, prefill_tokens: int, reason: str) -> None:
        """Lower the limits after a round with `prefill_tokens` prompt tokens ran out of memory."""
        self.count += 1
        self.reason = reason
        self.nodes = self._rounds = 0
        self.chunk = max(1, min(self.chunk, prefill_tokens or self.chunk) // 2)

    def on_success(self) -> None:
        """Record a round without a lack of memory."""
        if self.nodes is None and self.chunk == self._largest:
            return
        self._rounds += 1
        if self._rounds % _DOUBLE_AFTER == 0:
            self.chunk = min(2 * self.chunk, self._largest)
            if self.nodes is not None:
                self.nodes = max(2 * self.nodes, _FIRST_NODES)
                self.nodes = self.nodes if self.nodes < _MAX_NODES else None
