"""Triton's interpreter after its patches: what a student's kernel computes here is what a GPU would compute."""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
import warnings

import numpy as np
import pytest
import torch

from utils import interpreter, runtime
from utils.interpreter.bfloat16 import narrow, widen

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.runtime import interpreter as upstream  # isort: skip

pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(runtime.HAS_GPU, reason="the interpreter is repaired where it runs kernels"),
]

BF16 = torch.bfloat16


@triton.jit
def binary_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "div":
        z = x / y
    elif OP == "neg":
        z = -x
    elif OP == "max":
        z = tl.maximum(x, y)
    elif OP == "min":
        z = tl.minimum(x, y)
    elif OP == "less":
        z = tl.where(x < y, x, y)
    elif OP == "equal":
        z = tl.where(x == y, 1.0, 0.0)
    elif OP == "scalar":
        z = x * 0.3 + 1.7
    elif OP == "abs":
        z = tl.abs(x)
    elif OP == "clamp":
        z = tl.clamp(x, -0.5, 0.5)
    tl.store(out_ptr + offsets, z)


def binary(op: str, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    out = torch.zeros(x.numel(), dtype=dtype or x.dtype)
    binary_kernel[(1,)](x, y, out, OP=op, N=x.numel())
    return out


def test_bfloat16_rounds_to_nearest_even_with_carry():
    values = np.array([1.99999, 1.00390625, 1.01171875, -0.0, 3.3895314e38, 3.4e38, np.inf, 1e-40], dtype=np.float32)
    expected = torch.from_numpy(values).to(BF16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(narrow(values), expected)
    assert np.isnan(widen(narrow(np.array([np.nan], dtype=np.float32)))).all()


def test_bfloat16_conversion_agrees_with_torch_on_random_bits():
    print("seed 11")
    bits = np.random.default_rng(11).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values.copy()).to(BF16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(narrow(values), expected)


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        ("add", lambda x, y: x + y),
        ("sub", lambda x, y: x - y),
        ("mul", lambda x, y: x * y),
        ("div", lambda x, y: x / y),
        ("neg", lambda x, y: -x),
        ("max", torch.maximum),
        ("min", torch.minimum),
        ("less", torch.minimum),
        ("equal", lambda x, y: (x == y).to(x.dtype)),
        ("abs", lambda x, y: x.abs()),
        ("clamp", lambda x, y: x.clamp(-0.5, 0.5)),
    ],
)
def test_bfloat16_arithmetic_is_done_on_values(op, reference):
    print("seed 5")
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(64, generator=generator).to(BF16) for _ in range(2))
    y[:8] = x[:8]
    assert torch.equal(binary(op, x, y), reference(x, y))


def test_bfloat16_scalars_take_part_in_arithmetic():
    x = torch.linspace(-2, 2, 64).to(BF16)
    expected = (x * torch.tensor(0.3, dtype=BF16)) + torch.tensor(1.7, dtype=BF16)
    assert torch.equal(binary("scalar", x, x), expected)


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_dot_is_right_in_every_dtype(dtype):
    print("seed 3")
    generator = torch.Generator().manual_seed(3)
    if dtype == torch.int8:
        a, b = (torch.randint(-9, 9, s, generator=generator).to(dtype) for s in ((32, 64), (64, 16)))
        c = torch.zeros(32, 16, dtype=torch.int32)
    else:
        a, b = (torch.randn(s, generator=generator).to(dtype) for s in ((32, 64), (64, 16)))
        c = torch.zeros(32, 16)
    dot_kernel[(1,)](a, b, c, M=32, N=16, K=64)
    exact = a.double() @ b.double()
    assert (c.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@triton.jit
def cast_kernel(x_ptr, out_ptr, DTYPE: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N)).to(DTYPE)
    tl.store(out_ptr + tl.arange(0, N), x)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.int32, torch.float64])
def test_casts_to_bfloat16_round_by_value(source):
    x = torch.linspace(-300, 300, 128).to(source)
    out = torch.zeros(128, dtype=BF16)
    cast_kernel[(1,)](x, out, DTYPE=tl.bfloat16, N=128)
    assert torch.equal(out, x.to(torch.float32).to(BF16))


