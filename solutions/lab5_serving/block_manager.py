"""Which sequence's keys and values are in which blocks of the cache (exercise 5.2).

The cache is a pool of blocks of ``block_size`` token slots. A sequence has a *block table*, the list of its blocks in
order, so its memory need not lie in one piece, and less than one block of it is unused (Kwon et al. 2023, section 4).
A block may stand in several tables, of sequences with the same beginning; its *references* count them.

Everything here is integers: the keys and values themselves belong to the model runner.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .block_pool import BlockPool, OutOfBlocks, prefix_digest


@dataclass(slots=True)
class Sequence:
    """What the manager knows of a sequence: its tokens, its block table, and the digests of its committed blocks."""

    tokens: list[int]
    blocks: list[int]
    digests: list[bytes]


class BlockManager:
    """Gives sequences their blocks, and finds blocks that already hold a prompt's beginning.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        prefix_caching: look for reusable blocks; without it every sequence computes all of its tokens.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, prefix_caching: bool = True) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.pool = BlockPool(num_blocks)
        self.sequences: dict[str, Sequence] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those that still hold a reusable prefix included."""
        return self.pool.num_free

    @property
    def num_used(self) -> int:
        """Blocks that stand in at least one table."""
        return self.num_blocks - self.pool.num_free

    def references(self, block: int) -> int:
        """How many tables hold a block."""
        return self.pool.references[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take, the last one perhaps not full."""
        return -(-num_tokens // self.block_size)

    def table(self, id: str) -> list[int]:
        """The block table of a sequence: the list itself, to be read only."""
        return self.sequence(id).blocks

    def length(self, id: str) -> int:
        """How many tokens of a sequence have a slot."""
        return len(self.sequence(id).tokens)

    def slot(self, id: str, position: int) -> int:
        """Where in the cache a token's keys and values are: ``block * block_size + offset``.

        Raises:
            IndexError: no slot has been given to that position.
        """
        sequence = self.sequence(id)
        if not 0 <= position < len(sequence.tokens):
            raise IndexError(f"sequence {id!r} has slots for {len(sequence.tokens)} tokens, none for token {position}")
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def sequence(self, id: str) -> Sequence:
        """The entry of a sequence.

        Raises:
            KeyError: it has none: never allocated, or freed already.
        """
        try:
            return self.sequences[id]
        except KeyError:
            raise KeyError(f"no sequence {id!r} holds blocks: never allocated, or freed already") from None

    # ---- a sequence begins ---------------------------------------------------------------------------------------

    def cached_prefix(self, tokens: list[int]) -> tuple[list[int], list[bytes]]:
        """Blocks that hold the longest known beginning of ``tokens``, whole blocks only, and their digests.

        The last token is left out: one at least has to go through the model, to give the logits of the next.
        """
        blocks: list[int] = []
        digests: list[bytes] = []
        digest = b""
        for end in range(self.block_size, len(tokens) if self.prefix_caching else 0, self.block_size):
            digest = prefix_digest(digest, tokens[end - self.block_size : end])
            block = self.pool.find(digest)
            if block is None:
                break
            blocks.append(block)
            digests.append(digest)
        return blocks, digests

    def blocks_needed(self, tokens: list[int], cached: list[int]) -> int:
        """Free blocks that :meth:`allocate` takes: those to be computed, and ``cached`` ones that no table holds."""
        idle = sum(self.pool.references[block] == 0 for block in cached)
        return self.blocks_for(len(tokens)) - len(cached) + idle

    def can_allocate(self, tokens: list[int], reserve: int = 0) -> bool:
        """Whether :meth:`allocate` would succeed and leave ``reserve`` blocks free."""
        return self.blocks_needed(tokens, self.cached_prefix(tokens)[0]) + reserve <= self.num_free

    def allocate(self, id: str, tokens: list[int]) -> int:
        """Give a new sequence a table of blocks for all of ``tokens``; blocks of a known beginning are shared.

        Returns:
            How many tokens are in the cache already: a multiple of ``block_size``, less than ``len(tokens)``.

        Raises:
            OutOfBlocks: too few free blocks; nothing has changed.
            ValueError: no tokens, or ``id`` holds blocks already.
        """
        self._check_new(id)
        if not tokens:
            raise ValueError("a sequence holds at least one token, got none")
        cached, digests = self.cached_prefix(tokens)
        needed = self.blocks_needed(tokens, cached)
        if needed > self.num_free:
            raise OutOfBlocks(f"{len(tokens)} tokens of {id!r} need {needed} free blocks, there are {self.num_free}")
        ### BEGIN SOLUTION 5.2: allocate
        for block in cached:  # before any is taken: a cached block that nobody holds may be the next in line
            self.pool.share(block)
        fresh = [self.pool.take() for _ in range(self.blocks_for(len(tokens)) - len(cached))]
        self.sequences[id] = Sequence(list(tokens), cached + fresh, digests)
        return len(cached) * self.block_size
        ### END SOLUTION

    def fork(self, parent: str, child: str) -> None:
        """Begin a second sequence with the same tokens in the same blocks: nothing is taken, nothing copied yet.

        Raises:
            ValueError: ``child`` holds blocks already.
        """
        self._check_new(child)
        original = self.sequence(parent)
        ### BEGIN SOLUTION 5.2: fork
        for block in original.blocks:
            self.pool.share(block)
        self.sequences[child] = Sequence(list(original.tokens), list(original.blocks), list(original.digests))
        ### END SOLUTION

    def _check_new(self, id: str) -> None:
        if id in self.sequences:
            raise ValueError(f"sequence {id!r} holds blocks already; free it first")

    # ---- a sequence grows ----------------------------------------------------------------------------------------

    def writes_shared(self, id: str) -> bool:
        """Whether the next token would be written into a block that another table holds as well."""
        sequence = self.sequence(id)
        return len(sequence.tokens) % self.block_size > 0 and self.pool.references[sequence.blocks[-1]] > 1

    def can_append(self, id: str, count: int = 1) -> bool:
        """Whether :meth:`append` of so many tokens would succeed."""
        return self._fit(self.sequence(id), count)

    def _fit(self, sequence: Sequence, count: int) -> bool:
        left = len(sequence.blocks) * self.block_size - len(sequence.tokens)  # slots in its last block
        copied = count > 0 and left > 0 and self.pool.references[sequence.blocks[-1]] > 1
        taken = copied + (self.blocks_for(count - left) if count > left else 0)
        return not taken or taken <= self.pool.num_free

    def append(self, id: str, tokens: list[int]) -> list[tuple[int, int]]:
        """Give a sequence slots for more tokens at its end; without tokens nothing changes.

        The first of them may fall into the last block. If other tables hold that block too, it must not be written:
        the sequence gets a block of its own in its place (copy-on-write). If it is the sequence's own, what it was
        known by as a prefix is forgotten, since its content changes.

        Returns:
            Pairs (source, target) of blocks whose keys and values have to be copied before the next step writes.

        Raises:
            OutOfBlocks: too few free blocks; nothing has changed.
        """
        sequence = self.sequence(id)
        if not self._fit(sequence, len(tokens)):
            raise OutOfBlocks(f"no room for {len(tokens)} more tokens of {id!r}: {self.num_free} blocks are free")
        copies: list[tuple[int, int]] = []
        ### BEGIN SOLUTION 5.2: append
        if tokens and self.writes_shared(id):
            source, target = sequence.blocks[-1], self.pool.take()
            sequence.blocks[-1] = target
            self.pool.give_back(source)
            copies.append((source, target))
        elif tokens and len(sequence.tokens) % self.block_size:
            self.pool.forget(sequence.blocks[-1])
        sequence.tokens += tokens
        while len(sequence.blocks) < self.blocks_for(len(sequence.tokens)):
            sequence.blocks.append(self.pool.take())
        ### END SOLUTION
        return copies

    def commit(self, id: str, computed: int) -> None:
        """The keys and values of the first ``computed`` tokens are written: their full blocks may now be reused.

        Not before: a block found too early would be read while it still holds somebody else's values.
        """
        sequence = self.sequence(id)
        if computed > len(sequence.tokens):
            raise ValueError(f"sequence {id!r} has slots for {len(sequence.tokens)} tokens, not for {computed}")
        while self.prefix_caching and (len(sequence.digests) + 1) * self.block_size <= computed:
            index = len(sequence.digests)
            tokens = sequence.tokens[index * self.block_size : (index + 1) * self.block_size]
            sequence.digests.append(prefix_digest(sequence.digests[-1] if index else b"", tokens))
            self.pool.remember(sequence.blocks[index], sequence.digests[-1])

    def forget(self, id: str) -> None:
        """Let nobody reuse what a sequence holds: its computation failed, and what was written cannot be trusted."""
        for block in self.table(id):
            self.pool.forget(block)

    # ---- a sequence shrinks, and ends ----------------------------------------------------------------------------

    def truncate(self, id: str, length: int) -> None:
        """Drop the newest tokens until ``length`` are left, and the blocks that they leave: rejected drafts.

        Raises:
            ValueError: a length of 0, or more than the sequence has.
        """
        sequence = self.sequence(id)
        if not 1 <= length <= len(sequence.tokens):
            raise ValueError(f"length must be between 1 and {len(sequence.tokens)}, got {length}")
        del sequence.tokens[length:]
        del sequence.digests[length // self.block_size :]
        while len(sequence.blocks) > self.blocks_for(length):
            self.pool.give_back(sequence.blocks.pop())

    def free(self, id: str) -> None:
        """A sequence ends, and gives back its blocks, the last one first: beginnings are shared more often than ends.

        Raises:
            KeyError: no such sequence: never allocated, or freed already.
        """
        sequence = self.sequence(id)
        ### BEGIN SOLUTION 5.2: free
        del self.sequences[id]
        for block in reversed(sequence.blocks):
            self.pool.give_back(block)
        ### END SOLUTION

    def check(self) -> None:
        """AssertionError, saying what is wrong, unless the books balance; for tests, after every step."""
        for id, sequence in self.sequences.items():
            tokens, blocks = len(sequence.tokens), sequence.blocks
            assert len(blocks) == self.blocks_for(tokens), (
                f"sequence {id!r} has {tokens} tokens in {len(blocks)} blocks"
            )
            assert len(set(blocks)) == len(blocks), f"sequence {id!r} holds a block twice: {blocks}"
            committed = len(sequence.digests) * self.block_size
            assert committed <= tokens, f"sequence {id!r} has {tokens} tokens, {committed} of them committed"
        self.pool.check(Counter(block for sequence in self.sequences.values() for block in sequence.blocks))
