"""Lab 6: the exercises' functions against what they simplify, and what their checks are held against."""

from __future__ import annotations

import pytest
import torch
from parameters import thorough_but

from solutions.lab6_frontiers import (
    block_scaled_matmul,
    block_scaled_simple,
    encode,
    fp8_decode,
    fp8_decode_simple,
    int4_linear,
    int4_simple,
    paged_attention_decode,
    scaled_matmul,
)
from solutions.lab6_frontiers.exercises.formats import FORMATS, encoded, numbers
from solutions.lab6_frontiers.fp8_cache import Fp8Cache, quantize_cache
from utils import formats, runtime
from utils.compile_only import Request, resource_usages

every_format = pytest.mark.parametrize("format", FORMATS)


# ---- 6.1: codes
def magnitudes(format: str) -> torch.Tensor:
    """Every number of a format, the middles, what lies next to them, random numbers of all sizes; both signs."""
    values = numbers(format).float()
    middle = (values[1:] + values[:-1]) / 2
    ends = torch.tensor([0.0, torch.inf])
    beside = [middle.nextafter(end) for end in ends]
    source = torch.Generator().manual_seed(1)
    drawn = torch.randn(5000, generator=source) * torch.exp(4 * torch.randn(5000, generator=source))
    found = torch.cat([values, middle, *beside, drawn.abs(), torch.tensor([1e-45, 1e38, torch.inf])])
    return torch.cat([found, -found])


@every_format
def test_the_codes_are_those_of_the_course_to_the_bit(format):
    x = magnitudes(format)
    assert torch.equal(encode(x, format), formats.encode(x, format))
    assert torch.equal(encode(x.bfloat16()[:, None], format), formats.encode(x.bfloat16()[:, None], format))


@every_format
def test_the_right_codes_of_the_check_are_those_of_the_course_to_the_bit(format):
    x = magnitudes(format)
    assert torch.equal(encoded(x, format=format), formats.encode(x, format))
    codes = torch.arange(len(numbers(format)), dtype=torch.uint8)
    assert torch.equal(numbers(format).float(), formats.decode(codes, format))


def test_what_is_no_number_has_a_code_in_e4m3_alone():
    x = torch.tensor([1.0, torch.nan])
    assert encode(x, "e4m3").tolist() == [0x38, 0x7F] == encoded(x, format="e4m3").tolist()
    with pytest.raises(ValueError, match="e2m1 has no code for NaN, and x holds 1 of 2"):
        encode(x, "e2m1")


@pytest.mark.parametrize(
    ("x", "format", "error", "says"),
    [
        (torch.zeros(2, dtype=torch.int32), "e4m3", TypeError, "floating-point numbers, got torch.int32"),
        (1.0, "e4m3", TypeError, "got float"),
        (torch.zeros(2), "e5m2", ValueError, "'e4m3' or 'e2m1', got 'e5m2'"),
    ],
)
def test_other_arguments_are_refused(x, format, error, says):
    with pytest.raises(error, match=says):
        encode(x, format)


# ---- 6.2: a scale for each block
def quantised(rows: int, K: int) -> formats.Quantized:
    found = formats.quantize(torch.randn(rows, K) * torch.randn(rows, 1).exp(), "e4m3", 128)
    moved = (each.to(runtime.DEVICE) for each in (found.values, found.scales))
    return formats.Quantized(*moved, found.format, found.block)


@pytest.mark.parametrize(("M", "N"), [(1, 40), (33, 70)])
def test_the_simple_product_is_the_tuned_one(M, N):
    torch.manual_seed(M)
    a, b = quantised(M, 256), quantised(N, 256)
    found = block_scaled_matmul(a.values, a.scales, b.values, b.scales)
    assert torch.equal(found, scaled_matmul(a, b))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda a, s: (a.float(), s), TypeError, "a must be a tensor of torch.float8_e4m3fn"),
        (lambda a, s: (a, s.double()), TypeError, "a_scales must be a tensor of torch.float32"),
        (lambda a, s: (a[:, :100], s), ValueError, "a must have rows of a multiple of 128"),
        (lambda a, s: (a, s[:, :1]), ValueError, r"a_scales must have shape \(4, 2\)"),
        (lambda a, s: (a[:, :128], s[:, :1].contiguous()), ValueError, "b must have a's K = 128 columns"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, error, says):
    x, scales = torch.zeros(4, 256, device=runtime.DEVICE), torch.ones(4, 2, device=runtime.DEVICE)
    x = x.to(torch.float8_e4m3fn)
    with pytest.raises(error, match=says):
        block_scaled_matmul(*change(x, scales), x, scales)


# ---- 6.3: weights of 4 bits
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_the_product_is_that_of_the_dequantised_weight(rows):
    torch.manual_seed(rows)
    weight = formats.quantize(torch.randn(37, 256), "int4", 128)
    x = torch.randn(rows, 256).half()
    found = int4_linear(*(each.to(runtime.DEVICE) for each in (x, weight.values, weight.scales))).cpu()
    right = x.double() @ weight.dequantize().double().T
    assert found.shape == (rows, 37) and found.dtype == torch.float16
    assert (found.double() - right).abs().max() <= 2**-11 * right.abs().max()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda x, c, s: (x.float(), c, s), TypeError, "x must be a tensor of torch.float16 or torch.bfloat16"),
        (lambda x, c, s: (x, c.int(), s), TypeError, "codes must be a tensor of torch.uint8"),
        (lambda x, c, s: (x, c[:, ::2], s), ValueError, "codes must have shape .* and be contiguous"),
        (lambda x, c, s: (x.repeat(40, 1), c, s), ValueError, r"1 to 64 rows .* got shape \(80, 256\)"),
        (lambda x, c, s: (x, c, s[:, :1].contiguous()), ValueError, r"scales must have shape \(8, 2\)"),
        (lambda x, c, s: (x[0], c, s), ValueError, "x must have 2 axes"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, error, says):
    x, codes, scales = torch.zeros(2, 256).half(), torch.zeros(8, 128, dtype=torch.uint8), torch.ones(8, 2)
    with pytest.raises(error, match=says):
        int4_linear(*change(*(each.to(runtime.DEVICE) for each in (x, codes, scales))))


