"""Lab 6's quantising kernels: to the bit what utils.formats gives, alone and fused, with the least traffic."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from solutions import lab2_triton_kernels
from solutions.lab5_serving.fused_layers import silu_and_multiply
from solutions.lab6_frontiers import (
    SquareBlocks,
    quantize,
    quantize_blocks,
    quantize_rows,
    rms_norm_quantized,
    swiglu_quantized,
)
from utils import runtime
from utils.checks import cases
from utils.kernel_profile import profile_kernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = ("e4m3", "e5m2", "int8")
BLOCK = 128


def draw(*shape, dtype=torch.float32, seed=0):
    """Numbers of many magnitudes; the first row is zeros."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=source) * torch.exp2(2 * torch.randn(shape, generator=source))
    values.view(-1, shape[-1])[0] = 0
    return values.to(dtype).to(runtime.DEVICE)


def assert_same(found, right):
    """Equal to the bit: codes, scales and what describes them."""
    assert (found.format, found.block) == (right.format, right.block)
    assert found.values.dtype == right.values.dtype and found.scales.shape == right.scales.shape
    assert torch.equal(found.values.cpu().view(torch.uint8), right.values.view(torch.uint8))
    assert torch.equal(found.scales.cpu(), right.scales)


def right(x, format, block):
    """What utils.formats gives, on a CPU: PyTorch divides by a number in another way on a GPU."""
    return quantize(x.cpu(), format, block)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_those_of_the_definition(dtype, format):
    for shape in ((1, 1), (5, 384), (3, 100), (2, 3, 256)):
        x = draw(*shape, dtype=dtype)
        assert_same(quantize_rows(x, format), right(x, format, shape[-1]))
        if shape[-1] % BLOCK == 0:
            assert_same(quantize_blocks(x, format=format), right(x, format, BLOCK))


@pytest.mark.parametrize("format", FORMATS)
def test_ties_and_every_exponent_are_rounded_as_the_definition_does(format):
    ties = torch.arange(-255, 256) / 2.0
    exponents = torch.exp2(torch.arange(-149, 128).float())
    for x in (
        ties * 127 / 127.5,
        torch.cat((ties, exponents[130:160])),
        exponents,
        exponents[:20],
        1.9 * exponents[:3],
    ):
        x = x[None].to(runtime.DEVICE)
        assert_same(quantize_rows(x, format), right(x, format, x.shape[1]))


@pytest.mark.parametrize("layout", ["transposed", "padded", "strided", "offset", "expanded", "far"])
def test_every_layout_gives_the_same_codes(layout):
    x = draw(3, 256, dtype=torch.float16)
    turned = cases.with_layout(x, layout)
    x = turned.contiguous()
    assert_same(quantize_rows(turned), right(x, "e4m3", 256))
    assert_same(quantize_blocks(turned), right(x, "e4m3", BLOCK))
    squares, expected = quantize_blocks(turned, square=True), quantize_blocks(x, square=True)
    assert torch.equal(squares.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize(("N", "K"), [(256, 128), (300, 256), (5, 384)])
def test_a_square_has_the_scale_of_its_largest_number(N, K):
    x = draw(N, K)
    found = quantize_blocks(x, square=True)
    assert isinstance(found, SquareBlocks)
    padded = F.pad(x.cpu(), (0, 0, 0, -N % BLOCK))
    squares = padded.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK)).transpose(1, 2)  # (N/128, K/128, 128, 128)
    expected = quantize(squares.flatten(2), "e4m3", BLOCK * BLOCK)
    codes = expected.values.view(torch.uint8).unflatten(-1, (BLOCK, BLOCK)).transpose(1, 2).reshape(padded.shape)[:N]
    assert torch.equal(found.values.cpu().view(torch.uint8), codes)
    assert torch.equal(found.scales.cpu(), expected.scales.squeeze(-1))
    numbers = expected.dequantize().unflatten(-1, (BLOCK, BLOCK)).transpose(1, 2).reshape(padded.shape)[:N]
    assert torch.equal(found.dequantize().cpu(), numbers)


