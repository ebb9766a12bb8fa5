"""Prefix reuse: a radix tree from token ids to the KV slots that hold them. Torch-free.

Ownership. A slot in the tree belongs to the tree, which alone frees it. `match` lends a path: it stays locked
until `unlock`, and the borrower never frees its slots; locks are counted. `share` puts what a request has
committed so far into the tree while the request goes on reading it. `insert` takes a request's committed
slots over, borrowed ones included: afterwards the caller owns none of them. Only committed tokens may enter.
Tokens are compared exactly; there are no hashes to collide.

Eviction takes the least recently used leaves first, from their ends, never a locked one. A node above a
locked node is locked too, so everything that is not locked can be evicted.

It does not know requests, forwards or what a token means.
"""

import heapq
from collections.abc import Sequence

from ssd_serve.cache.slots import SlotError, SlotPool


class PrefixNode:
    """An edge of the tree: some tokens, the slot of each, and what may follow them."""

    __slots__ = ("children", "locks", "parent", "slots", "tokens", "used")

    def __init__(self, tokens: list[int], slots: list[int], parent: "PrefixNode | None") -> None:
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.children: dict[int, PrefixNode] = {}  # by first token
        self.locks = 0
        self.used = 0  # time of last use


class PrefixHandle:
    """A lock on a matched path, given back once by `PrefixCache.unlock`."""

    __slots__ = ("length", "node")

    def __init__(self, node: PrefixNode, length: int) -> None:
        self.node: PrefixNode | None = node
        self.length = length


