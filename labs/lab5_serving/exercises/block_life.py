"""A block manager at work: each call is made of the student's manager, and everything that must hold is looked at."""

from __future__ import annotations

from collections.abc import Callable

from utils.checks.core import classic

from .block_books import COUNTED, SHARED, Books, Known


class Life(Books):
    """A student's manager and the calls of its life."""

    def allocate(self, id: str, tokens: list[int]) -> bool:
        """Allocate a sequence; True if there was room. Nothing of it is written yet."""
        self.said.append(f"allocate({id!r}, {len(tokens)} tokens)")
        fits, before, given = self.manager.can_allocate(list(tokens)), self.books(), list(tokens)
        try:
            cached = self.manager.allocate(id, given)
        except self.out_of_blocks:
            self.refused(before, fits, COUNTED)
            return False
        self.said[-1] += f" -> {cached}"
        if not fits:
            self.stop("allocate hands out blocks although can_allocate says that there are too few")
        if given != tokens:
            self.stop("allocate changes the list of tokens that it is given", "its caller still needs it")
        self.known[id] = Known(list(tokens))
        self.judge_cached(id, cached, tokens)
        self.known[id].written = cached
        given.append(-1)  # the caller goes on with its list
        taken = self.manager.table(id)[cached // self.block_size :]
        self.lose(taken)
        self.verify(
            classic("each block found by its prefix is held by one more table: share it, before any is taken", 3)
        )
        self.judge_unshared(id, cached, len(tokens))
        return True

    def write(self, id: str, count: int | None = None, commit: bool = True) -> None:
        """The model computes the next ``count`` tokens of a sequence (all by default): their slots are written."""
        known = self.known[id]
        stop = len(known.tokens) if count is None else min(len(known.tokens), known.written + count)
        self.said.append(f"{id!r}: tokens {known.written}..{stop - 1} are written")
        self.judge_unshared(id, known.written, stop)
        histories = self.history(known.tokens)
        for position in range(known.written, stop):
            self.memory[self.manager.slot(id, position)] = histories[position]
        known.written = stop
        if commit:
            self.manager.commit(id, stop)
            for index in range(stop // self.block_size):
                self.offer(histories[(index + 1) * self.block_size - 1], self.manager.table(id)[index])
        self.verify(classic(SHARED, 2))

    def append(self, id: str, tokens: list[int]) -> bool:
        """Room for more tokens, which are not written yet; True if there was any."""
        known, table = self.known[id], list(self.manager.table(id))
        self.said.append(f"append({id!r}, {len(tokens)} tokens) to {len(known.tokens)}")
        fits, before, given = self.manager.can_append(id, len(tokens)), self.books(), list(tokens)
        partly = len(known.tokens) % self.block_size > 0 and bool(tokens)
        shared = partly and self.held()[table[-1]] > 1
        try:
            copies = self.manager.append(id, given)
        except self.out_of_blocks:
            self.refused(before, fits, COUNTED)
            return False
        if not fits:
            self.stop("append hands out blocks although can_append says that there are too few")
        known.tokens += tokens
        self.judge_copies(id, copies, table, shared)
        new = self.manager.table(id)
        self.lose([block for block in new if block not in table])
        if partly and not shared:
            self.lose([table[-1]])  # its content is about to change
        for source, target in copies:
            for offset in range(self.block_size):
                if (content := self.memory.get(source * self.block_size + offset)) is not None:
                    self.memory[target * self.block_size + offset] = content
        self.verify(classic("the block that was copied is held by one table less: give it back", 3))
        self.judge_unshared(id, len(known.tokens) - len(tokens), len(known.tokens))
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


def new_life(BlockManager: Callable, out_of_blocks: type[Exception], num_blocks: int, block_size: int) -> Life:
    """A fresh manager of so many blocks."""
    return Life(BlockManager(num_blocks, block_size), num_blocks, block_size, out_of_blocks)
