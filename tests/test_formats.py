"""Formats of 8 and 4 bits, held against their definition bit by bit, against PyTorch's dtypes and against search."""

import math
import re

import pytest
import torch

from utils.formats import (
    BLOCKS,
    ELEMENTS,
    FORMATS,
    decode,
    encode,
    grid,
    pack,
    quantization_error,
    quantize,
    rounding_error,
    unpack,
)

SEED = 20261127
FLOATS = ("e4m3", "e5m2", "e2m1")
WITH_DTYPE = ("e4m3", "e5m2", "int8")


def generator(seed=SEED):
    return torch.Generator().manual_seed(seed)


def every_code(name):
    return torch.arange(1 << ELEMENTS[name].bits, dtype=torch.int32).to(torch.uint8)


def defined(name, code):
    """The number of a code, in Python, from its bits written as text (the tables of the two OCP specifications)."""
    if name.startswith("int"):
        bits = int(name[3:])
        return float(code - 2**bits if code >= 2 ** (bits - 1) else code)
    exponent_bits, fraction_bits = int(name[1]), int(name[3])
    text = f"{code:0{1 + exponent_bits + fraction_bits}b}"
    sign = -1.0 if text[0] == "1" else 1.0
    field, fraction = int(text[1 : 1 + exponent_bits], 2), int(text[1 + exponent_bits :], 2)
    if name == "e4m3" and text[1:] == "1111111":
        return math.nan
    if name == "e5m2" and field == 31:
        return math.nan if fraction else sign * math.inf
    bias = 2 ** (exponent_bits - 1) - 1
    if field == 0:
        return sign * 2.0 ** (1 - bias) * fraction / 2**fraction_bits
    return sign * 2.0 ** (field - bias) * (1 + fraction / 2**fraction_bits)


def same(a, b):
    """Equal, NaN beside NaN, and zeros of the same sign."""
    both_nan = a.isnan() & b.isnan()
    return bool((both_nan | ((a == b) & (a.signbit() == b.signbit()))).all())


# ---- elements --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_means_what_its_bits_say(name):
    wanted = torch.tensor([defined(name, code) for code in range(1 << ELEMENTS[name].bits)])
    assert same(decode(every_code(name), name), wanted)


@pytest.mark.parametrize("name", WITH_DTYPE)
def test_every_code_means_what_pytorch_says(name):
    codes = every_code(name)
    assert same(decode(codes, name), codes.view(ELEMENTS[name].dtype).float())


@pytest.mark.parametrize(
    ("name", "count", "smallest", "smallest_normal", "largest"),
    [
        ("e4m3", 253, 2**-9, 2**-6, 448),
        ("e5m2", 247, 2**-16, 2**-14, 57344),
        ("e2m1", 15, 0.5, 1, 6),
        ("int8", 255, 1, None, 127),
        ("int4", 15, 1, None, 7),
    ],
)
def test_the_grid_has_the_published_ends(name, count, smallest, smallest_normal, largest):
    values = grid(name)
    assert len(values) == count and torch.equal(values, -values.flip(0)) and (values.diff() > 0).all()
    assert values.max() == largest == ELEMENTS[name].largest
    assert values[values > 0].min() == smallest
    if smallest_normal is not None:
        assert 2.0 ** ELEMENTS[name].min_exponent == smallest_normal


def test_e2m1_holds_fifteen_numbers():
    assert grid("e2m1")[7:].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(x, name):
    """Code of the number of the grid that is nearest to each x, by comparing with all; of two, the even code."""
    codes = torch.tensor(
        [c for c in range(1 << ELEMENTS[name].bits) if abs(defined(name, c)) <= ELEMENTS[name].largest]
    )
    values = torch.tensor([defined(name, int(c)) for c in codes], dtype=torch.float64)
    found = []
    for part in x.double().split(4096):
        distance = (part[:, None] - values).abs()
        # zeros have two codes in a float format: the one with the sign of x
        wrong_sign = (part.signbit()[:, None] != values.signbit()) & (values == 0) & (not name.startswith("int"))
        rank = (codes % 2 + 2 * wrong_sign).double()
        tied = distance == distance.min(1, keepdim=True).values
        found.append(codes[torch.where(tied, rank, torch.inf).argmin(1)])
    return torch.cat(found).to(torch.uint8)


