"""Checks of exercise 1.9: the cycles of a warp whose lanes take different branches, and the lane-cycles it wastes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from utils.checks.question import Case, Mistake, Question
from utils.simt import If, Op

from .rules import asking

Program = Sequence[Op | If]
MOST_CHARACTERS = 120  # of a drawn program: a person reads it in a message
DIVERGENT, UNIFORM, NESTED = "lanes that part", "a branch that all lanes take alike", "a branch inside a branch"


@dataclass(frozen=True)
class Condition:
    """A condition on the lane that can be called, and reads as the lambda one would type."""

    kind: str
    value: int

    def __call__(self, lane: int) -> bool:
        if self.kind == "%":
            return lane % self.value == 0
        return lane < self.value if self.kind == "<" else bool(lane & self.value)

    def __str__(self) -> str:
        return f"lane {self.kind} {self.value}" + (" == 0" if self.kind == "%" else "")

    def __repr__(self) -> str:
        return f"lambda lane: bool({self})"


def pseudocode(program: Program) -> str:
    """A program as lecture 01 writes it, with the cycles of each operation."""
    words = []
    for instruction in program:
        if isinstance(instruction, Op):
            words.append(f"{instruction.name}({instruction.cycles})")
            continue
        words.append(f"if ({instruction.condition}) {{{pseudocode(instruction.then)}}}")
        if instruction.otherwise:
            words.append(f"else {{{pseudocode(instruction.otherwise)}}}")
    return " ".join(words)


def _case(program: Program, warp_size: int = 32, tag: str = "") -> Case:
    brief = f"{pseudocode(program)}, {warp_size} lanes"
    return Case({"program": program, "warp_size": warp_size}, tag, brief=brief)


def draw_program(rng: Random, depth: int, names: Iterator[str]) -> list[Op | If]:
    """One to three instructions; a branch's sides are programs of smaller depth, and an ``otherwise`` may be empty."""
    program: list[Op | If] = []
    for _ in range(rng.randint(1, 3)):
        if depth and rng.random() < 0.6:
            condition = rng.choice(
                (
                    Condition("<", rng.randint(0, 33)),
                    Condition("%", rng.randint(2, 5)),
                    Condition("&", 2 ** rng.randint(0, 4)),
                )
            )
            otherwise = draw_program(rng, depth - 1, names) if rng.random() < 0.7 else []
            program.append(If(condition, draw_program(rng, depth - 1, names), otherwise))
        else:
            program.append(Op(next(names), rng.randint(1, 6)))
    return program


def _cases(rng: Random) -> list[Case]:
    a, b, x, y, z = (Op(name, rng.randint(2, 7)) for name in "ABXYZ")
    few, even = Condition("<", rng.randint(3, 9)), Condition("%", 2)
    fixed = [
        ([If(few, [a, b], [x, y]), z], DIVERGENT),
        ([If(even, [a, b], [x]), z], DIVERGENT),
        ([If(few, [a, b]), z], DIVERGENT),
        ([a, b], "no branch"),
        ([If(Condition("<", 31), [a], [x]), z], DIVERGENT),  # the last lane alone
        ([If(Condition("<", 32), [a], [x, y]), z], UNIFORM),
        ([If(Condition("<", 0), [a], [x, y]), z], UNIFORM),
        ([If(few, [If(even, [a], [b])], [x, If(Condition("<", 2), [y], [z])])], NESTED),
        ([If(few, [If(Condition("<", 20), [a], [b, y])], [x]), z], NESTED),
        ([If(even, [If(few, [a], [b, x])]), If(few, [y])], NESTED),
    ]
    cases = [_case(program, tag=tag) for program, tag in fixed]
    drawn = (draw_program(rng, 3, iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 9)) for _ in count())
    readable = (p for p in drawn if pseudocode(p).count("if") >= 2 and len(pseudocode(p)) <= MOST_CHARACTERS)
    return cases + [_case(program, rng.choice((4, 8, 32))) for program in islice(readable, 5)]