@pytest.mark.parametrize("format", ["e4m3", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_with_rms_norm_the_codes_are_those_of_its_result(dtype, format):
    for shape, block in (((4, 384), None), ((4, 384), BLOCK), ((2, 3, 100), None), ((1, 128), BLOCK)):
        x, weight = draw(*shape, dtype=dtype), draw(2, shape[-1], dtype=dtype, seed=1)[1]
        y = lab2_triton_kernels.rms_norm(x, weight)
        found, expected = (
            rms_norm_quantized(x, weight, format=format, block=block),
            right(y, format, block or shape[-1]),
        )
        if runtime.INTERPRET or dtype != torch.float32:
            assert_same(found, expected)
        else:  # the two kernels sum a row's squares in different orders
            torch.testing.assert_close(found.scales.cpu(), expected.scales, rtol=1e-6, atol=0)
            torch.testing.assert_close(found.dequantize().cpu(), y.cpu(), rtol=2**-4, atol=float(expected.scales.max()))
        torch.testing.assert_close(y, F.rms_norm(x, weight.shape, weight, 1e-6))


@pytest.mark.parametrize("format", ["e4m3", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_with_swiglu_the_codes_are_those_of_its_result(dtype, format):
    for shape, block in (((4, 768), None), ((4, 768), BLOCK), ((2, 3, 200), None), ((1, 256), BLOCK)):
        x = draw(*shape, dtype=dtype)
        y = silu_and_multiply(x.view(-1, shape[-1])).view(*shape[:-1], -1)
        assert_same(swiglu_quantized(x, format, block), right(y, format, block or shape[-1] // 2))
        gate, up = x.chunk(2, -1)
        torch.testing.assert_close(y, F.silu(gate) * up)


def test_every_number_is_read_once_and_every_code_and_scale_written_once():
    x = draw(6, 640, dtype=torch.bfloat16)
    weight = draw(2, 640, dtype=torch.bfloat16)[1]
    for function, columns, more in (
        (lambda block: quantize_blocks(x) if block else quantize_rows(x), 640, 0),
        (lambda block: rms_norm_quantized(x, weight, block=block), 640, 2 * 640),
        (lambda block: swiglu_quantized(x[:, :512], block=block), 256, 0),
    ):
        for block in (None, BLOCK):
            with profile_kernel(check_races=True) as profile:
                function(block)
            assert not profile.findings, profile.report()
            counts = profile.by_argument
            assert counts["x_ptr"].bytes_loaded == (2 * 6 * 512 if columns == 256 else 2 * 6 * columns)
            programs = len(profile.by_program)
            assert profile.bytes_loaded - counts["x_ptr"].bytes_loaded == more * programs  # the weight, each program
            assert counts["codes_ptr"].bytes_stored == 6 * columns
            assert counts["scales_ptr"].bytes_stored == 4 * 6 * (columns // BLOCK if block else 1)
            assert profile.bytes_stored == counts["codes_ptr"].bytes_stored + counts["scales_ptr"].bytes_stored


def test_squares_are_read_once_too():
    x = draw(200, 256, dtype=torch.bfloat16)
    with profile_kernel(check_races=True) as profile:
        quantize_blocks(x, square=True)
    assert not profile.findings, profile.report()
    assert (profile.bytes_loaded, profile.bytes_stored) == (2 * x.numel(), x.numel() + 4 * 2 * 2)


def test_what_cannot_be_quantised_is_refused_by_name():
    x, weight = draw(4, 256), draw(2, 256)[1]
    for function, error, message in (
        (lambda: quantize_rows(x.int()), TypeError, "x must be float32, float16 or bfloat16, got int32"),
        (lambda: quantize_rows(3), TypeError, "x must be a torch.Tensor, got int"),
        (lambda: quantize_rows(x[:0]), ValueError, r"x must hold at least one number, got shape \(0, 256\)"),
        (lambda: quantize_rows(x, "e2m1"), ValueError, "format must be one of e4m3, e5m2, int8, got 'e2m1'"),
        (lambda: quantize_rows(x[:, :1].expand(4, 40_000)), ValueError, "at most 16,384 columns, got 40,000"),
        (lambda: quantize_blocks(x[:, :100]), ValueError, "block must divide the last axis, got block=128 for 100"),
        (lambda: quantize_blocks(x, 64), ValueError, "block must be 128, got 64"),
        (lambda: quantize_blocks(x[None], square=True), ValueError, r"x must have shape \(N, K\) for square blocks"),
        (lambda: rms_norm_quantized(x, weight[:9]), ValueError, r"weight must have shape \(256,\), .* got \(9,\)"),
        (lambda: rms_norm_quantized(x, weight.half()), ValueError, "x's dtype float32 .* got .*float16"),
        (lambda: swiglu_quantized(x[:, :9]), ValueError, "gate_up must have an even last axis"),
        (lambda: quantize_rows(x.clone().requires_grad_()), RuntimeError, "quantize_rows has no backward pass"),
    ):
        with pytest.raises(error, match=message):
            function()
