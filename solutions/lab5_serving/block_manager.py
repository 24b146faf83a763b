"""Which request's keys and values are in which block of the cache (exercise 5.2).

The cache is a pool of `num_blocks` blocks of `block_size` token slots. A sequence holds a *block table*, the list of
its blocks in order, so its memory need not lie in one piece: at most `block_size - 1` slots of a sequence are unused
(Kwon et al. 2023, section 4). A block may stand in several tables, of sequences with the same beginning; its
*references* count them. Everything here is integers: the keys and values themselves belong to the model runner.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than asked for. Nothing was changed."""


@dataclass(slots=True)
class Sequence:
    """What the manager knows of one sequence: its tokens, its blocks, and the digests of those full and written."""

    tokens: list[int]
    blocks: list[int]
    digests: list[bytes] = field(default_factory=list)


class BlockManager:
    """Hands out blocks, counts references, and finds blocks that already hold a prompt's beginning.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        prefix_caching: look for reusable blocks; without it every sequence computes all of its tokens.

    A free block is either empty or still holds a prefix that somebody may ask for. Empty ones are taken first, then
    the one that was given back longest ago.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, prefix_caching: bool = True) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._sequences: dict[str, Sequence] = {}
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # the next to be taken first
        self._block_of: dict[bytes, int] = {}  # digest of a prefix that ends with a full block -> that block
        self._digest_of: list[bytes | None] = [None] * num_blocks  # the same, the other way round

    # ---- what there is -------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those that hold a reusable prefix included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that stand in at least one table."""
        return self.num_blocks - len(self._free)

    @property
    def ids(self) -> list[str]:
        """The sequences that hold blocks, oldest first."""
        return list(self._sequences)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def table(self, id: str) -> list[int]:
        """The block table of a sequence: the list itself, to be read only."""
        return self._sequence(id).blocks

    def length(self, id: str) -> int:
        """Tokens of a sequence that have a slot."""
        return len(self._sequence(id).tokens)

    def references(self, block: int) -> int:
        """Tables that hold the block."""
        return self._references[block]

    def slot(self, id: str, position: int) -> int:
        """Where in the cache a token's keys and values are: `block * block_size + offset`."""
        sequence = self._sequence(id)
        if not 0 <= position < len(sequence.tokens):
            raise IndexError(f"sequence {id!r} has slots for {len(sequence.tokens)} tokens, none at {position}")
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _sequence(self, id: str) -> Sequence:
        try:
            return self._sequences[id]
        except KeyError:
            raise KeyError(f"no sequence {id!r} holds blocks: never allocated, or freed already") from None

    # ---- taking and giving back one block ------------------------------------------------------------------------

    def _take(self) -> int:
        """A free block, for its first reference. What it held is forgotten."""
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are in use")
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._references[block] = 1
        return block

    def _share(self, block: int) -> None:
        """One more table holds the block; a free one that holds a prefix comes back into use."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def _give_back(self, block: int) -> None:
        """One table less holds the block. The last one frees it: to the end of the line if its prefix can be reused."""
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if self._digest_of[block] is None:
                self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        """The block's content is about to change: nobody may find it as a prefix any more."""
        digest, self._digest_of[block] = self._digest_of[block], None
        if digest is not None:
            del self._block_of[digest]

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def _digest(self, before: bytes, tokens: Tokens[int]) -> bytes:
        """A name for a prefix: of the block's tokens *and* all before them, since keys and values depend on both.

        A cryptographic hash, so that no two prefixes share a name and nobody can make one that is another's.
        """
        return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()

    def _find(self, tokens: Tokens[int]) -> list[int]:
        """Blocks that hold the longest beginning of `tokens` in whole blocks, the last token always left out.

        One token at least has to go through the model: its logits are what the next token is chosen from.
        """
        found: list[int] = []
        digest = b""
        if self.prefix_caching:
            for end in range(self.block_size, len(tokens), self.block_size):
                digest = self._digest(digest, tokens[end - self.block_size : end])
                if digest not in self._block_of:
                    break
                found.append(self._block_of[digest])
        return found

    def commit(self, id: str, computed: int) -> None:
        """The keys and values of the first `computed` tokens are written: their full blocks may be reused from now on.

        Not earlier: a block that is found before it is written would be read while it holds somebody else's values.
        """
        sequence = self._sequence(id)
        if computed > len(sequence.tokens):
            raise ValueError(f"sequence {id!r} has slots for {len(sequence.tokens)} tokens, not for {computed}")
        while self.prefix_caching and (len(sequence.digests) + 1) * self.block_size <= computed:
            index = len(sequence.digests)
            block, start = sequence.blocks[index], index * self.block_size
            before = sequence.digests[-1] if sequence.digests else b""
            digest = self._digest(before, sequence.tokens[start : start + self.block_size])
            sequence.digests.append(digest)
            if digest not in self._block_of:  # two sequences may have computed the same prefix side by side
                self._block_of[digest], self._digest_of[block] = block, digest

    # ---- sequences (exercise 5.2) --------------------------------------------------------------------------------

    def can_allocate(self, tokens: Tokens[int], reserve: int = 0) -> bool:
        """Whether :meth:`allocate` would succeed and leave `reserve` blocks free."""
        found = self._find(tokens)
        idle = sum(self._references[block] == 0 for block in found)  # found, but among the free ones
        return self.blocks_for(len(tokens)) - len(found) + idle + reserve <= self.num_free

    def allocate(self, id: str, tokens: Tokens[int]) -> int:
        """Give a new sequence blocks for all of `tokens`, those of a known beginning shared.

        Returns:
            How many tokens are in the cache already: a multiple of `block_size`, less than `len(tokens)`.

        Raises:
            OutOfBlocks: too few free blocks; nothing has changed.
            ValueError: no tokens, or `id` holds blocks already.
        """
        if id in self._sequences:
            raise ValueError(f"sequence {id!r} holds blocks already; free it first")
        if not tokens:
            raise ValueError("a sequence holds at least one token, got none")
        ### BEGIN SOLUTION 5.2: allocate
        if not self.can_allocate(tokens):
            raise OutOfBlocks(f"{len(tokens)} tokens need more than the {self.num_free} free blocks")
        found = self._find(tokens)
        for block in found:  # before any is taken: a found block may be the next in line
            self._share(block)
        fresh = [self._take() for _ in range(self.blocks_for(len(tokens)) - len(found))]
        self._sequences[id] = Sequence(list(tokens), found + fresh, [self._digest_of[block] for block in found])
        return len(found) * self.block_size
        ### END SOLUTION

    def _fresh_blocks(self, id: str, count: int) -> tuple[int, bool]:
        """Blocks that `count` more tokens take from the pool, and whether one of them replaces a shared last block."""
        sequence = self._sequence(id)
        length = len(sequence.tokens)
        grown = self.blocks_for(length + count) - len(sequence.blocks)
        partly = length % self.block_size > 0 and count > 0
        copied = partly and self._references[sequence.blocks[-1]] > 1
        return grown + copied, copied

    def can_append(self, id: str, count: int = 1) -> bool:
        """Whether :meth:`append` of so many tokens would succeed."""
        return self._fresh_blocks(id, count)[0] <= self.num_free

    def append(self, id: str, tokens: Tokens[int]) -> list[tuple[int, int]]:
        """Give a sequence slots for more tokens at its end.

        The first of them may go into the last block. If other tables hold that block too, it is not written: the
        sequence gets a block of its own in its place (copy-on-write).

        Returns:
            Pairs (source, target) of blocks whose keys and values have to be copied before the next step writes.

        Raises:
            OutOfBlocks: too few free blocks; nothing has changed.
        """
        sequence = self._sequence(id)
        ### BEGIN SOLUTION 5.2: append
        needed, copied = self._fresh_blocks(id, len(tokens))
        if needed > self.num_free:
            raise OutOfBlocks(f"{len(tokens)} more tokens of {id!r} need {needed} blocks, {self.num_free} are free")
        copies = []
        if copied:
            source, sequence.blocks[-1] = sequence.blocks[-1], self._take()
            self._give_back(source)
            copies.append((source, sequence.blocks[-1]))
        elif len(sequence.tokens) % self.block_size and tokens:
            self._forget(sequence.blocks[-1])  # it may have been full once, before a truncation
        sequence.tokens += tokens
        while len(sequence.blocks) < self.blocks_for(len(sequence.tokens)):
            sequence.blocks.append(self._take())
        return copies
        ### END SOLUTION

    def fork(self, parent: str, child: str) -> None:
        """A second sequence with the same tokens in the same blocks, at no cost; whoever writes first copies.

        Raises:
            ValueError: `child` holds blocks already.
        """
        if child in self._sequences:
            raise ValueError(f"sequence {child!r} holds blocks already; free it first")
        original = self._sequence(parent)
        ### BEGIN SOLUTION 5.2: fork
        for block in original.blocks:
            self._share(block)
        self._sequences[child] = Sequence(list(original.tokens), list(original.blocks), list(original.digests))
        ### END SOLUTION

    def truncate(self, id: str, length: int) -> None:
        """Drop the newest tokens until `length` are left: drafted tokens that were not accepted.

        Raises:
            ValueError: a length of 0 or over the sequence's.
        """
        sequence = self._sequence(id)
        if not 1 <= length <= len(sequence.tokens):
            raise ValueError(f"length must be between 1 and {len(sequence.tokens)}, got {length}")
        del sequence.tokens[length:]
        while len(sequence.blocks) > self.blocks_for(length):
            self._give_back(sequence.blocks.pop())
        del sequence.digests[length // self.block_size :]

    def free(self, id: str) -> None:
        """Give all blocks of a sequence back.

        Raises:
            KeyError: no such sequence: never allocated, or freed already.
        """
        sequence = self._sequence(id)
        ### BEGIN SOLUTION 5.2: free
        del self._sequences[id]
        for block in reversed(sequence.blocks):  # the end of a prompt is less likely to be shared: reused first
            self._give_back(block)
        ### END SOLUTION

    # ---- invariants ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """AssertionError, saying what is wrong, unless the books balance; for tests, after every step."""
        held = Counter(block for sequence in self._sequences.values() for block in sequence.blocks)
        for block, count in enumerate(self._references):
            assert count == held[block], f"block {block} counts {count} references, {held[block]} tables hold it"
            assert (block in self._free) == (count == 0), f"block {block} has {count} references and is " + (
                "free" if block in self._free else "not free"
            )
        assert self.num_free + len(held) == self.num_blocks, (
            f"{self.num_free} free blocks and {len(held)} used ones are not {self.num_blocks}"
        )
        for id, sequence in self._sequences.items():
            tokens, blocks = len(sequence.tokens), len(sequence.blocks)
            assert blocks == self.blocks_for(tokens), f"sequence {id!r} has {tokens} tokens in {blocks} blocks"
            assert len(set(sequence.blocks)) == blocks, f"sequence {id!r} holds a block twice: {sequence.blocks}"
        for digest, block in self._block_of.items():
            assert self._digest_of[block] == digest, f"block {block} is named by a prefix that it does not hold"
