"""The example kernels compute what float64 computes, on any size, and refuse what they cannot take."""

from __future__ import annotations

import pytest
import torch

from utils import example_kernels as ek
from utils import reference, runtime

pytestmark = pytest.mark.compat

SEED = 31
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = SEED) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64)
    return values.to(runtime.DEVICE, dtype)


def integers(low: int, high: int, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    values = torch.randint(low, high, (n,), generator=torch.Generator("cpu").manual_seed(SEED))
    return values.to(runtime.DEVICE, dtype)


def assert_close(result: torch.Tensor, exact: torch.Tensor, factor: float = 4.0) -> None:
    """``result`` errs at most ``factor`` units in the last place of the largest exact (float64) value."""
    bound = factor * torch.finfo(result.dtype).eps * exact.abs().max().item()
    assert result.shape == exact.shape
    assert (result.double() - exact).abs().max().item() <= bound


@pytest.mark.parametrize("n", [0, 1, 1023, 1025])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int64])
def test_copy_copies(n, dtype):
    x = integers(-100, 100, n, dtype)
    assert torch.equal(ek.copy(x), x)


def test_copy_takes_views_and_an_output():
    x, out = random(100), torch.zeros(99, device=runtime.DEVICE)
    assert ek.copy(x[1:], out=out) is out
    assert torch.equal(out, x[1:])


@pytest.mark.parametrize(("n", "stride"), [(0, 3), (1, 5), (1000, 1), (1000, 7), (3000, 2)])
def test_strided_copy_is_slicing(n, stride):
    x = random(n)
    assert torch.equal(ek.strided_copy(x, stride), x[::stride])


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (33, 31), (64, 300)])
@pytest.mark.parametrize("transpose", [ek.naive_transpose, ek.tiled_transpose])
def test_transposes_transpose(shape, transpose):
    x = random(*shape)
    assert torch.equal(transpose(x), x.t())


@pytest.mark.parametrize("dtype", FLOATS)
def test_gelu_is_exact_gelu(dtype):
    x = random(17, 100, dtype=dtype) * 3
    assert_close(ek.gelu(x), torch.nn.functional.gelu(x.double()))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 1000), (9, 65)])
@pytest.mark.parametrize("widest_row", [64, 16384])
def test_softmax_is_softmax(dtype, rows, columns, widest_row):
    x = random(rows, columns, dtype=dtype) * 10
    assert_close(ek.softmax(x, widest_row=widest_row), x.double().softmax(-1))


