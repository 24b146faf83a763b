"""A linear layer with weights of 4 bits, for the batches of decoding (exercise 6.3).

Letters: M rows of activations, N outputs (rows of the weight), K inputs, in groups of 128 that share a scale.
"""

from __future__ import annotations

import torch

from utils import runtime  # before triton: it decides between GPU and interpreter

from .simple_arguments import check_shape, check_tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: Inputs that share a scale, and rows of activations that one tile holds at most.
GROUP, MOST_ROWS = 128, 64
#: Outputs of one program.
BLOCK_N = runtime.pick(cpu=16, gpu=32)


@triton.jit
def int4_linear_kernel(
    x_ptr, codes_ptr, scales_ptr, o_ptr, M, N, K, stride_xm, stride_xk, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_N`` outputs of all rows. x is (M, K), codes (N, K / 2), scales (N, K / 128), o (M, N)."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, 64)  # of one group
    groups = K // 128
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        raise NotImplementedError("Lab 6, exercise 6.3: one group")
    o_ptrs = o_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(o_ptrs, total.to(o_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def int4_linear(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` for a weight of 4 bits, which is unpacked on chip.

    The weight of output n and input k is ``code[n, k] * scales[n, k // 128]``. Products are summed in float32.

    Args:
        x: (M, K) float16 or bfloat16, any strides, M from 1 to 64, K a multiple of 128.
        codes: (N, K / 2) uint8, contiguous. A byte holds two codes in two's complement, that of an even k in its low
            half, as :func:`utils.formats.quantize` gives them for ``"int4"``.
        scales: (N, K / 128) float32, contiguous, fewer than 2^31 (so many go with 128 GiB of codes).

    Returns:
        (M, N) of x's dtype, contiguous.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(x, codes, scales)
    (M, K), N = x.shape, len(codes)
    o = torch.empty((M, N), dtype=x.dtype, device=x.device)
    raise NotImplementedError("Lab 6, exercise 6.3: the launch")


def _check(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    check_tensor("x", x, 2, torch.float16, torch.bfloat16)
    check_tensor("codes", codes, 2, torch.uint8)
    check_tensor("scales", scales, 2, torch.float32)
    (M, K), N = x.shape, len(codes)
    if not 1 <= M <= MOST_ROWS or K % GROUP or not K or not N:
        got = f"{(M, K)} for {N} outputs"
        raise ValueError(f"x must have 1 to {MOST_ROWS} rows and a multiple of {GROUP} columns, got shape {got}")
    check_shape("codes", codes, (N, K // 2))
    check_shape("scales", scales, (N, K // GROUP))
