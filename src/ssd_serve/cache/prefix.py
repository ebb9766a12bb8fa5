"""Prefix reuse: a radix tree from token ids to the KV slots that hold them. Torch-free.

Ownership. A slot in the tree belongs to the tree, which alone frees it. A handle points to the end of a
prefix and locks the path to it. `follow` lends the cached slots after the handle; the borrower never frees
them. `share` adds the committed tokens of a running request. `insert` does so when the request ends: the
caller then owns no slot. Only committed tokens may enter. Tokens are compared exactly, not by hash.

Each salt has its own root, so requests of different salts never share a prefix. All salts share the slots and
one LRU order.

Every operation continues from the handle, so the cost of a step does not grow with the prompt.

Eviction removes the least recently used unlocked leaves, from their ends. The parent of a locked node is
locked, so all unlocked tokens can be evicted.

The cache knows neither requests nor forwards.
"""

import heapq
from collections.abc import Sequence

from ssd_serve.cache.slots import SlotError, SlotPool

_BLOCK = 4096
"""Tokens compared at once."""


class PrefixNode:
    """A radix tree node: a run of tokens, their slots, and children by first token.

    Invariants: `len(tokens) == len(slots)`; a node's `locks` are at least those of each child.
    """

    __slots__ = ("children", "locks", "parent", "slots", "tokens", "used")

    def __init__(self, tokens: list[int], slots: list[int], parent: "PrefixNode | None") -> None:
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.children: dict[int, PrefixNode] = {}  # by first token
        self.locks = 0
        self.used = 0  # time of last use


class PrefixRoot(PrefixNode):
    """The empty prefix of one salt."""

    __slots__ = ("salt",)

    def __init__(self, salt: bytes) -> None:
        super().__init__([], [], None)
        self.salt = salt


class PrefixHandle:
    """A lock on the path to a node, released once by `PrefixCache.insert` or `unlock`."""

    __slots__ = ("length", "node", "own")

    def __init__(self, node: PrefixNode) -> None:
        self.node: PrefixNode | None = node
        self.length = 0
        """Tokens on the path."""
        self.own: list[int] = []
        """Slots of the holder that duplicate cached ones."""


