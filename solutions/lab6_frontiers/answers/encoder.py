"""Right and wrong answers to exercise 6.1, the codes of e4m3 and e2m1."""

from __future__ import annotations

import functools

from utils.checks.answers import Answers

PLACE = "6.1: the codes"
ANSWERS = Answers(
    {
        PLACE: """
        magnitude = torch.where(x.isnan(), 0.0, x.abs())
        magnitude = torch.minimum(magnitude, torch.tensor(fmt.largest, device=x.device))
        exponent = torch.frexp(magnitude).exponent - 1
        exponent = torch.where(magnitude > 0, exponent, fmt.min_exponent)
        exponent = torch.maximum(exponent, torch.tensor(fmt.min_exponent, device=x.device))
        gap = torch.exp2((exponent - fmt.fraction_bits).float())
        gaps = torch.round(magnitude / gap).int()
        code = (exponent - fmt.min_exponent) * 2**fmt.fraction_bits + gaps
        sign_bit = 2 ** (fmt.bits - 1)
        code = torch.where(x.isnan(), sign_bit - 1, code)
        code = torch.where(torch.signbit(x), code + sign_bit, code)
        return code.to(torch.uint8)
        """
    }
)
also_right = ANSWERS.also_right
also_right("bits of float32", {PLACE: """
    bits = x.abs().clamp(max=fmt.largest).contiguous().view(torch.int32)
    drop = 23 - fmt.fraction_bits
    bits = bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)
    normal = (bits >> drop) - ((127 - fmt.bias) << fmt.fraction_bits)
    gap = 2.0 ** (fmt.min_exponent - fmt.fraction_bits)
    subnormal = (x.abs() / gap).round().clamp(max=2.0**fmt.bits).nan_to_num(nan=0.0).int()
    code = torch.where(x.abs() < 2.0**fmt.min_exponent, subnormal, normal)
    code = torch.where(x.isnan(), (1 << (fmt.bits - 1)) - 1, code)
    return (code | (torch.signbit(x).int() << (fmt.bits - 1))).to(torch.uint8)
"""})  # fmt: skip
also_right("a number that float32 rounds when it is added", {PLACE: """
    magnitude = x.abs().nan_to_num(nan=0.0).clamp(max=fmt.largest)
    power = torch.exp2(torch.floor(torch.log2(magnitude.double().clamp(min=2.0**fmt.min_exponent))))
    magic = power.float() * 2.0 ** (24 - 1 - fmt.fraction_bits)
    rounded = (magnitude + magic) - magic
    power = torch.exp2(torch.floor(torch.log2(rounded.double().clamp(min=2.0**fmt.min_exponent))))
    field = (torch.log2(power) + fmt.bias).int() - (rounded < power).int()
    fraction = rounded / power - (rounded >= power).double()
    code = (field << fmt.fraction_bits) + (fraction * 2**fmt.fraction_bits).int()
    code = torch.where(x.isnan(), (1 << (fmt.bits - 1)) - 1, code)
    return (code + (torch.signbit(x).int() << (fmt.bits - 1))).to(torch.uint8)
"""})  # fmt: skip
also_right("a search among the numbers in the middle", {PLACE: """
    count = (1 << (fmt.bits - 1)) - int(fmt.has_nan)
    code = torch.arange(count, device=x.device)
    field, fraction = code >> fmt.fraction_bits, code % (1 << fmt.fraction_bits)
    significand = fraction + (field > 0) * (1 << fmt.fraction_bits)
    values = torch.ldexp(significand.double(), field.clamp(min=1) - fmt.bias - fmt.fraction_bits)
    middle = (values[1:] + values[:-1]) / 2
    magnitude = x.abs().double().contiguous()
    upper = torch.searchsorted(middle, magnitude, right=True)
    lower = torch.searchsorted(middle, magnitude, right=False)
    found = torch.where(upper % 2 == 0, upper, lower)
    found = torch.where(x.isnan(), (1 << (fmt.bits - 1)) - 1, found)
    return (found + (torch.signbit(x) << (fmt.bits - 1))).to(torch.uint8)
"""})  # fmt: skip
also_right("field and fraction apart, in float64", {PLACE: """
    wide = x.double().abs()
    wide = torch.where(wide > fmt.largest, fmt.largest, wide)
    wide = torch.where(x.isnan(), 0.0, wide)
    significand, exponent = torch.frexp(wide)
    exponent = exponent - 1
    small = wide < 2.0**fmt.min_exponent
    fraction = torch.where(small, wide / 2.0**fmt.min_exponent, 2 * significand - 1) * 2**fmt.fraction_bits
    fraction = fraction.round()
    field = torch.where(small, 0, exponent + fmt.bias)
    full = fraction == 2**fmt.fraction_bits
    fraction = torch.where(full, 0, fraction)
    field = field + full
    code = field * 2**fmt.fraction_bits + fraction
    code = torch.where(x.isnan(), 2.0 ** (fmt.bits - 1) - 1, code)
    negative = (1 / torch.where(x == 0, x, 1.0) < 0) | (x < 0) | (x.isnan() & torch.signbit(x))
    return torch.where(negative, code + 2 ** (fmt.bits - 1), code).to(torch.uint8)
"""})  # fmt: skip

