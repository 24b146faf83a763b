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
from .flash_kernels import flash_delta_kernel, flash_dkdv_kernel, flash_dq_kernel, flash_forward_kernel, operands
from .tuning import capability_of
from .visible_tiles import Kind, lse_rows, plan_of


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

    @property
    def documents(self) -> int | None:
        """How many documents are packed; None of batches."""
        return None if self.starts_q is None else len(self.starts_q) - 1

    def by_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors as the kernels take them: (B, H, N, D), where packed ones are (N, H, D)."""
        return tensors if self.starts_q is None else tuple(x.transpose(0, 1).unsqueeze(0) for x in tensors)


class Tiles(NamedTuple):
    """The tiles of all sequences: rows of each, how many there are, and of packed documents their plan."""

    rows: int
    count: int
    plan: Tensor | None


def _tiles(q: Tensor, k: Tensor, mask: Mask, rows: int, of_keys: bool) -> Tiles:
    """Tiles of ``rows`` queries, or of as many keys."""
    length = (k if of_keys else q).shape[2]
    if mask.starts_q is None:
        return Tiles(rows, q.shape[0] * -(-length // rows), None)
    plan = plan_of(mask.starts_q, mask.starts_k, of_keys, length, rows)
    return Tiles(rows, len(plan), plan)


def _sizes(q: Tensor, k: Tensor, mask: Mask, tiles: Tiles, of_keys: bool) -> tuple[int, ...]:
    """What the kernels call ``sizes``."""
    (Hq, Nq), (Hkv, Nk) = q.shape[1:3], k.shape[1:3]
    heads, own = (Hkv, Nk) if of_keys else (Hq, Nq)
    rows, window, sinks = lse_rows(Nq, mask.documents), min(mask.window or 0, Nk), min(mask.sinks, Nk)
    return -(-own // tiles.rows), Nq, Nk, heads, tiles.count, rows, window, sinks


def _launch(
    kernel: Any, name: str, tensors: list[Tensor], strided: list[Tensor], mask: Mask, scale: float,
    tiles: Tiles | None = None,
) -> Tiles:  # fmt: skip
    """Run one of the kernels on its ``tensors``, of which ``strided`` are (B, H, N, D), and q, k, v (and dO) first.

    Returns:
        Its tiles: ``tiles``, of queries, if these have as many rows as are asked for.
    """
    loaded = strided[: 3 if name == "forward" else 4]
    q, k = loaded[:2]
    Nq, D, of_keys, packed = *q.shape[2:], name == "dkdv", mask.starts_q is not None
    group, length = q.shape[1] // k.shape[1], k.shape[2] // (mask.documents or 1)
    about = name, D, q.dtype, mask.causal, capability_of(q.device)
    tile = long_tuning.flash(*about, tma_compatible(*loaded), mask.window, length, scale > 0)
    given, use_tma = operands(tile.descriptors, packed, *zip(loaded, (tile.m, tile.n, tile.n, tile.m)))
    if tiles is None or tiles.rows != tile.m:
        tiles = _tiles(q, k, mask, tile.n if of_keys else tile.m, of_keys)
    sizes = _sizes(q, k, mask, tiles, of_keys)
    together = nheads_in_l2(name, Nq * group if of_keys else k.shape[2], mask.causal)
    only = {"ANCHORED": tile.anchored} if name == "forward" else {}
    kernel[(tiles.count * sizes[3],)](
        *given, *tensors[len(given):], q if tiles.plan is None else tiles.plan, *(x.stride() for x in strided), sizes,
        scale, together if of_keys else together * group,
        BLOCK_D=block_d(D), BLOCK_M=tile.m, BLOCK_N=tile.n, GQA_GROUP_SIZE=group, KIND=mask.kind,
        ACCESS=Access(D, index_dtype(*strided), use_tma, tile.loads_first, tile.masked), **only,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return tiles


def _delta(o: Tensor, do: Tensor, k: Tensor, lse: Tensor, mask: Mask, tiles: Tiles) -> Tensor:
    """rowsum(dO * O), laid out as ``lse``; ``tiles`` are those of queries."""
    D, delta, sizes = o.shape[3], torch.empty_like(lse), _sizes(o, k, mask, tiles, False)
    flash_delta_kernel[(tiles.count * sizes[3],)](
        o, do, delta, o if tiles.plan is None else tiles.plan, o.stride(), do.stride(), sizes,
        BLOCK_D=block_d(D), BLOCK_M=tiles.rows, KIND=Kind(False, False, False, mask.starts_q is not None),
        ACCESS=Access(D, index_dtype(o, do)), num_warps=long_tuning.delta_warps(D, tiles.rows),
    )  # fmt: skip
    return delta


class _FlashAttention(torch.autograd.Function):
    """Of tensors as they are given: views of packed ones are made inside, where autograd takes no note of each."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
        q_heads, k_heads, v_heads = mask.by_heads(q, k, v)
        check_attention(q_heads, k_heads, v_heads)
        ctx.mask, ctx.scale = mask, softmax_scale(scale, q.shape[-1])
        o = empty_in_order(q)
        B, Hq, Nq, _ = q_heads.shape
        lse = torch.empty((B, Hq, lse_rows(Nq, mask.documents)), dtype=torch.float32, device=q.device)
        if lse.numel():
            strided = [q_heads, k_heads, v_heads, *mask.by_heads(o)]
            ctx.tiles = _launch(flash_forward_kernel, "forward", [*strided, lse], strided, mask, ctx.scale)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        mask, scale = ctx.mask, ctx.scale
        of_q, of_k, of_v = ctx.needs_input_grad[:3]
        dq = empty_in_order(q) if of_q else None
        dk, dv = (empty_in_order(k), empty_in_order(v)) if of_k or of_v else (None, None)
        if not lse.numel():
            return dq, *(None if x is None else x.zero_() for x in (dk, dv)), None, None
        inputs = [*mask.by_heads(q, k, v, do)]
        (o,) = mask.by_heads(o)
        given = [*inputs, lse, _delta(o, inputs[3], inputs[1], lse, mask, ctx.tiles)]
        if dq is not None:
            made = [*mask.by_heads(dq)]
            _launch(flash_dq_kernel, "dq", given + made, inputs + made, mask, scale, ctx.tiles)
        if dk is not None:
            made = [*mask.by_heads(dk, dv)]
            _launch(flash_dkdv_kernel, "dkdv", given + made, inputs + made, mask, scale)
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
    if mask.window is None and mask.starts_q is None:
        return lab3.flash_attention(q, k, v, mask.causal, scale)
    return _FlashAttention.apply(q, k, v, mask, scale)


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