# ---- the oracle: each lane walks alone, nobody keeps a mask ----
def _walk(
    program: Program, lane: int, place: tuple[int, ...], marks: dict[tuple[int, ...], tuple[int, list[int]]]
) -> None:
    for index, instruction in enumerate(program):
        here = (*place, index)
        if isinstance(instruction, Op):
            marks.setdefault(here, (instruction.cycles, []))[1].append(lane)
        elif instruction.condition(lane):
            _walk(instruction.then, lane, (*here, 0), marks)
        else:
            _walk(instruction.otherwise, lane, (*here, 1), marks)


def lane_marks(program: Program, warp_size: int) -> list[tuple[int, int]]:
    """Each operation that any lane executes, as (cycles, how many lanes do), found lane by lane."""
    marks: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for lane in range(warp_size):
        _walk(program, lane, (), marks)
    return [(cycles, len(lanes)) for cycles, lanes in marks.values()]


def warp_cycles(program: Program, warp_size: int = 32) -> int:
    return sum(cycles for cycles, _ in lane_marks(program, warp_size))


def wasted_lane_cycles(program: Program, warp_size: int = 32) -> int:
    return sum(cycles * (warp_size - lanes) for cycles, lanes in lane_marks(program, warp_size))


# ---- what the mistakes compute ----
@dataclass(frozen=True)
class _Step:
    """An operation of a mistaken warp: its cycles, its lanes, and the lanes of the branch around its own."""

    cycles: int
    lanes: int
    around: int


def _mistaken(
    program: Program, active: list[int], everyone: list[int], around: int, *, skip: bool = True, ask_all: bool = False
) -> Iterator[_Step]:
    """A warp that walks sides without lanes (not ``skip``), or asks masked-off lanes too (``ask_all``)."""
    for instruction in program:
        if isinstance(instruction, Op):
            yield _Step(instruction.cycles, len(active), around)
            continue
        asked = everyone if ask_all else active
        taken = [lane for lane in asked if instruction.condition(lane)]
        sides = ((instruction.then, taken), (instruction.otherwise, [lane for lane in asked if lane not in taken]))
        for side, lanes in sides:
            if lanes or not skip:
                yield from _mistaken(side, lanes, everyone, len(active), skip=skip, ask_all=ask_all)


def _steps(program: Program, warp_size: int, **how: bool) -> list[_Step]:
    lanes = list(range(warp_size))
    return list(_mistaken(program, lanes, lanes, warp_size, **how))


def _side_by_side(program: Program, active: list[int]) -> int:
    """Cycles if the two sides of a branch could run at the same time."""
    cycles = 0
    for instruction in program if active else ():
        if isinstance(instruction, Op):
            cycles += instruction.cycles
        else:
            taken = [lane for lane in active if instruction.condition(lane)]
            rest = [lane for lane in active if lane not in taken]
            cycles += max(_side_by_side(instruction.then, taken), _side_by_side(instruction.otherwise, rest))
    return cycles


def _apart(program: Program, active: list[int], size: int) -> Iterator[tuple[int, int]]:
    """(cycles, idle lanes) of a warp whose groups never meet again: what follows a branch is run once a group."""
    for index, instruction in enumerate(program if active else ()):
        if isinstance(instruction, If):
            taken = [lane for lane in active if instruction.condition(lane)]
            rest = [lane for lane in active if lane not in taken]
            for side, lanes in ((instruction.then, taken), (instruction.otherwise, rest)):
                yield from _apart([*side, *program[index + 1 :]], lanes, size)
            return
        yield instruction.cycles, size - len(active)


def _first_lane(program: Program, warp_size: int) -> int:
    return sum(cycles for cycles, _ in lane_marks(program, 1))


def _total(program: Program, warp_size: int) -> int:
    return warp_size * warp_cycles(program, warp_size)


