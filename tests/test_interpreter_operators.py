"""Operators of tensors in Triton's interpreter: what is remembered of one use changes nothing about the next."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from utils import runtime
from utils.interpreter import operators

import triton.language as tl  # isort: skip
from triton.runtime import interpreter as upstream  # isort: skip

pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(runtime.HAS_GPU, reason="kernels are compiled here"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

TYPES = [
    *(tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64),
    *(tl.pointer_type(tl.float32), tl.pointer_type(tl.int1), tl.pointer_type(tl.pointer_type(tl.float16))),
]
SHAPES = [(), (4,), (2, 4), (2, 1)]
NUMBERS = [0, 1, -3, 2**24 + 1, 2**31 - 1, 2**31, -(2**31) - 1, 0.0, 0.1, -1.5, 1e30, math.inf, True]
NAMES = ["__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__and__", "__or__"]
NAMES += ["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"]
INDICES = [(None,), (slice(None), None), (None, slice(None)), (slice(None), None, slice(None)), None, slice(None)]
INDICES += [(slice(None), slice(None), None), (slice(0, 2),), (0,)]


def drawn(dtype: tl.dtype, shape: tuple[int, ...], turn: int) -> tl.tensor:
    """A tensor of numbers that narrower types round, or do not hold; another one each turn."""
    bits = upstream._get_np_dtype(dtype)
    values = np.array([2**24 + 1, -7, 0.1, 1e5, 0, 3, 1, 2**24])
    values = np.roll(values, turn)[: math.prod(shape or (1,))].reshape(shape or (1,))
    values = np.abs(values) if bits.kind == "u" else values
    data = (values != 0) if bits.kind == "b" else values.astype(bits)
    return tl.tensor(upstream.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def plain(name: str):
    """A method of tensors as upstream's interpreter calls it."""
    method = getattr(tl.tensor, name)
    return lambda *operands, **options: method(*operands, **options, _semantic=upstream.interpreter_semantic)


def told(call, *operands):
    """What a call gives: types, shapes and bits; or the kind of error."""
    try:
        found = call(*operands)
    except Exception as error:
        return type(error)
    data = found.handle.data
    same = (found.type, found.handle.dtype, data.dtype, data.shape)
    return [*map(str, same), [str(size) for size in found.shape], np.asarray(data).tobytes()]


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_gives_what_upstreams_gives(name):
    remembered, right = operators.remembering(name, plain(name)), plain(name)
    kept = 0
    for dtype, shape in itertools.product(TYPES, SHAPES):
        others = [(lambda turn, number=number: number) for number in NUMBERS]
        others += [(lambda turn, of=of: drawn(*of, turn + 1)) for of in itertools.product(TYPES, SHAPES)]
        for other in others:
            for turn in range(2):
                operands = drawn(dtype, shape, turn), other(turn)
                expected = told(right, *operands)
                assert told(remembered, *operands) == expected
                kept += isinstance(expected, list)
    assert kept > 500


def test_an_index_that_adds_axes_gives_what_upstreams_gives():
    remembered, right = operators.remembering("__getitem__", plain("__getitem__")), plain("__getitem__")
    for dtype, shape, index in itertools.product(TYPES, SHAPES, INDICES):
        for turn in range(2):
            operands = drawn(dtype, shape, turn), index
            assert told(remembered, *operands) == told(right, *operands)


def test_a_conversion_gives_what_upstreams_gives():
    remembered, right = operators.remembering("to", plain("to")), plain("to")
    for source, target, shape in itertools.product(TYPES, TYPES, SHAPES):
        for turn in range(2):
            for more in ((), (None, True)):  # the other bits, or the same ones
                operands = drawn(source, shape, turn), target, *more
                assert told(remembered, *operands) == told(right, *operands)
    x = drawn(tl.float32, (4,), 0)
    assert remembered(x, tl.float32) is x
    assert told(lambda: remembered(x, tl.int32, bitcast=True)) == told(lambda: right(x, tl.int32, None, True))


def test_known_operators_do_not_ask_upstream_again():
    asked = []

    def add(*operands):
        asked.append(operands)
        return plain("__add__")(*operands)

    remembered = operators.remembering("__add__", add)
    for other in (drawn(tl.float32, (4,), 0), drawn(tl.int32, (), 0), 1.5):
        before = len(asked)
        for turn in range(3):
            remembered(drawn(tl.float32, (2, 4), turn), other)
        assert len(asked) - before == (3 if isinstance(other, tl.tensor) and other.dtype == tl.int32 else 1)
