"""Hidden scenarios of exercises 5.4 and 5.5: attention over a paged cache, in parts, and the parts put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from utils import runtime
from utils.checks.hidden import Draw, Observation, collected

#: Added to what stands in slots of no context: whoever reads one is seen.
STRANGER = 7.0
#: Of these and other tokens in a part; a context of so many in as many parts leaves each of them equally many.
EVEN_PARTS, EVEN_TOKENS = 3, 192


@collected
def paged_decode(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Contexts that end within blocks and tiles, shared heads, other strides and dtypes; whole and in parts."""
    draw = Draw(seed, "5.4")
    group, size, odd = draw.between(2, 3), draw.random.choice((2, 4, 8)), draw.random.choice((20, 24, 40))
    around = [size, size + 1, max(1, size - 1), 2 * size + 1]
    cases: dict[str, dict] = {
        "of one sequence": {"lengths": [draw.between(34, 45)], "block": 16},
        "with shared heads": {"lengths": [draw.between(35, 46), draw.between(2, 15)], "H": 2 * group, "G": 2},
        "with small blocks": {"lengths": [draw.between(33, 47), draw.between(1, 20)], "block": size, "H": 2},
        "around a block's end": {"lengths": around, "block": size},
        "with large blocks": {"lengths": [draw.between(34, 60), 33], "block": draw.random.choice((32, 64))},
        "where some have no context": {"lengths": [0, draw.between(1, 30), 0], "H": 2},
        "with an odd head dimension": {"lengths": [draw.between(18, 30)], "D": odd, "H": 2},
        "with strided tensors": {
            "lengths": [draw.between(33, 46)],
            "H": 2 * group,
            "G": 2,
            "block": 8,
            "strided": True,
        },
        "with a given scale": {"lengths": [draw.between(18, 40)], "scale": 0.1 + draw.random.random()},
        "with large scores": {"lengths": [draw.between(35, 46), draw.between(3, 20)], "magnitude": 20.0},
        "in float16": {"lengths": [draw.between(35, 46)], "H": group, "D": 32, "dtype": torch.float16},
        "in bfloat16": {"lengths": [draw.between(35, 46)], "H": group, "D": 32, "dtype": torch.bfloat16},
    }
    for what, case in cases.items():
        given = _paged(draw, **{name: value for name, value in case.items() if name != "scale"})
        result = package.paged_attention_decode(*given, scale=case.get("scale"), num_splits=1)
        yield f"paged_attention_decode {what}", result
    for what, parts in (
        ("with shared heads", 2),
        ("with small blocks", 3),
        ("where some have no context", 2),
        ("with a given scale", 4),
        ("in float16", 3),
    ):
        given = _paged(draw, **{name: value for name, value in cases[what].items() if name != "scale"})
        found = package.paged_attention_parts(*given, parts, scale=cases[what].get("scale"))
        whole, total = _together(*found)
        yield f"paged_attention_parts {what}: the parts together", whole
        yield f"paged_attention_parts {what}: logsumexp of the parts together", total
    q, *cache = _paged(draw, [EVEN_TOKENS])
    _, logsumexps = package.paged_attention_parts(torch.zeros_like(q), *cache, EVEN_PARTS)
    tokens = logsumexps.exp()  # of a query of zeros every score is 0: what is left is the number of tokens
    yield "paged_attention_parts: tokens of each part", tokens