def test_softmax_takes_rows_of_any_pitch_and_large_values():
    wide = random(6, 128) * 1000
    assert_close(ek.softmax(wide[:, 10:77]), wide[:, 10:77].double().softmax(-1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [0, 1, 1024, 5001])
def test_dot_product_is_a_dot_product(dtype, n):
    x, y = random(n, dtype=dtype), random(n, dtype=dtype, seed=7)
    exact = x.double() @ y.double()
    assert abs(ek.dot_product(x, y).item() - exact.item()) <= 1e-5 * (x.double().abs() @ y.double().abs()).item()


@pytest.mark.parametrize("n", [0, 1, 3000])
def test_histogram_counts_what_is_inside(n):
    x = integers(-5, 40, n, torch.int32)
    expected = torch.bincount(x[(x >= 0) & (x < 32)].long(), minlength=32)
    assert torch.equal(ek.histogram(x, 32).long(), expected)


@pytest.mark.parametrize("width", [1, 33, 1025])
def test_gather_looks_rows_up(width):
    table, index = random(20, width), integers(0, 20, 11)
    assert torch.equal(ek.gather(table, index), table[index])
    assert torch.equal(ek.gather(table[::2], index // 2), table[::2][index // 2])


def assert_product(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``result`` errs no more than a sum of K products in float32, in any order, rounded once to its dtype.

    Summing K terms in floating point errs at most K u sum |a_ik b_kj| (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1), with u half the spacing at 1 where additions round to nearest; tensor cores truncate, and
    u is the whole spacing.
    """
    a, b = a.double(), b.double()
    exact, spacing = a @ b, torch.finfo(torch.float32).eps
    summed = a.shape[1] * spacing * (a.abs() @ b.abs())
    kind = torch.finfo(result.dtype)
    rounded = kind.eps / 2 * (exact.abs() + summed) + kind.eps / 2 * kind.smallest_normal
    assert result.shape == exact.shape
    assert ((result.double() - exact).abs() <= summed + rounded).all()


MATMULS = [ek.naive_matmul, ek.tiled_matmul]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (50, 70, 33), (65, 31, 100), (5, 6, 0)])
@pytest.mark.parametrize("matmul", MATMULS)
def test_matmuls_multiply(dtype, m, n, k, matmul):
    a, b = random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=8)
    assert_product(matmul(a, b), a, b)


@pytest.mark.parametrize("matmul", MATMULS)
def test_matmuls_take_transposed_views(matmul):
    a, b = random(40, 50).t(), random(30, 40).t()
    assert_product(matmul(a, b), a, b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 16), (100, 72, 56), (1, 8, 0)])
def test_descriptor_matmul_multiplies(dtype, m, n, k):
    a, b = random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=8)
    assert_product(ek.descriptor_matmul(a, b), a, b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 2, 113, 32), (1, 1, 203, 64)])
def test_flash_attention_is_attention(dtype, causal, shape):
    q, k, v = (random(*shape, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    o, lse = ek.flash_attention_forward(q, k, v, causal=causal)
    exact, exact_lse = reference.attention(q, k, v, causal)
    assert_close(o.cpu(), exact, factor=4 if dtype != torch.float32 else 20)
    assert_close(lse.cpu(), exact_lse, factor=20)


def test_flash_attention_takes_any_layout_scale_and_number_of_keys():
    qkv = random(1, 70, 2, 3, 32).permute(0, 2, 3, 1, 4)
    q, k, v = (qkv[:, :, i] for i in range(3))
    o, _ = ek.flash_attention_forward(q[:, :, :50], k, v, scale=0.5)
    exact, _ = reference.attention(q[:, :, :50], k, v, scale=0.5)
    assert_close(o.cpu(), exact, factor=20)


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ek.copy([1.0]), TypeError, "x must be a torch.Tensor, got list"),
        (lambda: ek.copy(random(4, 4)), ValueError, r"x must have 1 dimension, got shape \(4, 4\)"),
        (lambda: ek.copy(random(8)[::2]), ValueError, "x must have stride 1, got 2"),
        (lambda: ek.copy(random(8), out=random(9)), ValueError, r"out must have x's shape \(8,\), got \(9,\)"),
        (lambda: ek.copy(random(8), out=random(8, dtype=torch.float16)), TypeError, "out must have dtype float32"),
        (lambda: ek.strided_copy(random(8), 0), ValueError, "stride must be at least 1, got 0"),
        (lambda: ek.strided_copy(random(8), 2.0), TypeError, "stride must be an integer, got 2.0"),
        (lambda: ek.naive_transpose(random(8, 4).t()), ValueError, r"x must be contiguous, got strides \(1, 4\)"),
        (lambda: ek.gelu(integers(0, 9, 9)), TypeError, "x must have dtype float16, bfloat16, float32, got int64"),
        (lambda: ek.softmax(random(4, 0)), ValueError, r"x must have at least one column, got shape \(4, 0\)"),
        (lambda: ek.dot_product(random(4), random(5)), ValueError, "x and y must have one length, got 4 and 5"),
        (lambda: ek.histogram(integers(0, 3, 4, torch.int32), -1), ValueError, "bins must be at least 1, got -1"),
        (lambda: ek.histogram(integers(0, 3, 4), 3), TypeError, "x must have dtype int32, got int64"),
        (lambda: ek.gather(random(4, 4), integers(4, 5, 1)), IndexError, "index holds 4, but table has rows 0 to 3"),
        (lambda: ek.gather(random(4, 4), integers(-2, -1, 1)), IndexError, "index holds -2"),
        (lambda: ek.tiled_matmul(random(4, 5), random(4, 5)), ValueError, "a's columns must equal b's rows"),
        (lambda: ek.naive_matmul(random(4, 5).double(), random(5, 4)), TypeError, r"a must have dtype .* got float64"),
        (lambda: ek.naive_matmul(random(4, 5), random(5, 4).half()), TypeError, "b must have a's dtype torch.float32"),
        (lambda: ek.descriptor_matmul(random(8, 9), random(9, 8)), ValueError, "a needs rows of unit stride"),
        (lambda: ek.flash_attention_forward(*[random(1, 1, 4, 80)] * 3), ValueError, r"head_dim must be .* got 80"),
        (
            lambda: ek.flash_attention_forward(random(1, 1, 4, 16), *[random(1, 1, 5, 16)] * 2, causal=True),
            ValueError,
            "got N = 4 and N_k = 5",
        ),
        (lambda: ek.flash_attention_forward(*[random(4, 16)] * 3), ValueError, "q must have 4 dimensions"),
        (lambda: ek.copy_traffic(-1, 4), ValueError, "n must be at least 0, got -1"),
        (lambda: ek.tiled_matmul_traffic(4, 4, -3, 4), ValueError, "k must be at least 0, got -3"),
        (lambda: ek.softmax_traffic(4, 4, 0), ValueError, "element_size must be at least 1, got 0"),
        (lambda: ek.histogram_traffic(4, 5), ValueError, "inside must be at most n = 4, got 5"),
        (lambda: ek.flash_attention_forward_traffic(1, 1, 4, True, 4), TypeError, "head_dim must be an integer"),
    ],
)
def test_bad_input_is_refused_by_name_and_value(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_tensor_on_another_device_is_refused():
    with pytest.raises(ValueError, match=r"x must be on .* got meta"):
        ek.copy(torch.empty(4, device="meta"))


def test_traffics_add_up():
    assert ek.Traffic(1, 2, 3, 4) + ek.Traffic(10, 20, 30, 40) == ek.Traffic(11, 22, 33, 44)
    assert ek.Traffic(1, 2).bytes_moved == 3
