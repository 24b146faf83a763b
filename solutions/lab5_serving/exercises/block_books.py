"""What must hold of a block manager after every call: its books balance, and each sequence finds its own history.

Keys and values of a token depend on all tokens before it. So a slot's content is the *history* that it was computed
from, a number that stands for the token and everything before it in its sequence. If a sequence reads a slot and finds
another history than its own, a block was written while shared, found before it was written, or given away too early.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from utils.checks.core import classic, listed

from .scenes import mistaken

COUNTED = classic("the door counts the blocks that are needed: take no others, and none before it", 5)
SHARED = "a block that other tables hold is never written: copy it first (copy-on-write)"


@dataclass
class Known:
    """A sequence as it must be: its tokens, and how many of them have been written."""

    tokens: list[int]
    written: int = 0


@dataclass
class Books:
    """A student's manager and what must hold of it: who holds which block, and what is written there.

    Attributes:
        manager: the student's.
        out_of_blocks: the exception that says that the pool is too small.
        memory: slot -> history written there.
        said: the calls so far, the last of which a message shows.
    """

    manager: Any
    num_blocks: int
    block_size: int
    out_of_blocks: type[Exception]
    known: dict[str, Known] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    _histories: dict[tuple[int, int], int] = field(default_factory=dict)
    _offered: dict[int, set[int]] = field(default_factory=dict)  # history of a committed block's end -> its blocks
    _lost: set[int] = field(default_factory=set)  # histories of which a block was lost: they may or may not be found

    # ---- what a message shows
    def stop(self, headline: str, cause: str = "", *details: str) -> None:
        """End the scene, showing the last calls."""
        where = f"{self.num_blocks} blocks of {self.block_size}; last calls: {'; '.join(self.said[-4:])}"
        mistaken(headline, cause, *details, where)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def history(self, tokens: list[int]) -> list[int]:
        """The history at each of the tokens."""
        found, last = [], 0
        for token in tokens:
            last = self._histories.setdefault((last, token), len(self._histories) + 1)
            found.append(last)
        return found

    # ---- what must hold
    def verify(self, cause: str) -> None:
        """The books balance, and each sequence finds its own history in its slots.

        Args:
            cause: the likely reason where the count of a block's references is wrong.
        """
        for id, known in self.known.items():
            self._judge_table(id, known)
        held, manager = self.held(), self.manager
        for block in range(self.num_blocks):
            if manager.references(block) != held[block]:
                tables = [id for id in self.known if block in manager.table(id)]
                found = f"{held[block]} tables hold it ({listed(tables)})" if tables else "no table holds it"
                self.stop(f"block {block} counts {manager.references(block)} references, {found}", cause)
        free, due = manager.num_free, self.num_blocks - len(held)
        if free < due:
            lost = classic("they are leaked: nobody can ever take them again", 1)
            self.stop(f"{due - free} blocks are neither free nor in a table", lost)
        if free > due:
            self.stop(f"{free - due} blocks are free and in a table at once", cause)
        if manager.num_used != len(held):
            self.stop(f"num_used is {manager.num_used}, {len(held)} blocks are in tables")
        try:
            manager.check()
        except AssertionError as error:
            self.stop(f"check() says: {error}", cause)
        for id in self.known:
            self._judge_content(id)

    def _judge_table(self, id: str, known: Known) -> None:
        try:
            table, length = list(self.manager.table(id)), self.manager.length(id)
        except KeyError:
            self.stop(f"sequence {id!r} is lost: table({id!r}) raises KeyError", "the manager must remember it")
        if length != len(known.tokens):
            cause = "the manager keeps a list of its own, which grows with append"
            self.stop(f"sequence {id!r} has {len(known.tokens)} tokens, length({id!r}) is {length}", cause)
        due = self._blocks_for(length)
        if len(table) != due:
            cause = classic("n tokens need ceil(n / block_size) blocks: mind a length that fills its last block", 6)
            self.stop(f"sequence {id!r} has {length} tokens in {len(table)} blocks, {due} are right", cause)
        if not all(isinstance(block, int) and 0 <= block < self.num_blocks for block in table):
            self.stop(f"the table of {id!r} is {table}", f"blocks are integers from 0 to {self.num_blocks - 1}")
        if len(set(table)) < len(table):
            cause = "each place needs a block of its own"
            if self.said[-1].startswith("allocate"):
                cause = classic("a cached block that nobody holds may be taken: share them all before any is taken", 3)
            self.stop(f"the table of {id!r} holds a block twice: {listed(table)}", cause)

    def _judge_content(self, id: str) -> None:
        known = self.known[id]
        histories = self.history(known.tokens)
        for position in range(known.written):
            found = self.memory.get(self.manager.slot(id, position))
            if found == histories[position]:
                continue
            cause = self._why_content(found)
            what = "nothing was ever written" if found is None else "another sequence's token is written"
            block = self.manager.table(id)[position // self.block_size]
            self.stop(f"sequence {id!r}, token {position}: {what} in its slot (block {block})", cause)

    def _why_content(self, found: int | None) -> str:
        last = self.said[-1]
        if last.startswith("append"):
            return classic("a block was replaced and its content not copied: return the pair (old, new)", 2)
        if "are written" in last:
            return classic(SHARED, 2)
        return "a block was handed out while a table still held it"

    def judge_cached(self, id: str, cached: object, tokens: list[int]) -> None:
        """The number of tokens that allocate says are in the cache."""
        size = self.block_size
        if not isinstance(cached, int) or isinstance(cached, bool):
            self.stop(f"allocate returns {cached!r}", "expected the number of tokens that are in the cache already")
        most = self._longest_known(tokens)
        if cached >= len(tokens):
            cause = "one token at least goes through the model: its logits choose the next one"
            self.stop(f"allocate says that all {len(tokens)} tokens are in the cache", cause)
        if cached % size or cached < 0 or (size > 1 and cached * size == most > 0):
            unit = classic("this counts blocks; expected the number of tokens", 7)
            self.stop(f"allocate returns {cached}, {most} tokens are in the cache", unit)
        if cached < most:
            cause = classic("the blocks of a known beginning are used again: cached holds them", 7)
            self.stop(f"allocate computes {most - cached} tokens again that are in the cache", cause)
        histories = self.history(tokens)
        for position in range(cached):
            found = self.memory.get(self.manager.slot(id, position))
            if found != histories[position]:
                never = found is None
                what = "nothing has been written there" if never else "another token's keys are there"
                pending = any(
                    self.history(other.tokens)[position : position + 1] == histories[position : position + 1]
                    and other.written <= position
                    for name, other in self.known.items()
                    if name != id
                )
                cause = (
                    classic("a block can be found by its prefix once commit says that it is written, not before", 8)
                    if pending
                    else classic("a block whose content changes must not be found by its old prefix: forget it", 8)
                )
                self.stop(f"allocate says that token {position} of {id!r} is in the cache: {what}", cause)

    def judge_unshared(self, id: str, start: int, stop: int) -> None:
        """Blocks that will be written belong to this sequence alone."""
        held, table = self.held(), self.manager.table(id)
        for index in sorted({position // self.block_size for position in range(start, stop)}):
            if held[table[index]] > 1:
                others = [name for name in self.known if name != id and table[index] in self.manager.table(name)]
                self.stop(
                    f"block {table[index]} is to be written by {id!r}, and {listed(map(repr, others))} holds it too",
                    classic(SHARED, 2),
                )

    def judge_copies(self, id: str, copies: object, before: list[int], shared: bool) -> None:
        if not isinstance(copies, list) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in copies):
            self.stop(
                f"append returns {copies!r}", "expected a list of pairs (source, target), empty if nothing is copied"
            )
        table = self.manager.table(id)
        if copies and not shared:
            cause = classic("only a last block that others hold too, and that has room, is copied", 2)
            self.stop(f"append copies block {copies[0][0]} for nothing", cause)
        if shared and table[len(before) - 1] == before[-1]:
            self.stop(f"{id!r} goes on in block {before[-1]}, which another table holds", classic(SHARED, 2))
        if shared and list(copies) != [(before[-1], table[len(before) - 1])]:
            cause = classic("a block was replaced and its content not copied: return the pair (old, new)", 2)
            self.stop(f"append returns {copies}, expected {[(before[-1], table[len(before) - 1])]}", cause)

    def refused(self, before: tuple, fits: bool, cause: str) -> None:
        if fits:
            self.stop(f"{self.said[-1]} raises OutOfBlocks although there is room", COUNTED)
        if self.books() != before:
            self.stop("OutOfBlocks was raised, and blocks have changed hands before it", cause)

    def books(self) -> tuple:
        manager = self.manager
        tables = tuple((id, tuple(manager.table(id)), manager.length(id)) for id in self.known)
        return manager.num_free, tables, tuple(map(manager.references, range(self.num_blocks)))

    def held(self) -> Counter:
        return Counter(block for id in self.known for block in self.manager.table(id))

    # ---- what must be found by its prefix
    def offer(self, history: int, block: int) -> None:
        self._offered.setdefault(history, set()).add(block)

    def lose(self, blocks: list[int]) -> None:
        for history, holders in self._offered.items():
            if holders & set(blocks):
                holders -= set(blocks)
                self._lost.add(history)

    def _longest_known(self, tokens: list[int]) -> int:
        """Tokens of a beginning that surely is in the cache, in whole blocks, the last token left out."""
        histories, count = self.history(tokens), 0
        for end in range(self.block_size, len(tokens), self.block_size):
            history = histories[end - 1]
            if not self._offered.get(history) or history in self._lost:
                break
            count = end
        return count