@pytest.mark.parametrize(("target", "triton_type"), [(torch.int32, tl.int32), (torch.float16, tl.float16)])
def test_casts_from_bfloat16_keep_the_value(target, triton_type):
    x = torch.linspace(-100, 100, 64).to(BF16)
    out = torch.zeros(64, dtype=target)
    cast_kernel[(1,)](x, out, DTYPE=triton_type, N=64)
    assert torch.equal(out, x.to(target))


F8 = [(torch.float8_e4m3fn, tl.float8e4nv), (torch.float8_e5m2, tl.float8e5)]


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("target", "triton_type"), F8)
def test_casts_to_8_bit_floats_round_to_nearest_even_and_saturate(source, target, triton_type):
    print("seed 5")
    x = torch.randn(1024, generator=torch.Generator().manual_seed(5)) * torch.logspace(-8, 6, 1024)
    x[:8] = torch.tensor([1.125, -1.0625, 1.9375, 3.875, float("inf"), float("-inf"), float("nan"), 2.0**-10])
    x = x.to(source)
    out = torch.zeros(1024, dtype=target)
    cast_kernel[(1,)](x, out, DTYPE=triton_type, N=1024)
    most = torch.finfo(target).max
    assert torch.equal(out.view(torch.uint8), x.float().clamp(-most, most).to(target).view(torch.uint8))


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("source", "triton_type"), F8)
def test_each_8_bit_float_keeps_its_value_in_a_wider_type(source, triton_type, target):
    x = torch.arange(256, dtype=torch.uint8).view(source)
    out = torch.zeros(256, dtype=target)
    cast_kernel[(1,)](x, out, DTYPE=getattr(tl, str(target).removeprefix("torch.")), N=256)
    assert torch.equal(out.nan_to_num(1e9), x.to(target).nan_to_num(1e9))


@triton.jit
def atomic_kernel(x_ptr, values_ptr, old_ptr, OP: tl.constexpr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    values = tl.load(values_ptr + lanes)
    if OP == "add":
        old = tl.atomic_add(x_ptr + lanes % 2, values, mask=lanes < N - 1)
    else:
        old = tl.atomic_xchg(x_ptr + lanes % 2, values, mask=lanes < N - 1)
    tl.store(old_ptr + lanes, old, mask=lanes < N - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_atomic_exchange_of_floats_swaps_values(dtype):
    x, values, old = torch.tensor([1.5, -2.5], dtype=dtype), torch.arange(4, dtype=dtype), torch.zeros(4, dtype=dtype)
    atomic_kernel[(1,)](x, values, old, OP="xchg", N=4)
    assert (x.tolist(), old.tolist()) == ([2.0, 1.0], [1.5, -2.5, 0.0, 0.0])


def test_an_atomic_sum_in_bfloat16_adds_values_and_rounds_each():
    x, old = torch.tensor([256.0, 1.0], dtype=BF16), torch.zeros(4, dtype=BF16)
    atomic_kernel[(1,)](x, torch.tensor([1.0, 0.5, 3.0, 9.0], dtype=BF16), old, OP="add", N=4)
    # 256 + 1 is a tie and stays 256; 256 + 3 is a tie and becomes the even 260
    assert (x.tolist(), old.tolist()) == ([260.0, 1.5], [256.0, 1.0, 256.0, 0.0])


@triton.jit
def descriptor_add_kernel(x_ptr, M, N: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BLOCK, N])
    row = tl.program_id(0) * BLOCK
    x.atomic_add([row, 0], x.load([row, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16])
def test_a_descriptors_atomic_sum_stays_inside_of_the_tensor(dtype):
    x = torch.arange(6 * 8).reshape(6, 8).to(dtype)
    expected = x + x
    expected[5] = x[5]
    descriptor_add_kernel[(2,)](x, 5, N=8, BLOCK=4)
    assert torch.equal(x, expected)


@triton.jit
def reduce_kernel(x_ptr, out_ptr, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if OP == "sum":
        y = tl.sum(x, axis=1)
    elif OP == "max":
        y = tl.max(x, axis=1)
    elif OP == "min":
        y = tl.min(x, axis=1)
    elif OP == "member":
        y = x.sum(axis=1)
    tl.store(out_ptr + tl.arange(0, M), y)


def reduce(op: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape[0], dtype=x.dtype)
    reduce_kernel[(1,)](x, out, OP=op, M=x.shape[0], N=x.shape[1])
    return out


def test_bfloat16_reductions_are_done_on_values():
    print("seed 8")
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(8)).to(BF16)
    assert torch.equal(reduce("max", x), x.amax(1))
    assert torch.equal(reduce("min", x), x.amin(1))
    assert torch.allclose(reduce("sum", x).float(), x.float().sum(1), rtol=2**-8)
    assert torch.equal(reduce("member", x), reduce("sum", x))


def test_maximum_drops_nan_as_max_f32_on_a_gpu_does():
    nan, values = torch.full((8,), float("nan")), torch.arange(8.0)
    assert torch.equal(binary("max", nan, values), values)
    assert torch.equal(binary("min", values, nan), values)
    assert binary("max", nan, nan).isnan().all()


def test_max_of_a_row_drops_nan_and_a_row_of_nan_gives_nan_without_a_warning():
    x = torch.arange(16.0).reshape(2, 8)
    x[0, 3] = float("nan")
    x[1] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        largest, smallest = reduce("max", x), reduce("min", x)
    assert largest[0] == 7 and smallest[0] == 0
    assert largest[1].isnan() and smallest[1].isnan()


@triton.jit
def propagate_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.maximum(tl.load(x_ptr), 1.0, propagate_nan=tl.PropagateNan.ALL))


def test_maximum_can_be_told_to_pass_nan_on():
    out = torch.zeros(1)
    propagate_kernel[(1,)](torch.full((1,), float("nan")), out)
    assert out.isnan().all()


@triton.jit
def infinity_kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr)
    tl.store(out_ptr, x - x + tl.exp(x) / 0.0)


