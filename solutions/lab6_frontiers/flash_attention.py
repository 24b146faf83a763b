"""Attention of long and packed sequences, forward and backward: documents of any length, windows and sinks.

Documents laid end to end in one row need no padding, and a query must see its own document only: ``cu_seqlens`` says
where each begins. A window lets a query see the last keys only (Beltagy et al. 2020, section 3.1); sinks are the first
keys, which stay visible because they get much of the softmax's weight (Xiao et al. 2023, "StreamingLLM", section 3).
All three are masks, and tiles of scores that a mask hides entirely are neither loaded nor multiplied
(:mod:`.visible_tiles`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solutions import lab3_flash_attention as lab3
from solutions.lab3_flash_attention.arguments import check_attention, softmax_scale
from solutions.lab3_flash_attention.tiles import Access, empty_in_order, index_dtype, tma_compatible
from solutions.lab3_flash_attention.tuning import block_d, nheads_in_l2

from . import long_tuning
from .flash_kernels import flash_dkdv_kernel, flash_dq_kernel, flash_forward_kernel, operands
from .tuning import capability_of
from .visible_tiles import Kind, plan_of


class Mask(NamedTuple):
    """What a query sees. ``starts_q`` and ``starts_k``: of packed documents, (S + 1,) int32; None of batches."""

    causal: bool
    window: int | None
    sinks: int
    starts_q: Tensor | None
    starts_k: Tensor | None

    @property
    def kind(self) -> Kind:
        """What kernels are compiled for."""
        window = self.window is not None
        return Kind(self.causal, window, window and self.sinks > 0, self.starts_q is not None)


def _sizes_and_plan(q: Tensor, k: Tensor, mask: Mask, block: int, of_keys: bool) -> tuple[tuple[int, ...], Tensor]:
    """What the kernels call ``sizes``, and the plan of documents; ``block``: rows of a tile of queries or of keys."""
    (B, Hq, Nq, _), (Hkv, Nk) = q.shape, k.shape[1:3]
    heads, rows = (Hkv, Nk) if of_keys else (Hq, Nq)
    own = -(-rows // block)
    if mask.starts_q is None:
        tiles, plan = B * own, q
    else:
        plan = plan_of(mask.starts_q, mask.starts_k, of_keys, rows, block)
        tiles = len(plan)
    window, sinks = min(mask.window or 0, Nk), min(mask.sinks, Nk)
    return (own, Nq, Nk, heads, tiles, Nq, window, sinks), plan


def _launch(kernel: Any, name: str, tensors: list[Tensor], strided: list[Tensor], mask: Mask, scale: float) -> None:
    """Run one of the kernels on its ``tensors``, of which ``strided`` are (B, H, N, D), and q, k, v (and dO) first."""
    loaded = strided[: 3 if name == "forward" else 4]
    q, k = loaded[:2]
    Nq, D, of_keys, packed = *q.shape[2:], name == "dkdv", mask.starts_q is not None
    group = q.shape[1] // k.shape[1]
    about = name, D, q.dtype, mask.causal, capability_of(q.device)
    tile = long_tuning.flash(*about, tma_compatible(*loaded), mask.window, scale > 0)
    given, use_tma = operands(tile.descriptors, packed, *zip(loaded, (tile.m, tile.n, tile.n, tile.m)))
    sizes, plan = _sizes_and_plan(q, k, mask, tile.n if of_keys else tile.m, of_keys)
    together = nheads_in_l2(name, Nq * group if of_keys else k.shape[2], mask.causal)
    if of_keys and not tile.masked and (packed or Nq % tile.m):  # the kernel reads behind the last row's
        tensors[4:6] = (torch.nn.functional.pad(numbers.flatten(), (0, tile.m)) for numbers in tensors[4:6])
    only = {"ANCHORED": tile.anchored} if name == "forward" else {}
    kernel[(sizes[4] * sizes[3],)](
        *given, *tensors[len(given):], plan, *(x.stride() for x in strided), sizes, scale,
        together if of_keys else together * group,
        BLOCK_D=block_d(D), BLOCK_M=tile.m, BLOCK_N=tile.n, GQA_GROUP_SIZE=group, KIND=mask.kind,
        ACCESS=Access(D, index_dtype(*strided), use_tma, tile.loads_first, tile.masked), **only,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        o, lse = empty_in_order(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if lse.numel():
            _launch(flash_forward_kernel, "forward", [q, k, v, o, lse], [q, k, v, o], mask, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mask, ctx.scale = mask, scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        mask, scale = ctx.mask, ctx.scale
        delta = lab3.attention_delta(o, do)
        dq = dk = dv = None
        given = [q, k, v, do, lse, delta]
        if ctx.needs_input_grad[0]:
            dq = empty_in_order(q)
            if lse.numel():
                _launch(flash_dq_kernel, "dq", [*given, dq], [q, k, v, do, dq], mask, scale)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = empty_in_order(k), empty_in_order(v)
            if lse.numel():
                _launch(flash_dkdv_kernel, "dkdv", [*given, dk, dv], [q, k, v, do, dk, dv], mask, scale)
            else:
                dk, dv = dk.zero_(), dv.zero_()
        return dq, dk, dv, None, None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Attention of batches or of packed documents, with gradients; what no query sees is skipped in tiles.

    Only tiles of scores with at least one visible pair are computed: in the forward pass and for dQ a program goes
    through those from the first key in the window of its first query to the last key of its last, and through the tiles
    of the sinks; for dK and dV, from the first query that sees one of its keys to the last. Without window and
    documents this is lab 3's ``flash_attention``. On Hopper 16-bit tensors that descriptors can describe are loaded
    through them, and rows of tiles are anchored (exercise 3.9).

    Args:
        q: (B, Hq, Nq, D), or packed (total_q, Hq, D); float32 (multiplied as such, not as TF32), float16 or bfloat16,
            any strides, D from 16 to 256.
        k, v: (B, Hkv, Nk, D), or packed (total_k, Hkv, D), of q's dtype; Hkv divides Hq, and query head h reads key
            head h // (Hq / Hkv).
        causal: query i sees keys j <= i + Nk - Nq, of its own document: the last query sees every key.
        scale: factor of the scores, by default 1 / sqrt(D).
        window: keys that a query sees at most, its own position's included: j > i + Nk - Nq - window. Needs ``causal``.
        sinks: the first keys of each document, which stay visible (where they are not in the future).
        cu_seqlens_q: (S + 1,) int32, on the CPU or q's device: document s holds rows cu_seqlens_q[s] to
            cu_seqlens_q[s + 1] of q; it may be empty. Given, q, k and v are packed.
        cu_seqlens_k: the same of k and v, by default cu_seqlens_q.

    Returns:
        Of q's shape and dtype. A query that sees no key gets 0, and its gradient is 0.

    Raises:
        TypeError, ValueError: an argument does not fit. Values of ``cu_seqlens`` are checked on the CPU only: nothing
            waits for a GPU.
    """
    mask = _checked_mask(q, k, v, causal, window, sinks, cu_seqlens_q, cu_seqlens_k)
    packed = mask.starts_q is not None
    if packed:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    check_attention(q, k, v)
    scale = softmax_scale(scale, q.shape[3])
    if mask.window is None and not packed:
        return lab3.flash_attention(q, k, v, mask.causal, scale)
    o = _FlashAttention.apply(q, k, v, mask, scale)
    return o.squeeze(0).transpose(0, 1) if packed else o


