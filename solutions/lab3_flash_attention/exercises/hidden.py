"""Hidden scenarios of lab 3: attention, forward and backward, on lengths, views and dtypes that no release holds."""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import NamedTuple

import torch

from utils.checks.hidden import Draw, Observation, Observed, Tolerance, leaves_alone, normal, placed, words

from .anchored import anchored

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: A layout per tensor, each with strides of its own.
MIXED = {"q": "padded", "k": "whole", "v": "heads", "do": "transposed"}


class Sizes(NamedTuple):
    """Shapes of q (B, Hq, Nq, D) and of k and v (B, Hkv, Nk, D)."""

    B: int
    Hq: int
    Hkv: int
    Nq: int
    Nk: int
    D: int


class Inputs(NamedTuple):
    """Queries, keys, values, and the gradient that arrives for the output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor


def _inputs(draw: Draw, sizes: Sizes, dtype: torch.dtype = FP32, layout: str = "whole") -> Inputs:
    """Drawn inputs; ``layout`` is one of ``tensors.LAYOUTS``, ``"heads"`` (cut out of (B, N, H, D)) or ``"mixed"``."""
    B, Hq, Hkv, Nq, Nk, D = sizes
    shapes = {"q": (B, Hq, Nq, D), "k": (B, Hkv, Nk, D), "v": (B, Hkv, Nk, D), "do": (B, Hq, Nq, D)}
    return Inputs(
        **{
            name: _laid_out(draw.normal(*shape, dtype=dtype), MIXED[name] if layout == "mixed" else layout)
            for name, shape in shapes.items()
        }
    )


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    return placed(values.transpose(1, 2)).transpose(1, 2) if layout == "heads" else placed(values, layout)


def _low(given: Inputs) -> Inputs:
    """The same with every score shifted to about -105, which leaves the softmax as it is."""
    given.q[..., 0], given.k[..., 0] = 105.0 * given.q.shape[3] ** 0.5, -1.0
    return given


# ---- 3.1
def merge(package: ModuleType, seed: int) -> Observed:
    """3.1: parts of any shape, empty ones on either side and on both, large and far apart maxima, float64."""
    draw = Draw(seed, "3.1")
    observed = Observed()
    cases = [
        ("numbers", (), 1.0, 0.0, FP32),
        ("vectors", (draw.between(3, 20),), 3.0, 0.0, FP32),
        ("three axes", (2, draw.between(2, 5), draw.between(3, 9)), 3.0, 0.0, torch.float64),
        ("large maxima", (draw.between(9, 20),), 2.0, 9000.0, FP32),
        ("very low maxima", (draw.between(9, 20),), 2.0, -9000.0, FP32),
        ("maxima far apart", (draw.between(9, 20),), 200.0, 0.0, FP32),
    ]
    for what, shape, scale, shift, dtype in cases:
        first, second = (_part(draw, shape, scale, shift, dtype) for _ in range(2))
        observed |= _merged(package, what, first, second)
    first, second = (_part(draw, (12,), 2.0, 0.0, FP32) for _ in range(2))
    for part, empty in ((first, slice(0, 6)), (second, slice(4, 9))):  # one, both, the other, none
        part[0][empty], part[1][empty], part[2][empty] = -torch.inf, 0.0, 0.0
    observed |= _merged(package, "empty parts", first, second)
    return observed


Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _part(draw: Draw, shape: tuple[int, ...], scale: float, shift: float, dtype: torch.dtype) -> Part:
    m = draw.normal(*shape, dtype=dtype, scale=scale) + shift
    return m, draw.normal(*shape, dtype=dtype).abs() * 5 + 1, draw.normal(*shape, 5, dtype=dtype)


def _merged(package: ModuleType, what: str, first: Part, second: Part) -> dict[str, Observation]:
    (m, d), kept = leaves_alone(package.merge, *first[:2], *second[:2])
    (m_too, d_too, o), kept_too = leaves_alone(
        lambda *parts: package.merge_outputs(parts[:3], parts[3:]), *first, *second
    )
    return {
        f"m of merge of {what}": m,
        f"d of merge of {what}": d,
        f"merge leaves its inputs as they are, {what}": kept,
        f"m of merge_outputs of {what}": m_too,
        f"d of merge_outputs of {what}": d_too,
        f"o of merge_outputs of {what}": o,
        f"merge_outputs leaves its inputs as they are, {what}": kept_too,
    }


# ---- 3.2
def tiled_attention(package: ModuleType, seed: int) -> Observed:
    """3.2: tiles that divide nothing, tiles larger than the whole, shared heads, queries that see no key."""
    draw = Draw(seed, "3.2")
    n, few, odd = draw.between(20, 30), draw.between(5, 15), draw.between(17, 40)
    tile = draw.between(3, 9), draw.between(3, 9)
    cases = [
        ("one element", Sizes(1, 1, 1, 1, 1, 16), {}, (1, 1), FP32, "whole"),
        ("uneven tiles", Sizes(2, 2, 2, n, n + few, odd), {}, tile, FP32, "whole"),
        ("tiles of 64", Sizes(1, 2, 2, 64 + n, 64 + few, 16), {"causal": True}, (64, 64), FP32, "mixed"),
        ("shared heads", Sizes(2, 6, 2, n, few, 16), {"scale": 0.3}, tile, FP32, "heads"),
        ("causal", Sizes(1, 2, 1, n, n, 16), {"causal": True}, tile, FP32, "whole"),
        ("causal, more keys", Sizes(1, 1, 1, few, n, 16), {"causal": True}, tile, FP32, "whole"),
        ("causal, more queries", Sizes(1, 2, 1, n, few, odd), {"causal": True, "scale": -0.2}, tile, FP32, "whole"),
        ("float16", Sizes(1, 2, 1, n, n, odd), {"causal": True}, tile, FP16, "whole"),
        ("bfloat16", Sizes(1, 2, 1, n, n, odd), {}, tile, BF16, "padded"),
    ]
    observed = Observed()
    for what, sizes, options, (block_m, block_n), dtype, layout in cases:
        q, k, v, do = _inputs(draw, sizes, dtype, layout)
        options = {**options, "block_m": block_m, "block_n": block_n}
        o, lse = package.tiled_attention(q, k, v, **options)
        gradients = package.tiled_attention_backward(q, k, v, o, lse, do, **options)
        observed |= {f"o of tiled_attention, {what}": o, f"lse of tiled_attention, {what}": lse}
        observed |= {f"{name} of tiled_attention_backward, {what}": x for name, x in zip(("dq", "dk", "dv"), gradients)}
    return observed


# ---- 3.3 and 3.4
def flash_forward(package: ModuleType, seed: int) -> Observed:
    """3.3: any lengths and widths, shared heads, every layout, growing and low scores, scales of either sign."""
    draw = Draw(seed, "3.3")
    n, more, odd = draw.between(18, 30), draw.between(33, 45), draw.between(17, 31)
    cases = [
        ("one element", Sizes(1, 1, 1, 1, 1, 16), {}, FP32, "whole"),
        ("fewer keys than a tile", Sizes(1, 1, 1, n, 3, 16), {}, FP32, "whole"),
        ("whole tiles", Sizes(1, 1, 1, 32, 64, 32), {}, FP32, "whole"),
        ("", Sizes(1, 2, 2, n, more, odd), {}, FP32, "whole"),
        ("shared heads", Sizes(2, 4, 2, n, n, 16), {}, FP32, "heads"),
        ("a given scale", Sizes(1, 1, 1, more, n, 16), {"scale": draw.random.uniform(0.4, 0.9)}, FP32, "padded"),
        ("a negative scale", Sizes(1, 1, 1, n, more, 16), {"scale": -0.3}, FP32, "strided"),
        ("each its own strides", Sizes(1, 2, 2, n, n, 16), {}, FP32, "mixed"),
        ("", Sizes(1, 2, 1, n, more, odd), {}, FP16, "transposed"),
        ("", Sizes(1, 3, 1, n, more, 64), {}, BF16, "whole"),
    ]
    observed = Observed()
    for what, sizes, options, dtype, layout in cases:
        q, k, v, _ = _inputs(draw, sizes, dtype, layout)
        observed |= _forward(package, _case(what, dtype, layout), q, k, v, **options)
    q, k, v, _ = _inputs(draw, Sizes(1, 1, 1, n, 2 * more, 16))
    k *= torch.linspace(0.2, 5, k.shape[2], device=k.device)[:, None]
    observed |= _forward(package, "growing scores", q, k, v)
    observed |= _forward(package, "low scores", *_low(_inputs(draw, Sizes(1, 1, 1, n, more, 16)))[:3])
    q, k, v, _ = _inputs(draw, Sizes(1, 1, 1, n, 130, 16), FP16)
    q *= 0.05
    v[:, :, :65] += DRIFT
    v[:, :, 65:] -= DRIFT
    observed |= _forward(package, "values that cancel, float16", q, k, v)
    return observed


#: How far the values of either half of the keys lie from 0 where they cancel.
DRIFT = 20.0
CANCELLING = "o of flash_forward_simple, values that cancel"


def _case(what: str, dtype: torch.dtype = FP32, layout: str = "whole") -> str:
    if layout in ("heads", "mixed"):
        return ", ".join(part for part in (what, "heads last" * (layout == "heads"), str(dtype)[6:]) if part)
    return words(*([what] if what else []), dtype=dtype, layout=layout)


def _forward(
    package: ModuleType, what: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: bool, **options: float
) -> dict[str, Observation]:
    o, lse = package.flash_forward_simple(q, k, v, *given, **options)
    return {f"o of flash_forward_simple, {what}": o, f"lse of flash_forward_simple, {what}": lse}


def flash_causal(package: ModuleType, seed: int) -> Observed:
    """3.4: queries before and after the keys, every place of the diagonal in a tile, rows that see no key."""
    draw = Draw(seed, "3.4")
    n, more, odd = draw.between(18, 30), draw.between(33, 45), draw.between(17, 31)
    cases = [
        ("one element", Sizes(1, 1, 1, 1, 1, 16), {}, FP32, "whole"),
        ("as many queries as keys", Sizes(2, 1, 1, more, more, 16), {}, FP32, "whole"),
        ("more keys", Sizes(1, 2, 2, n, more + 16, odd), {}, FP32, "heads"),
        ("more queries", Sizes(1, 2, 1, more + 5, n, odd), {}, FP32, "whole"),
        ("many more queries", Sizes(1, 1, 1, more + 32, 3, 16), {}, FP32, "whole"),
        ("a negative scale", Sizes(1, 1, 1, more, more, 16), {"scale": -0.4}, FP32, "padded"),
        ("shared heads", Sizes(1, 4, 2, more, more, 16), {}, FP16, "whole"),
        ("more queries", Sizes(1, 1, 1, more, n, 64), {}, BF16, "whole"),
    ]
    observed = Observed()
    for what, sizes, options, dtype, layout in cases:
        q, k, v, _ = _inputs(draw, sizes, dtype, layout)
        observed |= _forward(package, f"causal, {_case(what, dtype, layout)}", q, k, v, True, **options)
    outputs = []
    for offset in range(-8, 8):
        q, k, v, _ = _inputs(draw, Sizes(1, 1, 1, 34, 34 + offset, 16))
        outputs.append(list(package.flash_forward(q, k, v, True)))
    observed["o and lse of flash_forward, causal, 16 numbers of keys"] = outputs
    return observed


# ---- 3.5
def delta(package: ModuleType, seed: int) -> Observed:
    """3.5: every layout, o and dO with different strides, dtypes whose product needs float32, the gradient of L."""
    draw = Draw(seed, "3.5")
    n, odd = draw.between(18, 40), draw.between(17, 60)
    cases = [
        ("one element", (1, 1, 1, 16), FP32, "whole", "whole"),
        ("", (2, 3, n, odd), FP32, "whole", "padded"),
        ("heads last", (2, 3, n, 16), FP32, "whole", "heads"),
        ("", (1, 2, n, odd), FP16, "transposed", "whole"),
        ("", (1, 2, n, 64), BF16, "whole", "strided"),
    ]
    observed = Observed()
    for what, shape, dtype, of_o, of_do in cases:
        o, do = _laid_out(draw.normal(*shape, dtype=dtype), of_o), _laid_out(draw.normal(*shape, dtype=dtype), of_do)
        layout = "heads" if "heads" in (of_o, of_do) else of_do
        observed[f"attention_delta, dO being {_case(what, dtype, layout)}"] = package.attention_delta(o, do)
    o, do = normal(draw, 1, 2, n, 16), normal(draw, 1, 1, 1, 1).expand(1, 2, n, 16)
    observed["attention_delta where dO has strides of 0"] = package.attention_delta(o, do)
    dlse, do = normal(draw, 1, 2, n), normal(draw, 1, 2, n, 16)
    observed["attention_delta with dlse and blind queries"] = package.attention_delta(o, do, dlse, draw.between(2, 9))
    return observed


# ---- 3.6 and 3.7
def _backward_cases(draw: Draw) -> list[tuple[str, Sizes, bool, float, torch.dtype, str]]:
    n, more, odd = draw.between(18, 30), draw.between(33, 45), draw.between(17, 31)
    few, scale = draw.between(3, 13), draw.random.uniform(0.15, 0.4)
    return [
        ("one element", Sizes(1, 1, 1, 1, 1, 16), False, 0.25, FP32, "whole"),
        ("whole tiles", Sizes(1, 1, 1, 32, 32, 16), False, scale, FP32, "whole"),
        ("causal, more queries", Sizes(1, 2, 1, more + 5, n, 16), True, scale, FP32, "whole"),
        ("", Sizes(1, 2, 2, n, more, odd), False, scale, FP32, "whole"),
        ("shared heads", Sizes(1, 4, 2, n, n, 16), False, scale, FP32, "heads"),
        ("a negative scale", Sizes(1, 1, 1, more, n, 16), False, -scale, FP32, "padded"),
        ("each its own strides", Sizes(1, 2, 2, n, n, 16), False, scale, FP32, "mixed"),
        ("causal", Sizes(1, 2, 1, more, more, 16), True, scale, FP32, "whole"),
        ("causal, more keys", Sizes(1, 1, 1, n, more + 16, odd), True, scale, FP32, "mixed"),
        ("causal, whole tiles of queries", Sizes(1, 1, 1, 48, 48 + few, 16), True, scale, FP32, "whole"),
        ("", Sizes(1, 2, 1, n, more, odd), False, scale, FP16, "transposed"),
        ("causal", Sizes(2, 1, 1, more, more, 16), True, scale, BF16, "whole"),
    ]


def _statistics(draw: Draw, given: Inputs, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What a backward kernel is handed: the logsumexp of each row of scores, and any delta; float32, contiguous."""
    q, k = given.q.double(), given.k.double()
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(hidden.triu(k.shape[2] - q.shape[2] + 1), -torch.inf)
    lse = placed(torch.logsumexp(scores, -1).float())
    blind = max(0, q.shape[2] - k.shape[2]) if causal else 0
    numbers = draw.normal(*q.shape[:3])
    numbers[:, :, :blind] = 0.0
    return lse, placed(numbers)


