"""Compile a Triton kernel for a GPU that is not there, and read what the compiler spent on it.

::

    resource_usage(
        copy_kernel, {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}, {"BLOCK": 1024}, capability=90
    )

A child process compiles, so that this works in a session whose kernels are interpreted. :func:`readings` stops before
code is made: it says in a moment whether a kernel is Triton at all, and which products it has.
"""

from __future__ import annotations

from utils.compile_only.resources import (
    CAPABILITIES,
    CompileError,
    Product,
    Reading,
    Request,
    ResourceUsage,
    begin_reading,
    readings,
    resource_usage,
    resource_usages,
)
