"""Lab 6's scaled products: as right as PyTorch's arithmetic, with exactly their traffic, and clear about refusals."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from solutions.lab6_frontiers import (
    Quantized,
    SquareBlocks,
    quantize,
    quantize_blocks,
    quantize_rows,
    scaled_matmul,
    tuning,
)
from utils import runtime
from utils.checks import tensors
from utils.kernel_profile import profile_kernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 128


def matrix(rows, columns, seed=0, spread=0.0):
    """Normal numbers; with ``spread`` rows of different magnitudes."""
    source = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(spread * torch.randn(rows, 1, generator=source))
    return (sizes * torch.randn(rows, columns, generator=source)).to(runtime.DEVICE)


#: How an operand is quantised, by the name of its scales.
SCALED = {
    "tensor": lambda x: quantize(x, "e4m3"),
    "row": lambda x: quantize(x, "e4m3", x.shape[1]),
    "block": lambda x: quantize(x, "e4m3", BLOCK),
    "square": lambda x: quantize_blocks(x, square=True),
}
PAIRS = (
    ("tensor", "tensor"),
    ("row", "row"),
    ("tensor", "row"),
    ("row", "tensor"),
    ("block", "block"),
    ("block", "square"),
)


def parts(a, b):
    """Values and scales of both operands as floating-point tensors whose scales broadcast to the values of a block."""
    rows_of_b = b.scales.repeat_interleave(b.block, 0)[: len(b.values)] if isinstance(b, SquareBlocks) else b.scales
    a_scales, b_scales = (s if s.ndim else s.reshape(1, 1) for s in (a.scales, rows_of_b))
    return a.values.float(), a_scales, b.values.float(), b_scales


def product(x, y):
    """x y^T of 8-bit numbers: in float64, or as PyTorch adds them up, on a GPU in its tensor cores."""
    if not x.is_cuda or x.dtype == torch.float64:
        return x @ y.T
    rows, columns, K = len(x), len(y), x.shape[1]
    x, y = (F.pad(each, (0, -K % 16, 0, -len(each) % 16)).to(torch.float8_e4m3fn) for each in (x, y))
    one = torch.ones((), device=x.device)
    found = torch._scaled_mm(x, y.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True)
    return found[:rows, :columns]


def in_pytorch(a, a_scales, b, b_scales, out_dtype):
    """The same arithmetic: products of 8-bit numbers added up in float32, scaled, and blocks added up."""
    groups = a_scales.shape[1]
    total = sum(
        product(x, y) * a_scales[:, [i]] * b_scales[:, [i]].T
        for i, (x, y) in enumerate(zip(a.chunk(groups, 1), b.chunk(groups, 1)))
    )
    return total if total.dtype == torch.float64 else total.to(out_dtype)


def excess(number):
    """How far a random product is beyond twice the error of PyTorch, as text; empty where it is within."""
    draw = random.Random(f"scaled product {number}")
    kinds = PAIRS[number % len(PAIRS)]
    out_dtype = draw.choice(DTYPES)
    M, N, K = draw.randint(1, 90), draw.randint(1, 150), draw.randint(1, 200)
    if "block" in kinds:
        K = BLOCK * draw.randint(1, 4)
    elif draw.random() < 0.5:
        K = -(-K // 16) * 16
    x, y = (matrix(rows, K, draw.getrandbits(32), draw.choice((0.0, 1.0))) for rows in (M, N))
    a, b = (SCALED[kind](each) for kind, each in zip(kinds, (x, y)))
    (target,) = tensors.targets(lambda *args: in_pytorch(*args, out_dtype), parts(a, b))
    found = scaled_matmul(a, b, out_dtype)
    assert (tuple(found.shape), found.dtype) == (target.shape, out_dtype)
    error = float((found.double().cpu() - target.right).abs().max())
    within = error <= target.allowed
    return "" if within else f"case {number}, {kinds}, {(M, N, K)}, {out_dtype}: {error} > {target.allowed}"


@pytest.mark.slow
def test_random_ragged_products_err_no_more_than_twice_what_pytorch_does():
    assert [text for number in range(24) if (text := excess(number))] == []


@pytest.mark.thorough
def test_two_hundred_random_ragged_products_err_no_more_than_twice_what_pytorch_does():
    assert [text for number in range(200) if (text := excess(number))] == []


@pytest.mark.parametrize(("kinds", "M", "N", "K"), [(("row", "row"), 70, 50, 272), (("tensor", "tensor"), 33, 64, 77)])
def test_a_product_loads_a_band_for_each_tile_and_stores_its_result_once(kinds, M, N, K):
    a, b = (SCALED[kind](matrix(rows, K, rows)) for kind, rows in zip(kinds, (M, N)))
    tile = tuning.scaled_matmul(K % 16 == 0, torch.bfloat16, tuning.capability_of(runtime.DEVICE))
    with profile_kernel(check_races=True) as profile:
        scaled_matmul(a, b)
    assert not profile.findings, profile.report()
    bands_m, bands_n = -(-M // tile.m), -(-N // tile.n)
    loaded = {name: counters.bytes_loaded for name, counters in profile.by_argument.items() if counters.bytes_loaded}
    assert loaded == {
        "a": M * K * bands_n, "b": N * K * bands_m, "a_scale_ptr": 4 * M * bands_n, "b_scale_ptr": 4 * N * bands_m,
    }  # fmt: skip
    assert profile.by_argument["c"].bytes_stored == profile.bytes_stored == 2 * M * N


@pytest.mark.parametrize("kind", ["block", "square"])
def test_a_product_in_blocks_loads_a_scale_for_each_row_or_tile_and_block(kind):
    M, N, K = 70, 150, 384
    a, b = SCALED["block"](matrix(M, K)), SCALED[kind](matrix(N, K, 1))
    tile = tuning.block_scaled_matmul(kind == "square", tuning.capability_of(runtime.DEVICE))
    with profile_kernel(check_races=True) as profile:
        scaled_matmul(a, b, torch.float32)
    assert not profile.findings, profile.report()
    bands_m, bands_n = -(-M // tile.m), -(-N // tile.n)
    b_scales = bands_n if kind == "square" else N
    loaded = {name: counters.bytes_loaded for name, counters in profile.by_argument.items() if counters.bytes_loaded}
    assert loaded == {
        "a": M * K * bands_n, "b": N * K * bands_m,
        "a_scale_ptr": 4 * M * K // BLOCK * bands_n, "b_scale_ptr": 4 * b_scales * K // BLOCK * bands_m,
    }  # fmt: skip
    assert profile.by_argument["c"].bytes_stored == profile.bytes_stored == 4 * M * N


def test_leading_axes_and_padded_rows_are_taken_as_they_are():
    x, b = matrix(12, 256), SCALED["block"](matrix(40, 256, 1))
    flat = scaled_matmul(SCALED["block"](x), b)
    batched = scaled_matmul(SCALED["block"](x.view(3, 4, 256)), b)
    assert torch.equal(batched, flat.view(3, 4, 40))
    a = SCALED["row"](x)
    home = torch.zeros(12, 320, dtype=torch.uint8, device=x.device)
    home[:, 32:288] = a.values.view(torch.uint8)
    padded = Quantized(home.view(torch.float8_e4m3fn)[:, 32:288], a.scales, "e4m3", 256)
    b = SCALED["row"](matrix(40, 256, 1))
    assert torch.equal(scaled_matmul(padded, b), scaled_matmul(a, b))


def test_scales_in_any_strides_give_the_same_numbers():
    x, y = matrix(20, 384), matrix(30, 384, 1)
    ours, theirs = quantize_blocks(x), quantize(x, "e4m3", BLOCK)
    assert ours.scales.stride() != theirs.scales.stride()
    b = quantize_blocks(y, square=True)
    assert torch.equal(scaled_matmul(ours, b), scaled_matmul(theirs, b))
    repeated = theirs.scales[:, :1].expand(20, 3)
    expanded, copied = (Quantized(theirs.values, scales, "e4m3", BLOCK) for scales in (repeated, repeated.clone()))
    assert torch.equal(scaled_matmul(expanded, b), scaled_matmul(copied, b))


@pytest.mark.parametrize(("M", "N", "K"), [(0, 5, 16), (5, 0, 16), (3, 4, 0)])
def test_products_without_elements_are_zeros_of_the_right_shape(M, N, K):
    def empty(rows):
        return Quantized(
            torch.zeros(rows, K, device=runtime.DEVICE).to(torch.float8_e4m3fn),
            torch.ones((), device=runtime.DEVICE), "e4m3",
        )  # fmt: skip

    assert torch.equal(scaled_matmul(empty(M), empty(N)).float(), torch.zeros(M, N, device=runtime.DEVICE))


def test_what_does_not_fit_the_result_becomes_infinite_and_nan_stays_nan():
    x = matrix(4, 16) * 1000
    assert scaled_matmul(SCALED["row"](x), SCALED["row"](x), torch.float16).isinf().any()
    a = SCALED["row"](x)
    a.scales[1] = torch.nan
    found = scaled_matmul(a, SCALED["row"](x), torch.float32)
    assert found[1].isnan().all() and found[[0, 2, 3]].isfinite().all()


def test_what_cannot_be_multiplied_is_refused_by_name():
    x = matrix(4, 256)
    row, block, square = (SCALED[kind](x) for kind in ("row", "block", "square"))
    for a, b, error, message in (
        (x, row, TypeError, "a must be Quantized .*, got Tensor"),
        (row, quantize(x, "e5m2"), ValueError, "b must be in e4m3, got e5m2"),
        (row, SCALED["row"](matrix(4, 128)), ValueError, r"b must have shape \(N, 256\) .* got \(4, 128\)"),
        (row, block, ValueError, "blocks of a and b must both be 128, or each be None or K = 256, got a.block=256 and"),
        (quantize(x, "e4m3", 64), quantize(x, "e4m3", 64), ValueError, "must both be 128"),
        (square, block, ValueError, "a must have a scale for each row of a block"),
        (row, SCALED["row"](x.view(2, 2, 256)), ValueError, r"b must have shape \(N, 256\)"),
        (
            Quantized(row.values.T, row.scales[:1, 0], "e4m3", 4),
            row,
            ValueError,
            r"a.values must be contiguous along K",
        ),
        (Quantized(row.values, row.scales[:2], "e4m3", 256), row, ValueError, r"a.scales must have shape \(4, 1\)"),
        (
            Quantized(row.values, row.scales.half(), "e4m3", 256),
            row,
            TypeError,
            "a.scales must be float32, got float16",
        ),
    ):
        with pytest.raises(error, match=message):
            scaled_matmul(a, b)
    with pytest.raises(TypeError, match=r"out_dtype must be torch\.float32, float16 or bfloat16, got torch\.int8"):
        scaled_matmul(row, row, torch.int8)


def test_rows_of_quantising_kernels_go_into_a_product():
    x, y = matrix(33, 96), matrix(20, 96, 1)
    found = scaled_matmul(quantize_rows(x), quantize_rows(y), torch.float32)
    torch.testing.assert_close(found, x @ y.T, rtol=0.1, atol=1.5)
