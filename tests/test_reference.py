"""The references against loops, against PyTorch's own operators in float64, and against finite differences."""

import math

import pytest
import torch
import torch.nn.functional as F

from utils import reference

SEED = 20263


def rand(*shape, seed=SEED, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def loop_attention(q, k, v, causal, scale):
    """One query at a time, in Python floats; a query that sees no key gives zeros and -inf."""
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    o = torch.zeros(batch, heads, queries, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                seen = [j for j in range(k.shape[2]) if not causal or j <= i + k.shape[2] - queries]
                query, rows = q[b, h, i].tolist(), k[b, h // group].tolist()
                scores = [scale * sum(x * y for x, y in zip(query, rows[j])) for j in seen]
                if not scores:
                    continue
                top = max(scores)
                total = sum(math.exp(s - top) for s in scores)
                lse[b, h, i] = top + math.log(total)
                for s, j in zip(scores, seen):
                    o[b, h, i] += math.exp(s - top) / total * v[b, h // group, j]
    return o, lse


def test_results_are_float64_on_the_cpu_whatever_comes_in():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = rand(3, 5, dtype=dtype)
        for result in (reference.gelu(x), reference.softmax(x), reference.logsumexp(x)):
            assert (result.dtype, result.device.type) == (torch.float64, "cpu")
        close(reference.softmax(x), torch.softmax(x.double(), -1))
    assert not reference.gelu(rand(2).requires_grad_()).requires_grad


def test_gelu_agrees_with_pytorch():
    x = 4 * rand(1000)
    close(reference.gelu(x), F.gelu(x, approximate="tanh"))
    close(reference.gelu(x, "none"), F.gelu(x))
    far = reference.gelu(torch.tensor([-8.0]), "none").item()
    assert far == pytest.approx(-4 * math.erfc(8 / math.sqrt(2)), rel=1e-12)  # no cancellation in the tail


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_and_logsumexp_agree_with_pytorch(dim):
    x = 100 * rand(4, 6, 7)
    close(reference.softmax(x, dim), torch.softmax(x, dim))
    close(reference.logsumexp(x, dim), torch.logsumexp(x, dim))


def test_softmax_survives_large_scores_and_rows_that_are_masked_out():
    close(reference.softmax(torch.tensor([1e4, 1e4, 0.0])), torch.tensor([0.5, 0.5, 0.0]).double())
    masked = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]])
    close(reference.softmax(masked), torch.tensor([[0.0, 0.0], [1.0, 0.0]]).double())
    assert reference.logsumexp(masked).tolist() == [-math.inf, 0.0]
    assert torch.isnan(reference.softmax(torch.tensor([0.0, math.nan]))).all()


def test_the_worked_row_of_the_lecture():
    weights = reference.softmax(torch.tensor([-29.0, -30.0, -20.0, -20.0]))
    total = 2 + math.exp(-9) + math.exp(-10)
    close(weights, torch.tensor([math.exp(-9), math.exp(-10), 1, 1], dtype=torch.float64) / total)


def test_matmul_and_weighted_sum_agree_with_loops():
    a, b, weight = rand(2, 3, 4), rand(2, 4, 5, seed=1), rand(4, seed=2)
    looped = [[[sum(a[n, i, k] * b[n, k, j] for k in range(4)) for j in range(5)] for i in range(3)] for n in range(2)]
    close(reference.matmul(a, b), torch.tensor(looped, dtype=torch.float64))
    close(reference.weighted_sum(a, weight), torch.stack([sum(a[..., k] * weight[k] for k in range(4))])[0])


def test_references_take_tensors_that_are_not_contiguous():
    x = rand(6, 8)
    close(reference.softmax(x.T), torch.softmax(x.T.contiguous(), -1))
    close(reference.matmul(x[::2].T, x[::2]), x[::2].T.contiguous() @ x[::2].contiguous())


# ---- attention ----

SHAPES = [
    # batch, heads, kv_heads, queries, keys, head_dim, value_dim
    (2, 2, 2, 5, 5, 4, 4),
    (1, 4, 2, 3, 7, 4, 4),
    (1, 6, 1, 7, 3, 2, 2),
    (2, 1, 1, 1, 9, 8, 3),
    (1, 2, 1, 1, 1, 4, 4),
]


def tensors(batch, heads, kv_heads, queries, keys, head_dim, value_dim):
    q = rand(batch, heads, queries, head_dim)
    return q, rand(batch, kv_heads, keys, head_dim, seed=1), rand(batch, kv_heads, keys, value_dim, seed=2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_agrees_with_a_loop_over_queries(shape, causal, scale):
    q, k, v = tensors(*shape)
    expected = loop_attention(q, k, v, causal, scale or 1 / math.sqrt(q.shape[3]))
    for got, wanted in zip(reference.attention(q, k, v, causal, scale), expected):
        close(got, wanted)


def test_attention_agrees_with_pytorch():
    q, k, v = tensors(2, 4, 2, 6, 6, 8, 8)
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        close(reference.attention(q, k, v, causal)[0], expected)


def test_a_query_that_sees_no_key_gives_zeros_and_minus_infinity_not_nan():
    o, lse = reference.attention(*tensors(1, 1, 1, 5, 2, 4, 4), causal=True)
    assert o[0, 0, :3].eq(0).all()
    assert lse[0, 0, :3].eq(-math.inf).all()
    assert torch.isfinite(o).all() and torch.isfinite(lse[0, 0, 3:]).all()


def test_the_causal_mask_is_aligned_to_the_last_query_and_the_last_key():
    assert reference.causal_mask(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert reference.causal_mask(3, 2).int().tolist() == [[0, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_gradients_of_attention_agree_with_autograd(shape, causal):
    inputs = [each.requires_grad_() for each in tensors(*shape)]
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(q.shape[3])
    mask = reference.causal_mask(q.shape[2], k.shape[2]) | (not causal)
    weights = torch.where(mask, scores, -math.inf)
    weights = torch.softmax(torch.where(mask.any(1, keepdim=True), weights, 0.0), -1) * mask
    o = weights @ v.repeat_interleave(group, 1)
    do = rand(*o.shape, seed=3)
    expected = torch.autograd.grad((o * do).sum(), inputs)
    for got, wanted in zip(reference.attention_backward(q, k, v, do, causal), expected):
        close(got, wanted, 1e-10)


def test_the_gradients_of_attention_agree_with_finite_differences():
    inputs = list(tensors(1, 2, 1, 3, 4, 3, 2))
    do = rand(1, 2, 3, 2, seed=3)
    gradients = reference.attention_backward(*inputs, do, causal=True, scale=0.7)
    for position, gradient in enumerate(gradients):
        for index in range(0, inputs[position].numel(), 3):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [each.clone() for each in inputs]
                moved[position].view(-1)[index] += step
                ends.append((reference.attention(*moved, causal=True, scale=0.7)[0] * do).sum())
            assert ((ends[0] - ends[1]) / 2e-5).item() == pytest.approx(gradient.flatten()[index].item(), abs=1e-8)


# ---- bad input ----

Q = torch.zeros(1, 4, 3, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: reference.softmax([1.0]), TypeError, r"x must be a torch tensor, got list"),
        (lambda: reference.gelu(torch.ones(2, dtype=torch.bool)), TypeError, r"must hold real numbers, got torch.bool"),
        (lambda: reference.gelu(Q, "sigmoid"), ValueError, r"approximate must be 'tanh' or 'none', got 'sigmoid'"),
        (lambda: reference.matmul(Q, Q), ValueError, r"got \(1, 4, 3, 8\) and \(1, 4, 3, 8\)"),
        (lambda: reference.weighted_sum(Q, torch.zeros(7)), ValueError, r"got \(1, 4, 3, 8\) and \(7,\)"),
        (lambda: reference.attention(Q, Q[:, :3], Q[:, :3]), ValueError, r"heads of q must be a multiple .* 4 and 3"),
        (lambda: reference.attention(Q[0], Q, Q), ValueError, r"q, k, v must be \(B, H, N, D\), got q \(4, 3, 8\)"),
        (lambda: reference.attention(Q, Q[..., :4], Q), ValueError, r"do not fit: q \(1, 4, 3, 8\), k \(1, 4, 3, 4\)"),
        (lambda: reference.attention_backward(Q, Q, Q, Q[..., :2]), ValueError, r"do must have the shape of o"),
    ],
)
def test_bad_input_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()