ALWAYS_BOTH = "both sides of a branch are always walked: a side that no lane takes is skipped"
APART = "what follows a branch is run once for each side: after both sides, the lanes go on together"
ASKS_ALL = "a branch inside a branch asks all lanes: only the active ones get there"

CYCLES = Question(
    "warp_cycles",
    _cases,
    warp_cycles,
    (
        Mistake(
            "the two sides of a branch run at the same time: a warp has one instruction stream, so they take turns",
            lambda program, warp_size: _side_by_side(program, list(range(warp_size))),
            1,
        ),
        Mistake(
            ALWAYS_BOTH, lambda program, warp_size: sum(s.cycles for s in _steps(program, warp_size, skip=False)), 2
        ),
        Mistake(
            ASKS_ALL, lambda program, warp_size: sum(s.cycles for s in _steps(program, warp_size, ask_all=True)), 3
        ),
        Mistake(
            APART,
            lambda program, warp_size: sum(c for c, _ in _apart(program, list(range(warp_size)), warp_size)),
            6,
        ),
        Mistake("lane 0's branch is taken for the whole warp: each active lane is asked", _first_lane, 2),
        Mistake(
            "lane-cycles are returned, not cycles: an operation occupies the warp once, however many lanes are active",
            _total,
            4,
        ),
        Mistake(
            "each active lane's cycles are added up: the lanes of a warp work at the same time",
            lambda program, warp_size: sum(c * lanes for c, lanes in lane_marks(program, warp_size)),
            4,
        ),
        Mistake(
            "operations are counted, not their cycles",
            lambda program, warp_size: len(lane_marks(program, warp_size)),
            4,
        ),
    ),
    refused={"warp_size": -32},
)
WASTED = Question(
    "wasted_lane_cycles",
    _cases,
    wasted_lane_cycles,
    (
        Mistake(
            "the useful lane-cycles are returned: the wasted ones are those of the idle lanes",
            lambda program, warp_size: sum(c * lanes for c, lanes in lane_marks(program, warp_size)),
            5,
        ),
        Mistake("all lane-cycles are returned, useful ones included", _total, 5),
        Mistake(
            "lanes that were idle already before an inner branch are forgotten: they wait there too",
            lambda program, warp_size: sum(s.cycles * (s.around - s.lanes) for s in _steps(program, warp_size)),
            5,
        ),
        Mistake(
            "idle lanes are counted once an operation: each waits for all its cycles",
            lambda program, warp_size: sum(warp_size - lanes for _, lanes in lane_marks(program, warp_size)),
            4,
        ),
        Mistake(
            ALWAYS_BOTH,
            lambda program, warp_size: sum(
                s.cycles * (warp_size - s.lanes) for s in _steps(program, warp_size, skip=False)
            ),
            2,
        ),
        Mistake(
            ASKS_ALL,
            lambda program, warp_size: sum(
                s.cycles * (warp_size - s.lanes) for s in _steps(program, warp_size, ask_all=True)
            ),
            3,
        ),
        Mistake(
            APART,
            lambda program, warp_size: sum(c * idle for c, idle in _apart(program, list(range(warp_size)), warp_size)),
            6,
        ),
        Mistake("cycles are returned, not lane-cycles", warp_cycles, 5),
        Mistake(
            "a warp of 32 lanes is assumed: use warp_size",
            lambda program, warp_size: sum(c * (32 - lanes) for c, lanes in lane_marks(program, warp_size)),
            4,
        ),
    ),
    refused={"warp_size": -32},
)


DIVERGENCE = asking(
    "1.9",
    "divergence",
    10,
    (CYCLES, WASTED),
    check="check_divergence",
    says="cycles and wasted lane-cycles of a warp that executes a program with branches.",
    notice="a branch costs both its sides as soon as one lane differs, and nothing when all lanes agree",
)
check_divergence = DIVERGENCE.check
