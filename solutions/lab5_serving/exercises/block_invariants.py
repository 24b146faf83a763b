"""What must hold of a block manager after every call: no block leaks, and each sequence finds its own tokens.

The keys and values of a token depend on all tokens before it. So what stands in a slot here is the **history** that it
was computed from: the token and everything before it in its sequence. A sequence that finds another history in its
slots reads a block that was written while shared, found before it was written, or given away too early.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from utils.checks.core import classic, listed

from .scenarios import CheckMismatch

SHARED = classic("a block that other tables hold is never written: copy it first (copy-on-write)", 2)
COPIED = classic("a block was replaced and its content not copied: return the pair (old, new) of its place", 2)
EVICT = classic("a block whose content changes must not be found by its old prefix: forget it", 8)
EARLY = classic("a block can be found by its prefix once commit says that it is written, not before", 8)
USED = classic("the blocks of a known beginning are used again: cached holds them", 7)
LOST = classic("a block is forgotten when its content changes, and not before", 8)
ENDS_FIRST = classic("free gives the last block of a table back first: beginnings are shared more often than ends", 9)
ADDS = "append adds its tokens to the sequence's own"
TAKEN = classic("self.pool.take() chooses: empty blocks first, then the one that was given back longest ago", 9)
#: By the last call, why a block's references are wrong.
REFERENCES = {
    "allocate": classic("each block found by its prefix is held by one more table: share it, before any is taken", 3),
    "append": classic("the block that was copied is held by one table less: give it back", 3),
    "fork": classic("after a fork each of the parent's blocks is held by one more table", 3),
    "free": classic("each block of the table is given back once; shared blocks stay with the others", 1),
}


@dataclass
class Known:
    """A sequence as it must be: its tokens, and how many of them have been written."""

    tokens: list[int]
    written: int = 0

    @property
    def is_written(self) -> bool:
        """Whether all of its tokens are."""
        return self.written == len(self.tokens)


class BlockInvariants:
    """A student's manager, the sequences that it was given, and what is written in the cache.

    Attributes:
        known: the sequences by id.
        memory: slot -> the history written there, a number.
    """

    def __init__(self, manager: Any) -> None:
        self.manager, self.block_size = manager, manager.block_size
        self.known: dict[str, Known] = {}
        self.memory: dict[int, int] = {}
        self._histories: dict[tuple[int, int], int] = {}  # (history before, token) -> history
        self._free = [*range(manager.num_blocks)]  # the next to be taken first
        self._beginnings_first = [*self._free]  # what it would be if tables were given back from their beginning on
        self._found: dict[int, int] = {}  # the history at a committed block's end -> the block that is found by it
        self._also: dict[int, set[int]] = {}  # and other blocks that hold the same
        self._sure = (
            True  # whether it is known which blocks are found: not once one of several that hold the same is gone
        )

    def history(self, tokens: list[int]) -> list[int]:
        """What the keys and values of each token are computed from."""
        found, last = [], 0
        for token in tokens:
            last = self._histories.setdefault((last, token), len(self._histories) + 1)
            found.append(last)
        return found

    def holders(self) -> Counter[int]:
        """How many tables hold each block."""
        return Counter(block for id in self.known for block in self.manager.table(id))

    def state(self) -> tuple:
        """All that a refused call must leave as it was."""
        manager = self.manager
        tables = [(id, list(manager.table(id)), manager.length(id)) for id in self.known]
        return manager.num_free, tables, [*map(manager.references, range(manager.num_blocks))]

    # ---- what the model and the pool do
    def write(self, id: str, stop: int) -> None:
        """The model writes the keys and values of a sequence's tokens up to ``stop``, and they are committed."""
        known, size = self.known[id], self.block_size
        histories, table = self.history(known.tokens), self.manager.table(id)
        for position in range(known.written, stop):
            self.memory[self.manager.slot(id, position)] = histories[position]
        for index in range(known.written // size, stop // size) if self.manager.prefix_caching else ():
            history, block = histories[(index + 1) * size - 1], table[index]
            if self._found.get(history, block) == block:
                self._forget(block)
                self._found[history] = block
            else:
                self._also.setdefault(history, set()).add(block)
        known.written = stop

    def copy(self, source: int, target: int) -> None:
        """The content of a block is copied."""
        size = self.block_size
        for offset in range(size):
            if (content := self.memory.get(source * size + offset)) is not None:
                self.memory[target * size + offset] = content

    def change(self, block: int) -> None:
        """A block's content is about to change."""
        self._forget(block)

    def share(self, blocks: list[int]) -> None:
        """These blocks, which were found, are in use."""
        for free in (self._free, self._beginnings_first):
            free[:] = [block for block in free if block not in blocks]

    def take(self, blocks: list[int]) -> None:
        """These blocks were taken: empty ones first, then those that were given back longest ago."""
        count = len(blocks)
        due, others = self._free[:count], self._beginnings_first[:count]
        if self._sure and count and set(blocks) != set(due):
            wrong = next(block for block in blocks if block not in due)
            cause = (
                ENDS_FIRST if set(blocks) == set(others) else TAKEN if set(blocks) == set(self._free[-count:]) else ""
            )
            raise CheckMismatch(f"block {wrong} is taken, expected {listed(due)}", cause)
        self.share(blocks)
        for block in blocks:
            self._forget(block)

    def give_back(self, table: list[int], length: int = 0) -> None:
        """All blocks of a table, but for its first ``length``, are given back, the last one first."""
        held, blocks = self.holders(), table[length:]
        for free, order in ((self._free, reversed(blocks)), (self._beginnings_first, blocks)):
            for block in order:
                if not held[block] and block not in free:
                    free.insert(len(free) if block in self._found.values() else 0, block)
        for others in self._also.values():
            others.difference_update(block for block in blocks if not held[block])

    def _forget(self, block: int) -> None:
        for history in [history for history, found in self._found.items() if found == block]:
            del self._found[history]
            self._sure = self._sure and not self._also.get(history)
        for others in self._also.values():
            others.discard(block)

    def cached(self, tokens: list[int]) -> int:
        """Tokens of a beginning that surely are in the cache: whole blocks, the last token left out."""
        histories, count = self.history(tokens), 0
        for end in range(self.block_size, len(tokens) if self._sure else 0, self.block_size):
            if histories[end - 1] not in self._found:
                break
            count = end
        return count

    # ---- what must hold
    def check(self, call: str) -> None:
        """Raise CheckMismatch unless all invariants hold after that call (``"allocate"``)."""
        for id in self.known:
            self.check_table(id, call)
        self._check_references(REFERENCES.get(call, "a block that no table holds any more is free"))
        held = self.holders()
        for id, known in self.known.items():
            self._check_content(id, known, call, held)
            self._check_found(id, known)

    def check_table(self, id: str, call: str) -> None:
        """As many blocks as the sequence's tokens need, each of them once."""
        known = self.known[id]
        try:
            table, length = list(self.manager.table(id)), self.manager.length(id)
        except KeyError:
            raise CheckMismatch(f"sequence {id!r} is lost: table({id!r}) raises KeyError") from None
        if length != len(known.tokens):
            cause = ADDS if call == "append" else ""
            raise CheckMismatch(f"length({id!r}): expected {len(known.tokens)} tokens, got {length}", cause)
        num_blocks, needed = self.manager.num_blocks, -(-length // self.block_size)
        if len(table) != needed:
            cause = "n tokens need ceil(n / block_size) blocks, those found by their prefix included"
            if len(table) - needed == (-1 if length % self.block_size else 1):
                cause = classic(f"{cause}: mind a length that fills its last block", 6)
            raise CheckMismatch(f"{id!r} has {length} tokens: expected {needed} blocks, got {len(table)}", cause)
        if not all(isinstance(block, int) and 0 <= block < num_blocks for block in table):
            raise CheckMismatch(f"the table of {id!r} is {table}", f"blocks are integers from 0 to {num_blocks - 1}")
        if len(set(table)) < len(table):
            cause = classic("a cached block that no table holds may be taken: share them all before any is taken", 3)
            cause = cause if call == "allocate" else "each place needs a block of its own"
            raise CheckMismatch(f"the table of {id!r} holds a block twice: {listed(table)}", cause)

    def _check_references(self, cause: str) -> None:
        held, manager = self.holders(), self.manager
        for block in range(manager.num_blocks):
            if (counted := manager.references(block)) != held[block]:
                tables = listed(repr(id) for id in self.known if block in manager.table(id))
                raise CheckMismatch(
                    f"block {block} counts {counted} references, expected {held[block]} (in tables: {tables})", cause
                )
        leaked = manager.num_blocks - len(held) - manager.num_free
        if leaked > 0:
            raise CheckMismatch(f"block leak: {leaked} blocks neither free nor referenced", REFERENCES["free"])
        if leaked < 0:
            raise CheckMismatch(f"{-leaked} blocks are free and in a table at once", cause)
        try:
            manager.check()
        except AssertionError as error:
            raise CheckMismatch(f"check() says: {error}") from None

    def _check_content(self, id: str, known: Known, call: str, held: Counter[int]) -> None:
        histories, table = self.history(known.tokens), self.manager.table(id)
        for position in range(known.written):
            if (found := self.memory.get(self.manager.slot(id, position))) != histories[position]:
                what = "nothing was ever written" if found is None else "another sequence's token is written"
                cause = {"append": COPIED, "commit": SHARED}.get(call, "a block was handed out while a table held it")
                raise CheckMismatch(f"sequence {id!r}, token {position}: {what} in its slot", cause)
        for block in [] if known.is_written else table[known.written // self.block_size :]:
            if held[block] > 1:
                others = listed(repr(name) for name in self.known if name != id and block in self.manager.table(name))
                headline = f"block {block} is to be written by {id!r}, and {others} holds it too"
                raise CheckMismatch(headline, EVICT if call == "allocate" else SHARED)

    def _check_found(self, id: str, known: Known) -> None:
        """What is found by a sequence's tokens holds them."""
        histories, size = self.history(known.tokens), self.block_size
        for index, block in enumerate(self.manager.cached_prefix([*known.tokens, 0])[0]):
            for offset in range(size):
                if self.memory.get(block * size + offset) != histories[index * size + offset]:
                    own = block in self.manager.table(id)
                    headline = f"block {block} is found by tokens of {id!r} that nobody has written there"
                    raise CheckMismatch(headline, EARLY if own else EVICT)

    def check_cached(self, id: str, cached: object, found: int) -> None:
        """The number of tokens that allocate says are in the cache; ``found`` is what the manager knew before."""
        known, size = self.known[id], self.block_size
        most, count, histories = self.cached(known.tokens), len(known.tokens), self.history(known.tokens)
        if not isinstance(cached, int) or isinstance(cached, bool):
            raise CheckMismatch(f"allocate returns {cached!r}", "expected the number of tokens already in the cache")
        if cached >= count:
            cause = "one token at least goes through the model: its logits choose the next one"
            raise CheckMismatch(f"allocate says that all {count} tokens are in the cache", cause)
        if cached != found and cached == found // size:
            cause = classic("this counts blocks; expected the number of tokens", 7)
            raise CheckMismatch(f"allocate returns {cached}, {found} tokens are in the cache", cause)
        if cached % size or cached < 0:
            cause = classic("expected the tokens of whole blocks, those in cached", 7)
            raise CheckMismatch(f"allocate returns {cached}, {found} tokens are in the cache", cause)
        if cached < most:
            cause = USED if found > cached else LOST
            raise CheckMismatch(f"allocate computes {most - cached} tokens again that are in the cache", cause)
        for position in range(cached):
            there = self.memory.get(self.manager.slot(id, position))
            if there != histories[position] and cached > found:
                cause = classic("expected the tokens of whole blocks, those in cached", 7)
                raise CheckMismatch(f"allocate returns {cached}, {found} tokens are in the cache", cause)
            if there != histories[position]:
                pending = there is None or any(
                    other.written <= position < len(other.tokens)
                    and self.history(other.tokens)[position] == histories[position]
                    for name, other in self.known.items()
                    if name != id
                )
                what = "nothing has been written there" if there is None else "another token's keys are there"
                raise CheckMismatch(
                    f"allocate says that token {position} of {id!r} is in the cache: {what}",
                    EARLY if pending else EVICT,
                )
