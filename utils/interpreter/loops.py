"""The variable of a loop, of the type that it has in a compiled kernel.

Upstream runs ``for i in range(n)`` as Python does, so that ``i`` is a number of Python's: ``i * K * N`` with constants
``K`` and ``N`` never overflows, where a compiled kernel computes it in 32 bits and wraps around. Here the loop's line
is rewritten so that ``i`` is a tensor of the type that the compiler gives it: that of the bounds and the step, promoted
as in a sum. A variable of ``tl.static_range`` is a constant in a compiled kernel too, and stays a number.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from utils.interpreter import upstream

import triton.language as tl  # isort: skip

_NAME = "loop_values"


def _values(of: Callable, *bounds: Any, **options: Any) -> Iterator[tl.tensor]:
    """What a loop over ``of(*bounds)`` gives its variable."""
    semantic = upstream.interpreter_semantic
    for bound in bounds:
        if isinstance(bound, tl.tensor) and not bound.dtype.is_int():
            raise TypeError(f"bounds and step of a loop must be whole numbers, got one of type {bound.dtype}")
    types = [semantic.to_tensor(bound).dtype for bound in bounds]
    type = types[0]
    for other in types[1:]:
        type = semantic.integer_promote_impl(type, other)
    numpy_type = upstream.module._get_np_dtype(type)
    for value in of(*bounds, **options):
        yield tl.tensor(upstream.TensorHandle(np.array([value], numpy_type), type), type)


def typed_variable(_: None) -> Callable:
    """Rewrites the loops of a kernel, and what is in them, to take their values from :func:`_values`.

    It lies on an object of the interpreter's that each rewritten kernel finds among its names.
    """
    setattr(upstream.interpreter_semantic, _NAME, _values)

    def visit_For(self: ast.NodeTransformer, node: ast.For) -> ast.For:
        self.generic_visit(node)
        loop = node.iter
        if isinstance(loop, ast.Call) and "range" in (getattr(loop.func, "id", ""), getattr(loop.func, "attr", "")):
            values = ast.Attribute(ast.Name("interpreter_semantic", ast.Load()), _NAME, ast.Load())
            node.iter = ast.Call(values, [loop.func, *loop.args], loop.keywords)
        return node

    return visit_For