def flash_dkdv(package: ModuleType, seed: int) -> Observed:
    """3.6: both gradients for any lengths, shared heads, every layout, every place of the diagonal in a tile."""
    draw = Draw(seed, "3.6")
    observed = Observed()

    def both(given: Inputs, causal: bool, scale: float) -> list[torch.Tensor]:
        lse, numbers = _statistics(draw, given, causal, scale)
        return list(package.flash_dkdv(*given, lse, numbers, causal, scale))

    for what, sizes, causal, scale, dtype, layout in _backward_cases(draw):
        gradients = both(_inputs(draw, sizes, dtype, layout), causal, scale)
        case = _case(what, dtype, layout)
        observed |= {f"{name} of flash_dkdv, {case}": value for name, value in zip(("dk", "dv"), gradients)}
    observed["dk and dv of flash_dkdv, low scores"] = both(_low(_inputs(draw, Sizes(1, 1, 1, 21, 37, 16))), False, 0.25)
    observed["dk and dv of flash_dkdv, causal, 16 numbers of keys"] = [
        both(_inputs(draw, Sizes(1, 1, 1, 34, 34 + offset, 16)), True, 0.25) for offset in range(-8, 8)
    ]
    return observed


def flash_dq(package: ModuleType, seed: int) -> Observed:
    """3.7: the gradient for any lengths, shared heads, every layout, low scores, every place of the diagonal."""
    draw = Draw(seed, "3.7")
    observed = Observed()

    def gradient(given: Inputs, causal: bool, scale: float) -> torch.Tensor:
        lse, numbers = _statistics(draw, given, causal, scale)
        return package.flash_dq(*given, lse, numbers, causal, scale)

    for what, sizes, causal, scale, dtype, layout in _backward_cases(draw):
        value = gradient(_inputs(draw, sizes, dtype, layout), causal, scale)
        observed[f"dq of flash_dq, {_case(what, dtype, layout)}"] = value
    observed["dq of flash_dq, low scores"] = gradient(_low(_inputs(draw, Sizes(1, 1, 1, 21, 37, 16))), False, 0.25)
    observed["dq of flash_dq, causal, 8 numbers of keys"] = [
        gradient(_inputs(draw, Sizes(1, 1, 1, 34, 34 + offset, 16)), True, 0.25) for offset in range(-8, 8, 2)
    ]
    return observed