class PrefixCache:
    """Radix trees, one for each salt, over the slots of one pool.

    Invariants: a slot is in at most one node; `size` counts the tree's slots; exactly unlocked tokens are
    evictable.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.queries = 0
        """Tokens looked up so far."""
        self.hits = 0
        """Tokens found so far."""
        self._pool = pool
        self._roots: dict[bytes, PrefixRoot] = {}  # those that are locked or hold something
        self._owned = bytearray(pool.slots)  # 1 where the slot stands in the tree
        self._size = 0
        self._locked = 0
        self._nodes = 0
        self._time = 0
        self._leaves: list[tuple[int, int, PrefixNode]] = []  # heap by last use; entries may be outdated
        self._pushed = 0

    @property
    def size(self) -> int:
        """Tokens in the tree; equal to the slots that it owns."""
        return self._size

    @property
    def evictable(self) -> int:
        """Tokens that `evict` could free now."""
        return self._size - self._locked

    def count(self, asked: int, found: int) -> None:
        """Count a lookup of `asked` tokens, or `found` tokens of an earlier one."""
        self.queries += asked
        self.hits += found

    @property
    def salts(self) -> int:
        """Number of salts with cached tokens or handles."""
        return len(self._roots)

    def begin(self, salt: bytes = b"") -> PrefixHandle:
        """A handle on the empty prefix of a salt."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = PrefixRoot(salt)
        root.locks += 1
        return PrefixHandle(root)

    def follow(self, handle: PrefixHandle, text: Sequence[int], end: int, least: int = 1) -> list[int]:
        """Advance a handle along `text`, which starts with its prefix, to at most position `end`.

        Returns the slots of the cached tokens that were passed; none if there are fewer than `least`.
        """
        path, last = _ahead(_held(handle), text, handle.length, end)
        if sum(len(node.tokens) for node in path[:-1]) + last < max(least, 1):
            return []
        return self._advance(handle, path, last)

    def unlock(self, handle: PrefixHandle) -> None:
        """Release a handle. Raises `SlotError` the second time."""
        step: PrefixNode | None = _held(handle)
        handle.node = None
        used = 0
        while step is not None:
            used = step.used = max(step.used, used)  # a use of a node is a use of all its ancestors
            step.locks -= 1
            if step.locks == 0:
                self._locked -= len(step.tokens)
                self._offer(step)
                self._forget(step)
            step = step.parent

    def share(self, handle: PrefixHandle, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """Cache the tokens that a running request has committed after its handle, and advance the handle.

        The tree takes the slots of tokens that were not cached. A token cached in another slot keeps both:
        the request goes on with its own slot, which `insert` frees at the end.
        """
        if len(tokens) != len(slots):
            raise SlotError(f"{len(tokens)} tokens cannot stand in {len(slots)} slots")
        path, last = _ahead(_held(handle), tokens, 0, len(tokens))
        cached = sum(len(node.tokens) for node in path[:-1]) + last
        kept = (slot for node in path for slot in node.slots)
        own = [mine for mine, other in zip(slots[:cached], kept, strict=False) if mine != other]
        new = list(slots[cached:])
        if not self._pool.in_use([*own, *new]) or any(map(self._owned.__getitem__, (*own, *new))):
            raise SlotError("a slot to share is listed twice, or is not the caller's to give")
        self._advance(handle, path, last)
        handle.own += own
        if new:
            self._grow(handle, list(tokens[cached:]), new)

    def insert(self, tokens: Sequence[int], slots: Sequence[int], handle: PrefixHandle) -> int:
        """Cache the tokens after a handle, take over their slots and release the handle.

        Returns the number of duplicates: tokens already cached in another slot, so that their slot here is
        freed. The caller must not use the slots afterwards.
        """
        self.share(handle, tokens, slots)
        self._pool.free(handle.own)
        self.unlock(handle)
        return len(handle.own)

    def evict(self, count: int) -> int:
        """Free up to `count` unlocked slots; returns the number freed."""
        freed = 0
        while freed < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.used != used or node.locks or node.children or not node.tokens:
                continue  # outdated: used again since, locked, no leaf any more, or gone
            freed += self._trim(node, count - freed)
        return freed

    def _advance(self, handle: PrefixHandle, path: list[PrefixNode], last: int) -> list[int]:
        """Lock the nodes of `path`, the last one up to `last` tokens, for a handle above; returns their
        slots."""
        self._time += 1
        slots: list[int] = []
        if path and last < len(path[-1].tokens):
            path[-1] = self._split(path[-1], last)
        for node in path:
            if node.locks == 0:
                self._locked += len(node.tokens)
            node.locks += 1
            node.used = self._time
            slots.extend(node.slots)
            handle.node = node
        handle.length += len(slots)
        return slots

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Split a node at a token; returns the new upper part. The node and its handles become the lower
        part."""
        upper = PrefixNode(node.tokens[:at], node.slots[:at], node.parent)
        upper.locks, upper.used = node.locks, node.used
        if node.parent is not None:
            node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        upper.children[node.tokens[0]] = node
        self._nodes += 1
        return upper

    def _grow(self, handle: PrefixHandle, tokens: list[int], slots: list[int]) -> None:
        """Add tokens after a handle: to its node if no other handle or child needs it, else as a new leaf."""
        node = _held(handle)
        if node.locks == 1 and not node.children and node.parent is not None:
            node.tokens += tokens
            node.slots += slots
        else:
            parent, node = node, PrefixNode(tokens, slots, node)
            parent.children[tokens[0]] = handle.node = node
            node.locks = 1
            self._nodes += 1
        node.used = self._time
        for slot in slots:
            self._owned[slot] = 1
        self._size += len(tokens)
        self._locked += len(tokens)
        handle.length += len(tokens)

    def _trim(self, leaf: PrefixNode, most: int) -> int:
        """Free up to `most` slots from the end of an unlocked leaf; remove it when empty."""
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
                self._forget(parent)
            leaf.tokens, leaf.slots, leaf.parent = [], [], None
            self._nodes -= 1
        return len(freed)

    def _forget(self, node: PrefixNode) -> None:
        if isinstance(node, PrefixRoot) and not node.locks and not node.children:
            del self._roots[node.salt]

    def _offer(self, node: PrefixNode) -> None:
        """Add a node to the eviction heap if it is an unlocked leaf."""
        if node.children or node.locks or node.parent is None:
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


def _held(handle: PrefixHandle) -> PrefixNode:
    if handle.node is None:
        raise SlotError("this prefix was unlocked already")
    return handle.node


def _ahead(node: PrefixNode, text: Sequence[int], start: int, end: int) -> tuple[list[PrefixNode], int]:
    """The nodes below `node` that match `text[start:end]`, and the matching tokens of the last node."""
    path: list[PrefixNode] = []
    common = 0
    while start < end and (child := node.children.get(text[start])) is not None:
        common = common_length(child.tokens, text, start, end)
        path.append(child)
        if common < len(child.tokens):
            break
        start += common
        node = child
    return path, common


def common_length(edge: Sequence[int], text: Sequence[int], start: int, end: int) -> int:
    """Length of the common prefix of `edge` and `text[start:end]`."""
    length = min(len(edge), end - start)
    for low in range(0, length, _BLOCK):
        high = min(low + _BLOCK, length)
        if list(edge[low:high]) != list(text[start + low : start + high]):
            return next(at for at in range(low, high) if edge[at] != text[start + at])
    return max(length, 0)