def many_numbers(name):
    """10^5 numbers over the whole range and beyond, every number of the grid, every midpoint, and their neighbours."""
    values = grid(name).double()
    middles = (values[1:] + values[:-1]).float() / 2  # exact in float32
    low, high = math.log2(float(values[values > 0].min())) - 3, math.log2(float(values.max())) + 2
    size = 2 ** (low + (high - low) * torch.rand(100_000, generator=generator(), dtype=torch.float64))
    sign = torch.randint(0, 2, size.shape, generator=generator(1)) * 2 - 1
    near = [middles.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf)]
    ends = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e9, -1e9])
    return torch.cat([(size * sign).float(), values.float(), middles, *near, ends])


@pytest.mark.parametrize("name", ELEMENTS)
def test_encoding_finds_the_nearest_number_and_ties_go_to_the_even_code(name):
    x = many_numbers(name)
    assert torch.equal(encode(x, name), nearest(x, name))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_encoding_gives_pytorchs_bits(name):
    x = many_numbers(name)
    x = torch.cat((x, torch.tensor([math.nan, math.inf, -math.inf])))
    largest = ELEMENTS[name].largest
    wanted = x.clamp(-largest, largest).to(ELEMENTS[name].dtype).view(torch.uint8)  # PyTorch's e5m2 does not saturate
    assert torch.equal(encode(x, name), wanted)


@pytest.mark.parametrize("name", ELEMENTS)
def test_numbers_beyond_the_range_and_infinity_saturate(name):
    largest = ELEMENTS[name].largest
    x = torch.tensor([largest, 1.01 * largest, 1e30, math.inf])
    assert decode(encode(x, name), name).tolist() == [largest] * 4
    assert decode(encode(-x, name), name).tolist() == [-largest] * 4


def test_nan_stays_nan_where_the_format_has_one():
    x = torch.tensor([1.0, math.nan])
    for name in ("e4m3", "e5m2"):
        assert decode(encode(x, name), name).isnan().tolist() == [False, True]
    for name in ("e2m1", "int8", "int4"):
        with pytest.raises(ValueError, match=f"{name} has no code for NaN, and x holds 1 of 2"):
            encode(x, name)


@pytest.mark.parametrize("name", ELEMENTS)
def test_encoding_a_decoded_number_changes_nothing(name):
    values = grid(name)
    for stochastic in (None, generator()):
        assert torch.equal(decode(encode(values, name, stochastic), name), values)


@pytest.mark.parametrize("name", ELEMENTS)
def test_a_larger_number_is_never_rounded_to_a_smaller_one(name):
    x = many_numbers(name).sort().values
    assert (decode(encode(x, name), name).diff() >= 0).all()


