"""A block manager at work on a memory that remembers: each slot knows which token, after which others, was written.

Keys and values of a token depend on all tokens before it. So a slot's content is the *history* that it was computed
from, a number that stands for the token and everything before it in its sequence. If a sequence reads a slot and finds
another history than its own, a block was written while shared, found before it was written, or given away too early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from utils.checks.lab5.scenes import mistaken
from utils.checks.lab5.words import classic, listed

_COUNTED = classic("the door counts the blocks that are needed: take no others, and none before it", 5)
SHARED = "a block that other tables hold is never written: copy it first (copy-on-write)"


@dataclass
class Known:
    """A sequence as it must be: its tokens, and how many of them have been written."""

    tokens: list[int]
    written: int = 0


@dataclass
class Life:
    """A student's manager, and what must hold of it after every call.

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

    # ---- calls
    def allocate(self, id: str, tokens: list[int]) -> bool:
        """Allocate a sequence; True if there was room. Nothing of it is written yet."""
        self.said.append(f"allocate({id!r}, {len(tokens)} tokens)")
        fits, before, given = self.manager.can_allocate(list(tokens)), self._books(), list(tokens)
        try:
            cached = self.manager.allocate(id, given)
        except self.out_of_blocks:
            self._refused(before, fits, _COUNTED)
            return False
        self.said[-1] += f" -> {cached}"
        if not fits:
            self.stop("allocate hands out blocks although can_allocate says that there are too few")
        if given != tokens:
            self.stop("allocate changes the list of tokens that it is given", "its caller still needs it")
        self.known[id] = Known(list(tokens))
        self._judge_cached(id, cached, tokens)
        self.known[id].written = cached
        given.append(-1)  # the caller goes on with its list
        taken = self.manager.table(id)[cached // self.block_size :]
        self._lose(taken)
        self.verify(
            classic("each block found by its prefix is held by one more table: share it, before any is taken", 3)
        )
        self._judge_unshared(id, cached, len(tokens))
        return True

    def write(self, id: str, count: int | None = None, commit: bool = True) -> None:
        """The model computes the next ``count`` tokens of a sequence (all by default): their slots are written."""
        known = self.known[id]
        stop = len(known.tokens) if count is None else min(len(known.tokens), known.written + count)
        self.said.append(f"{id!r}: tokens {known.written}..{stop - 1} are written")
        self._judge_unshared(id, known.written, stop)
        histories = self.history(known.tokens)
        for position in range(known.written, stop):
            self.memory[self.manager.slot(id, position)] = histories[position]
        known.written = stop
        if commit:
            self.manager.commit(id, stop)
            for index in range(stop // self.block_size):
                self._offer(histories[(index + 1) * self.block_size - 1], self.manager.table(id)[index])
        self.verify(classic(SHARED, 2))

    def append(self, id: str, tokens: list[int]) -> bool:
        """Room for more tokens, which are not written yet; True if there was any."""
        known, table = self.known[id], list(self.manager.table(id))
        self.said.append(f"append({id!r}, {len(tokens)} tokens) to {len(known.tokens)}")
        fits, before, given = self.manager.can_append(id, len(tokens)), self._books(), list(tokens)
        partly = len(known.tokens) % self.block_size > 0 and bool(tokens)
        shared = partly and self._held()[table[-1]] > 1
        try:
            copies = self.manager.append(id, given)
        except self.out_of_blocks:
            self._refused(before, fits, _COUNTED)
            return False
        if not fits:
            self.stop("append hands out blocks although can_append says that there are too few")
        known.tokens += tokens
        self._judge_copies(id, copies, table, shared)
        new = self.manager.table(id)
        self._lose([block for block in new if block not in table])
        if partly and not shared:
            self._lose([table[-1]])  # its content is about to change
        for source, target in copies:
            for offset in range(self.block_size):
                if (content := self.memory.get(source * self.block_size + offset)) is not None:
                    self.memory[target * self.block_size + offset] = content
        self.verify(classic("the block that was copied is held by one table less: give it back", 3))
        self._judge_unshared(id, len(known.tokens) - len(tokens), len(known.tokens))
        return True

    def fork(self, parent: str, child: str) -> None:
        """A second sequence with the same tokens."""
        self.said.append(f"fork({parent!r}, {child!r})")
        before = self.manager.num_free
        self.manager.fork(parent, child)
        self.known[child] = Known(list(self.known[parent].tokens), self.known[parent].written)
        if self.manager.table(child) is self.manager.table(parent):
            cause = classic("parent and child share blocks, not the list of them: each has a table of its own", 2)
            self.stop("the child's table is the parent's list itself", cause)
        if self.manager.num_free != before:
            cause = "a fork shares all blocks: whoever writes first copies"
            self.stop(f"fork takes {before - self.manager.num_free} blocks", cause)
        self.verify(classic("after a fork each of the parent's blocks is held by one more table", 3))

    def truncate(self, id: str, length: int) -> None:
        """Drop the newest tokens."""
        self.said.append(f"truncate({id!r}, {length})")
        self.manager.truncate(id, length)
        known = self.known[id]
        del known.tokens[length:]
        known.written = min(known.written, length)
        self.verify("a block that no table holds any more is free")

    def free(self, id: str) -> None:
        """Give a sequence's blocks back; a second time must be refused."""
        self.said.append(f"free({id!r})")
        self.manager.free(id)
        known = self.known.pop(id)
        for attempt, call in (("table", self.manager.table), ("free, a second time,", self.manager.free)):
            try:
                call(id)
            except KeyError:
                continue
            cause = classic("a sequence that is freed is forgotten: only so is a double free an error", 4)
            self.stop(f"{attempt} of {id!r} does not raise KeyError after it was freed", cause)
        shared = "shared blocks" if len(known.tokens) else "blocks"
        self.verify(classic(f"each block of the table is given back once; {shared} stay with the others", 1))

    # ---- what must hold
    def verify(self, cause: str) -> None:
        """The books balance, and each sequence finds its own history in its slots.

        Args:
            cause: the likely reason where the count of a block's references is wrong.
        """
        for id, known in self.known.items():
            self._judge_table(id, known)
        held, manager = self._held(), self.manager
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

    def _judge_cached(self, id: str, cached: object, tokens: list[int]) -> None:
        """The number of tokens that allocate says are in the cache."""
        size = self.block_size
        if not isinstance(cached, int) or isinstance(cached, bool):
            self.stop(f"allocate returns {cached!r}", "the number of tokens that are in the cache already is due")
        most = self._longest_known(tokens)
        if cached >= len(tokens):
            cause = "one token at least goes through the model: its logits choose the next one"
            self.stop(f"allocate says that all {len(tokens)} tokens are in the cache", cause)
        if cached % size or cached < 0 or (size > 1 and cached * size == most > 0):
            unit = classic("this counts blocks; the number of tokens is due", 7)
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

    def _judge_unshared(self, id: str, start: int, stop: int) -> None:
        """Blocks that will be written belong to this sequence alone."""
        held, table = self._held(), self.manager.table(id)
        for index in sorted({position // self.block_size for position in range(start, stop)}):
            if held[table[index]] > 1:
                others = [name for name in self.known if name != id and table[index] in self.manager.table(name)]
                self.stop(
                    f"block {table[index]} is to be written by {id!r}, and {listed(map(repr, others))} holds it too",
                    classic(SHARED, 2),
                )

    def _judge_copies(self, id: str, copies: object, before: list[int], shared: bool) -> None:
        if not isinstance(copies, list) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in copies):
            self.stop(
                f"append returns {copies!r}", "a list of pairs (source, target) is due, empty if nothing is copied"
            )
        table = self.manager.table(id)
        if copies and not shared:
            cause = classic("only a last block that others hold too, and that has room, is copied", 2)
            self.stop(f"append copies block {copies[0][0]} for nothing", cause)
        if shared and table[len(before) - 1] == before[-1]:
            self.stop(f"{id!r} goes on in block {before[-1]}, which another table holds", classic(SHARED, 2))
        if shared and list(copies) != [(before[-1], table[len(before) - 1])]:
            cause = classic("a block was replaced and its content not copied: return the pair (old, new)", 2)
            self.stop(f"append returns {copies}, {[(before[-1], table[len(before) - 1])]} is due", cause)

    def _refused(self, before: tuple, fits: bool, cause: str) -> None:
        if fits:
            self.stop(f"{self.said[-1]} raises OutOfBlocks although there is room", _COUNTED)
        if self._books() != before:
            self.stop("OutOfBlocks was raised, and blocks have changed hands before it", cause)

    def _books(self) -> tuple:
        manager = self.manager
        tables = tuple((id, tuple(manager.table(id)), manager.length(id)) for id in self.known)
        return manager.num_free, tables, tuple(map(manager.references, range(self.num_blocks)))

    def _held(self) -> Counter:
        return Counter(block for id in self.known for block in self.manager.table(id))

    # ---- what must be found by its prefix
    def _offer(self, history: int, block: int) -> None:
        self._offered.setdefault(history, set()).add(block)

    def _lose(self, blocks: list[int]) -> None:
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


def new_life(BlockManager: Callable, out_of_blocks: type[Exception], num_blocks: int, block_size: int) -> Life:
    """A fresh manager of so many blocks."""
    return Life(BlockManager(num_blocks, block_size), num_blocks, block_size, out_of_blocks)
