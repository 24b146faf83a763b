"""4-bit weights as numbers of 16 bits again, for products of so many activations that tensor cores set the time."""

from __future__ import annotations

import torch
from torch import Tensor

from utils import runtime  # before triton: it decides between GPU and interpreter

from .int4_packing import GROUP, PackedInt4
from .int4_unpack import unpack_nibbles

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: Rows of the weight that a program takes.
ROWS = runtime.pick(cpu=16, gpu=32)


@triton.jit(do_not_specialize=["N"])
def expand_int4_kernel(codes_ptr, scales_ptr, o_ptr, N, BLOCK_N: tl.constexpr, ASSEMBLY: tl.constexpr):
    """One program: ``BLOCK_N`` rows of the weight in one group of 128 columns."""
    dtype = o_ptr.dtype.element_ty
    group, groups = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    halfword = tl.arange(0, 32)
    inside = row < N
    place = group * N + row
    codes = tl.load(codes_ptr + place[:, None] * 32 + halfword[None, :], mask=inside[:, None], other=0)  # (BLOCK_N, 32)
    scales = tl.load(scales_ptr + place, mask=inside, other=0.0)  # (BLOCK_N,)
    numbers = unpack_nibbles(codes, dtype, ASSEMBLY)
    o_ptrs = o_ptr + (row.to(tl.int64) * groups + group)[:, None] * 128 + halfword[None, :]
    for j in tl.static_range(4):
        number = (numbers[j].to(tl.float32) * scales[:, None]).to(dtype)
        tl.store(o_ptrs + 32 * j, number, mask=inside[:, None])


def expand_int4(packed: PackedInt4, dtype: torch.dtype) -> Tensor:
    """A weight's numbers (N, K), float16 or bfloat16: code times scale, rounded once."""
    N, K = packed.shape
    o = torch.empty((N, K), dtype=dtype, device=packed.codes.device)
    if o.numel():
        expand_int4_kernel[(triton.cdiv(N, ROWS), K // GROUP)](
            packed.codes, packed.scales, o, N, BLOCK_N=ROWS, ASSEMBLY=not runtime.INTERPRET, num_warps=4
        )
    return o
