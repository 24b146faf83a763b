"""The check of exercise 5.2: a block manager that leaks nothing, shares what it can and never writes what is shared."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from utils.checks.core import Exercise, classic

from . import hidden_blocks
from .block_life import Life, new_life
from .scenes import Scene, check_scenes

Answer = Mapping[str, Callable]


def _life(answer: Answer, rng: random.Random, num_blocks: int, block_size: int = 0) -> Life:
    size = block_size or rng.choice((2, 3, 4, 5))
    return new_life(answer["BlockManager"], answer["OutOfBlocks"], num_blocks, size)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(count)]


def _one_sequence(answer: Answer, rng: random.Random) -> None:
    """Token by token over several boundaries; lengths that fill their last block, and one token."""
    for size in (1, rng.choice((2, 3, 5)), 4):
        life = _life(answer, rng, 12, size)
        for count in (size, 1, 2 * size, 2 * size + 1):
            life.allocate("a", _tokens(rng, count))
            life.write("a")
            for _ in range(2 * size + 1):
                life.append("a", _tokens(rng, 1))
                life.write("a")
            life.append("a", _tokens(rng, 2 * size))
            life.write("a")
            life.free("a")


def _side_by_side(answer: Answer, rng: random.Random) -> None:
    """Sequences that come, grow and go at different times."""
    life = _life(answer, rng, 24)
    for id in "abc":
        life.allocate(id, _tokens(rng, rng.randint(1, 3 * life.block_size)))
        life.write(id)
    life.free("b")
    for id in "acd":
        if id == "d":
            life.allocate("d", _tokens(rng, 2 * life.block_size))
        else:
            life.append(id, _tokens(rng, life.block_size + 1))
        life.write(id)
    for id in "cda":
        life.free(id)


def _too_small(answer: Answer, rng: random.Random) -> None:
    """A pool that runs out: nothing changes then."""
    life = _life(answer, rng, 6)
    size = life.block_size
    head = _tokens(rng, 2 * size)
    life.allocate("a", head + _tokens(rng, 1))
    life.write("a")
    life.allocate("b", _tokens(rng, 8 * size))  # more than there are
    life.allocate("c", head + _tokens(rng, 4 * size))  # too many, although it shares two
    life.append("a", _tokens(rng, 4 * size))
    life.allocate("d", _tokens(rng, 3 * size))  # all that is left
    life.write("d")
    life.append("d", _tokens(rng, 1))
    life.append("a", _tokens(rng, size))
    life.free("d")
    life.append("a", _tokens(rng, size))
    life.write("a")
    life.free("a")


def _fork(answer: Answer, rng: random.Random) -> None:
    """Copies of a sequence that go on apart; blocks of which the last is full, or not."""
    for extra in (1, 0):
        life = _life(answer, rng, 30)
        size = life.block_size
        life.allocate("a", _tokens(rng, 2 * size + extra))
        life.write("a")
        life.fork("a", "b")
        life.fork("a", "c")
        life.append("b", _tokens(rng, 1))
        life.write("b")
        life.append("a", _tokens(rng, size))
        life.write("a")
        life.append("c", _tokens(rng, 1))
        life.write("c")
        life.fork("c", "d")
        life.free("c")
        life.append("d", _tokens(rng, 2))
        life.write("d")
        for id in "bda":
            life.free(id)


def _fork_in_a_full_pool(answer: Answer, rng: random.Random) -> None:
    """A copy that needs a block where there is none."""
    life = _life(answer, rng, 3)
    size = life.block_size
    life.allocate("a", _tokens(rng, 2 * size + 1))
    life.write("a")
    life.fork("a", "b")
    life.append("b", _tokens(rng, 1))  # no block for the copy
    life.append("a", _tokens(rng, size))
    life.free("a")
    life.append("b", _tokens(rng, 1))
    life.write("b")
    life.free("b")


def _prefix(answer: Answer, rng: random.Random) -> None:
    """A common beginning: before it is written, while it is in use, and after its owner is gone."""
    life = _life(answer, rng, 40)
    size = life.block_size
    head = _tokens(rng, 3 * size)
    life.allocate("a", head + _tokens(rng, rng.randint(1, size)))
    life.allocate("b", head + _tokens(rng, rng.randint(1, size)))  # nothing is written yet: nothing is found
    life.write("a", 2 * size)
    life.allocate("c", head + _tokens(rng, 2))  # two blocks of three
    life.write("a")
    life.write("b")
    life.write("c")
    life.allocate("d", list(head))  # its last token must be computed
    life.write("d")
    life.allocate("e", head[: 2 * size] + _tokens(rng, 2 * size))  # the same only at first
    life.write("e")
    for id in "acb":
        life.free(id)
    life.allocate("f", head + _tokens(rng, 1))
    life.write("f")
    for id in "dfe":
        life.free(id)
    life.allocate("g", head + _tokens(rng, 1))  # nobody holds it any more, and it is still there
    life.write("g")
    life.free("g")


def _prefix_in_a_full_pool(answer: Answer, rng: random.Random) -> None:
    """The blocks that a beginning is found in are the next to be taken."""
    life = _life(answer, rng, 4)
    size = life.block_size
    head = _tokens(rng, 2 * size)
    life.allocate("a", head + _tokens(rng, 2 * size))
    life.write("a")
    life.free("a")
    life.allocate("b", head + _tokens(rng, 2 * size))
    life.write("b")
    life.free("b")
    life.allocate("c", head[:size] + _tokens(rng, 3 * size))
    life.write("c")
    life.append("c", _tokens(rng, 1))
    life.free("c")


def _drafts(answer: Answer, rng: random.Random) -> None:
    """Tokens that are dropped again, also from a full block that can be found by its prefix."""
    life = _life(answer, rng, 30)
    size = life.block_size
    head = _tokens(rng, 2 * size)
    life.allocate("a", list(head))
    life.write("a")
    life.truncate("a", 2 * size - 1)
    life.append("a", [head[-1] + 1])
    life.write("a", commit=False)
    life.allocate("b", head + _tokens(rng, 1))  # the second block is another one now
    life.write("b")
    for _ in range(4):
        count = rng.randint(1, 2 * size)
        life.append("a", _tokens(rng, count))
        life.write("a", commit=False)
        life.truncate("a", len(life.known["a"].tokens) - rng.randint(0, count))
        life.write("a")
    life.fork("b", "c")
    life.truncate("c", size + 1)
    life.append("c", _tokens(rng, size))
    life.write("c")
    for id in "bac":
        life.free(id)


def _a_long_life(answer: Answer, rng: random.Random) -> None:
    """Many calls in any order on a small pool."""
    life = _life(answer, rng, rng.randint(5, 14))
    size, heads = life.block_size, [_tokens(rng, 12) for _ in range(2)]
    for number in range(70):
        ids, id = list(life.known), str(number)
        choice = rng.random()
        if not ids or choice < 0.25:
            head = rng.choice(heads)[: rng.randint(0, 12)]
            if life.allocate(id, head + _tokens(rng, rng.randint(1, size))) and rng.random() < 0.7:
                life.write(id, rng.choice((None, size)))
            continue
        id = rng.choice(ids)
        known = life.known[id]
        if known.written < len(known.tokens):
            life.write(id, rng.choice((None, 2)))
        elif choice < 0.65:
            life.append(id, _tokens(rng, rng.randint(1, size + 1)))
        elif choice < 0.75:
            life.fork(id, f"{number}f")
        elif choice < 0.82:
            life.truncate(id, rng.randint(1, len(known.tokens)))
        else:
            life.free(id)
    for id in list(life.known):
        life.free(id)


_TAKEN = {
    "OutOfBlocks": classic("more blocks are taken than are needed, and counted at the door", 5),
    "KeyError": classic("a sequence that is freed is forgotten, and no other: only so is a double free an error", 4),
    "AssertionError": "",
}
_SCENES = (
    Scene("one sequence", _one_sequence, _TAKEN),
    Scene("sequences side by side", _side_by_side, _TAKEN, times=2),
    Scene("a pool that is too small", _too_small, _TAKEN, times=2),
    Scene("forks", _fork, _TAKEN, times=2),
    Scene("a fork in a full pool", _fork_in_a_full_pool, _TAKEN, times=2),
    Scene("a common beginning", _prefix, _TAKEN, times=2),
    Scene("a common beginning in a full pool", _prefix_in_a_full_pool, _TAKEN, times=2),
    Scene("drafts that are dropped", _drafts, _TAKEN, times=2),
    Scene("a long life", _a_long_life, _TAKEN, times=6),
)


BLOCK_MANAGER = Exercise(
    "5.2",
    "block manager",
    points=18,
    observe=hidden_blocks.block_manager,
)


@BLOCK_MANAGER.checked_by
def check_block_manager(BlockManager: Callable, OutOfBlocks: type[Exception], seed: int | None = None) -> None:
    """Exercise 5.2: allocate, append, fork and free blocks.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    check_scenes(
        BLOCK_MANAGER,
        {"BlockManager": BlockManager, "OutOfBlocks": OutOfBlocks},
        _SCENES,
        seed,
        "every sequence found its own tokens in its slots after every call, and every block came back",
    )
