"""The check of exercise 5.4: attention of one query a sequence over a paged cache, whole and in parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from utils import runtime
from utils.checks import forbid
from utils.checks.cases import Case
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, draw_seed
from utils.checks.hidden import Observation, Tolerance, collected
from utils.checks.kernel import check_kernel
from utils.checks.launches import tile_sizes, within
from utils.checks.speed import Speed

from . import paged
from .decode_rules import (
    KERNEL,
    MERGING,
    PART_RULES,
    RULES,
    SUM_ERROR,
    even,
    exact,
    float32_sums,
    merged,
    once,
    output,
    tables,
)
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


@collected
def observe(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Hidden cases: those of the check with another seed and further shapes, whole and in parts, and parts' lengths."""
    tiles = dict.fromkeys(paged.DTYPES, 16)
    sizes = {"S": 2, "H": 6, "G": 2, "D": 48, "tile": 16}
    further = [Case(kind, sizes | {"block": 4}, seed=seed, options={"num_splits": 1}) for kind in FURTHER]
    for number, case in enumerate([*paged.drawn(seed, tiles), *further]):
        if case.layout != "far":
            name = f"paged_attention_decode {_named(case)}, case {number + 1}: {case.kind}"
            yield name, package.paged_attention_decode(*paged.inputs(case), **case.options)
    for splits, chosen in ((2, slice(2, None, 2)), (3, slice(3, 4)), (4, slice(2, 3))):
        for case in paged.drawn(seed + splits, tiles, splits)[chosen]:
            found = package.paged_attention_parts(*paged.inputs(case), splits)
            name = f"paged_attention_parts {_named(case)}, {splits} parts: {case.kind}"
            whole, logsumexp = _together(*found)
            yield f"{name}, merged", whole
            yield f"logsumexp of {name}", logsumexp
    zeros, table = torch.zeros(EVEN_TOKENS // 16, 16, 1, 16), torch.arange(EVEN_TOKENS // 16, dtype=torch.int32)
    for tokens in (EVEN_TOKENS, EVEN_TOKENS - 5):
        given = [zeros[0, :1], zeros, zeros, table[None], torch.tensor([tokens], dtype=torch.int32)]
        _, logsumexps = package.paged_attention_parts(*(x.to(runtime.DEVICE) for x in given), EVEN_PARTS)
        # every score is 0, so e to the logsumexp is the number of tokens
        yield f"paged_attention_parts: tokens of each part of {tokens}", logsumexps.exp().sort().values


#: What must hold of the compiled kernel.
COMPILED = Compiled(tf32=8, wide=8)
#: A context of so many tokens in as many parts leaves each of them equally many.
EVEN_PARTS, EVEN_TOKENS = 3, 192
#: Kinds of cases that hidden cases play with more heads.
FURTHER = ("no context", "block boundary")


def _named(case: Case) -> str:
    scores = "with large scores " if case.magnitude > 1 else f"with {paged.LOW} " if case.kind == paged.LOW else ""
    return f"{scores}in {str(case.dtype).removeprefix('torch.')}"


def _together(outputs: Tensor, logsumexps: Tensor) -> tuple[Tensor, Tensor]:
    """The parts merged in float64, which does not depend on how tokens are assigned to them."""
    total = logsumexps.double().logsumexp(-1)
    weights = torch.exp(logsumexps.double() - torch.where(total.isinf(), 0.0, total)[..., None])
    kept = torch.where((logsumexps == -torch.inf)[..., None], 0.0, outputs.double())
    return (weights[..., None] * kept).sum(2).float(), total.float()


PAGED_DECODE = Exercise(
    "5.4",
    "paged decode kernel",
    points=20,
    observe=observe,
    tolerance=Tolerance(1e-4),
    tolerances={
        "paged_attention_decode in float16": Tolerance(4e-3),
        "paged_attention_decode in bfloat16": Tolerance(3e-2),
        "paged_attention_parts in bfloat16": Tolerance(3e-2),
        "logsumexp of paged_attention_parts": Tolerance(SUM_ERROR, SUM_ERROR),
        "paged_attention_decode with large scores": Tolerance(2e-3),
        f"paged_attention_decode with {paged.LOW}": Tolerance(2e-3),
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
        compiled=COMPILED,
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
        inspections=[
            once,
            *(within(KERNEL, budget) for budget in (exact, tables)),
            even,
            float32_sums(paged_attention_parts),
        ],
        forbidden=forbid.Rules(allow=MERGING),
        diagnose=PART_RULES,
        compiled=COMPILED,
        seed=seed,
        notice="the parts together are the whole, and no token is in two of them",
    )