def test_infinities_raise_no_warning():
    out = torch.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infinity_kernel[(1,)](torch.full((1,), float("inf")), out)
    assert out.isnan().all()


@triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (32, 64, 128)], key=["n"])
@triton.heuristics({"TWICE": lambda args: args["n"] * 2})
@triton.jit
def tuned_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x + TWICE + BLOCK, mask=offsets < n)


def test_autotune_takes_its_first_configuration_without_a_driver():
    x, out = torch.arange(100.0), torch.zeros(100)
    tuned_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, out, 100)
    assert torch.equal(out, x + 200 + 32)
    assert tuned_kernel.best_config.kwargs == {"BLOCK": 32}


def test_autotune_names_a_parameter_that_it_sets_itself():
    with pytest.raises(ValueError, match="BLOCK must not be passed"):
        tuned_kernel[(1,)](torch.zeros(7), torch.zeros(7), 7, BLOCK=64)


@triton.jit
def loop_kernel(bounds_ptr, out_ptr):
    start = tl.load(bounds_ptr)
    stop = tl.load(bounds_ptr + 1)
    total = 0
    for i in range(start, stop, 2):
        total += i
    for i in tl.range(tl.program_id(0), stop):
        total += i
    tl.store(out_ptr, total)


def test_tensors_can_be_loop_bounds():
    out = torch.zeros(1, dtype=torch.int32)
    loop_kernel[(1,)](torch.tensor([3, 9], dtype=torch.int32), out)
    assert out.item() == (3 + 5 + 7) + sum(range(9))


