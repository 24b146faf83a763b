"""The check of exercise 5.2: a block manager that leaks nothing, shares what it can and never writes what is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from string import ascii_letters
from types import ModuleType
from typing import Any

from utils.checks.core import Exercise, classic
from utils.checks.hidden import Observation, collected

from .block_invariants import ADDS, COPIED, SHARED, BlockInvariants, Known
from .scenarios import Answer, CheckMismatch
from .stateful import Call, Machine, Workload, check_workloads

COUNTED = classic("allocate exactly what was counted, after the check has succeeded", 5)
SHARES = "a fork shares all blocks: whoever writes first copies"
#: In place of a result: the call refused, as it must.
REFUSED = object()
NOTHING = classic("without tokens nothing is written, and nothing is copied", 2)
FORGOTTEN = classic("a sequence that is freed is forgotten, and no other: only so is a double free an error", 4)
#: How often each rule is drawn.
RULES = {"allocate": 25, "append": 35, "fork": 15, "truncate": 10, "free": 15}


class BlockManagerMachine(Machine):
    """Sequences that come, grow, fork, lose rejected tokens and go.

    Args:
        num_blocks, block_size: the least and the most, both drawn.
        calls: how many are drawn; after them every sequence is freed.
        prefix_caching: of the manager.
        compared: what an observation holds, beside the error; a small pool that caches prefixes may evict any of them.
    """

    def __init__(
        self, answer: Answer, key: str, *, num_blocks: tuple[int, int], block_size: tuple[int, int], calls: int,
        prefix_caching: bool = True, compared: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(answer, key)
        pool = self.random.randint(*num_blocks), self.random.randint(*block_size)
        self.shown.append(f"BlockManager(num_blocks={pool[0]}, block_size={pool[1]})")
        self.manager = answer["BlockManager"](*pool, prefix_caching)
        self.invariants = BlockInvariants(self.manager)
        self.known, self.left, self.compared = self.invariants.known, calls, compared
        self.texts = [self._tokens(3 * pool[1] + 1) for _ in range(2)]  # that prompts begin like
        self.planned: list[Call] = []
        self.gave: Observation = None

    # ---- which call is next
    def draw(self) -> Call | None:
        """A call of any rule, of any sequence; tokens that are not written yet are written first."""
        random, size, ids = self.random, self.manager.block_size, list(self.known)
        self.left -= 1
        if self.left < 0:
            return ("free", ids[0]) if ids else None
        if self.planned and self.is_possible(*self.planned[0]):
            return self.planned.pop(0)
        self.planned = []
        rule = random.choices(list(RULES), RULES.values())[0]
        new = next(letter for letter in ascii_letters if letter not in self.known)
        if rule == "allocate" or not ids:
            text = random.choice(self.texts)
            return "allocate", new, text[: random.randint(0, len(text))] + self._tokens(random.randint(1, size + 1))
        id = random.choice(ids)
        known = self.known[id]
        if not known.is_written and (rule != "free" or random.random() < 0.7):
            return "write", id, random.choice((len(known.tokens), known.written + 1))
        if rule == "append":
            return "append", id, self._tokens(random.choice((0, 1, 1, 2, size, 2 * size + 1)))
        if rule == "fork":
            return "fork", id, new
        if rule == "truncate":  # other tokens take the place of the rejected ones, which another prompt has
            more = self._tokens(random.choice((0, 1)))
            self.planned = [("append", id, more), ("allocate", new, known.tokens + self._tokens(1))]
        elif rule == "free" and random.random() < 0.4:  # all blocks of a small pool are free, and some of them found
            others = [("free", other) for other in ids if other != id]
            kept = known.tokens[: random.randint(1, len(known.tokens))]
            later = self._tokens(size + 1)  # leaves a block that is found, and that was given back after those of kept
            whole = self.manager.num_blocks * size  # then a sequence takes all of a small pool, found blocks among them
            rest = self._tokens(max(0, min(whole, 12 * size) - len(kept)))
            between = [("allocate", new, later), ("write", new, len(later)), ("free", new)]
            self.planned = [*others, *between, ("allocate", new, kept + rest)]
        return ("free", id) if rule == "free" else ("truncate", id, random.randint(1, len(known.tokens)))

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randint(1, 99) for _ in range(count)]

    def is_possible(self, rule: str, id: str, *arguments: Any) -> bool:
        """A new id for a new sequence, and only a sequence that is all written grows, forks or loses tokens."""
        if rule == "allocate":
            return id not in self.known
        known = self.known.get(id)
        if known is None or (rule in ("append", "fork", "truncate") and not known.is_written):
            return False
        if rule == "write":
            return known.written < arguments[0] <= len(known.tokens)
        if rule == "truncate":
            return arguments[0] <= len(known.tokens)
        return rule != "fork" or arguments[0] not in self.known

    # ---- the rules
    def allocate(self, id: str, tokens: list[int]) -> None:
        """A sequence comes. Nothing of it is written yet, but what is in the cache."""
        size = self.manager.block_size
        found = len(self.manager.cached_prefix(list(tokens))[0]) * size
        cached = self._grow("allocate", id, tokens, self.manager.can_allocate(list(tokens)))
        self.gave = "refused" if cached is REFUSED else cached
        if cached is not REFUSED:
            self.known[id] = Known(list(tokens))
            self.invariants.check_table(id, "allocate")
            self.invariants.check_cached(id, cached, found)
            self.known[id].written, table = cached, self.manager.table(id)
            self.invariants.share(table[: cached // size])
            self.invariants.take(table[cached // size :])
        self.invariants.check("allocate")

    def write(self, id: str, stop: int) -> None:
        """The model computes a sequence's tokens up to ``stop``, and the manager is told."""
        self.invariants.write(id, stop)
        self.gave = self.call(self.manager.commit, id, stop)
        self.invariants.check("commit")

    def append(self, id: str, tokens: list[int]) -> None:
        """A sequence grows, by tokens that are not written yet."""
        known, table = self.known[id], list(self.manager.table(id))
        partly = len(known.tokens) % self.manager.block_size > 0
        shared = bool(tokens) and partly and self.invariants.holders()[table[-1]] > 1
        copies = self._grow("append", id, tokens, self.manager.can_append(id, len(tokens)))
        self.gave = "refused" if copies is REFUSED else len(copies) if isinstance(copies, list) else repr(copies)
        if copies is not REFUSED:
            known.tokens += tokens
            after = self.manager.table(id)
            _check_copies(id, copies, table[-1], after[len(table) - 1], shared, bool(tokens))
            if tokens and partly and not shared:
                self.invariants.change(table[-1])
            self.invariants.take([block for block in after if block not in table])
            for source, target in copies:
                self.invariants.copy(source, target)
        self.invariants.check("append")

    def fork(self, parent: str, child: str) -> None:
        """A second sequence with the same tokens: no block is taken."""
        before = self.manager.num_free
        self.gave = self.call(self.manager.fork, parent, child, expected=self.answer["OutOfBlocks"])
        if isinstance(self.gave, Exception):
            raise CheckMismatch(f"fork raises OutOfBlocks: {self.gave}", SHARES)
        self.known[child] = Known(list(self.known[parent].tokens), self.known[parent].written)
        self.invariants.check_table(child, "fork")
        mine, theirs = self.manager.sequence(child), self.manager.sequence(parent)
        for name, what in (("blocks", "table"), ("tokens", "list of tokens"), ("digests", "list of digests")):
            if getattr(mine, name) is getattr(theirs, name):
                cause = classic(f"parent and child share blocks, not the lists: each has a {what} of its own", 2)
                raise CheckMismatch(f"the child's {what} is the parent's itself", cause)
        if self.manager.num_free != before:
            raise CheckMismatch(f"fork takes {before - self.manager.num_free} blocks", SHARES)
        self.invariants.check("fork")

    def truncate(self, id: str, length: int) -> None:
        """The newest tokens were a rejected draft, and are dropped."""
        known = self.known[id]
        self.texts.append(list(known.tokens))
        table = list(self.manager.table(id))
        self.gave = self.call(self.manager.truncate, id, length)
        del known.tokens[length:]
        known.written = length
        self.invariants.give_back(table, -(-length // self.manager.block_size))
        self.invariants.check("truncate")

    def free(self, id: str) -> None:
        """A sequence gives its blocks back; a second time is refused."""
        table = list(self.manager.table(id))
        self.gave = self.call(self.manager.free, id)
        self.texts.append(self.known.pop(id).tokens)
        self.invariants.give_back(table)
        for name in ("table", "free"):
            try:
                getattr(self.manager, name)(id)
            except KeyError:
                continue
            raise CheckMismatch(f"{name}({id!r}) does not raise KeyError after {id!r} was freed", FORGOTTEN)
        self.invariants.check("free")

    def _grow(self, name: str, id: str, tokens: list[int], fits: bool) -> object:
        """What allocate or append returns; REFUSED where it refuses as it must, and changes nothing."""
        before, given = self.invariants.state(), list(tokens)
        result = self.call(getattr(self.manager, name), id, given, expected=self.answer["OutOfBlocks"])
        if isinstance(result, Exception):
            if fits:
                raise CheckMismatch(f"{name} raises OutOfBlocks although there is room", COUNTED if tokens else NOTHING)
            if self.invariants.state() != before:
                raise CheckMismatch(f"{name} raises OutOfBlocks after it has changed tables or references", COUNTED)
            return REFUSED
        if not fits:
            raise CheckMismatch(f"{name} takes blocks although can_{name} says that there are too few", COUNTED)
        if given != tokens:
            raise CheckMismatch(f"{name} changes the list of tokens that it is given", "its caller still needs it")
        if id in self.manager.sequences and self.manager.sequence(id).tokens is given:
            cause = "the manager keeps a list of its own: its caller goes on with the one that it gave"
            raise CheckMismatch(
                f"the tokens of {id!r} are the list that was given", cause if name == "allocate" else ADDS
            )
        given.append(-1)  # the caller goes on with its list
        return result

    def observation(self) -> Observation:
        """What the call gave, tables, references and free blocks; blocks numbered by where they first stand."""
        if not self.compared:
            return None
        labels: dict[int, int] = {}
        tables = [
            [id, self.manager.length(id), *(labels.setdefault(block, len(labels)) for block in self.manager.table(id))]
            for id in sorted(self.known)
        ]
        return [self.gave, tables, [self.manager.references(block) for block in labels], self.manager.num_free]


def _check_copies(id: str, copies: object, old: int, new: int, shared: bool, grows: bool) -> None:
    if not isinstance(copies, list) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in copies):
        cause = "expected a list of pairs (source, target), empty if nothing is copied"
        raise CheckMismatch(f"append returns {copies!r}", cause)
    if copies and not shared:
        cause = classic("only a last block that others hold too, and that has room, is copied", 2)
        raise CheckMismatch(f"append copies block {copies[0][0]} for nothing", cause if grows else NOTHING)
    if shared and new == old:
        raise CheckMismatch(f"{id!r} goes on in block {old}, which another table holds", SHARED)
    if shared and copies != [(old, new)]:
        raise CheckMismatch(f"append returns {copies}, expected {[(old, new)]}", COPIED)


WORKLOADS = (
    Workload(
        "BlockManager with blocks of one token",
        BlockManagerMachine,
        {"num_blocks": (60, 60), "block_size": (1, 1), "calls": 12},
        times=5,
        hidden=({"num_blocks": (500, 500), "calls": 60}, 2),
    ),
    Workload(
        "BlockManager with many blocks",
        BlockManagerMachine,
        {"num_blocks": (30, 40), "block_size": (2, 4), "calls": 25},
        times=15,
        hidden=({"num_blocks": (500, 500), "block_size": (2, 5), "calls": 60}, 3),
    ),
    Workload(
        "BlockManager in a small pool",
        BlockManagerMachine,
        {"num_blocks": (3, 10), "block_size": (2, 4), "calls": 30},
        times=25,
        hidden=({"num_blocks": (4, 12), "calls": 60, "compared": False}, 5),
    ),
    Workload(
        "BlockManager without prefix caching in a small pool",
        BlockManagerMachine,
        {"num_blocks": (5, 12), "block_size": (2, 4), "calls": 30, "prefix_caching": False},
        times=1,
        hidden=({"calls": 60}, 3),
    ),
)


@collected
def observe(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Hidden cases: longer runs, in larger pools and in small ones."""
    for workload in WORKLOADS:
        yield from workload.observe(vars(package), f"{seed}/5.2")


BLOCK_MANAGER = Exercise("5.2", "block manager", points=16, observe=observe)


@BLOCK_MANAGER.checked_by
def check_block_manager(BlockManager: Callable, OutOfBlocks: type[Exception], seed: int | None = None) -> None:
    """Exercise 5.2: allocate, append, fork and free blocks.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    check_workloads(
        BLOCK_MANAGER,
        {"BlockManager": BlockManager, "OutOfBlocks": OutOfBlocks},
        WORKLOADS,
        seed,
        "every sequence found its own tokens in its slots after every call, and every block came back",
        {},
    )