# ---- 3.8
def flash_attention(package: ModuleType, seed: int) -> Observed:
    """3.8: outputs and gradients from either output, a NaN that arrives where no key is seen, part of the gradients."""
    draw = Draw(seed, "3.8")
    n, few, odd = draw.between(9, 14), draw.between(2, 6), draw.between(17, 31)
    square, shared = Sizes(1, 1, 1, n, n, 16), Sizes(1, 4, 2, n, n + few, odd)
    cases = [
        ("one element", Sizes(1, 1, 1, 1, 1, 16), {}, FP32, "whole", "both"),
        ("more queries, causal", Sizes(1, 1, 1, n + few, n, 16), {"causal": True}, FP32, "whole", "nan"),
        ("a given scale", square, {"scale": draw.random.uniform(0.4, 0.9)}, FP32, "whole", "both"),
        ("a negative scale, causal", square, {"scale": -0.2, "causal": True}, FP32, "whole", "both"),
        ("more queries", Sizes(1, 1, 1, n + few, n, 16), {}, FP32, "whole", "both"),
        ("a gradient for the output", square, {}, FP32, "whole", "o"),
        ("a gradient for the logsumexp", square, {}, FP32, "heads", "lse"),
        ("more keys, causal", Sizes(1, 1, 1, n, n + few, 16), {"causal": True}, FP32, "padded", "both"),
        ("shared heads, causal", shared, {"causal": True}, FP32, "mixed", "both"),
        ("several tiles, causal", Sizes(1, 1, 1, 3 * n, 3 * n, odd), {"causal": True}, FP16, "whole", "both"),
        ("", Sizes(1, 1, 1, n, n, 16), {}, BF16, "transposed", "o"),
    ]
    observed = Observed()
    for what, sizes, options, dtype, layout, upstream in cases:
        q, k, v, do = _inputs(draw, sizes, dtype, layout)
        dlse = normal(draw, *q.shape[:3])
        if upstream == "nan":
            dlse[:, :, : sizes.Nq - sizes.Nk] = math.nan
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        o, lse = package.flash_attention_with_lse(q, k, v, **options)
        arriving = {"o": ((o,), (do,)), "lse": ((lse,), (dlse,))}.get(upstream, ((o, lse), (do, dlse)))
        gradients = torch.autograd.grad(arriving[0], (q, k, v), arriving[1])
        case = _case(what, dtype, layout)
        observed |= {f"o of flash_attention_with_lse, {case}": o, f"lse of flash_attention_with_lse, {case}": lse}
        for name, value in zip(("dq", "dk", "dv"), gradients):
            observed[f"{name} of flash_attention_with_lse, {case}"] = value
    q, k, v, _ = _inputs(draw, square)
    alone = k.detach().requires_grad_()
    o = package.flash_attention(q, alone, v, True, 0.3)
    observed["o of flash_attention"] = o
    (dk,) = torch.autograd.grad(o.sum(), alone)
    observed["dk of flash_attention where only k asks for its gradient"] = dk
    return observed