wrong = functools.partial(ANSWERS.wrong, PLACE)
FIRST, SECOND, FIFTH = ('"classic wrong answers" 1', '"classic wrong answers" 2', '"classic wrong answers" 5')
GAPS = "torch.round(magnitude / gap)"
CLAMP = "magnitude = torch.minimum(magnitude, torch.tensor(fmt.largest, device=x.device))"
ZERO = "exponent = torch.where(magnitude > 0, exponent, fmt.min_exponent)"
LEAST = "exponent = torch.maximum(exponent, torch.tensor(fmt.min_exponent, device=x.device))"
NAN = "code = torch.where(x.isnan(), sign_bit - 1, code)"
BECAME = "x = 0.0009765625 became 0x01 (0.00195312), expected 0x00"
wrong("half away from zero", "ties go away from zero", FIRST, BECAME, edits={
    GAPS: "torch.floor(magnitude / gap + 0.5)",
})  # fmt: skip
wrong("half towards zero", "ties go towards zero", FIRST, edits={GAPS: "torch.ceil(magnitude / gap - 0.5)"})
wrong("cut off", "fractions are cut off", FIRST, edits={GAPS: "torch.floor(magnitude / gap)"})
wrong("subnormal numbers are zero", "all numbers below the least normal one become zero", SECOND, edits={
    GAPS: "torch.where(magnitude < 2.0**fmt.min_exponent, 0.0, torch.round(magnitude / gap))",
})  # fmt: skip
wrong("exponents without end", "below the least normal number the gap stays", SECOND, edits={LEAST: "pass"})
wrong("zero as a half", "zero is no power of two", SECOND, edits={ZERO: "pass"})
wrong("no carry", "must raise the exponent", '"classic wrong answers" 3', edits={
    "gaps = torch.round(magnitude / gap).int()":
        "whole = 2**fmt.fraction_bits\n        gaps = torch.round(magnitude / gap).int()\n        "
        "gaps = torch.where(gaps >= whole, whole + gaps % whole, gaps)",
})  # fmt: skip
wrong("field one too large", "the exponent field is one too large", '"classic wrong answers" 4', edits={
    "(exponent - fmt.min_exponent) *": "(exponent + fmt.bias) *",
})  # fmt: skip
EXPONENT = "exponent = torch.frexp(magnitude).exponent - 1"
wrong(
    "frexp's exponent as it is",
    "the exponent is one too large, in the gap and in the code",
    '"classic wrong answers" 4',
    edits={EXPONENT: EXPONENT.removesuffix(" - 1")},
)
wrong(
    "frexp's exponent less two",
    "the exponent is one too small, in the gap and in the code",
    '"classic wrong answers" 4',
    edits={EXPONENT: EXPONENT.replace("- 1", "- 2")},
)
wrong("the exponent of twice the number", "the exponent is one too large, in the gap and in the code",
      '"classic wrong answers" 4', edits={
    EXPONENT: "exponent = torch.frexp(magnitude.clamp(min=2.0**fmt.min_exponent)).exponent",
    ZERO: "pass", LEAST: "pass",
})  # fmt: skip
wrong("the exponent of half the number", "the exponent is one too small, in the gap and in the code",
      '"classic wrong answers" 4', edits={
    EXPONENT: "exponent = torch.frexp(magnitude.clamp(min=2.0**fmt.min_exponent)).exponent - 2",
    ZERO: "pass", LEAST: "pass",
})  # fmt: skip
wrong("minus zero", "minus zero loses its sign", FIFTH, "x = -0 became 0x00", edits={"torch.signbit(x)": "x < 0"})
wrong("two's complement", "negative numbers are in two's complement", FIFTH, edits={
    "torch.where(torch.signbit(x), code + sign_bit, code)":
        "torch.where(torch.signbit(x), (2 * sign_bit - code) % (2 * sign_bit), code)",
})  # fmt: skip
wrong("sign in bit 7", "the sign stands in bit 7", FIFTH, edits={
    "torch.signbit(x), code + sign_bit": "torch.signbit(x), code + 128",
})  # fmt: skip
wrong("no saturation", "saturate, infinity too", '"classic wrong answers" 6', edits={
    CLAMP: "magnitude = torch.where(magnitude > 1e30, fmt.largest, magnitude)",
})  # fmt: skip
wrong("infinity is NaN", "saturate, infinity too", '"classic wrong answers" 6', edits={
    NAN: "code = torch.where(x.isnan() | x.isinf(), sign_bit - 1, code)",
})  # fmt: skip
wrong("NaN is the largest number", "NaN has a code of its own", '"classic wrong answers" 7', edits={NAN: "pass"})
wrong("rounded to float16 first", '"classic wrong answers" 8', edits={
    "magnitude = torch.where(x.isnan()": "x = x.half().float()\n        magnitude = torch.where(x.isnan()",
})  # fmt: skip
wrong("rounded to bfloat16 first", "the number is rounded twice", '"classic wrong answers" 8', edits={
    "magnitude = torch.where(x.isnan()": "x = x.bfloat16().float()\n        magnitude = torch.where(x.isnan()",
})  # fmt: skip
wrong(
    "distance to every number",
    "largest allocation",
    '"classic wrong answers" 9',
    instead="""
    count = (1 << (fmt.bits - 1)) - int(fmt.has_nan)
    code = torch.arange(count, device=x.device)
    field, fraction = code >> fmt.fraction_bits, code % (1 << fmt.fraction_bits)
    significand = fraction + (field > 0) * (1 << fmt.fraction_bits)
    values = torch.ldexp(significand.double(), field.clamp(min=1) - fmt.bias - fmt.fraction_bits)
    far = (x.abs().double().clamp(max=fmt.largest)[..., None] - values).abs()
    order = torch.cat([code[code % 2 == 0], code[code % 2 == 1]])
    found = order[far[..., order].argmin(-1)]
    found = torch.where(x.isnan(), (1 << (fmt.bits - 1)) - 1, found)
    return (found + (torch.signbit(x) << (fmt.bits - 1))).to(torch.uint8)
""",
)
wrong(
    "PyTorch's own",
    "encode uses a PyTorch dtype of 8-bit floats",
    instead="""
    if format == "e4m3":
        return torch.where(x.isnan(), x, x.clamp(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8)
    return x.to(torch.uint8)
""",
)
wrong(
    "the course's own",
    "encode uses the course's utils.formats.elements.encode",
    instead="""
    import utils.formats
    return utils.formats.encode(x, format)
""",
)
wrong("as int32", "expected codes.dtype uint8, got int32", edits={"code.to(torch.uint8)": "code"})
