"""Which blocks are stored: found by what they are, evicted by when they were used last."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import NamedTuple

from ..errors import StateError
from .extent import Extent, join
from .identity import Root, block_key, root_key

# Keys of evicted blocks that are remembered, to tell a miss for lack of room from one for lack of history.
_MOST_EVICTED_KEYS = 65_536


class Block:
    """One stored block: what it is, where its states are, and what depends on it."""

    __slots__ = ("children", "extent", "key", "parent", "pins", "position", "root", "tokens", "touched")

    def __init__(self, key: bytes, root: Root, parent: Block | None, tokens: bytes) -> None:
        self.key = key
        self.root = root
        self.parent = parent
        self.tokens = tokens
        self.extent: Extent
        self.position = 0
        """Its place in the extent."""
        self.children = 0
        self.pins = 0
        self.touched = 0.0


class Match(NamedTuple):
    """What is stored of a text."""

    path: list[Block]
    """Its first blocks, in order."""
    keys: list[bytes]
    """The keys of all its whole blocks, stored or not."""
    missing: str | None
    """Where `path` is empty, why."""


class Index:
    """Blocks in trees, one tree per root, in at most `capacity_bytes` of states.

    Every method is atomic: any number of threads may use one index. Blocks are kept in the order of their last use, a
    parent always behind its children, so that the first that may go is the deepest of what was used least recently.

    Args:
        block_size: Tokens per block.
        capacity_bytes: Bytes of states to keep at most.
        lifetime_seconds: How long a block is kept after its last use; None for as long as there is room.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        block_size: int,
        capacity_bytes: int,
        lifetime_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.capacity_bytes = capacity_bytes
        self.lifetime_seconds = lifetime_seconds
        self.lock = RLock()
        self.held_bytes = 0
        self.evictions = 0
        """Blocks evicted for lack of room, or because their lifetime was over."""
        self._clock = clock
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._gone: OrderedDict[bytes, str] = OrderedDict()
        # First blocks by their tokens alone: which roots have such a text.
        self._beginnings: dict[bytes, set[Root]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def pinned_blocks(self) -> int:
        """Blocks that stay until they are unpinned."""
        with self.lock:
            return sum(block.pins > 0 for block in self._blocks.values())

    @property
    def blocks_in_use(self) -> int:
        """Blocks that a cache reads, or that lie in one piece of memory with some that are read."""
        with self.lock:
            return sum(block.extent.leases > 0 for block in self._blocks.values())

    # ------------------------------------------------------------------------------------------------- finding

    def match(self, root: Root, tokens: Sequence[bytes]) -> Match:
        """The longest stored beginning of a text, given as the tokens of its whole blocks. It counts as used now.

        A key is a hint. A block is found only if it follows the block found before it and its tokens are equal, so
        that not even equal hashes of different texts, models or namespaces can mix histories up.
        """
        with self.lock:
            self._expire()
            keys: list[bytes] = []
            path: list[Block] = []
            parent_key = root_key(root, self.block_size)
            for number, text in enumerate(tokens):
                parent_key = block_key(parent_key, text)
                keys.append(parent_key)
                if len(path) < number:
                    continue
                block = self._blocks.get(parent_key)
                if block is None or not _is(block, root, path[-1] if path else None, text):
                    continue
                path.append(block)
            self.touch(path)
            return Match(path, keys, None if path else self._reason(root, keys, tokens))

    def touch(self, path: Sequence[Block]) -> None:
        """Note that the blocks of a path are used now."""
        with self.lock:
            now = self._clock()
            for block in reversed(path):
                block.touched = now
                self._blocks.move_to_end(block.key)

    def _reason(self, root: Root, keys: Sequence[bytes], tokens: Sequence[bytes]) -> str:
        if not keys:
            return "shorter_than_a_block"
        if keys[0] in self._gone:
            return self._gone[keys[0]]
        others = self._beginnings.get(tokens[0], set()) - {root}
        if any(other._replace(media=root.media) == root for other in others):
            return "other_media"
        if any(other.model == root.model for other in others):
            return "other_namespace"
        return "other_model" if others else "nothing_shared"

    # ------------------------------------------------------------------------------------------------- storing

    def room_for(self, block_bytes: int, path: Sequence[Block]) -> int:
        """Blocks of a size that could be stored behind `path` if all others were evicted that may be."""
        with self.lock:
            kept = {id(block.extent): block.extent for block in self._blocks.values() if _is_protected(block)}
            kept |= {id(block.extent): block.extent for block in path}
            return max(0, self.capacity_bytes - sum(extent.nbytes for extent in kept.values())) // block_bytes

    def insert(self, match: Match, tokens: Sequence[bytes], extent: Extent, root: Root) -> int:
        """Store the states of the blocks that follow ``match.path``; all of them, or none if there is no room.

        Where the history before them lies in pieces no longer than what is new, they are joined to one, so that a
        conversation that grows turn by turn is read in few pieces and each token is copied a few times at most.

        Args:
            match: What `match` found, under the same lock.
            tokens: Of all whole blocks of the text, as given to `match`.
            extent: The states of the blocks from ``len(match.path)`` on; taken over.
            root: Of the text.

        Returns:
            Blocks stored; fewer than given where a key is taken by another text.
        """
        first = len(match.path)
        end = first
        while end < first + extent.blocks and match.keys[end] not in self._blocks:
            end += 1
        if end == first:
            return 0
        if end - first < extent.blocks:
            extent.shorten(end - first, self.block_size)
        before = self._joinable(match.path, extent.blocks)
        held = [*{id(block.extent): block.extent for block in match.path}.values()]
        for piece in held:
            piece.leases += 1
        self._make_room(extent.nbytes)
        for piece in held:
            piece.leases -= 1
        if self.held_bytes + extent.nbytes > self.capacity_bytes:
            return 0
        self._publish(match, tokens, end, join([*before, extent]), root, before)
        return end - first

    def _publish(
        self, match: Match, tokens: Sequence[bytes], end: int, extent: Extent, root: Root, before: Sequence[Extent]
    ) -> None:
        first = len(match.path)
        path = list(match.path)
        for number in range(first, end):
            parent = path[-1] if path else None
            block = Block(match.keys[number], root, parent, tokens[number])
            if parent is None:
                self._beginnings.setdefault(block.tokens, set()).add(root)
            else:
                parent.children += 1
            path.append(block)
            self._gone.pop(block.key, None)
        for position, block in enumerate(path[end - extent.blocks :]):
            block.extent, block.position = extent, position
        self.held_bytes += extent.nbytes - sum(piece.nbytes for piece in before)
        for block in path[first:]:
            self._blocks[block.key] = block
        self.touch(path)

    def _joinable(self, path: Sequence[Block], blocks: int) -> list[Extent]:
        """The pieces at the end of a path that are worth joining with `blocks` new ones."""
        pieces: list[Extent] = []
        place = len(path)
        while place:
            last = path[place - 1]
            piece = last.extent
            ends_here = last.position == piece.blocks - 1
            if not ends_here or piece.leases or piece.blocks > blocks:
                break
            pieces.insert(0, piece)
            blocks += piece.blocks
            place -= piece.blocks
        return pieces

    # ------------------------------------------------------------------------------------------------- keeping

    def pin(self, path: Sequence[Block]) -> None:
        """Keep the blocks of a path until they are unpinned as often as they were pinned."""
        with self.lock:
            for block in path:
                block.pins += 1

    def unpin(self, path: Sequence[Block]) -> None:
        """Undo one `pin`."""
        with self.lock:
            for block in path:
                block.pins = max(0, block.pins - 1)

    def lease(self, path: Sequence[Block]) -> Lease:
        """Keep the blocks of a path until the lease is released."""
        with self.lock:
            return Lease(self, {id(block.extent): block.extent for block in path}.values())

    # ------------------------------------------------------------------------------------------------- evicting

    def evict(self, path: Sequence[Block]) -> int:
        """Evict the blocks at the end of a path that nothing else needs. Returns how many went."""
        with self.lock:
            gone = []
            for block in reversed(path):
                if block.children or _is_protected(block):
                    break
                self._remove(block, "evicted")
                gone.append(block)
            self._give_back(gone)
            return len(gone)

    def clear(self, namespace: str | None = None) -> None:
        """Forget every block, or those of one namespace, pinned ones too. Caches go on reading what they hold."""
        with self.lock:
            gone = [block for block in self._blocks.values() if namespace in (None, block.root.namespace)]
            extents = {id(block.extent): block.extent for block in gone}
            for block in gone:
                self._remove(block, "evicted")
            self.held_bytes -= sum(extent.nbytes for extent in extents.values())

    def _make_room(self, needed_bytes: int) -> None:
        excess = self.held_bytes + needed_bytes - self.capacity_bytes
        gone = []
        for block in list(self._blocks.values()) if excess > 0 else []:
            if excess <= 0:
                break
            if _is_protected(block):
                continue
            self._remove(block, "evicted")
            gone.append(block)
            excess -= block.extent.nbytes // block.extent.blocks
        self.evictions += len(gone)
        self._give_back(gone)

    def _expire(self) -> None:
        if self.lifetime_seconds is None:
            return
        oldest = self._clock() - self.lifetime_seconds
        gone = []
        for block in list(self._blocks.values()):
            if block.touched > oldest:
                break
            if not _is_protected(block):
                self._remove(block, "expired")
                gone.append(block)
        self.evictions += len(gone)
        self._give_back(gone)

    def _remove(self, block: Block, reason: str) -> None:
        del self._blocks[block.key]
        if block.parent is not None:
            block.parent.children -= 1
        else:
            roots = self._beginnings[block.tokens]
            roots.discard(block.root)
            if not roots:
                del self._beginnings[block.tokens]
        self._gone[block.key] = reason
        if len(self._gone) > _MOST_EVICTED_KEYS:
            self._gone.popitem(last=False)

    def _give_back(self, gone: Iterable[Block]) -> None:
        """Shorten the extents whose last blocks have gone. A parent goes after its children: what is left is a head."""
        left: dict[int, tuple[Extent, int]] = {}
        for block in gone:
            _, blocks = left.get(id(block.extent), (block.extent, block.extent.blocks))
            left[id(block.extent)] = (block.extent, min(blocks, block.position))
        for extent, blocks in left.values():
            self.held_bytes -= extent.nbytes
            if blocks:
                extent.shorten(blocks, self.block_size)
                self.held_bytes += extent.nbytes

    # ------------------------------------------------------------------------------------------------- checking

    def check_integrity(self) -> None:
        """Raise StateError unless blocks, extents, counts and bytes agree."""
        with self.lock:
            children: Counter[bytes] = Counter()
            extents: dict[int, Extent] = {}
            places: dict[int, set[int]] = {}
            seen: set[bytes] = set()
            for key, block in self._blocks.items():
                parent = block.parent
                if parent is not None:
                    children[parent.key] += 1
                    if self._blocks.get(parent.key) is not parent or parent.key in seen or parent.root != block.root:
                        raise StateError(f"block {key.hex()[:12]} does not follow a stored block that goes after it")
                before = parent.key if parent is not None else root_key(block.root, self.block_size)
                if key != block.key or key != block_key(before, block.tokens):
                    raise StateError(f"block {key.hex()[:12]} is not what its key says")
                if block.position and (parent is None or parent.extent is not block.extent):
                    raise StateError(f"block {key.hex()[:12]} does not lie behind the block it follows")
                seen.add(key)
                extents[id(block.extent)] = block.extent
                places.setdefault(id(block.extent), set()).add(block.position)
            self._check_counts(children, extents, places)

    def _check_counts(self, children: Counter[bytes], extents: dict[int, Extent], places: dict[int, set[int]]) -> None:
        if any(block.children != children[block.key] for block in self._blocks.values()):
            raise StateError("a block counts other children than it has")
        for number, extent in extents.items():
            tokens = {states.shape[1] for layer in extent.layers for states in layer}
            if places[number] != set(range(extent.blocks)) or tokens != {extent.blocks * self.block_size}:
                raise StateError(f"an extent of {extent.blocks} blocks, {tokens} tokens, has blocks {places[number]}")
            if extent.leases < 0:
                raise StateError(f"an extent was released more often than leased: {extent.leases}")
        held = sum(extent.nbytes for extent in extents.values())
        if held != self.held_bytes or held > self.capacity_bytes:
            raise StateError(f"{held} bytes are held, {self.held_bytes} were counted, {self.capacity_bytes} allowed")
        beginnings = {(block.tokens, block.root) for block in self._blocks.values() if block.parent is None}
        if beginnings != {(text, root) for text, roots in self._beginnings.items() for root in roots}:
            raise StateError("the beginnings of texts are not those of the stored blocks")


class Lease:
    """Keeps what a cache reads from being evicted. Released once; releasing it again changes nothing."""

    def __init__(self, index: Index, extents: Iterable[Extent]) -> None:
        self._index = index
        self._extents = list(extents)
        for extent in self._extents:
            extent.leases += 1

    def copy(self) -> Lease:
        """One more lease on the same."""
        with self._index.lock:
            return Lease(self._index, self._extents)

    def release(self) -> None:
        """Give it back."""
        with self._index.lock:
            for extent in self._extents:
                extent.leases -= 1
            self._extents = []


def _is(block: Block, root: Root, parent: Block | None, tokens: bytes) -> bool:
    return block.root == root and block.parent is parent and block.tokens == tokens


def _is_protected(block: Block) -> bool:
    return block.pins > 0 or block.extent.leases > 0
