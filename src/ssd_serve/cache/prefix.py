"""Prefix reuse: a radix tree from token ids to the KV slots that hold them. Torch-free.

Ownership. A slot in the tree belongs to the tree, which alone frees it. A handle stands at the end of a
prefix and locks the path to it; `follow` lends what is cached behind it, and the borrower never frees those
slots. `share` puts what a request has committed so far into the tree while the request goes on reading it.
`insert` does so for the last time: afterwards the caller owns none of the slots. Only committed tokens may
enter. Tokens are compared exactly; there are no hashes to collide.

Texts of different salts are not found by each other, however alike: each salt has a root of its own. All of
them share the slots, and what is evicted is the least recently used of all.

Each step goes on where the handle stands: what a long prompt costs does not grow with what is read of it.

Eviction takes the least recently used leaves first, from their ends, never a locked one. A node above a
locked node is locked too, so everything that is not locked can be evicted.

It does not know requests, forwards or what a token means.
"""

import heapq
from collections.abc import Sequence

from ssd_serve.cache.slots import SlotError, SlotPool

_BLOCK = 4096
"""Tokens that are compared at once."""


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


class PrefixRoot(PrefixNode):
    """Where the texts of one salt begin."""

    __slots__ = ("salt",)

    def __init__(self, salt: bytes) -> None:
        super().__init__([], [], None)
        self.salt = salt


class PrefixHandle:
    """A lock on the path to a node, given back once by `PrefixCache.insert` or `unlock`."""

    __slots__ = ("length", "node", "own")

    def __init__(self, node: PrefixNode) -> None:
        self.node: PrefixNode | None = node
        self.length = 0
        """Tokens on the path."""
        self.own: list[int] = []
        """Slots of the holder in whose place others are cached."""


class PrefixCache:
    """The trees over one pool's slots."""

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

    @property
    def salts(self) -> int:
        """Salts of which something is kept."""
        return len(self._roots)

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> tuple[list[int], PrefixHandle]:
        """Slots of the longest cached prefix of `tokens`, and the lock on them.

        At least one token is left for the caller to compute.
        """
        handle = self.begin(salt)
        return self.follow(handle, tokens, len(tokens) - 1), handle

    def begin(self, salt: bytes = b"") -> PrefixHandle:
        """A handle on the empty prefix of a salt's texts."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = PrefixRoot(salt)
        root.locks += 1
        return PrefixHandle(root)

    def follow(self, handle: PrefixHandle, text: Sequence[int], end: int, least: int = 1) -> list[int]:
        """Move a handle on along a text that begins with its prefix, up to position `end`, as far as it is
        cached; returns the slots of those tokens. Fewer than `least` are not taken."""
        path, last = _ahead(_held(handle), text, handle.length, end)
        if sum(len(node.tokens) for node in path[:-1]) + last < max(least, 1):
            return []
        return self._advance(handle, path, last)

    def unlock(self, handle: PrefixHandle) -> None:
        """Give a path back; a second time is an error."""
        step: PrefixNode | None = _held(handle)
        handle.node = None
        used = 0
        while step is not None:
            used = step.used = max(step.used, used)  # whoever used a node used all above it
            step.locks -= 1
            if step.locks == 0:
                self._locked -= len(step.tokens)
                self._offer(step)
                self._forget(step)
            step = step.parent

    def share(self, handle: PrefixHandle, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """Let others use what its request has committed behind a handle and goes on reading.

        Takes over the slots of those tokens that are not cached yet, and moves the handle behind all of them.
        Where a token was cached under another slot, the request's own stays its own, to be given up by
        `insert` in the end: no slot of the request changes.
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

    def insert(self, tokens: Sequence[int], slots: Sequence[int], handle: PrefixHandle | None = None) -> int:
        """Take over the slots of what was committed behind a handle, or of a whole prefix, and give the
        handle back; returns the number of duplicates.

        Where a token was cached under another slot, the cached one stays and the caller's is freed. The
        caller must be done with all of them.
        """
        held = self.begin() if handle is None else handle
        try:
            self.share(held, tokens, slots)
        except SlotError:
            if handle is None:
                self.unlock(held)
            raise
        self._pool.free(held.own)
        self.unlock(held)
        return len(held.own)

    def evict(self, count: int) -> int:
        """Free `count` slots, or as many as are not locked; returns how many were freed."""
        freed = 0
        while freed < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.used != used or node.locks or node.children or not node.tokens:
                continue  # outdated: used again since, locked, no leaf any more, or gone
            freed += self._trim(node, count - freed)
        return freed

    def _advance(self, handle: PrefixHandle, path: list[PrefixNode], last: int) -> list[int]:
        """Lock these nodes, of the last of them `last` tokens, for a handle above them; returns their
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
        """Cut a node in two and return the new upper part; the node, and its handles, become the lower."""
        upper = PrefixNode(node.tokens[:at], node.slots[:at], node.parent)
        upper.locks, upper.used = node.locks, node.used
        if node.parent is not None:
            node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        upper.children[node.tokens[0]] = node
        self._nodes += 1
        return upper

    def _grow(self, handle: PrefixHandle, tokens: list[int], slots: list[int]) -> None:
        """Add tokens behind a handle: to its node where nobody else would notice, or as a leaf below it."""
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
                self._forget(parent)
            leaf.tokens, leaf.slots, leaf.parent = [], [], None
            self._nodes -= 1
        return len(freed)

    def _forget(self, node: PrefixNode) -> None:
        """Let a root go of which nothing is kept."""
        if isinstance(node, PrefixRoot) and not node.locks and not node.children:
            del self._roots[node.salt]

    def _offer(self, node: PrefixNode) -> None:
        """Remember that a node may be evictable now."""
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
    """The nodes below `node` that hold `text[start:end]`, as far as they do, and how many tokens of the
    last."""
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
