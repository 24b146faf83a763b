"""What Triton's interpreter makes of what the course repairs, without the repairs. Runs as a script of its own.

It prints the name of each repair, and whether Triton does it right by itself.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl

EIGHT = tl.constexpr(8)


@triton.jit
def dot_kernel(x_ptr, out_ptr):
    offsets = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, tl.dot(x, x))


@triton.jit
def square_kernel(x_ptr, out_ptr):
    offsets = tl.arange(0, EIGHT)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, x * x)


@triton.jit
def sum_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, EIGHT)), 0))


@triton.jit
def constant_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, EIGHT), tl.full((EIGHT,), 1.5, tl.bfloat16))


@triton.jit
def cast_kernel(x_ptr, out_ptr):
    offsets = tl.arange(0, EIGHT)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(out_ptr.dtype.element_ty))


@triton.jit
def larger_kernel(x_ptr, out_ptr):
    offsets = tl.arange(0, EIGHT)
    tl.store(out_ptr + offsets, tl.maximum(tl.load(x_ptr + offsets), 1.0))


@triton.jit
def largest_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.max(tl.load(x_ptr + tl.arange(0, EIGHT)), 0))


@triton.jit
def exchange_kernel(x_ptr, out_ptr):
    offsets = tl.arange(0, EIGHT)
    tl.atomic_xchg(out_ptr + offsets, tl.load(x_ptr + offsets))


@triton.jit
def add_tile_kernel(x_ptr, out_ptr):
    tile = tl.load(x_ptr + tl.arange(0, EIGHT)[:, None] * EIGHT + tl.arange(0, EIGHT)[None, :])
    out = tl.make_tensor_descriptor(out_ptr, [EIGHT, EIGHT], [EIGHT, 1], [EIGHT, EIGHT])
    out.atomic_add([0, 0], tile)


@triton.autotune([triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=[])
@triton.jit
def tuned_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


@triton.jit
def loop_kernel(x_ptr, out_ptr):
    total = 0.0
    for _ in range(tl.load(x_ptr).to(tl.int32)):
        total += 1.0
    tl.store(out_ptr, total)


@triton.jit
def wrapping_kernel(out_ptr, BIG: tl.constexpr):
    for i in range(2):
        for j in tl.range(2, num_stages=1):
            for k in tl.static_range(1, 2):
                tl.store(out_ptr + i * 2 + j, i * BIG * BIG * 2 + j * k * BIG * BIG * 2)


@triton.jit
def flag_kernel(out_ptr, flag):
    tl.store(out_ptr, tl.where(flag, 1.0, 2.0))


ONES = torch.ones(8)


def ran(kernel: Callable, x: torch.Tensor | None, expected: torch.Tensor, *more: object, grid: tuple = (1,)) -> bool:
    """Whether a kernel leaves what is expected, without a warning."""
    out = torch.zeros_like(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel[grid](*([] if x is None else [x]), out, *more)
    return torch.equal(out.float().nan_to_num(-1), expected.float().nan_to_num(-1))


def bfloat16(*values: float) -> torch.Tensor:
    return torch.tensor((values * 8)[:8]).bfloat16()


def error_names_kernel() -> bool:
    try:
        square_kernel[(1,)](ONES, "no tensor")
    except Exception as error:
        return "square_kernel" in str(error)
    return False


def helper_is_reloaded() -> bool:
    """A kernel of one file still calls a helper of another that was reloaded, as a notebook does it: emptied first."""
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        try:
            for name, text in (("probed_helpers", HELPERS), ("probed_kernels", KERNELS)):
                Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
            kernel = importlib.import_module("probed_kernels").double_kernel
            first = ran(kernel, ONES, 2 * ONES)
            helpers = sys.modules["probed_helpers"]
            for name in set(vars(helpers)) - {"__name__", "__spec__", "__loader__"}:
                del vars(helpers)[name]
            importlib.reload(helpers)
            return first and ran(kernel, ONES, 2 * ONES)
        finally:
            sys.path.remove(folder)
            for name in ("probed_helpers", "probed_kernels"):
                sys.modules.pop(name, None)


HEAD = "import triton\nimport triton.language as tl\n"
HELPERS = f"{HEAD}@triton.jit\ndef double(x):\n    y = x\n    return x + y\n"
KERNELS = f"""{HEAD}from probed_helpers import double
@triton.jit
def double_kernel(x_ptr, out_ptr):
    offsets = tl.arange(0, 8)
    tl.store(out_ptr + offsets, double(tl.load(x_ptr + offsets)))
"""


def dots() -> bool:
    x = torch.arange(256).reshape(16, 16).remainder(5).bfloat16()
    return ran(dot_kernel, x, x.float() @ x.float())


NAN = float("nan")
#: Each tries what one of the course's points is for, by the point's repair and first name.
TRIED = {
    "bfloat16 dot: create_dot": dots,
    "NaN in maximum and minimum: create_minnumf": lambda: ran(larger_kernel, torch.full((8,), NAN), ONES),
    "bfloat16 arithmetic: create_fadd": lambda: ran(square_kernel, bfloat16(1.5), bfloat16(2.25)),
    "bfloat16 arithmetic: apply_impl": lambda: ran(sum_kernel, bfloat16(1.5), torch.tensor([12.0]).bfloat16()),
    "bfloat16 arithmetic: get_bf16": lambda: ran(constant_kernel, None, bfloat16(1.5)),
    "bfloat16 rounding: cast_impl": lambda: (
        ran(cast_kernel, torch.full((8,), 1.00390625), bfloat16(1.0))
        and ran(cast_kernel, torch.full((8,), 1.9999), bfloat16(2.0))
    ),
    "8-bit floats: create_fp_to_fp": lambda: ran(
        cast_kernel, torch.tensor([1.9999, 1.0625] * 4), torch.tensor([2.0, 1.0] * 4).to(torch.float8_e4m3fn)
    ),
    "atomics: create_atomic_rmw": lambda: ran(exchange_kernel, ONES, ONES),
    "atomics: create_descriptor_reduce": lambda: ran(add_tile_kernel, torch.ones(8, 8), torch.ones(8, 8)),
    "NaN in maximum and minimum: min_max": lambda: ran(largest_kernel, torch.full((8,), NAN), torch.tensor([NAN])),
    "autotune without a driver: _bench": lambda: ran(tuned_kernel, ONES, ONES, grid=(2,)),
    "loop bounds: _patch_lang_tensor": lambda: ran(loop_kernel, 3 * ONES, torch.tensor([3.0])),
    "loop variables: visit_For": lambda: ran(
        wrapping_kernel, None, torch.tensor([0, -(2**31), -(2**31), 0], dtype=torch.int64), 2**15
    ),
    "boolean arguments: _implicit_cvt": lambda: ran(flag_kernel, None, torch.tensor([1.0]), True),
    "error messages: __call__": error_names_kernel,
    "reloaded modules: rewrite": helper_is_reloaded,
}


def works(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except Exception:
        return False


if __name__ == "__main__":
    assert "utils" not in sys.modules
    with np.errstate(all="ignore"):
        print(json.dumps({name: works(check) for name, check in TRIED.items()}))
