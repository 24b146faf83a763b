"""Compile a Triton kernel for a GPU that is not there, and read what the compiler spent on it.

::

    resource_usage(
        copy_kernel, {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}, {"BLOCK": 1024}, capability=90
    )

A child process compiles, so that this works in a session whose kernels are interpreted.
"""

from __future__ import annotations

from utils.compile_only.resources import (
    CAPABILITIES,
    CompileError,
    Request,
    ResourceUsage,
    resource_usage,
    resource_usages,
)
