"""Hidden scenarios of lab 2: its kernels on sizes, views and dtypes that no release holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch

from utils import runtime
from utils.checks.hidden import Draw, Observed, Tolerance, normal, placed, words

import triton  # isort: skip
import triton.language as tl  # isort: skip

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def gelu(package: ModuleType, seed: int) -> Observed:
    """2.1: any number of axes, rows longer than any tile, every layout, values for which a tanh overflows."""
    draw = Draw(seed, "2.1")
    cases = [
        ("one element", (1,), FP32, "whole", 1.0),
        ("no axes", (), FP32, "whole", 1.0),
        ("one axis", (draw.between(1100, 4500),), FP32, "whole", 1.0),
        ("one axis", (draw.between(1100, 4500),), FP16, "strided", 1.0),
        ("short rows", (draw.between(3, 9), draw.between(3, 60)), FP32, "padded", 1.0),
        ("long rows", (draw.between(2, 4), draw.between(1030, 2500)), BF16, "strided", 1.0),
        ("", (draw.between(20, 50), draw.between(20, 50)), FP32, "transposed", 1.0),
        ("long rows", (2, draw.between(3, 4), draw.between(1025, 1300)), FP32, "turned", 1.0),
        ("four axes", (2, 3, draw.between(2, 5), draw.between(5, 30)), FP16, "turned", 1.0),
        ("large values", (draw.between(2000, 3000),), FP32, "whole", 40.0),
        ("no element", (0, 7), FP32, "whole", 1.0),
    ]
    return _each("gelu", package.gelu, draw, cases)


def _each(name: str, function: Callable[..., torch.Tensor], draw: Draw, cases: Sequence[tuple]) -> Observed:
    """What a function of one tensor gives for each case: words, shape, dtype, layout and scale."""
    observed = Observed()
    for what, shape, dtype, layout, scale in cases:
        x = normal(draw, *shape, dtype=dtype, layout=layout, scale=scale)
        observed[f"{name} of {_case(what, dtype, layout)}"] = function(x)
    return observed


def _case(what: str, dtype: torch.dtype, layout: str) -> str:
    return words(*([what] if what else []), dtype=dtype, layout=layout)


def _rows(draw: Draw) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Words, the layout, a tensor with rows and a vector as long as one: ragged, tall, every layout and dtype."""
    cases = [
        ("one element", (1, 1), FP32, "whole"),
        ("one row", (draw.between(300, 900),), FP32, "whole"),
        ("one column", (draw.between(5, 40), 1), FP32, "whole"),
        ("", (draw.between(5, 30), draw.between(260, 700)), FP32, "padded"),
        ("", (draw.between(5, 30), draw.between(30, 300)), FP16, "strided"),
        ("", (draw.between(5, 30), draw.between(30, 300)), BF16, "whole"),
        ("", (draw.between(9, 30), draw.between(9, 30)), FP32, "transposed"),
        ("", (3, draw.between(4, 9), draw.between(17, 60)), FP32, "turned"),
        ("tall", (draw.between(500, 1500), draw.between(3, 9)), FP32, "whole"),
    ]
    for what, shape, dtype, layout in cases:
        x = normal(draw, *shape, dtype=dtype, layout=layout)
        step = "strided" if layout in ("padded", "turned") else "whole"
        yield _case(what, dtype, layout), layout, x, normal(draw, shape[-1], dtype=dtype, layout=step)


