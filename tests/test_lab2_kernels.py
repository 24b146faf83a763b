"""Lab 2's kernels: right on any shape, stride and dtype, and clear about what they refuse.

That they move no byte more than needed is what the checks hold the solution to, in test_exercises.py.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import kernel_errors
from solutions import lab2_triton_kernels as lab
from solutions.lab2_triton_kernels import tuning
from solutions.lab2_triton_kernels.multi_cta_softmax import in_pairs, multi_cta_fits, multi_cta_softmax_kernel
from solutions.lab2_triton_kernels.rows import as_elements, as_rows
from utils import runtime
from utils.checks import cases

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def draw(*shape, dtype=torch.float32, layout="contiguous", seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(runtime.DEVICE)
    return cases.with_layout(values, layout)


def rms_norm_of_pytorch(x, weight, eps=1e-6):
    return F.rms_norm(x, weight.shape, weight, eps)


# ---- right ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("operator", kernel_errors.OPERATORS)
def test_random_shapes_strides_and_dtypes_err_no_more_than_twice_what_pytorch_does(operator):
    names = list(kernel_errors.OPERATORS)
    for turn in range(5):
        number = 1000 * len(names) + turn * len(names) + names.index(operator)
        point = kernel_errors.case(number, largest=130)
        assert point["operator"] == operator
        assert kernel_errors.within(point), f"case {number}: {point}"


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_every_layout_gives_the_same_numbers(layout):
    if layout == "far":
        assert cases.far_fits(torch.float16), "needs room for offsets beyond 2^31"
    x, dtype = draw(3, 70, layout=layout, dtype=torch.float16), torch.float16
    vector = draw(70, dtype=dtype, seed=1)
    plain = x.contiguous()
    for function in (lab.gelu, lab.softmax, lab.online_softmax):
        assert torch.equal(function(x), function(plain))
    for function in (lab.bias_relu, lab.rms_norm, lab.weighted_sum):
        assert torch.equal(function(x, vector), function(plain, vector))
    target = torch.tensor([3, -100, 69], device=x.device)
    assert torch.equal(lab.cross_entropy(x, target), lab.cross_entropy(plain, target))
    b = draw(70, 40, dtype=dtype, seed=2)
    torch.testing.assert_close(lab.matmul(x, b), lab.matmul(plain, b))
    torch.testing.assert_close(lab.tiled_matmul(x, b), lab.matmul(plain, b))


def test_an_operand_whose_rows_lie_beyond_2_to_the_31_is_multiplied_from_either_side():
    assert cases.far_fits(torch.float16), "needs room for offsets beyond 2^31"
    a, b = draw(3, 40, dtype=torch.float16, layout="far"), draw(3, 24, dtype=torch.float16, layout="far", seed=1)
    column = b.T[:, :1].expand(24, 40).T  # one row of b, 40 times
    torch.testing.assert_close(lab.matmul(a, column), a.contiguous() @ column.contiguous())
    torch.testing.assert_close(lab.matmul(a.T, b), a.T.contiguous() @ b.contiguous())


def test_a_gradient_arrives_in_any_layout():
    x, vector = draw(6, 50), draw(50, seed=1)
    pairs = ((lab.bias_relu, lambda x, bias: F.relu(x + bias)), (lab.rms_norm, rms_norm_of_pytorch))
    for grad in (torch.ones((), device=runtime.DEVICE).expand(6, 50), draw(50, 6, seed=2).T):
        for functions in pairs:
            mine, theirs = (kernel_errors.with_gradients(function)(x, vector, grad) for function in functions)
            torch.testing.assert_close(mine, theirs)
    rows = torch.ones((), device=runtime.DEVICE).expand(6)
    mine, theirs = (
        kernel_errors.with_gradients(function)(x, vector, rows)
        for function in (lab.weighted_sum, lambda x, w: (w * x).sum(-1))
    )
    torch.testing.assert_close(mine, theirs)


def test_only_the_gradients_that_are_asked_for_are_computed():
    x, weight = draw(5, 33), draw(33, seed=1)
    (dx,) = torch.autograd.grad(lab.weighted_sum(x.requires_grad_(), weight).sum(), x)
    torch.testing.assert_close(dx, weight.expand(5, 33))
    (dweight,) = torch.autograd.grad(lab.weighted_sum(x.detach(), weight.requires_grad_()).sum(), weight)
    torch.testing.assert_close(dweight, x.detach().sum(0))


def test_a_second_derivative_is_refused_rather_than_wrong():
    x, weight = draw(3, 8).requires_grad_(), draw(8, seed=1).requires_grad_()
    target = torch.tensor([0, 7, 2], device=x.device)
    for function in (lab.bias_relu, lab.rms_norm, lab.weighted_sum, lambda x, _: lab.cross_entropy(x, target)):
        (dx,) = torch.autograd.grad((function(x, weight) ** 2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


def test_a_loss_and_its_gradient_are_pytorchs_whatever_the_logits_hold():
    logits = draw(7, 5000)
    logits[0] = -math.inf
    logits[1, :4900] = -math.inf
    logits[2, 1::2] = -math.inf
    logits[3, 3] = math.inf
    logits[4, 4] = math.nan
    logits[5] += 1e5
    target = torch.tensor([9, 4950, 8, 0, 1, 2, -100], device=logits.device)
    losses = []
    for function in (lab.cross_entropy, lambda x, t: F.cross_entropy(x, t, reduction="none")):
        x = logits.clone().requires_grad_()
        loss = function(x, target)
        losses.append((loss.detach(), *torch.autograd.grad(loss.sum(), x)))
    (mine, dmine), (theirs, dtheirs) = losses
    torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dmine[[1, 2, 5, 6]], dtheirs[[1, 2, 5, 6]], rtol=1e-2, atol=1e-6)
    assert torch.equal(lab.cross_entropy(logits[1:3], target[1:3], ignore_index=8)[1], torch.zeros((), device=x.device))


def test_losses_have_the_targets_shape_and_one_number_keeps_its_row():
    logits, target = draw(2, 3, 9), torch.tensor([[0, 8, 4], [1, 1, -100]], device=runtime.DEVICE)
    flat = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    torch.testing.assert_close(lab.cross_entropy(logits, target), flat.view(2, 3))
    torch.testing.assert_close(lab.cross_entropy(logits[0, 1], target[0, 1]), flat[1])
    assert lab.cross_entropy(logits.half(), target).dtype == torch.float32


def test_large_values_overflow_nowhere():
    x = torch.tensor([[-1e4, 0.0, 1e4, 88.0, 3e4]], dtype=torch.float16, device=runtime.DEVICE).repeat(2, 700)
    torch.testing.assert_close(lab.gelu(x), F.gelu(x, approximate="tanh"))
    for function in (lab.softmax, lab.online_softmax):
        torch.testing.assert_close(function(x), torch.softmax(x, -1))
    big = torch.tensor([-1e20, -3.0, 0.0, 3.0, 1e20], device=runtime.DEVICE)
    torch.testing.assert_close(lab.gelu(big), F.gelu(big, approximate="tanh"))


@pytest.mark.parametrize("columns", [7, 5000])
def test_infinities_and_nan_go_where_pytorch_sends_them(columns):
    x = draw(6, columns)
    x[0, :] = -math.inf
    x[1, : columns // 2] = -math.inf
    x[2, columns // 2 :] = -math.inf
    x[3, 1] = math.inf
    x[4, -1] = math.nan
    for function in (lab.softmax, lab.online_softmax):
        torch.testing.assert_close(function(x), torch.softmax(x, -1), equal_nan=True)
    vector = torch.zeros(columns, device=runtime.DEVICE)
    torch.testing.assert_close(lab.bias_relu(x, vector), F.relu(x), equal_nan=True)
    torch.testing.assert_close(lab.gelu(x), F.gelu(x, approximate="tanh"), equal_nan=True)


def test_a_row_that_one_program_has_for_itself_goes_through_the_words_of_the_multi_cta_softmax():
    # one part a row: a program waits for nobody but itself, so that the interpreter can run it
    x = draw(7, 100, dtype=torch.bfloat16, layout="padded")
    x[0, :] = -math.inf
    x[1, :60] = -math.inf
    x[2, 3] = math.nan
    out = torch.full((7, 100), 9.0, dtype=x.dtype, device=x.device)
    words = torch.zeros(1 + 7, dtype=torch.int64, device=x.device)
    _, rows = as_rows(x)
    multi_cta_softmax_kernel[(7,)](
        x, out, words, rows.columns, 1, *rows.layout_args, PARTS=1, BLOCK=128, INT64=rows.needs_int64
    )
    torch.testing.assert_close(out, torch.softmax(x, -1), equal_nan=True)
    assert words[0] == 7 and (words[1:] != 0).all()


def test_rows_go_in_pairs_where_two_elements_make_a_word():
    even = torch.zeros(6, 100, dtype=torch.float16)
    pairs = [in_pairs(*as_rows(x)) for x in (even, even[:, 2:], even[::2], even[:, :50])]
    singles = [in_pairs(*as_rows(x)) for x in (even.float(), even[:, 1:99], even[:, :99], even.T, even[:, ::2])]
    assert all(pairs) and not any(singles)
    odd_rows = torch.zeros(5, 101, dtype=torch.float16)[:, :100]
    assert not in_pairs(*as_rows(odd_rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("columns", runtime.pick(cpu=[2049, 5000], gpu=[40_000, 65_537, 131_072, 300_002]))
def test_rows_that_no_program_holds_alone_give_what_pytorch_gives(dtype, shift, columns):
    x = (4 * draw(9, columns + shift, dtype=torch.float32)).to(dtype)[:, shift:]
    x[0] = -math.inf
    x[1, : columns // 2] = -math.inf
    x[2, 3] = math.nan
    x[3] *= 1000
    x[4, 5] = math.inf
    for _ in range(3):
        torch.testing.assert_close(lab.softmax(x), torch.softmax(x, -1), equal_nan=True)


def test_rows_are_spread_only_where_programs_run_at_the_same_time(monkeypatch):
    x = draw(1, 8)
    monkeypatch.setattr(runtime, "INTERPRET", True)
    assert not multi_cta_fits(x, 100_000)
    monkeypatch.setattr(runtime, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=10))
    shared = tuning.multi_cta_softmax(10**6, pairs=False)
    most = 10 * shared.programs_per_sm * shared.block
    assert multi_cta_fits(x, most) and not multi_cta_fits(x, most + 1)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4)])
def test_tensors_without_elements_give_what_pytorch_gives(shape):
    x, vector = torch.zeros(shape, device=runtime.DEVICE), torch.ones(shape[-1], device=runtime.DEVICE)
    for mine, theirs in (
        (lab.gelu(x), F.gelu(x, approximate="tanh")),
        (lab.softmax(x), torch.softmax(x, -1)),
        (lab.online_softmax(x), torch.softmax(x, -1)),
        (lab.bias_relu(x, vector), F.relu(x + vector)),
        (lab.weighted_sum(x, vector), (vector * x).sum(-1)),
        (lab.rms_norm(x, vector), torch.empty_like(x)),
        (lab.matmul(x, torch.ones(shape[-1], 3, device=runtime.DEVICE)), x @ torch.ones(shape[-1], 3, device=x.device)),
    ):
        assert torch.equal(mine, theirs)
    leaves = [x.requires_grad_(), vector.requires_grad_()]
    for mine, theirs in ((lab.bias_relu, lambda x, v: F.relu(x + v)), (lab.weighted_sum, lambda x, v: (v * x).sum(-1))):
        found, expected = (torch.autograd.grad(function(*leaves).sum(), leaves) for function in (mine, theirs))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_scalar_and_a_vector_are_tensors_too():
    scalar = torch.tensor(1.5, device=runtime.DEVICE)
    torch.testing.assert_close(lab.gelu(scalar), F.gelu(scalar, approximate="tanh"))
    x, vector, b = draw(20), draw(20, seed=1), draw(20, 6, seed=2)
    torch.testing.assert_close(lab.weighted_sum(x, vector), (vector * x).sum(-1))
    torch.testing.assert_close(lab.matmul(x, b), x @ b)


def test_five_leading_axes_in_any_order_are_found_in_memory():
    x = draw(2, 3, 2, 3, 2, 9).permute(3, 1, 4, 0, 2, 5)
    vector = draw(9, seed=1)
    torch.testing.assert_close(lab.weighted_sum(x, vector), (vector * x).sum(-1))
    torch.testing.assert_close(lab.gelu(x[..., ::2]), F.gelu(x[..., ::2], approximate="tanh"))


def test_gelu_keeps_the_layout_of_a_dense_tensor_and_reads_it_as_one_row():
    x = draw(4, 5, 6).permute(2, 0, 1)
    assert lab.gelu(x).stride() == x.stride()
    assert as_elements(x)[1].count == 1 and as_elements(x)[1].columns == 120


def test_leading_axes_merge_where_one_stride_describes_them():
    _, rows = as_rows(torch.zeros(4, 5, 6))
    assert (rows.count, rows.columns, rows.sizes, rows.strides, rows.stride_col) == (20, 6, (1, 1), (6, 0, 0), 1)
    _, rows = as_rows(torch.zeros(4, 5, 6, 7).transpose(0, 1))
    assert (rows.count, rows.sizes, rows.strides) == (120, (4, 6), (42, 210, 7))
    _, rows = as_rows(torch.zeros(4, 9)[:, ::2])
    assert (rows.columns, rows.stride_col, rows.strides[0], rows.needs_int64) == (5, 2, 9, False)


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: lab.gelu([1.0]), TypeError, "x must be a torch.Tensor, got list"),
        (lambda: lab.gelu(draw(3).double()), TypeError, "x must be float32, float16 or bfloat16, got float64"),
        (lambda: lab.softmax(draw(3).int()), TypeError, "got int32"),
        (lambda: lab.softmax(draw(3)[0]), ValueError, r"x must have at least 1 axes, got shape \(\)"),
        (lambda: lab.bias_relu(draw(4, 3), draw(4)), ValueError, r"bias must have shape \(3,\).*got \(4,\)"),
        (lambda: lab.bias_relu(draw(4, 3), draw(1, 3)), ValueError, r"bias must have shape \(3,\).*got \(1, 3\)"),
        (lambda: lab.weighted_sum(draw(4, 3), draw(3).half()), TypeError, "weight must have x's dtype float32"),
        (lambda: lab.matmul(draw(4, 3), draw(4, 3)), ValueError, r"b must have shape \(3, N\).*got \(4, 3\)"),
        (lambda: lab.matmul(draw(4, 3), draw(3)), ValueError, "b must have at least 2 axes"),
        (lambda: lab.matmul(draw(4, 3), draw(2, 3, 5)), ValueError, r"got \(2, 3, 5\)"),
        (lambda: lab.matmul(draw(4, 3), draw(3, 5).bfloat16()), TypeError, "must have a's dtype float32, got bf"),
        (lambda: lab.gelu(torch.zeros(3, device="meta")), ValueError, "x must be on .*, got meta"),
        (lambda: lab.rms_norm(draw(1, 8193), draw(8193)), ValueError, "x must have at most 8,192 columns, got 8,193"),
        (lambda: lab.cross_entropy(draw(2, 3), torch.zeros(2)), TypeError, "target must be int64, got float32"),
        (lambda: lab.cross_entropy(draw(2, 3), torch.zeros(3).long()), ValueError, r"shape \(2,\).*got \(3,\)"),
        (lambda: lab.cross_entropy(draw(2, 0), torch.zeros(2).long()), ValueError, r"logits \(2, 0\)"),
        (lambda: lab.cross_entropy(draw(2, 3), torch.zeros(2, device="meta").long()), ValueError, "got meta"),
    ],
)  # fmt: skip
def test_what_no_kernel_takes_is_refused_by_value(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("function", [lab.gelu, lab.softmax, lab.online_softmax])
def test_a_function_without_a_backward_pass_does_not_lose_a_gradient_silently(function):
    x = draw(2, 3).requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"has no backward pass: call it under torch.no_grad\(\), or on x.detach\(\)"
    ):
        function(x)
    with torch.no_grad():
        assert function(x).shape == x.shape