@collected
def merge_parts(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Few parts and many, empty ones among them, large logsumexps, other strides and dtypes."""
    draw = Draw(seed, "5.5")
    odd = draw.random.choice((20, 24, 40))
    cases: dict[str, dict] = {
        "of few parts": {"parts": draw.between(2, 4)},
        "of one part": {"parts": 1},
        "of many parts": {"parts": draw.between(17, 31), "S": 1},
        "of many parts that grow": {"parts": draw.between(17, 31), "S": 1, "slope": 0.7},
        "of many parts with large logsumexps": {"parts": draw.between(17, 31), "S": 1, "magnitude": 90.0},
        "of empty parts": {"parts": draw.between(6, 12), "empty": "some"},
        "of nothing at all": {"parts": draw.between(9, 12), "empty": "a head", "H": 2},
        "of only the last part": {"parts": draw.between(9, 12), "empty": "all but the last"},
        "with an odd head dimension": {"parts": draw.between(2, 9), "D": odd},
        "of strided tensors": {"parts": draw.between(9, 12), "H": 2, "strided": True},
    }
    for what, case in cases.items():
        yield f"merge_parts {what}", package.merge_parts(*_parts(draw, **case))
    yield "merge_parts into bfloat16", package.merge_parts(*_parts(draw, 5), dtype=torch.bfloat16)


def _paged(
    draw: Draw, lengths: Sequence[int], *, H: int = 1, G: int = 1, D: int = 16, block: int = 16,
    dtype: torch.dtype = torch.float32, magnitude: float = 1.0, strided: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """q, caches, tables and lengths: blocks in any order, slots of no context full of strange values."""
    needed = [-(-n // block) for n in lengths]
    total = sum(needed) + 2
    order = draw.random.sample(range(total), total)
    strange = order.pop()
    tables = torch.full((len(lengths), max(needed) + 2), strange, dtype=torch.int32)
    foreign = torch.ones(total, block, dtype=torch.bool)
    for s, (n, count) in enumerate(zip(lengths, needed)):
        mine = [order.pop() for _ in range(count)]
        tables[s, :count] = torch.tensor(mine, dtype=torch.int32)
        for position in range(n):
            foreign[mine[position // block], position % block] = False
    q = draw.normal(len(lengths), H, D, scale=magnitude)
    k, v = (draw.normal(total, block, G, D) + STRANGER * foreign[:, :, None, None] for _ in range(2))
    tensors = [x.to(dtype) for x in (q, k, v)] + [tables, torch.tensor(lengths, dtype=torch.int32)]
    if strided:
        q, k, v, tables, lens = tensors
        wide = torch.full((*k.shape[:-1], 2 * D), STRANGER, dtype=dtype)
        wide[..., ::2] = k
        tensors = [
            q.transpose(0, 1).contiguous().transpose(0, 1), wide[..., ::2],
            v.transpose(1, 2).contiguous().transpose(1, 2), tables.t().contiguous().t(), lens,
        ]  # fmt: skip
    return tuple(_there(x) for x in tensors)


def _there(x: Tensor) -> Tensor:
    """The tensor on the kernels' device, with the same strides."""
    if x.device.type == runtime.DEVICE.type:
        return x
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=runtime.DEVICE)
    return there.copy_(x)


def _together(outputs: Tensor, logsumexps: Tensor) -> tuple[Tensor, Tensor]:
    """The parts merged in float64: how tokens are dealt out to them leaves no trace."""
    total = logsumexps.double().logsumexp(-1)
    weights = torch.exp(logsumexps.double() - torch.where(total.isinf(), 0.0, total)[..., None])
    kept = torch.where((logsumexps == -torch.inf)[..., None], 0.0, outputs.double())
    return (weights[..., None] * kept).sum(2).float(), total.float()


def _parts(
    draw: Draw, parts: int, *, S: int = 2, H: int = 1, D: int = 16, magnitude: float = 2.0, slope: float = 0.0,
    empty: str = "", strided: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and logsumexps; those of empty parts are NaN and -inf."""
    outputs = draw.normal(S, H, parts, D)
    logsumexps = draw.normal(S, H, parts, scale=magnitude) + slope * torch.arange(parts)
    none = torch.zeros(S, H, parts, dtype=torch.bool)
    if empty == "some":
        none = torch.rand(none.shape, generator=draw.generator) < 0.4
        none[..., 0], none[..., -1] = True, False
    elif empty == "a head":
        none[:, 0] = True
    elif empty:
        none[..., :-1] = True
    outputs[none], logsumexps[none] = torch.nan, -torch.inf
    if strided:
        wide = torch.full((*logsumexps.shape[:-1], 3 * parts), torch.nan)
        wide[..., ::3] = logsumexps
        outputs, logsumexps = outputs.transpose(1, 2).contiguous().transpose(1, 2), wide[..., ::3]
    return _there(outputs), _there(logsumexps)
