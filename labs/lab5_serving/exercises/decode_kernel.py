"""The check of exercise 5.4: attention of one query a sequence over a paged cache, whole and in parts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from utils import runtime
from utils.checks import forbid
from utils.checks.cases import Case
from utils.checks.core import Exercise, draw_seed
from utils.checks.hidden import Tolerance
from utils.checks.kernel import check_kernel
from utils.checks.launches import tile_sizes, within
from utils.checks.speed import Speed

from . import hidden_attention, paged
from .decode_parts import MERGING, PART_RULES, even, merged, once
from .decode_rules import KERNEL, RULES, exact, output, tables
from .paged import attention

Tensor = torch.Tensor


def _large() -> tuple[Tensor, ...]:
    """64 sequences of 2,048 tokens in bfloat16: enough programs for a GPU with no context in parts."""
    S, H, G, D, block, n = 64, 32, 8, 128, 16, 2048
    blocks = S * n // block
    shape = (blocks, block, G, D)
    k, v = (torch.randn(shape, device=runtime.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    order = torch.randperm(blocks, device=runtime.DEVICE).int().view(S, -1)
    lens = torch.full((S,), n, dtype=torch.int32, device=runtime.DEVICE)
    return torch.randn(S, H, D, device=runtime.DEVICE, dtype=torch.bfloat16), k, v, order, lens


def _copy(q: Tensor, k: Tensor, v: Tensor, block_tables: Tensor, lens: Tensor) -> Tensor:
    """As many bytes read as the keys and values are: half of them copied."""
    return k.clone()


def _tiles(whole: Callable[..., Tensor]) -> dict[torch.dtype, int]:
    """Tokens of the tile that the kernel is launched with, by the inputs' dtype."""
    case = paged.drawn(0, dict.fromkeys(paged.DTYPES, 16))[0]
    few = [paged.inputs(Case(case.kind, case.sizes, dtype)) for dtype in (torch.float32, torch.float16)]
    single, half = (tile_sizes(whole, args, KERNEL, BLOCK_N=16)["BLOCK_N"] for args in few)
    return {dtype: half if dtype.itemsize == 2 else single for dtype in paged.DTYPES}


PAGED_DECODE = Exercise(
    "5.4",
    "paged decode kernel",
    points=22,
    observe=hidden_attention.paged_decode,
    tolerance=Tolerance(1e-4),
    tolerances={
        "paged_attention_decode in float16": Tolerance(4e-3),
        "paged_attention_decode in bfloat16": Tolerance(3e-2),
        "paged_attention_parts in float16": Tolerance(4e-3),
        "paged_attention_decode with large scores": Tolerance(2e-3),
    },
)


@PAGED_DECODE.checked_by
def check_paged_decode(
    paged_attention_decode: Callable[..., Tensor],
    paged_attention_parts: Callable[..., tuple[Tensor, Tensor]],
    seed: int | None = None,
) -> None:
    """Exercise 5.4: paged decode attention, unsplit and in parts.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    unsplit = {"num_splits": 1}  # everywhere: to put parts together is exercise 5.5
    tiles = _tiles(functools.partial(paged_attention_decode, **unsplit))
    speed = Speed(_large, _copy, 0.6, "a copy of as many bytes", options=unsplit)
    check_kernel(
        PAGED_DECODE,
        paged_attention_decode,
        attention,
        paged.drawn(seed, tiles),
        paged.inputs,
        outputs=("o",),
        inspections=[within(KERNEL, budget) for budget in (exact, output, tables)],
        diagnose=RULES,
        speed=speed,
        seed=seed,
        notice="each key and each value of every context is read once, for all query heads that share it",
    )
    check_kernel(
        PAGED_DECODE.part("paged decode kernel in parts"),
        merged(paged_attention_parts),
        attention,
        paged.drawn(seed + 1, tiles, splits=3),
        paged.inputs,
        outputs=("o",),
        inspections=[once, *(within(KERNEL, budget) for budget in (exact, tables)), even],
        forbidden=forbid.Rules(allow=MERGING),
        diagnose=PART_RULES,
        seed=seed,
        notice="the parts together are the whole, and no token is in two of them",
    )