def _checked_mask(q, k, v, causal, window, sinks, cu_seqlens_q, cu_seqlens_k) -> Mask:
    """What a query sees; refuses what is no mask, or does not belong to q, k and v."""
    for name, value, least in (("window", window, 1), ("sinks", sinks, 0)):
        if value is None and name == "window":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if window is not None and not causal:
        raise ValueError(f"a window needs causal=True, got window={window}")
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k needs cu_seqlens_q, got None")
    given = {"q": q, "k": k, "v": v}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if cu_seqlens_q is None:
        return Mask(bool(causal), window, sinks, None, None)
    for name, value in given.items():
        if value.ndim != 3:
            raise ValueError(f"with cu_seqlens {name} must have shape (total, H, D), got {tuple(value.shape)}")
    starts_q = _checked_starts("cu_seqlens_q", cu_seqlens_q, q)
    starts_k = _checked_starts("cu_seqlens_k", cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, k)
    if len(starts_q) != len(starts_k):
        raise ValueError(f"cu_seqlens_k must have {len(starts_q)} entries as cu_seqlens_q, got {len(starts_k)}")
    return Mask(bool(causal), window, sinks, starts_q, starts_k)


def _checked_starts(name: str, starts: Tensor, rows: Tensor) -> Tensor:
    """Where documents begin, on the device of ``rows``."""
    if not isinstance(starts, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(starts).__name__}")
    if starts.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {str(starts.dtype).removeprefix('torch.')}")
    if starts.ndim != 1 or len(starts) < 2:
        raise ValueError(f"{name} must have shape (documents + 1,), got {tuple(starts.shape)}")
    if starts.device.type == "cpu":
        values = starts.tolist()
        if values[0] != 0 or values[-1] != len(rows) or values != sorted(values):
            raise ValueError(f"{name} must rise from 0 to the {len(rows)} rows, got {values}")
    elif starts.device != rows.device:
        raise ValueError(f"{name} must be on the CPU or on {rows.device}, got {starts.device}")
    return starts.to(rows.device)
