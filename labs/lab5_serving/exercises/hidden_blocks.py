"""Hidden scenarios of exercise 5.2: long lives of a block manager, and what its books say after every call.

Which of several free blocks is taken is the manager's own business. So blocks are numbered here by where they first
stand in the tables, and a pool in which found beginnings must be thrown away is asked only whether all is in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from utils.checks.hidden import Draw, Observation, collected

#: Calls of a life.
CALLS = 60


@collected
def block_manager(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Lives in pools without end, in small ones without sharing of beginnings, and in small ones with it."""
    draw = Draw(seed, "5.2")
    for number in range(4):
        life = _Life(package, draw, 500, draw.between(1, 5))
        life.live()
        yield from life.told(f"BlockManager with many blocks, life {number + 1}").items()
    for number in range(4):
        life = _Life(package, draw, draw.between(5, 12), draw.between(2, 4), prefix_caching=False)
        life.live()
        yield from life.told(f"BlockManager without prefix caching in a small pool, life {number + 1}").items()
    for number in range(2):
        life = _Life(package, draw, 4, draw.between(1, 4))
        life.find_a_beginning_that_is_next_in_line()
        yield from life.told(f"BlockManager whose free blocks are all known, life {number + 1}").items()
        life = _Life(package, draw, 30, draw.between(2, 5))
        life.drop_drafts()
        yield from life.told(f"BlockManager with drafts that are dropped, life {number + 1}").items()
    lives = [_Life(package, draw, draw.between(5, 12), draw.between(2, 4)) for _ in range(6)]
    for life in lives:
        life.live()
    yield "BlockManager in a small pool: each sequence finds its own tokens", [life.content for life in lives]
    yield "BlockManager in a small pool: the books balance", [life.balance for life in lives]
    strange = [sorted(set(life.errors) - {"", "OutOfBlocks", "ValueError", "KeyError"}) for life in lives]
    yield "BlockManager in a small pool: errors that are not due", strange


@dataclass
class _Known:
    """A sequence as its owner knows it: its tokens, and how many of them are written."""

    tokens: list[int]
    written: int = 0


