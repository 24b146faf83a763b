"""Checks of exercise 1.3: FLOPs of a ReLU and a softmax, and their passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from utils.checks.question import Case, Mistake, Question

from . import counting
from .operators import size_mistakes
from .rules import asking, element_size, size_cases

SMALL = 3_000  # an oracle carries out up to so many steps one by one; beyond, a closed form serves


def relu_flops(n: int) -> int:
    return counting.relu(n).comparisons if n <= SMALL else n


def relu_bytes(n: int, element_size: int) -> int:
    return (counting.relu(n).elements_moved if n <= SMALL else 2 * n) * element_size


def softmax_flops(rows: int, cols: int) -> int:
    return counting.softmax(rows, cols, "fused").flops if rows * cols <= SMALL else 4 * rows * cols


def softmax_bytes(rows: int, cols: int, element_size: int, method: str) -> int:
    if rows * cols <= SMALL:
        return counting.softmax(rows, cols, method).elements_moved * element_size
    matrix = rows * cols
    return element_size * {"fused": 2 * matrix, "three_pass": 4 * matrix, "eager": 8 * matrix + 4 * rows}[method]


RELU_FLOPS = Question(
    "relu_flops",
    lambda rng: size_cases(rng, ("n",), small=(2, 99), large=(2**55,)),
    relu_flops,
    (
        Mistake("the comparison is counted as nothing: it is all the work that a ReLU does", lambda n: 0, 1),
        Mistake("two operations are counted an element: a maximum with zero is one", lambda n: 2 * n, 1),
    ),
    refused={"n": -4},
)
RELU_BYTES = Question(
    "relu_bytes",
    lambda rng: size_cases(rng, ("n",), small=(2, 99), large=(2**55,), element_size=element_size),
    relu_bytes,
    (
        Mistake(
            "elements are read but not written, or written but not read", lambda n, element_size: n * element_size, 2
        ),
        Mistake(
            "three tensors move: there is one input, and zero is born on the chip",
            lambda n, element_size: 3 * n * element_size,
            2,
        ),
        *size_mistakes(relu_bytes, 2),
    ),
    refused={"n": -4, "element_size": -2},
)


def _pass_table(
    three_pass: tuple[int, int] = (4, 0), eager: tuple[int, int] = (8, 4), fused: tuple[int, int] = (2, 0)
) -> Callable[..., int]:
    """A count of softmax bytes from trips of the matrix and of one element per row; those not given are right."""
    passes = {"fused": fused, "three_pass": three_pass, "eager": eager}

    def moved(rows: int, cols: int, element_size: int, method: str) -> int:
        matrix_passes, statistics = passes[method]
        return (matrix_passes * rows * cols + statistics * rows) * element_size

    return moved


SOFTMAX_FLOPS = Question(
    "softmax_flops",
    lambda rng: size_cases(rng, ("rows", "cols"), small=(2, 20), large=(2**12, 2**42)),
    softmax_flops,
    (
        Mistake(
            "the comparisons that find the maximum are counted: inside a softmax they are free",
            lambda rows, cols: 5 * rows * cols,
            3,
        ),
        Mistake("one of subtract, exponentiate, add, divide is left out", lambda rows, cols: 3 * rows * cols, 3),
        Mistake("only the exponentials and the division are counted", lambda rows, cols: 2 * rows * cols, 3),
        Mistake(
            "one division a row is counted: every element is divided by the sum",
            lambda rows, cols: 3 * rows * cols + rows,
            3,
        ),
        Mistake(
            "each row's sum is one addition short: it starts at zero", lambda rows, cols: 4 * rows * cols - rows, 3
        ),
        *(
            Mistake(
                "the comparisons that find the maximum are counted (cols - 1 per row): inside a softmax they are free",
                lambda rows, cols, sums=sums: 5 * rows * cols - sums * rows,
                3,
            )
            for sums in (1, 2)
        ),
        Mistake(
            "more operations are counted than there are: x - m is computed once, and the maximum is free",
            lambda rows, cols: 6 * rows * cols,
            3,
        ),
        Mistake("one row is counted", lambda rows, cols: 4 * cols, 0),
    ),
    refused={"rows": -4, "cols": -3},
)


def _softmax_cases(rng: Random) -> list[Case]:
    draw = {"element_size": element_size}
    cases = []
    for method in ("fused", "three_pass", "eager"):
        fixed = {"method": lambda _, method=method: method}
        cases += size_cases(rng, ("rows", "cols"), drawn=3, small=(2, 20), large=(2**12, 2**42), **draw, **fixed)
    return cases


SOFTMAX_BYTES = Question(
    "softmax_bytes",
    _softmax_cases,
    softmax_bytes,
    (
        Mistake("the matrix is read but not written, or written but not read", _pass_table(fused=(1, 0)), 4),
        *(
            Mistake(
                "a row moves more than twice: fused, it stays on the chip between one read and one write",
                _pass_table(fused=(trips, 0)),
                4,
            )
            for trips in (3, 4)
        ),
        *(
            Mistake(
                "the maximum and the sum of a row are counted: they stay on the chip, in one kernel",
                _pass_table(fused=(2, statistics), three_pass=(4, statistics)),
                5,
            )
            for statistics in (2, 4)
        ),
        Mistake("each of the three passes also writes: only the last one does", _pass_table(three_pass=(6, 0)), 5),
        Mistake(
            "three_pass is counted like fused, with two of its four trips: a long row does not stay on the chip, "
            "so three passes read it and one writes",
            _pass_table(three_pass=(2, 0)),
            5,
        ),
        Mistake(
            "one of four trips is left out: three passes read (the maximum, the sum and the result), one writes",
            _pass_table(three_pass=(3, 0)),
            5,
        ),
        Mistake("the row statistics are left out: they too are written and read again", _pass_table(eager=(8, 0)), 6),
        Mistake(
            "half of the trips of the row statistics are missing, left out or subtracted: each is written by one "
            "kernel and read by another",
            _pass_table(eager=(8, 2)),
            6,
        ),
        Mistake(
            "three of the four trips of the row statistics are left out: each is written by one kernel and read by "
            "another",
            _pass_table(eager=(8, 1)),
            6,
        ),
        Mistake("one of the four trips of the row statistics is left out", _pass_table(eager=(8, 3)), 6),
        Mistake(
            "one trip of a matrix is left out: each kernel reads all its inputs and writes its output",
            _pass_table(eager=(7, 4)),
            6,
        ),
        Mistake(
            "two trips of a matrix are missing: two kernels are taken as one, or the one for e is left out, or some "
            "trips of others are left out or subtracted: each of d and e is written by one kernel and read by the next",
            _pass_table(eager=(6, 4)),
            6,
        ),
        Mistake(
            "the statistics are counted in 4 bytes: they have element_size, as all else",
            lambda rows, cols, element_size, method: (
                _pass_table(eager=(8, 0))(rows, cols, element_size, method) + (16 * rows if method == "eager" else 0)
            ),
            7,
        ),
        Mistake(
            "the five kernels are counted as if what one writes stayed on the chip for the next, or one of them alone "
            "is counted",
            _pass_table(eager=(2, 0)),
            6,
        ),
        Mistake(
            "these are the kernels' reads alone, or three of the five kernels: each of the five reads and writes",
            _pass_table(eager=(5, 2)),
            6,
        ),
        Mistake(
            "each of the five kernels reads and writes the whole matrix: two of them write one number a row",
            _pass_table(eager=(10, 0)),
            6,
        ),
        Mistake(
            "each of the five kernels reads and writes the whole matrix: two of them write one number a row",
            _pass_table(eager=(10, 2)),
            6,
        ),
        Mistake(
            "ten trips of a matrix are counted, there are eight: a kernel is counted twice, or each of the five "
            "is taken to read and write the whole matrix, though two of them write one number a row",
            _pass_table(eager=(10, 4)),
            6,
        ),
        Mistake(
            "these are the kernels' writes alone, or two of the five kernels: each of the five reads and writes",
            _pass_table(eager=(3, 2)),
            6,
        ),
        *size_mistakes(softmax_bytes, 7),
    ),
    refused={"rows": -4, "cols": -3, "element_size": -2, "method": "online"},
    split_by="method",
)


RELU_SOFTMAX = asking(
    "1.3",
    "ReLU and softmax",
    10,
    (RELU_FLOPS, RELU_BYTES, SOFTMAX_FLOPS, SOFTMAX_BYTES),
    check="check_relu_softmax",
    says="a ReLU's FLOPs and bytes of n elements, a softmax's of (rows, cols) by method.",
    notice="the same four operations an element cost two to eight passes over memory: fusing is about bytes",
)
check_relu_softmax = RELU_SOFTMAX.check
