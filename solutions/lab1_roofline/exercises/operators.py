"""Checks of exercises 1.1 and 1.2: FLOPs and bytes of a dot product and of a matmul."""

from __future__ import annotations

from collections.abc import Callable

from utils.checks.question import Mistake, Question

from . import counting
from .rules import asking, element_size, size_cases

SMALL = 3_000  # an oracle carries out up to so many steps one by one; beyond, a closed form serves
MULTIPLY_ADD = "a multiply-add is counted as one operation (the hardware issues it as one, it is two FLOPs)"
ELEMENTS = "elements are counted, not bytes: multiply by the size of one"
BITS = "bits are counted, not bytes"


def fixed_size(bytes_of: Callable[..., int], assumed: int) -> Callable[..., int]:
    """What ``bytes_of`` gives when the element size is taken to be ``assumed``, whatever is passed."""
    return lambda **arguments: bytes_of(**(arguments | {"element_size": assumed}))


def size_mistakes(bytes_of: Callable[..., int], classic: int) -> tuple[Mistake, ...]:
    """The mistakes about the size of an element that every count of bytes shares."""
    taken = "every element is taken to have {} bytes: use element_size"
    return (
        Mistake(ELEMENTS, fixed_size(bytes_of, 1), classic),
        *(Mistake(taken.format(assumed), fixed_size(bytes_of, assumed), classic) for assumed in (2, 4, 8)),
        Mistake(BITS, lambda **arguments: 8 * bytes_of(**arguments), classic),
    )


# ---- 1.1 dot product ----
def dot_product_flops(n: int) -> int:
    return counting.dot_product(n).flops if n <= SMALL else 2 * n


def dot_product_bytes(n: int, element_size: int) -> int:
    return (counting.dot_product(n).elements_moved if n <= SMALL else 2 * n + 1) * element_size


DOT_FLOPS = Question(
    "dot_product_flops",
    lambda rng: size_cases(rng, ("n",), small=(2, 99), large=(2**55,)),
    dot_product_flops,
    (
        Mistake(MULTIPLY_ADD, lambda n: n, 1),
        Mistake(
            "the first addition is left out: here the sum starts at zero, so each product is added",
            lambda n: 2 * n - 1,
            2,
        ),
        Mistake("only the additions are counted", lambda n: n - 1, 1),
    ),
    refused={"n": -4},
)
DOT_BYTES = Question(
    "dot_product_bytes",
    lambda rng: size_cases(rng, ("n",), small=(2, 99), large=(2**55,), element_size=element_size),
    dot_product_bytes,
    (
        Mistake("the result is not written", lambda n, element_size: 2 * n * element_size, 3),
        Mistake("only one of the two vectors is read", lambda n, element_size: (n + 1) * element_size, 4),
        Mistake(
            "a whole vector is written: a dot product's result is one number",
            lambda n, element_size: 3 * n * element_size,
            4,
        ),
        *size_mistakes(dot_product_bytes, 5),
        Mistake(
            "the result is counted as one byte, not one element", lambda n, element_size: 2 * n * element_size + 1, 5
        ),
    ),
    refused={"n": -4, "element_size": -2},
)


DOT_PRODUCT = asking(
    "1.1",
    "dot product",
    5,
    (DOT_FLOPS, DOT_BYTES),
    check="check_dot_product",
    says="``dot_product_flops(n)`` and ``dot_product_bytes(n, element_size)``.",
    notice="in 16 bit that is 2n FLOPs for 4n + 2 bytes: half a FLOP a byte, however long the vectors are",
)
check_dot_product = DOT_PRODUCT.check


# ---- 1.2 matmul ----
def matmul_flops(m: int, k: int, n: int) -> int:
    return counting.matmul(m, k, n).flops if m * k * n <= SMALL else 2 * m * k * n


def matmul_bytes(m: int, k: int, n: int, element_size: int) -> int:
    small = m * k * n <= SMALL
    return (counting.matmul(m, k, n).elements_moved if small else m * k + k * n + m * n) * element_size


MATMUL_FLOPS = Question(
    "matmul_flops",
    lambda rng: size_cases(rng, ("m", "k", "n"), large=(2**11, 2**12, 2**31)),
    matmul_flops,
    (
        Mistake(MULTIPLY_ADD, lambda m, k, n: m * k * n, 1),
        Mistake(
            "each dot product is one addition short: its sum starts at zero", lambda m, k, n: m * n * (2 * k - 1), 2
        ),
        Mistake(
            "only one dot product is counted: there is one for each of the m * n outputs", lambda m, k, n: 2 * k, 0
        ),
        Mistake("k is left out: each output is a dot product of length k", lambda m, k, n: 2 * m * n, 0),
        Mistake(
            "the inputs' elements are counted: every element takes part in many multiplications",
            lambda m, k, n: 2 * (m * k + k * n),
            0,
        ),
    ),
    refused={"m": -3, "k": -4, "n": -5},
)
MATMUL_BYTES = Question(
    "matmul_bytes",
    lambda rng: size_cases(rng, ("m", "k", "n"), large=(2**11, 2**12, 2**43), element_size=element_size),
    matmul_bytes,
    (
        Mistake("the output is not written", lambda m, k, n, element_size: (m * k + k * n) * element_size, 3),
        Mistake(
            "both operands of every multiplication come from HBM: here each element is read once and stays on the chip",
            lambda m, k, n, element_size: (2 * m * k * n + m * n) * element_size,
            4,
        ),
        Mistake(
            "the output is read as well as written: the sums start at zero on the chip",
            lambda m, k, n, element_size: (m * k + k * n + 2 * m * n) * element_size,
            5,
        ),
        Mistake("only the second matrix (the weights) moves", lambda m, k, n, element_size: k * n * element_size, 3),
        *size_mistakes(matmul_bytes, 6),
    ),
    refused={"m": -3, "k": -4, "n": -5, "element_size": -2},
)


MATMUL = asking(
    "1.2",
    "matmul",
    5,
    (MATMUL_FLOPS, MATMUL_BYTES),
    check="check_matmul",
    says="``matmul_flops(m, k, n)`` and ``matmul_bytes(m, k, n, element_size)``.",
    notice="FLOPs grow with the product of three sizes, bytes with products of two: size buys intensity",
)
check_matmul = MATMUL.check