class PrefixCache:
    """The tree over one pool's slots."""

    def __init__(self, pool: SlotPool) -> None:
        self.queries = 0
        """Tokens looked up so far."""
        self.hits = 0
        """Tokens found so far."""
        self._pool = pool
        self._root = PrefixNode([], [], None)
        self._owned = bytearray(pool.slots)  # 1 where the slot stands in the tree
        self._size = 0
        self._locked = 0
        self._nodes = 0
        self._time = 0
        self._leaves: list[tuple[int, int, PrefixNode]] = []  # heap by last use; entries may be outdated
        self._pushed = 0

    @property
    def size(self) -> int:
        """Tokens in the tree, which is also the number of slots that it owns."""
        return self._size

    @property
    def evictable(self) -> int:
        """Tokens that `evict` could free now."""
        return self._size - self._locked

    def count(self, asked: int, found: int) -> None:
        """Count a look-up, or tokens that were found later for one that was counted before."""
        self.queries += asked
        self.hits += found

    def match(self, tokens: Sequence[int]) -> tuple[list[int], PrefixHandle]:
        """Slots of the longest cached prefix of `tokens`, and the lock on them.

        At least one token is left for the caller to compute.
        """
        node, slots = self._descend(list(tokens[:-1]))
        return slots, self._lock(node, len(slots))

    def _lock(self, node: PrefixNode, length: int) -> PrefixHandle:
        step: PrefixNode | None = node
        while step is not None:
            if step.locks == 0:
                self._locked += len(step.tokens)
            step.locks += 1
            step = step.parent
        return PrefixHandle(node, length)

    def unlock(self, handle: PrefixHandle) -> None:
        """Give a matched path back; a second time is an error."""
        if handle.node is None:
            raise SlotError("this prefix was unlocked already")
        step: PrefixNode | None = handle.node
        handle.node = None
        while step is not None:
            step.locks -= 1
            if step.locks == 0:
                self._locked -= len(step.tokens)
                self._offer(step)
            step = step.parent

    def share(self, tokens: Sequence[int], slots: Sequence[int], handle: PrefixHandle | None) -> PrefixHandle:
        """Let others use a committed prefix that its request goes on reading; `slots` from position 0.

        Takes over the slots of those tokens that are not cached yet, and returns the lock on all of them,
        which replaces `handle` on a part of them. Where a token was cached under another slot, the request's
        own stays its own, to be given up by `insert` in the end: no slot of the request changes.
        """
        if len(tokens) != len(slots):
            raise SlotError(f"{len(tokens)} tokens cannot stand in {len(slots)} slots")
        if handle is not None and handle.length > len(tokens):
            raise SlotError(f"{handle.length} tokens are locked, more than the {len(tokens)} to share")
        wanted, given = list(tokens), list(slots)
        node, cached = self._descend(wanted)
        new = given[len(cached) :]
        if not self._pool.in_use(new) or any(map(self._owned.__getitem__, new)):
            raise SlotError("a slot to share is listed twice, or is not the caller's to give")
        if new:
            node = self._grow(node, wanted[len(cached) :], new)
        locked = self._lock(node, len(wanted))
        if handle is not None:
            self.unlock(handle)
        return locked

    def insert(self, tokens: Sequence[int], slots: Sequence[int]) -> int:
        """Take over the slots of a committed prefix, all from position 0; returns the number of duplicates.

        Slots that `match` lent or `share` took (still locked) are passed along with the caller's own. Where
        a token was cached under another slot, the cached one stays and the caller's is freed. The caller must
        be done with all of them.
        """
        if len(tokens) != len(slots):
            raise SlotError(f"{len(tokens)} tokens cannot stand in {len(slots)} slots")
        wanted, given = list(tokens), list(slots)
        node, cached = self._descend(wanted)
        length = len(cached)
        duplicates = [mine for mine, kept in zip(given, cached, strict=False) if mine != kept]
        own = duplicates + given[length:]
        if not self._pool.in_use(own) or any(map(self._owned.__getitem__, own)):
            raise SlotError("a slot to insert is listed twice, or is not the caller's to give")
        self._pool.free(duplicates)
        if length < len(wanted):
            self._grow(node, wanted[length:], given[length:])
        return len(duplicates)

    def evict(self, count: int) -> int:
        """Free `count` slots, or as many as are not locked; returns how many were freed."""
        freed = 0
        while freed < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.used != used or node.locks or node.children or not node.tokens:
                continue  # outdated: used again since, locked, no leaf any more, or gone
            freed += self._trim(node, count - freed)
        return freed

    def _descend(self, wanted: list[int]) -> tuple[PrefixNode, list[int]]:
        """The node that ends the longest cached prefix, split there if need be, and the prefix's slots."""
        self._time += 1
        node, slots = self._root, list[int]()
        while len(slots) < len(wanted):
            child = node.children.get(wanted[len(slots)])
            if child is None:
                break
            common = common_length(child.tokens, wanted, len(slots))
            if common < len(child.tokens):
                child = self._split(child, common)
            child.used = self._time
            slots.extend(child.slots)
            node = child
        if node.locks == 0 and node is not self._root:
            self._offer(node)
        return node, slots

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Cut a node in two and return the new upper part; the node, and its handles, become the lower."""
        upper = PrefixNode(node.tokens[:at], node.slots[:at], node.parent)
        upper.locks, upper.used = node.locks, node.used
        if node.parent is not None:
            node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        upper.children[node.tokens[0]] = node
        self._nodes += 1
        return upper

    def _grow(self, parent: PrefixNode, tokens: list[int], slots: list[int]) -> PrefixNode:
        """Add a leaf."""
        node = PrefixNode(tokens, slots, parent)
        node.used = self._time
        parent.children[tokens[0]] = node
        for slot in slots:
            self._owned[slot] = 1
        self._size += len(tokens)
        self._nodes += 1
        self._offer(node)
        return node

    def _trim(self, leaf: PrefixNode, most: int) -> int:
        """Free up to `most` slots from the end of an unlocked leaf, which goes when it is empty."""
        kept = max(0, len(leaf.tokens) - most)
        freed = leaf.slots[kept:]
        self._pool.free(freed)
        for slot in freed:
            self._owned[slot] = 0
        self._size -= len(freed)
        if kept:
            del leaf.tokens[kept:], leaf.slots[kept:]
            self._offer(leaf)
        else:
            parent = leaf.parent
            if parent is not None:
                del parent.children[leaf.tokens[0]]
                self._offer(parent)
            leaf.tokens, leaf.slots, leaf.parent = [], [], None
            self._nodes -= 1
        return len(freed)

    def _offer(self, node: PrefixNode) -> None:
        """Remember that a node may be evictable now."""
        if node.children or node.locks or node is self._root:
            return
        self._pushed += 1  # breaks ties: nodes have no order
        heapq.heappush(self._leaves, (node.used, self._pushed, node))
        if len(self._leaves) > 4 * self._nodes + 64:
            current = [
                entry
                for entry in self._leaves
                if entry[2].used == entry[0] and entry[2].tokens and not entry[2].children
            ]
            self._leaves = list({id(entry[2]): entry for entry in current}.values())
            heapq.heapify(self._leaves)


def common_length(edge: list[int], wanted: list[int], start: int = 0) -> int:
    """Length of the common prefix of `edge` and `wanted[start:]`."""
    end = min(len(edge), len(wanted) - start)
    if edge[:end] == wanted[start : start + end]:
        return end
    low = 0
    while edge[low] == wanted[start + low]:
        low += 1
    return low