# ---- 6.4: a cache of 8 bits
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_over_the_cache_is_the_tuned_one(dtype):
    torch.manual_seed(4)
    k, v = torch.randn(6, 16, 2, 24), torch.randn(6, 16, 2, 24)
    cache = Fp8Cache(*(each.to(runtime.DEVICE) for each in quantize_cache(k, v)))
    q = torch.randn(3, 4, 24).to(runtime.DEVICE, dtype)
    tables = torch.tensor([[4, 1, 0], [2, 5, 0], [3, 0, 0]], dtype=torch.int32, device=runtime.DEVICE)
    lens = torch.tensor([35, 17, 0], dtype=torch.int32, device=runtime.DEVICE)
    found = fp8_decode(q, *cache, tables, lens)
    tuned = paged_attention_decode(q, cache.keys, cache.values, tables, lens, cache.k_scale, cache.v_scale)
    assert torch.allclose(found.float(), tuned.float(), atol=2 * torch.finfo(dtype).eps)
    assert not found[2].any()


@pytest.mark.parametrize(
    ("name", "change", "error", "says"),
    [
        ("q", torch.Tensor.float, TypeError, "q must be a tensor of torch.float16 or torch.bfloat16"),
        ("q", lambda x: x[:, :3].contiguous(), ValueError, r"q of shape \(2, 3, 16\) does not go with caches"),
        ("v_cache", lambda x: x[:, :, :1], ValueError, "k_cache and v_cache must have shape"),
        ("v_scale", lambda x: x[:1], ValueError, r"v_scale must have shape \(3, 2\)"),
        ("block_tables", torch.Tensor.long, TypeError, "block_tables must be a tensor of torch.int32"),
        ("context_lens", lambda x: x[:1], ValueError, r"context_lens must have shape \(2,\)"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(name, change, error, says):
    zeros = torch.zeros(3, 4, 2, 16).to(torch.float8_e4m3fn)
    given = {
        "q": torch.zeros(2, 4, 16).half(), "k_cache": zeros, "v_cache": zeros,
        "k_scale": torch.ones(3, 2), "v_scale": torch.ones(3, 2),
        "block_tables": torch.zeros(2, 1, dtype=torch.int32), "context_lens": torch.ones(2, dtype=torch.int32),
    }  # fmt: skip
    given = {key: value.to(runtime.DEVICE) for key, value in given.items()}
    with pytest.raises(error, match=says):
        fp8_decode(**given | {name: change(given[name])})


@pytest.mark.slow
@pytest.mark.parametrize("architecture", thorough_but((80, 90, 100), 90))
def test_the_kernels_compile_for_every_architecture_that_has_their_types_and_spill_nothing(architecture):
    int4 = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*fp32", "o_ptr": "*bf16"}
    blocks = {
        "a_ptr": "*fp8e4nv",
        "b_ptr": "*fp8e4nv",
        "a_scales_ptr": "*fp32",
        "b_scales_ptr": "*fp32",
        "c_ptr": "*bf16",
    }
    sizes = dict.fromkeys(("M", "N", "K"), "i32")
    requests = [
        Request(
            int4_simple.int4_linear_kernel, int4 | sizes | {"stride_xm": "i32"},
            {"stride_xk": 1, "BLOCK_M": rows, "BLOCK_N": 32}, capability, divisible_by_16=(*int4, "K", "stride_xm"),
        )
        for rows, capability in ((64, 80), (16, 90), (64, 90), (64, 100))
    ] + [
        Request(
            block_scaled_simple.block_scaled_kernel, blocks | sizes | {"stride_a": "i32", "stride_b": "i32"},
            {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 128}, capability, num_warps=8,
            divisible_by_16=(*blocks, "K", "stride_a", "stride_b"),
        )
        for capability in (90, 100)
    ]  # fmt: skip
    cache = dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*fp8e4nv") | {"q_ptr": "*bf16", "o_ptr": "*bf16"}
    cache |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32")
    cache |= dict.fromkeys(("block_tables_ptr", "context_lens_ptr"), "*i32")
    strides = dict.fromkeys(("stride_k", "stride_v"), ("i32:16", "i32:16", "i32:16", 1))
    requests += [
        Request(
            fp8_decode_simple.fp8_decode_kernel, cache | strides | {"max_blocks": "i32", "scale_log2": "fp32"},
            {"GROUP": 4, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_SIZE": 16, "HEAD_DIM": D, "BLOCK_D": D}, capability,
            divisible_by_16=tuple(cache),
        )
        for D, capability in ((128, 90), (128, 100), (64, 90))
    ]  # fmt: skip
    requests = [asked for asked in requests if asked.capability == architecture]
    assert requests and not any(used.spills for used in resource_usages(requests))