@dataclass
class _Life:
    """A manager, the sequences that it was given, and what was seen of it.

    A slot's content is a number that stands for its token and all before it in the sequence; ``memory`` maps slots to
    these. So a block that is written while shared, or found too early or too late, is seen.
    """

    package: ModuleType
    draw: Draw
    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    known: dict[str, _Known] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    results: list[Observation] = field(default_factory=list)
    tables: list[Observation] = field(default_factory=list)
    counts: list[Observation] = field(default_factory=list)
    content: bool = True
    balance: bool = True

    def __post_init__(self) -> None:
        self.manager = self.package.BlockManager(self.num_blocks, self.block_size, self.prefix_caching)
        self.heads = [self._tokens(4 * self.block_size) for _ in range(3)]
        self.histories: dict[tuple[int, int], int] = {}

    def told(self, name: str) -> dict[str, Observation]:
        """What was seen, by name."""
        return {
            f"{name}: what the calls return": self.results,
            f"{name}: errors": self.errors,
            f"{name}: tables": self.tables,
            f"{name}: lengths, references and free blocks": self.counts,
            f"{name}: each sequence finds its own tokens": self.content,
            f"{name}: the books balance": self.balance,
        }

    def live(self) -> None:
        """Many calls in any order; at the end every sequence goes."""
        for number in range(CALLS):
            self._act(number)
            self._look()
        for id in list(self.known):
            self._free(id)
            self._look()

    def find_a_beginning_that_is_next_in_line(self) -> None:
        """Every block is free, and some of them hold what is asked for: these are shared before others are taken."""
        size = self.block_size
        head = self._tokens(2 * size)
        for id, beginning, more in (("a", head, 2 * size), ("b", head, 2 * size), ("c", head[:size], 3 * size)):
            self._allocate(id, beginning + self._tokens(more))
            self._write(id, None)
            self._look()
            self._free(id)
            self._look()

    def drop_drafts(self) -> None:
        """Tokens of a full block that was known are replaced: it is not found by them any more."""
        size = self.block_size
        for number in range(3):
            head, id = self._tokens(2 * size), f"a{number}"
            self._allocate(id, list(head))
            self._write(id, None)
            self._truncate(id, 2 * size - 1 - min(number, size - 1))
            self._append(id, [head[-1] + 1])
            self._allocate(f"b{number}", head + self._tokens(1))
            self._look()
            self._write(f"b{number}", None)
            self._look()

    # ---- the calls
    def _act(self, number: int) -> None:
        random, ids = self.draw.random, list(self.known)
        choice = random.random()
        if not ids or choice < 0.22:
            head = random.choice(self.heads)[: random.randint(0, 4 * self.block_size)]
            self._allocate(f"s{number}", head + self._tokens(random.randint(0 if head else 1, self.block_size + 1)))
            return
        id = random.choice(ids)
        if choice < 0.4:
            self._write(id, random.choice((None, None, 1, self.block_size)))
        elif choice < 0.65:
            self._append(id, self._tokens(random.choice((1, 1, 2, self.block_size, 2 * self.block_size + 1))))
        elif choice < 0.76:
            self._fork(id, f"f{number}")
        elif choice < 0.83:
            self._truncate(id, random.randint(1, len(self.known[id].tokens)))
        elif choice < 0.88:
            self._try(lambda: self.manager.allocate(id, self._tokens(2)))  # it holds blocks already
        else:
            self._free(id)

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.random.randrange(500) for _ in range(count)]

    def _try(self, call: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether a call went through, and what it returned; an error's name is noted."""
        try:
            result = call()
        except NotImplementedError:
            raise
        except Exception as error:
            self.errors.append("OutOfBlocks" if isinstance(error, self.package.OutOfBlocks) else type(error).__name__)
            return False, None
        self.errors.append("")
        return True, result

    def _allocate(self, id: str, tokens: list[int]) -> None:
        given = list(tokens)
        done, cached = self._try(lambda: self.manager.allocate(id, given))
        if not done:
            return
        self.results.append([given == tokens, cached])
        self.known[id] = _Known(list(tokens), cached if isinstance(cached, int) else 0)
        given.append(-1)  # the caller goes on with its list
        if self.draw.random.random() < 0.6:
            self._write(id, None)

    def _append(self, id: str, tokens: list[int]) -> None:
        if id not in self.known:
            return
        known, given = self.known[id], list(tokens)
        self._write(id, None)
        done, copies = self._try(lambda: self.manager.append(id, given))
        if not done:
            return
        known.tokens += tokens
        if not isinstance(copies, list) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in copies):
            self.results.append(str(type(copies)))
            return
        labels = self._labels()
        self.results.append([[labels.get(source, -1), labels.get(target, -1)] for source, target in copies])
        for source, target in copies:
            for offset in range(self.block_size):
                if (found := self.memory.get(source * self.block_size + offset)) is not None:
                    self.memory[target * self.block_size + offset] = found

    def _write(self, id: str, count: int | None) -> None:
        """The model computes the next ``count`` tokens (None: all): their slots are written, and it is said so."""
        if id not in self.known:  # the manager has refused it
            return
        known = self.known[id]
        stop = len(known.tokens) if count is None else min(len(known.tokens), known.written + count)
        histories = self._history(known.tokens)
        for position in range(known.written, stop):
            self.memory[self._slot(id, position)] = histories[position]
        known.written = max(known.written, stop)
        self._try(lambda: self.manager.commit(id, known.written))

    def _fork(self, parent: str, child: str) -> None:
        self._write(parent, None)
        done, _ = self._try(lambda: self.manager.fork(parent, child))
        if done:
            self.known[child] = _Known(list(self.known[parent].tokens), self.known[parent].written)
            self.results.append(self.manager.table(child) is not self.manager.table(parent))

    def _truncate(self, id: str, length: int) -> None:
        done, _ = self._try(lambda: self.manager.truncate(id, length))
        if done and id in self.known:
            del self.known[id].tokens[length:]
            self.known[id].written = min(self.known[id].written, length)

    def _free(self, id: str) -> None:
        self._try(lambda: self.manager.free(id))
        self._try(lambda: self.manager.free(id))  # a second time
        self.known.pop(id, None)

    # ---- what is seen after each
    def _history(self, tokens: list[int]) -> list[int]:
        found, last = [], 0
        for token in tokens:
            last = self.histories.setdefault((last, token), len(self.histories) + 1)
            found.append(last)
        return found

    def _slot(self, id: str, position: int) -> int:
        """A token's slot; -1 where the manager names none."""
        try:
            return self.manager.slot(id, position)
        except (IndexError, KeyError):
            return -1

    def _table(self, id: str) -> list[int]:
        try:
            return list(self.manager.table(id))
        except KeyError:
            return []

    def _labels(self) -> dict[int, int]:
        """Blocks numbered by where they first stand in the tables."""
        labels: dict[int, int] = {}
        for id in sorted(self.known):
            for block in self._table(id):
                labels.setdefault(block, len(labels))
        return labels

    def _look(self) -> None:
        """Note the tables and counts, and whether all is in order."""
        labels, manager, held = self._labels(), self.manager, Counter[int]()
        lengths = []
        for id, known in sorted(self.known.items()):
            table, histories = self._table(id), self._history(known.tokens)
            held.update(table)
            lengths.append(manager.length(id) if table else -1)
            self.balance &= lengths[-1] == len(known.tokens) and len(table) == -(-len(known.tokens) // self.block_size)
            self.content &= all(
                self.memory.get(self._slot(id, position)) == histories[position] for position in range(known.written)
            )
        self.balance &= all(manager.references(block) == held[block] for block in range(self.num_blocks))
        self.balance &= manager.num_free == self.num_blocks - len(held) and manager.num_used == len(held)
        self.tables.append([labels[block] for id in sorted(self.known) for block in self._table(id)])
        self.counts.append([*lengths, *map(manager.references, labels), manager.num_free])
