"""What the course uses of Triton's interpreter, imported in this one place. What it replaces there: :mod:`patches`."""

from __future__ import annotations

from triton.language import core, semantic
from triton.runtime import autotuner
from triton.runtime import interpreter as module

__all__ = [
    "InterpretedFunction",
    "TensorHandle",
    "autotuner",
    "core",
    "interpreter_builder",
    "ir",
    "module",
    "semantic",
]

TensorHandle, InterpretedFunction, ir = module.TensorHandle, module.InterpretedFunction, module._ir
interpreter_builder, interpreter_semantic = module.interpreter_builder, module.interpreter_semantic
