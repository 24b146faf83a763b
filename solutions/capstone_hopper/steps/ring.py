"""What the Gluon steps share: a program's place (as in step 5 or by a list), barriers, copies, and an order of work.

A barrier alternates between phase 0 and 1. Wait for the n-th completion with parity (n - 1) & 1; a fresh barrier lets
parity 1 pass, so whoever fills a stage for the first time does not wait.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as tl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..parts import layout


@gluon.jit
def place(length, together, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr):
    """First row of a program's head, its first query in there, and how many tiles of keys it sees: order of step 5."""
    program = tl.program_id(0)
    tiles = length // M
    head = program // (together * tiles) * together + program % together
    first = (tiles - 1 - program % (together * tiles) // together) * M
    return head * length, first, tl.cdiv(first + M if CAUSAL else length, N)


@gluon.jit
def listed(work, step, turn, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr):
    """Tile ``turn`` of a program's list: the head's first row, first query, number of key tiles; and ``step, turn``."""
    list_ptr, length = work
    tile = tl.load(list_ptr + 1 + turn)
    first = tile % (length // M) * M
    return tile // (length // M) * length, first, tl.cdiv(first + M if CAUSAL else length, N), step, turn


@gluon.jit
def barriers(COUNT: tl.constexpr, ARRIVALS: tl.constexpr):
    """``COUNT`` barriers in shared memory that complete a phase when ``ARRIVALS`` have arrived."""
    made = tl.allocate_shared_memory(tl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in tl.static_range(COUNT):
        mbarrier.init(made.index(i), ARRIVALS)
    return made


@gluon.jit
def copy(descriptor, row, tile, full):
    """TMA fills ``tile`` with the rows from ``row`` on; ``full`` completes when all its bytes are there."""
    mbarrier.expect(full, descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [row, 0], full, tile)


@gluon.jit
def settled(total):
    """``total`` unchanged; a wait that follows comes after everything that ``total`` is made of.

    ptxas may move a wait for the tensor cores ahead of arithmetic that does not depend on it, and does: a softmax that
    was meant to run beside a product then runs after it. It does not move a wait across an instruction with an effect,
    such as this one, which never runs: sums are not negative.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred never; setp.lt.f32 never, $1, 0f00000000; mov.f32 $0, $1; @never nanosleep.u32 0; }",
        "=f,f", [total], tl.float32, is_pure=False, pack=1,
    )  # fmt: skip


def described(*tiles: tuple[torch.Tensor, int]) -> list[TensorDescriptor]:
    """Descriptors that hand out tiles (rows, D) of tensors (B, H, N, D), seen as rows (B * H * N, D)."""
    return [
        TensorDescriptor.from_tensor(x.view(-1, x.shape[3]), [rows, x.shape[3]], layout([rows, x.shape[3]], x.dtype))
        for x, rows in tiles
    ]