# ---- 3.9
def challenge(package: ModuleType, seed: int) -> Observed:
    """3.9: with the anchored loop: both widths, both 16-bit dtypes, causal or not, ragged, scores that outgrow it."""
    draw = Draw(seed, "3.9")
    observed = Observed()
    cases = [
        (f"{'causal, ' if causal else ''}D = {D}", Sizes(1, 2, 1, n, n, D), {"causal": causal}, dtype, 0.0)
        for dtype, D, causal in ((FP16, 64, True), (FP16, 128, False), (BF16, 64, False), (BF16, 128, True))
        for n in [draw.between(66, 100)]
    ]
    few, some = draw.between(34, 60), draw.between(65, 90)
    cases += [
        ("more keys, causal", Sizes(1, 2, 1, few, some, 16), {"causal": True}, FP32, 0.0),
        ("more queries, causal", Sizes(1, 1, 1, some + 40, few, 16), {"causal": True}, FP32, 0.0),
        ("one tile", Sizes(1, 1, 1, few, draw.between(3, 14), 16), {}, FP32, 0.0),
        ("a negative scale", Sizes(1, 1, 1, few, some, 16), {"scale": -0.3}, FP32, 0.0),
        ("scores that grow by 30", Sizes(1, 1, 1, few, some, 16), {}, FP32, 30.0),
        ("scores that grow by 88", Sizes(1, 1, 1, few, some, 16), {}, FP32, 88.0),
        ("scores that grow by 150", Sizes(1, 1, 1, few, some, 16), {}, BF16, 150.0),
        ("scores that grow by 40", Sizes(1, 1, 1, few, some, 16), {}, FP16, 40.0),
        ("large values", Sizes(1, 1, 1, few, some, 16), {}, FP32, 40.0),
        ("many scores that grow by 87", Sizes(1, 1, 1, few, some, 16), {}, FP32, 87.0),
    ]
    with anchored(importlib.import_module(f"{package.__name__}.tuning")):
        for what, sizes, options, dtype, growth in cases:
            q, k, v, _ = _inputs(draw, sizes, dtype, "heads")
            if growth:  # of the later keys' scores, for every other query
                q[..., 0] = torch.tensor([0.0, 4.0]).repeat(sizes.Nq)[: sizes.Nq]
                k[..., 0] = torch.where(torch.arange(sizes.Nk) < sizes.Nk // 2, 0.0, growth)
            if what == "large values":  # a column whose products with e^40 are no float32
                v[..., 9] = -1e35 * (1 + v[..., 9].abs())
            if what.startswith("many"):  # whose powers, and their products with values, are float32, and the sum is not
                q[..., 1:], v = 0.0, v / 1000
            o, lse = package.flash_attention_with_lse(q, k, v, **options)
            case = _case(what, dtype, "whole")
            observed |= {f"o of flash_attention_with_lse, {case}": o, f"lse of flash_attention_with_lse, {case}": lse}
        q, k, v, _ = _low(_inputs(draw, Sizes(1, 1, 1, few, some, 16)))
        o, lse = package.flash_attention_with_lse(q, k, v, False, 0.25)
        observed |= {"o of flash_attention_with_lse, low scores": o, "lse of flash_attention_with_lse, low scores": lse}
    return observed


#: Probabilities are rounded to the inputs' dtype before they are multiplied, or are not: both are right.
ATTENTION = Tolerance(absolute=1e-5, times=2)
#: Scores of -105: a float32 of that size is rounded to 1e-5, and its exponential with it.
LOW = Tolerance(relative=1e-3, absolute=1e-4)
