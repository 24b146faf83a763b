"""The blocks themselves: which are free, how many tables hold each, and which hold a prefix that may be reused."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than asked for. Nothing was changed."""


def prefix_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """A name for a prefix: of a block's tokens *and* of all before them, since keys and values depend on both.

    A cryptographic hash: no two prefixes share a name, nor can anybody make up a prompt that is taken for another's.

    Args:
        before: the digest of the prefix up to this block; empty for the first.
        tokens: those of the block.
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Blocks 0 to ``num_blocks - 1``, with their references counted.

    A free block is empty, or it still holds a prefix that somebody may ask for. Empty ones are taken first, then the
    one that was given back longest ago.
    """

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # the next to be taken first
        self._block_of: dict[bytes, int] = {}  # digest of a prefix -> the block that it ends with
        self._digest_of: list[bytes | None] = [None] * num_blocks  # the same, the other way round

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those that hold a reusable prefix included."""
        return len(self._free)

    def take(self) -> int:
        """A free block, for its first table. What it held is lost.

        Raises:
            OutOfBlocks: there is none.
        """
        if not self._free:
            raise OutOfBlocks(f"all {len(self.references)} blocks are in use")
        block, _ = self._free.popitem(last=False)
        self.forget(block)
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table holds the block; a free one that holds a prefix is in use again."""
        if self.references[block] == 0:
            del self._free[block]
        self.references[block] += 1

    def give_back(self, block: int) -> None:
        """One table fewer holds the block; if that was the last, it is free.

        Raises:
            ValueError: no table holds it: it was given back before.
        """
        if self.references[block] == 0:
            raise ValueError(f"block {block} is free already")
        self.references[block] -= 1
        if self.references[block] == 0:
            self._free[block] = None
            if self._digest_of[block] is None:  # empty: the next to be taken
                self._free.move_to_end(block, last=False)

    def remember(self, block: int, digest: bytes) -> None:
        """Note that a block ends a prefix, unless another is known to do so: two requests may compute it at once."""
        if digest not in self._block_of:
            self.forget(block)
            self._block_of[digest], self._digest_of[block] = block, digest

    def forget(self, block: int) -> None:
        """The block's content is about to change: nobody may find it any more."""
        digest, self._digest_of[block] = self._digest_of[block], None
        if digest is not None:
            del self._block_of[digest]

    def find(self, digest: bytes) -> int | None:
        """The block that holds the end of a prefix, if there is one."""
        return self._block_of.get(digest)

    def check(self, held: Mapping[int, int]) -> None:
        """AssertionError, saying what is wrong, unless each block counts as many references as tables hold it."""
        for block, count in enumerate(self.references):
            assert count == held.get(block, 0), (
                f"block {block} has {count} references, but {held.get(block, 0)} tables hold it"
            )
            assert (block in self._free) == (count == 0), (
                f"block {block} has {count} references and is {'' if block in self._free else 'not '}free"
            )
        total = len(self.references)
        assert self.num_free + len(held) == total, f"{self.num_free} free and {len(held)} used blocks are not {total}"
        for digest, block in self._block_of.items():
            assert self._digest_of[block] == digest, f"block {block} is found by a prefix that it does not hold"