@pytest.mark.parametrize("name", FLOATS)
def test_halving_a_number_halves_what_it_is_rounded_to_while_it_stays_normal(name):
    fmt = ELEMENTS[name]
    x = many_numbers(name)
    x = x[(x.abs() <= fmt.largest) & (x.abs() >= 2 ** (fmt.min_exponent + 1))]
    assert len(x) > 1000
    assert torch.equal(decode(encode(x / 2, name), name), decode(encode(x, name), name) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_rounded_from_float32(dtype):
    x = torch.randn(3, 5, 7, generator=generator()).to(dtype).transpose(0, 2)
    assert torch.equal(encode(x, "e4m3"), x.float().to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_rounding_takes_one_of_the_two_neighbours_and_is_right_on_average(name):
    values = grid(name)
    gaps = values.diff()
    k = torch.arange(len(gaps))[:: max(1, len(gaps) // 16)]
    share = 0.3
    x = values[k] + share * gaps[k]
    draws = 20_000
    got = decode(encode(x.expand(draws, -1), name, generator()), name)
    upper = got == values[k + 1]
    assert (upper | (got == values[k])).all()
    # five standard deviations; x itself is rounded, which moves the share by less than a thousandth
    assert (upper.double().mean(0) - share).abs().max() < 5 * (share * (1 - share) / draws) ** 0.5 + 1e-3


def test_stochastic_rounding_repeats_with_its_seed_and_not_with_another():
    x = torch.randn(1000, generator=generator())
    first, again, other = (encode(x, "e2m1", generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_two_codes_share_a_byte_the_first_in_the_low_half():
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    assert pack(codes)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(unpack(pack(codes)), codes)


# ---- tensors with scales ---------------------------------------------------------------------------------------------


def loop_quantize(x, name, block):
    """The rules in Python, one number after the other: the scales, and the numbers that come back, row by row."""
    element = BLOCKS[name].element if name in BLOCKS else name

    def numbers_of(kind):
        return {c: v for c in range(1 << ELEMENTS[kind].bits) if abs(v := defined(kind, c)) <= ELEMENTS[kind].largest}

    def f32(number):
        return float(torch.tensor(number, dtype=torch.float32))

    def rounded(number, numbers):
        return numbers[min(numbers, key=lambda code: (abs(numbers[code] - number), code % 2))]

    values, e4m3, largest = numbers_of(element), numbers_of("e4m3"), ELEMENTS[element].largest
    overall = f32(max(abs(v) for row in x for v in row) / (6 * 448)) if name == "nvfp4" else None
    scales, back = [], []
    for row in x:
        for start in range(0, len(row), block):
            part = row[start : start + block]
            amax = max(abs(v) for v in part)
            if name.startswith("mx"):
                shared = math.floor(math.log2(amax)) - math.floor(math.log2(largest)) if amax else -127
                scale = factor = 2.0 ** max(-127, min(127, shared))
            elif name == "nvfp4":
                scale = rounded(f32(f32(amax / 6) / overall), e4m3)
                factor = f32(scale * overall)
            else:
                scale = factor = f32(amax / largest)
            scales.append(scale)
            back += [rounded(f32(v / factor), values) * factor if factor else 0.0 for v in part]
    return torch.tensor(scales), torch.tensor(back)


def rows(shape=(6, 64), seed=SEED):
    """Rows of different magnitude, with an outlier and a block of zeros."""
    x = torch.randn(shape, generator=generator(seed)) * 2.0 ** torch.arange(-2, shape[0] - 2)[:, None]
    x[1, 3] = 200.0
    x[2, :32] = 0
    return x


@pytest.mark.parametrize("name", BLOCKS)
def test_block_formats_follow_their_rules(name):
    x = rows()
    block = BLOCKS[name].block
    found = quantize(x, name)
    scales, back = loop_quantize(x.tolist(), name, block)
    assert found.scales.shape == (6, 64 // block) and found.scales.dtype == BLOCKS[name].scale_dtype
    assert torch.equal(found.scales.float().flatten(), scales)
    assert torch.equal(found.dequantize().flatten(), back)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("block", [16, 64])
def test_element_formats_have_a_float32_scale_per_block_or_row(name, block):
    x = rows()
    found = quantize(x, name, block)
    scales, back = loop_quantize(x.tolist(), name, block)
    assert found.scales.shape == (6, 64 // block) and found.scales.dtype == torch.float32
    assert torch.equal(found.scales.flatten(), scales)
    assert torch.equal(found.dequantize().flatten(), back)


@pytest.mark.parametrize("name", ELEMENTS)
def test_without_a_block_there_is_one_scale_for_the_tensor(name):
    x = rows((4, 32)).reshape(2, 2, 32)
    found = quantize(x, name)
    assert found.scales.shape == () and float(found.scales) == float(x.abs().max() / ELEMENTS[name].largest)
    assert torch.equal(found.dequantize(), quantize(x.reshape(1, -1), name, x.numel()).dequantize().reshape(x.shape))


@pytest.mark.parametrize("name", FORMATS)
def test_values_have_the_shape_and_dtype_that_a_kernel_reads(name):
    element = BLOCKS[name].element if name in BLOCKS else name
    found = quantize(rows(), name)
    if ELEMENTS[element].bits == 4:
        assert found.values.shape == (6, 32) and found.values.dtype == torch.uint8
    else:
        assert found.values.shape == (6, 64) and found.values.dtype == ELEMENTS[element].dtype
    assert found.dequantize().shape == (6, 64) and found.dequantize().dtype == torch.float32
    assert (found.tensor_scale is not None) == (name == "nvfp4")


@pytest.mark.parametrize(
    ("name", "bits"), [("mxfp8", 8.25), ("mxfp4", 4.25), ("nvfp4", 4.5), ("int4", 4.25), ("e4m3", 8.25)]
)
def test_bytes_count_the_scales(name, bits):
    x = torch.randn(32, 1024, generator=generator())
    found = quantize(x, name, None if name in BLOCKS else 128)
    assert found.nbytes == bits * x.numel() / 8 + (4 if name == "nvfp4" else 0)


def test_the_largest_number_of_a_block_of_mxfp4_may_saturate_and_nvfp4_keeps_it():
    x = torch.full((1, 32), 0.1)
    x[0, 0] = 7.9  # floor(log2) is that of 4: the scale is 1, and 6 is the largest
    assert float(quantize(x, "mxfp4").dequantize()[0, 0]) == 6
    assert float(quantize(x, "nvfp4").dequantize()[0, 0]) == pytest.approx(7.9, rel=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_the_smallest_numbers_stay_finite(name):
    assert torch.equal(quantize(torch.zeros(2, 64), name).dequantize(), torch.zeros(2, 64))
    for size in (1e-45, 1e-38, 3e38):
        x = torch.full((2, 64), size)
        x[0, :32] = 0
        back = quantize(x, name).dequantize()
        assert torch.isfinite(back).all() and not back[0, :32].any()


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_no_scale_is_below_the_smallest_of_e8m0(name):
    found = quantize(torch.full((1, 32), 2.0**-127), name)
    assert float(found.scales) == 2.0**-127 and (found.dequantize() == 2.0**-127).all()


def test_a_block_far_below_the_tensors_largest_number_becomes_zeros_in_nvfp4():
    x = torch.ones(2, 16)
    x[1] = 2**-20
    assert float(quantize(x, "nvfp4").scales[1, 0]) == 0
    assert not quantize(x, "nvfp4").dequantize()[1].any()
    assert (quantize(x[1:], "nvfp4").dequantize() > 0).all()  # alone it is kept


@pytest.mark.parametrize("name", [*ELEMENTS, "mxfp8", "mxfp4"])
@pytest.mark.parametrize("power", [-7, 5])
def test_scaling_by_a_power_of_two_changes_the_scales_alone(name, power):
    x = rows()
    x[2, :32] = 1  # zeros have no scale to change
    a, b = (quantize(each, name) for each in (x, x * 2.0**power))
    assert torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8))
    assert torch.equal(a.scales.float() * 2.0**power, b.scales.float())


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_quantizing_what_came_back_changes_nothing(name):
    once = quantize(rows(), name).dequantize()
    assert torch.equal(quantize(once, name).dequantize(), once)


def test_scales_carry_no_gradient():
    found = quantize(rows().requires_grad_(), "int8")
    assert not found.scales.requires_grad and not found.dequantize().requires_grad


@pytest.mark.slow
def test_stochastic_quantization_is_right_on_average():
    x = torch.linspace(0.1, 1, 32).reshape(1, 32)
    mean = torch.stack([quantize(x, "mxfp4", stochastic=generator(seed)).dequantize() for seed in range(2000)]).mean(0)
    assert (mean - x).abs().max() < 0.025 < (quantize(x, "mxfp4").dequantize() - x).abs().max()


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_the_error_of_rounding_is_that_of_a_uniform_remainder():
    normal = rounding_error(torch.tensor([1.0, 8.0]), "e4m3")
    # gap / sqrt(12) over x, averaged over an octave of 1/x^2: 2^-3 / sqrt(12) * sqrt(3 / (8 ln 2))
    wanted = 2**-3 / 12**0.5 * (3 / (8 * math.log(2))) ** 0.5
    assert normal[0] == pytest.approx(normal[1]) and float(normal[0]) == pytest.approx(wanted, rel=0.1)
    assert float(rounding_error(torch.tensor([447 / 2**0.5]), "e4m3")) == pytest.approx(wanted, rel=0.1)  # up to 447
    small, large = rounding_error(torch.tensor([1e-6, 1e6]), "e4m3").tolist()
    assert small == 1 and large == pytest.approx(1, abs=1e-3)


def test_finer_scales_lose_less():
    x = rows()
    tensor, row, block = (quantization_error(x, "int4", block) for block in (None, 64, 16))
    assert tensor > row > block > 0
    assert quantization_error(torch.zeros(2, 2), "int4") == 0
    half = torch.tensor([[448.0, 17.0]])  # the gap at 17 is 2: rounded to 16
    assert quantization_error(half, "e4m3") == pytest.approx(1 / math.hypot(448, 17))


# ---- bad input -------------------------------------------------------------------------------------------------------

X = torch.ones(2, 64)
REFUSED = {
    "an unknown element format": (lambda: encode(X, "fp8"), ValueError, "e4m3, e5m2, e2m1, int8, int4, got 'fp8'"),
    "a block format as element": (lambda: grid("mxfp4"), ValueError, "got 'mxfp4'"),
    "an unknown format": (lambda: quantize(X, "fp8"), ValueError, "mxfp8, mxfp4, nvfp4, got 'fp8'"),
    "integers": (lambda: encode(torch.ones(2, dtype=torch.int32), "e4m3"), TypeError, "got torch.int32"),
    "a list": (lambda: quantize([1.0], "e4m3"), TypeError, "got list"),
    "nothing": (lambda: quantize(torch.ones(0, 64), "e4m3"), ValueError, "got shape (0, 64)"),
    "NaN": (lambda: quantize(X * math.nan, "e4m3"), ValueError, "128 of its 128 numbers"),
    "infinity": (lambda: quantize(X.double() * 1e300, "mxfp8"), ValueError, "x must be finite in float32"),
    "a block that does not divide": (lambda: quantize(X, "int8", 48), ValueError, "block=48 for shape (2, 64)"),
    "a block of none": (lambda: quantize(X, "int8", 0), ValueError, "block must divide the last axis, got block=0"),
    "a block of a number": (lambda: quantize(X[0, 0], "int8", 1), ValueError, "for shape ()"),
    "a block that is no integer": (lambda: quantize(X, "int8", 16.0), TypeError, "got 16.0"),
    "another block": (lambda: quantize(X, "nvfp4", 32), ValueError, "nvfp4 has blocks of 16, got block=32"),
    "a row that ends within a block": (lambda: quantize(X[:, :48], "mxfp8"), ValueError, "block=32 for shape (2, 48)"),
    "half a byte": (lambda: quantize(X[:, :3], "int4"), ValueError, "even last axis"),
    "half a byte of codes": (lambda: pack(torch.ones(3, dtype=torch.uint8)), ValueError, "got shape (3,)"),
    "codes that are numbers": (lambda: decode(X, "e4m3"), TypeError, "uint8 tensor, got torch.float32"),
    "a code of five bits": (lambda: decode(torch.full((1,), 16).byte(), "int4"), ValueError, "4 bits, got 16"),
    "a magnitude of 0": (lambda: rounding_error(torch.zeros(1), "e4m3"), ValueError, "above 0, got 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_with_what_would_be_right(what):
    call, error, text = REFUSED[what]
    with pytest.raises(error, match=re.escape(text)):
        call()