def _with_gradients(
    function: Callable[..., torch.Tensor], x: torch.Tensor, vector: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The output of a function of (x, vector), and both gradients."""
    x, vector = x.detach().requires_grad_(), vector.detach().requires_grad_()
    out = function(x, vector)
    return out.detach(), *torch.autograd.grad(out, (x, vector), dout)


def bias_relu(package: ModuleType, seed: int) -> Observed:
    """2.2: the output and both gradients, for every layout, a bias with a step, and a dout of stride 0."""
    draw = Draw(seed, "2.2")
    observed = Observed()
    for case, layout, x, bias in _rows(draw):
        dout = normal(draw, *x.shape, dtype=x.dtype, layout="whole" if layout == "transposed" else layout)
        for name, value in zip(("", "dx", "dbias"), _with_gradients(package.bias_relu, x, bias, dout)):
            observed[f"{name + ' of ' if name else ''}bias_relu of {case}"] = value
    x, bias = normal(draw, draw.between(5, 20), draw.between(20, 40)), normal(draw, 1)
    dout = normal(draw, 1).expand(x.shape)
    results = _with_gradients(package.bias_relu, x, bias.expand(x.shape[1]), dout)
    observed["dx of bias_relu where dout has stride 0"], observed["dbias of bias_relu where dout has stride 0"] = (
        results[1:]
    )
    return observed


def weighted_sum(package: ModuleType, seed: int) -> Observed:
    """2.3: every layout, a weight with a step, rows that cancel."""
    draw = Draw(seed, "2.3")
    observed = Observed()
    for case, _, x, weight in _rows(draw):
        observed[f"weighted_sum of {case}"] = package.weighted_sum(x, weight)
    for dtype in (FP16, BF16):
        x, weight = _drifting(draw, draw.between(6, 9), draw.between(2100, 2900), dtype)
        observed[f"weighted_sum of rows whose halves cancel, {words(dtype=dtype)}"] = package.weighted_sum(x, weight)
    return observed


def _drifting(draw: Draw, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights whose partial sums grow to a hundred times the sum: it takes float32 to add them up."""
    x = draw.normal(rows, columns).abs()
    half = columns // 2
    x[:, half : 2 * half] = -x[:, :half]
    weight = draw.normal(columns).abs() + 4
    weight[half : 2 * half] = weight[:half]
    x[:, -1] = draw.normal(rows) * 9
    return placed(x.to(dtype)), placed(weight.to(dtype))


def weighted_sum_backward(package: ModuleType, seed: int) -> Observed:
    """2.4: both gradients, a dout with gaps, and one gradient without the other."""
    draw = Draw(seed, "2.4")
    observed = Observed()
    for case, _, x, weight in _rows(draw):
        dout = normal(draw, *x.shape[:-1], dtype=x.dtype, layout="strided" if x.dim() == 2 else "whole")
        _, dx, dweight = _with_gradients(package.weighted_sum, x, weight, dout)
        observed[f"dx of weighted_sum of {case}"], observed[f"dweight of weighted_sum of {case}"] = dx, dweight
    x, weight = normal(draw, draw.between(9, 40), draw.between(9, 40)), normal(draw, 1)
    weight = weight.expand(x.shape[1])
    alone = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(package.weighted_sum(alone, weight).sum(), alone)
    observed["dx of weighted_sum where only x asks for its gradient"] = dx
    alone = weight.detach().requires_grad_()
    (dweight,) = torch.autograd.grad(package.weighted_sum(x, alone).sum(), alone)
    observed["dweight of weighted_sum where only the weight asks for its gradient"] = dweight
    return observed


def softmax(package: ModuleType, seed: int) -> Observed:
    """2.5: rows that fit, of every width and layout, with large values, -inf and equal values."""
    draw = Draw(seed, "2.5")
    cases = [
        ("one element", (1, 1), FP32, "whole", 1.0),
        ("one row", (draw.between(1030, 2040),), FP32, "whole", 1.0),
        ("one column", (draw.between(5, 40), 1), FP32, "whole", 1.0),
        ("", (draw.between(60, 150), draw.between(17, 31)), FP32, "padded", 1.0),
        ("", (draw.between(5, 20), draw.between(130, 250)), FP16, "strided", 1.0),
        ("", (draw.between(5, 20), draw.between(130, 250)), BF16, "whole", 3.0),
        ("", (draw.between(9, 30), draw.between(9, 30)), FP32, "transposed", 1.0),
        ("", (3, draw.between(4, 9), draw.between(17, 60)), FP32, "turned", 1.0),
        ("rows of 64", (draw.between(17, 40), 64), FP32, "whole", 1.0),
        ("large values", (draw.between(3, 9), draw.between(40, 90)), FP32, "whole", 200.0),
        ("no row", (0, 7), FP32, "whole", 1.0),
    ]
    observed = _each("softmax", package.softmax, draw, cases)
    low = normal(draw, draw.between(5, 9), draw.between(33, 60)) - 90  # a lane that counts as 0 is the maximum
    observed["softmax of rows far below 0"] = package.softmax(low)
    masked = normal(draw, draw.between(5, 9), draw.between(33, 60))
    masked[:, : draw.between(3, 20)] = -torch.inf
    observed["softmax of rows that begin with -inf"] = package.softmax(masked)
    return observed


def online_softmax(package: ModuleType, seed: int) -> Observed:
    """2.6: rows of one block and of many, rising and falling, beginning or ending with -inf."""
    draw = Draw(seed, "2.6")
    cases = [
        ("one element", (1, 1), FP32, "whole", 1.0),
        ("short rows", (draw.between(3, 9), draw.between(17, 60)), FP32, "padded", 1.0),
        ("rows of 1024", (3, 1024), FP32, "whole", 1.0),
        ("long rows", (draw.between(2, 4), draw.between(4100, 6000)), FP32, "whole", 2.0),
        ("long rows", (3, draw.between(1100, 3000)), FP16, "strided", 2.0),
        ("long rows", (3, draw.between(1100, 3000)), BF16, "padded", 2.0),
        ("long rows", (2, 3, draw.between(1100, 2000)), FP32, "turned", 1.0),
        ("long rows", (2, draw.between(1100, 2000)), FP32, "transposed", 1.0),
        ("large values", (3, draw.between(2100, 3000)), FP32, "whole", 200.0),
        ("no row", (0, 7), FP32, "whole", 1.0),
    ]
    observed = _each("online_softmax", package.online_softmax, draw, cases)
    columns = draw.between(5200, 7000)
    slope = torch.linspace(0, draw.between(20, 60), columns, device=runtime.DEVICE)
    x = normal(draw, 2, columns)
    observed["online_softmax of rising rows"] = package.online_softmax(x + slope)
    observed["online_softmax of falling rows"] = package.online_softmax(x - slope)
    begin, end = x.clone(), x.clone()
    begin[:, : columns - draw.between(3, 900)] = -torch.inf
    end[:, draw.between(3, 900) :] = -torch.inf
    observed["online_softmax of rows that begin with -inf"] = package.online_softmax(begin)
    observed["online_softmax of rows that end with -inf"] = package.online_softmax(end)
    low = normal(draw, 2, draw.between(1100, 3000)) - 90
    observed["online_softmax of rows far below 0"] = package.online_softmax(low)
    return observed


def tiled_matmul(package: ModuleType, seed: int) -> Observed:
    """2.7: ragged tiles, every layout of both operands, one row or column, long sums that cancel."""
    draw = Draw(seed, "2.7")

    def side() -> int:
        return draw.between(33, 75)

    cases = [
        ("one element", (1, 1, 1), FP32, "whole", "whole"),
        ("one row and column", (1, draw.between(40, 90), 1), FP32, "whole", "whole"),
        ("one step", (side(), 1, side()), FP32, "whole", "whole"),
        ("", (side(), side(), side()), FP32, "padded", "transposed"),
        ("", (side(), side(), side()), FP16, "transposed", "strided"),
        ("", (side(), side(), side()), BF16, "strided", "padded"),
        ("whole tiles", (64, 96, 128), FP32, "whole", "whole"),
    ]
    observed = Observed()
    for what, (m, k, n), dtype, of_a, of_b in cases:
        a, b = normal(draw, m, k, dtype=dtype, layout=of_a), normal(draw, k, n, dtype=dtype, layout=of_b)
        pair = _case(what, dtype, of_a) + (f", with b {words(dtype=dtype, layout=of_b)}" if of_a != of_b else "")
        observed[f"tiled_matmul of {pair}"] = package.tiled_matmul(a, b)
    for dtype in (FP16, BF16):
        a, b = _cancelling(draw, draw.between(5, 30), 512, draw.between(5, 30), dtype)
        observed[f"tiled_matmul of long sums that cancel, {words(dtype=dtype)}"] = package.tiled_matmul(a, b)
    return observed


def _cancelling(draw: Draw, m: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands whose partial sums along K grow to hundreds of times the product."""
    a, b = draw.normal(m, k).abs() + 2, draw.normal(k, n).abs() + 2
    half = k // 2
    a[:, half:] = -a[:, :half]
    b[half:] = b[:half]
    a[:, -1] += draw.normal(m) * 4
    return placed(a.to(dtype)), placed(b.to(dtype))


# The function that the kernel below asks; a kernel sees the globals of its module.
_grouped_tile: Callable | None = None


@triton.jit
def order_kernel(out_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile ``program_id(0)`` as the student's ``grouped_tile`` gives them."""
    pid = tl.program_id(0)
    row, column = _grouped_tile(pid, tiles_m, tiles_n, GROUP_M)
    tl.store(out_ptr + 2 * pid, row)
    tl.store(out_ptr + 2 * pid + 1, column)


def grouped_matmul(package: ModuleType, seed: int) -> Observed:
    """2.8: the order of tiles, products in it, and products through descriptors, turned or not."""
    global _grouped_tile
    draw = Draw(seed, "2.8")
    observed = Observed()
    _grouped_tile = package.grouping.grouped_tile
    shapes = [("one tile", 1, 1, 3), ("whole groups", 6, draw.between(2, 5), 3), ("one group", 3, 4, 9)]
    shapes += [
        ("a short last group", 7, draw.between(2, 6), draw.between(2, 5)),
        ("one row in the last group", 5, 3, 4),
    ]
    for what, tiles_m, tiles_n, group in shapes:
        places = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32, device=runtime.DEVICE)
        order_kernel[(tiles_m * tiles_n,)](places, tiles_m, tiles_n, GROUP_M=group)
        observed[f"grouped_tile with {what}"] = places

    def side() -> int:
        return draw.between(33, 90)

    for dtype, group in ((FP32, 2), (FP16, 3)):
        a, b = normal(draw, 2 * side(), side(), dtype=dtype), normal(draw, side(), side(), dtype=dtype)
        b = normal(draw, a.shape[1], b.shape[1], dtype=dtype, layout="transposed")
        observed[f"tiled_matmul in groups, {words(dtype=dtype)}"] = package.tiled_matmul(a, b, group=group)

    def aligned() -> int:
        return 8 * draw.between(5, 11)

    for dtype, a_turned, b_turned in (
        (FP32, False, False),
        (FP16, True, False),
        (BF16, False, True),
        (FP32, True, True),
    ):
        m, k, n = aligned(), aligned(), aligned()
        a = normal(draw, k, m, dtype=dtype).T if a_turned else normal(draw, m, k, dtype=dtype)
        b = normal(draw, n, k, dtype=dtype).T if b_turned else normal(draw, k, n, dtype=dtype)
        turned = [name for name, is_so in (("a", a_turned), ("b", b_turned)) if is_so]
        what = f"{' and '.join(turned)} stored column by column" if turned else "operands stored row by row"
        observed[f"matmul of {what}, {words(dtype=dtype)}"] = package.matmul(a, b)
    a, b = normal(draw, 3, draw.between(9, 20), 40), normal(draw, 40, draw.between(17, 60))
    observed["matmul of an a of three axes"] = package.matmul(a, b)
    for dtype in (FP16, BF16):
        a, b = _cancelling(draw, aligned(), 512, 16, dtype)
        observed[f"matmul of long sums that cancel, {words(dtype=dtype)}"] = package.matmul(a, b)
    return observed


#: Partial sums of thousands: float32 rounds them to 1e-4, and float16 to 1.
CANCELLED = Tolerance(absolute=2e-2)