@triton.jit
def doubling_kernel(x_ptr, o_ptr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    tl.store(o_ptr + tl.arange(0, 4), x + x)


def test_a_sum_of_integers_wraps_as_on_a_gpu_and_is_checked_only_where_assertions_are(monkeypatch):
    x = torch.tensor([2**30, 2**31 - 1, 3, -(2**31)], dtype=torch.int32)
    o = torch.empty_like(x)
    doubling_kernel[(1,)](x, o)
    assert o.tolist() == [-(2**31), -2, 6, 0]
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    with pytest.raises(Exception, match="int32 overflow detected for operation add"):
        doubling_kernel[(1,)](x, o)


@triton.jit
def flag_kernel(out_ptr, flag):
    tl.store(out_ptr, tl.where(flag, 1, 2))


@pytest.mark.parametrize(("flag", "expected"), [(True, 1), (False, 2)])
def test_a_bool_can_be_an_argument(flag, expected):
    out = torch.zeros(1, dtype=torch.int32)
    flag_kernel[(1,)](out, flag)
    assert out.item() == expected


@triton.jit
def add_one(x):
    tl.static_assert(x.dtype == tl.int32, "add_one takes int32")
    return x + 1


@triton.jit
def failing_kernel(out_ptr):
    value = tl.load(out_ptr + tl.program_id(0))
    tl.assume(value == 0)
    tl.store(out_ptr + tl.program_id(0), add_one(value))


def test_an_error_names_kernel_program_and_cause():
    data = torch.tensor([0, 0, 5, 0], dtype=torch.int32)
    with pytest.raises(
        triton.InterpreterError, match=r"failing_kernel raised AssertionError in program \(2, 0, 0\)"
    ) as e:
        failing_kernel[(4,)](data)
    assert "Assume failed" in str(e.value)
    assert data.tolist() == [1, 1, 5, 0]


def test_an_error_in_a_device_function_is_told_once():
    with pytest.raises(triton.InterpreterError, match="add_one takes int32") as e:
        failing_kernel[(1,)](torch.zeros(1, dtype=torch.int64))
    assert str(e.value).count("InterpreterError") == 0


@pytest.mark.parametrize(
    ("grid", "error", "message"),
    [
        (4, TypeError, "flag_kernel: grid must be a tuple of one to three numbers of programs, got 4"),
        ((), TypeError, r"got \(\)"),
        ((1, 1, 1, 1), TypeError, r"got \(1, 1, 1, 1\)"),
        ((-2,), ValueError, r"whole numbers of programs, none negative, got \(-2, 1, 1\)"),
        ((2.5,), ValueError, r"got \(2.5, 1, 1\)"),
        (lambda meta: 3, TypeError, "flag_kernel: grid must be a tuple of one to three numbers of programs, got 3"),
        (lambda meta: (3, -1), ValueError, r"got \(3, -1, 1\)"),
    ],
)
def test_a_bad_grid_is_refused_by_value(grid, error, message):
    with pytest.raises(error, match=message):
        flag_kernel[grid](torch.zeros(1, dtype=torch.int32), True)


def test_warps_are_a_power_of_two_as_on_a_gpu():
    flag_kernel[(1,)](torch.zeros(1, dtype=torch.int32), True, num_warps=8)
    with pytest.raises(ValueError, match="flag_kernel: num_warps must be a power of two from 1 to 32, got 7"):
        flag_kernel[(1,)](torch.zeros(1, dtype=torch.int32), True, num_warps=7)


def test_a_list_is_a_grid_as_on_a_gpu():
    out = torch.zeros(1, dtype=torch.int32)
    flag_kernel[[1]](out, True)
    flag_kernel[lambda meta: [1, 1]](out, True)
    assert out.item() == 1


@pytest.mark.parametrize("value", [[1.0, 2.0], "x", np.zeros(3)])
def test_an_argument_that_is_no_tensor_is_refused_by_name(value):
    with pytest.raises(
        TypeError, match=f"flag_kernel: out_ptr must be a tensor or a number, got {type(value).__name__}"
    ):
        flag_kernel[(1,)](value, True)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.ones(2, dtype=torch.complex64), "torch.complex64"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
    ],
)
def test_a_tensor_without_addresses_or_of_complex_numbers_is_refused_by_name(value, shown):
    with pytest.raises(TypeError, match=f"flag_kernel: out_ptr must be a dense tensor of real numbers, got .*{shown}"):
        flag_kernel[(1,)](value, True)


