"""Blocks that are only counted: what a scheduler is tried with, so that exercise 5.3 can be solved before 5.2."""

from __future__ import annotations

from collections.abc import Sequence


class NoRoom(RuntimeError):
    """More blocks were asked for than are free."""


class FakeBlockManager:
    """A block manager's interface without sharing: each sequence has so many blocks, and a count of tokens.

    Attributes:
        cached: how many tokens of a sequence a prefix in the cache saves, by its first token; the owner fills it.
        lengths: tokens of each sequence that have a slot.
        calls: (name, id) of each call that gave or took all blocks of a sequence, in order; cleared by its reader.
    """

    prefix_caching = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cached: dict[int, int] = {}
        self.lengths: dict[str, int] = {}
        self.calls: list[tuple[str, str]] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    @property
    def num_used(self) -> int:
        """Blocks of all sequences."""
        return sum(map(self.blocks_for, self.lengths.values()))

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return self.num_blocks - self.num_used

    def length(self, id: str) -> int:
        """Tokens of a sequence that have a slot."""
        return self.lengths[id]

    def cached_prefix(self, tokens: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """As many blocks, and digests, as hold the longest known beginning; which ones they are is not known here."""
        blocks = min(self.cached.get(tokens[0], 0), len(tokens) - 1) // self.block_size if tokens else 0
        return list(range(blocks)), [b""] * blocks

    def blocks_needed(self, tokens: Sequence[int], cached: Sequence[int]) -> int:
        """Free blocks that :meth:`allocate` takes: nothing is shared, so all of them."""
        return self.blocks_for(len(tokens))

    def can_allocate(self, tokens: Sequence[int], reserve: int = 0) -> bool:
        """Whether all of ``tokens`` fit beside ``reserve`` blocks."""
        return self.blocks_for(len(tokens)) + reserve <= self.num_free

    def allocate(self, id: str, tokens: Sequence[int]) -> int:
        """Slots for a new sequence; returns how many of its tokens are in the cache."""
        if id in self.lengths:
            raise ValueError(f"sequence {id!r} holds blocks already")
        if not self.can_allocate(tokens):
            raise NoRoom(f"allocate: {len(tokens)} tokens of {id!r} do not fit into {self.num_free} free blocks")
        self.lengths[id] = len(tokens)
        self.calls.append(("allocate", id))
        return len(self.cached_prefix(tokens)[0]) * self.block_size

    def can_append(self, id: str, count: int = 1) -> bool:
        """Whether ``count`` more tokens fit."""
        length = self.lengths[id]
        return self.blocks_for(length + count) - self.blocks_for(length) <= self.num_free

    def append(self, id: str, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Slots for more tokens at the end."""
        if not self.can_append(id, len(tokens)):
            raise NoRoom(f"append: {len(tokens)} more tokens of {id!r} do not fit into {self.num_free} free blocks")
        self.lengths[id] += len(tokens)
        return []

    def truncate(self, id: str, length: int) -> None:
        """Drop the newest tokens."""
        self.lengths[id] = length

    def commit(self, id: str, computed: int) -> None:
        """Nothing is shared, so nothing is noted."""

    def writes_shared(self, id: str) -> bool:
        """Nothing is shared."""
        return False

    def free(self, id: str) -> None:
        """Give all blocks of a sequence back."""
        del self.lengths[id]
        self.calls.append(("free", id))
