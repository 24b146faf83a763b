"""Blocks that are only counted: what a scheduler is tried with, so that exercise 5.3 can be solved before 5.2."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class NoRoom(RuntimeError):
    """More blocks were asked for than are free."""


class PlainBlocks:
    """A block manager's interface without sharing: each sequence has so many blocks, and a count of tokens.

    Args:
        num_blocks, block_size: of the pool.
        cached: how many tokens of a sequence a prefix in the cache would save, by its id.

    Attributes:
        calls: (name, id, tokens) of each call that changed something, in order; cleared by whoever reads it.
    """

    def __init__(self, num_blocks: int, block_size: int, cached: Callable[[str], int] = lambda id: 0) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, True
        self.calls: list[tuple[str, str, int]] = []
        self._cached, self._lengths = cached, {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    @property
    def num_used(self) -> int:
        """Blocks of all sequences."""
        return sum(map(self.blocks_for, self._lengths.values()))

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return self.num_blocks - self.num_used

    def length(self, id: str) -> int:
        """Tokens of a sequence that have a slot."""
        return self._lengths[id]

    def can_allocate(self, tokens: Sequence[int], reserve: int = 0) -> bool:
        """Whether all of ``tokens`` fit beside ``reserve`` blocks."""
        return self.blocks_for(len(tokens)) + reserve <= self.num_free

    def allocate(self, id: str, tokens: Sequence[int]) -> int:
        """Slots for a new sequence; returns how many of its tokens are in the cache."""
        if id in self._lengths:
            raise ValueError(f"sequence {id!r} holds blocks already")
        if not self.can_allocate(tokens):
            raise NoRoom(f"allocate: {len(tokens)} tokens of {id!r} do not fit into {self.num_free} free blocks")
        self._lengths[id] = len(tokens)
        self.calls.append(("allocate", id, len(tokens)))
        return min(self._cached(id), len(tokens) - 1) // self.block_size * self.block_size

    def can_append(self, id: str, count: int = 1) -> bool:
        """Whether ``count`` more tokens fit."""
        length = self._lengths[id]
        return self.blocks_for(length + count) - self.blocks_for(length) <= self.num_free

    def append(self, id: str, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Slots for more tokens at the end."""
        if not self.can_append(id, len(tokens)):
            raise NoRoom(f"append: {len(tokens)} more tokens of {id!r} do not fit into {self.num_free} free blocks")
        self._lengths[id] += len(tokens)
        if tokens:
            self.calls.append(("append", id, len(tokens)))
        return []

    def truncate(self, id: str, length: int) -> None:
        """Drop the newest tokens."""
        self._lengths[id] = length

    def commit(self, id: str, computed: int) -> None:
        """Nothing is shared, so nothing is noted."""

    def free(self, id: str) -> None:
        """Give all blocks of a sequence back."""
        del self._lengths[id]
        self.calls.append(("free", id, 0))