def test_a_misspelt_argument_is_refused_by_name_and_launch_options_are_not():
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"flag_kernel has no argument 'flagg', .* it takes: out_ptr, flag"):
        flag_kernel[(1,)](out, True, flagg=False)
    flag_kernel[(1,)](out, True, num_warps=8, num_stages=2, maxnreg=64)
    assert out.item() == 1


def test_a_kernel_called_without_a_grid_is_told_so():
    with pytest.raises(RuntimeError, match=r"launch it with a grid, flag_kernel\[grid\]\(...\)"):
        flag_kernel(torch.zeros(1, dtype=torch.int32), True)


def test_the_language_is_restored_after_a_launch_and_after_an_error():
    before = [*map(vars(tl.tensor).get, ("__bool__", "__index__", "sum")), tl.load, tl.core.load, tl.reduce]
    reduce("sum", torch.zeros(2, 4))
    with pytest.raises(triton.InterpreterError):
        failing_kernel[(4,)](torch.full((4,), 7, dtype=torch.int32))
    after = [*map(vars(tl.tensor).get, ("__bool__", "__index__", "sum")), tl.load, tl.core.load, tl.reduce]
    assert after == before


HELPERS = """import triton
import triton.language as tl

@triton.jit
def factor(x):
    return x * {factor}

@triton.jit
def scaled(x):
    y = x + 0.0
    return factor(y)
"""
KERNELS = """import triton
import triton.language as tl
from {helpers} import scaled

@triton.jit
def scale_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N), scaled(tl.load(x_ptr + tl.arange(0, N))))
"""


def test_a_kernel_notices_that_a_file_of_helpers_was_edited_and_reloaded(tmp_path, monkeypatch):
    """As a notebook's autoreload does it: the file's names are emptied, then the new file is run."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reloaded_helpers.py").write_text(HELPERS.format(factor=2))
    (tmp_path / "reloading_kernels.py").write_text(KERNELS.format(helpers="reloaded_helpers"))
    kernel = importlib.import_module("reloading_kernels").scale_kernel
    x, out = torch.arange(8.0), torch.empty(8)
    kernel[(1,)](x, out, N=8)
    assert torch.equal(out, 2 * x)
    (tmp_path / "reloaded_helpers.py").write_text(HELPERS.format(factor=30))
    helpers = sys.modules["reloaded_helpers"]
    kept = {name: value for name, value in vars(helpers).items() if name in ("__name__", "__spec__", "__loader__")}
    vars(helpers).clear()
    vars(helpers).update(kept)
    importlib.reload(helpers)
    kernel[(1,)](x, out, N=8)
    assert torch.equal(out, 30 * x)


def test_repair_is_idempotent_and_lists_what_it_did():
    builder = triton.runtime.interpreter.InterpreterBuilder
    before = builder.create_dot
    interpreter.apply_patches()
    assert builder.create_dot is before
    assert {"bfloat16 dot", "autotune without a driver"} <= set(interpreter.patches())
    assert ("loop bounds" in interpreter.patches()) == triton.__version__.startswith("3.6.")


@pytest.mark.compat
@pytest.mark.parametrize(
    "shape", [[4], [2, 8], tl.tuple([tl.constexpr(16), 1]), [tl.constexpr(4), 4, 4]], ids=["1d", "2d", "tuple", "3d"]
)
@pytest.mark.parametrize(
    "elements", [tl.float32, tl.int1, tl.pointer_type(tl.float16), tl.pointer_type(tl.float16, const=True)], ids=str
)
def test_a_types_shape_that_is_remembered_is_upstreams(elements, shape):
    upstream = object.__new__(tl.block_type)
    tl.block_type.__init__.__wrapped__(upstream, elements, list(shape))
    for _ in range(2):  # worked out, then remembered
        mine = tl.block_type(elements, shape)
        assert mine == upstream and (mine.name, mine.numel, mine.scalar) == (upstream.name, upstream.numel, elements)
        assert type(mine.shape) is type(upstream.shape) and list(mine.shape) == list(upstream.shape)
        value, theirs = tl.tensor(None, mine), object.__new__(tl.tensor)
        tl.tensor.__init__.__wrapped__(theirs, None, upstream)
        assert vars(value).keys() == vars(theirs).keys() and value.type is mine and value.dtype == elements
        assert [s.value for s in value.shape] == [s.value for s in theirs.shape]
        assert value.numel.value == theirs.numel.value
    assert tl.block_type(tl.float64, shape) != mine


@pytest.mark.compat
def test_types_that_look_alike_are_told_apart():
    plain, const = tl.pointer_type(tl.int8), tl.pointer_type(tl.int8, const=True)
    other = tl.pointer_type(tl.int8, address_space=3)
    blocks = [tl.block_type(elements, [8]) for elements in (plain, const, other, tl.int8, tl.uint8)]
    assert all((a == b) == (i == k) for i, a in enumerate(blocks) for k, b in enumerate(blocks))
    assert tl.float32 == tl.float32 and tl.float32 != tl.float16 and tl.float32 == tl.constexpr(tl.float32)
    scalars = [tl.tensor(None, tl.int32), tl.tensor(None, plain)]
    assert all(len(value.shape) == 0 and value.numel.value == 1 for value in scalars)
    tl.block_type(tl.float32, [2, 8])
    for bad in ([], [3], [2, 6], [2.0, 8], [2, scalars[0]]):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=r"forbidden|power of 2|constexpr\[int\]"):
                tl.block_type(tl.float32, bad)


@pytest.mark.compat
def test_types_of_gluon_keep_their_layouts():
    """A kernel may be compiled in a process in which another was interpreted."""
    gl = pytest.importorskip("triton.experimental.gluon.language", reason="this Triton has no Gluon")
    tile = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    layouts = [gl.SliceLayout(0, tile), gl.SliceLayout(1, tile)]
    kinds = [gl.distributed_type(gl.float32, [64], layout) for layout in layouts]
    assert [kind.layout for kind in kinds] == layouts
    assert [kind.with_element_ty(gl.float16).layout for kind in kinds] == layouts
    assert gl.distributed_type(gl.float32, [64], layouts[0]) == kinds[0] != kinds[1] != tl.block_type(tl.float32, [64])


#: Every type of numbers, a pointer, and numbers of Python that one or another of them does not hold.
OPERAND_TYPES = [
    *(tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64),
    *(tl.float8e5, tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.pointer_type(tl.float32)),
]
NUMBERS = [0, 1, -1, 7, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, 0.0, -1.5, 1e30, 1e300, math.inf, True]
#: (left may be a pointer, right may be, types are to agree, a division), as the language's operations ask.
CHECKS = [
    (True, True, True, False), (True, False, True, False), (False, True, True, False), (False, False, True, False),
    (False, False, True, True), (False, False, False, False),
]  # fmt: skip


def operand(dtype, shape):
    data = np.ones(shape or (1,), dtype=upstream._get_np_dtype(dtype))
    return tl.tensor(upstream.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def agreed(check, lhs, rhs, options):
    """What two operands become: types, bits and types of the bits; or the kind of error."""
    try:
        return [(str(x.type), x.handle.data.dtype, x.handle.data.tolist()) for x in check(lhs, rhs, *options)]
    except Exception as error:
        return type(error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("dtype", OPERAND_TYPES, ids=str)
def test_operands_agree_on_the_types_that_upstream_finds(dtype):
    mine = upstream.interpreter_semantic.binary_op_type_checking_impl
    others = [operand(other, shape) for other in OPERAND_TYPES for shape in ((), (4,), (2, 4), (1, 4))]
    same = 0
    for shape in ((), (4,), (2, 1)):
        for other in (*others, *NUMBERS):
            for pair in ((operand(dtype, shape), other), (other, operand(dtype, shape))):
                for options in CHECKS:
                    expected = agreed(mine.__wrapped__, *pair, options)
                    assert str(agreed(mine, *pair, options)) == str(expected)
                    same += isinstance(expected, list)
    assert same > 300


@pytest.mark.compat
def test_an_operator_of_pytorchs_takes_an_interpreted_kernel():
    assert torch.library.wrap_triton(binary_kernel) is binary_kernel
    with pytest.raises(RuntimeError, match="wrap_triton only works on"):
        torch.library.wrap_triton(len)
