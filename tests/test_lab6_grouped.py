"""The product of an expert layer is that of a loop over experts, in both directions, whatever the counts."""

from __future__ import annotations

import random

import pytest
import torch

from solutions.lab6_frontiers import tuning
from solutions.lab6_frontiers.grouped_matmul import grouped_matmul
from utils import runtime
from utils.checks import tensors
from utils.kernel_profile import profile_kernel


def operands(T, E, K, N, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    x, weights = (torch.randn(shape, generator=source).to(runtime.DEVICE, dtype) for shape in ((T, K), (E, K, N)))
    return x, weights / K**0.5


def counts_of(*counts, dtype=torch.int64):
    return torch.tensor(counts, dtype=dtype, device=runtime.DEVICE)


def loop(x, weights, counts):
    """The same by a product for each expert."""
    return torch.cat([rows @ w for rows, w in zip(x.split(counts.tolist()), weights)])


def with_gradients(product, x, weights, counts, dout):
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = product(x, weights, counts)
    return (out.detach(), *torch.autograd.grad(out, (x, weights), dout))


@pytest.mark.parametrize(
    "counts",
    [(7, 0, 40, 1), (0, 0, 0, 48), (48, 0, 0, 0), (12, 12, 12, 12), (0, 0, 0, 0), (16, 16, 1, 15)],
    ids=lambda counts: "-".join(map(str, counts)),
)
def test_outputs_and_gradients_are_those_of_a_loop_over_experts(counts):
    x, weights = operands(sum(counts), 4, 37, 45)
    dout = torch.randn(sum(counts), 45, generator=torch.Generator().manual_seed(1)).to(runtime.DEVICE)
    given = (x, weights, counts_of(*counts))
    for got, right in zip(with_gradients(grouped_matmul, *given, dout), with_gradients(loop, *given, dout)):
        assert got.shape == right.shape
        if right.numel():
            assert float((got - right).abs().max()) <= 1e-6 * max(1.0, float(right.abs().max()))


def excess(number):
    """How far a random product and its gradients are beyond twice the error of PyTorch; empty where they are within."""
    draw = random.Random(f"grouped product {number}")
    dtype = draw.choice((torch.float32, torch.float16, torch.bfloat16))
    E, K, N = draw.randint(1, 9), draw.randint(1, 90), draw.randint(1, 90)
    counts = [draw.choice((0, 1, draw.randint(0, 40))) for _ in range(E)]
    x, weights = operands(sum(counts), E, K, N, dtype, draw.getrandbits(32))
    dout = torch.randn(sum(counts), N, generator=torch.Generator().manual_seed(number)).to(runtime.DEVICE, dtype)
    given = counts_of(*counts, dtype=draw.choice((torch.int32, torch.int64)))
    if not sum(counts):
        return ""
    right = tensors.targets(lambda *args: with_gradients(loop, args[0], args[1], given, args[2]), (x, weights, dout))
    got = with_gradients(grouped_matmul, x, weights, given, dout)
    errors = [float((one.double().cpu() - of.right).abs().max()) for one, of in zip(got, right)]
    within = all(error <= of.allowed for error, of in zip(errors, right))
    return "" if within else f"case {number}, {dtype}, {counts}, {(K, N)}: {errors}"


@pytest.mark.slow
def test_random_groups_err_no_more_than_twice_what_pytorch_does():
    assert [text for number in range(16) if (text := excess(number))] == []


@pytest.mark.thorough
def test_two_hundred_random_groups_err_no_more_than_twice_what_pytorch_does():
    assert [text for number in range(200) if (text := excess(number))] == []


def test_strides_of_any_kind_are_taken():
    x, weights = operands(50, 3, 33, 20)
    counts = counts_of(20, 0, 30)
    right = loop(x, weights, counts)
    for given in (
        (x.T.contiguous().T, weights),
        (x, weights.mT.contiguous().mT),
        (x, weights.transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        torch.testing.assert_close(grouped_matmul(*given, counts), right, rtol=1e-5, atol=1e-5)


def test_an_experts_nan_reaches_its_own_rows_only():
    x, weights = operands(40, 3, 33, 20)
    weights[1] = float("nan")
    out = grouped_matmul(x, weights, counts_of(13, 5, 22))
    assert torch.equal(out.isnan().any(1), torch.tensor([False] * 13 + [True] * 5 + [False] * 22, device=out.device))


@pytest.mark.interpreted
def test_traffic_is_that_of_the_tiles_that_have_rows():
    T, E, K, N = 48, 3, 64, 64
    x, weights = operands(T, E, K, N, torch.float16)
    with profile_kernel() as profile:
        grouped_matmul(x, weights, counts_of(17, 0, 31))
    launch = profile.launches[-1]
    tiles_m, tiles_n = 2 + 0 + 2, 2  # tiles of 16 rows and 32 columns
    loaded = {
        name: sum(cell.bytes_loaded for (_, of), cell in launch.cells.items() if of == name)
        for name in ("x_ptr", "weights_ptr")
    }
    assert loaded == {"x_ptr": T * K * 2 * tiles_n, "weights_ptr": tiles_m * K * N * 2}
    assert sum(cell.bytes_stored for (_, of), cell in launch.cells.items() if of == "out_ptr") == T * N * 2
    assert not profile.out_of_bounds and not profile.races


@pytest.mark.interpreted
def test_traffic_of_the_backward_pass_is_that_of_its_tiles():
    T, E, K, N = 48, 3, 64, 64
    x, weights = (each.requires_grad_() for each in operands(T, E, K, N, torch.float16))
    out = grouped_matmul(x, weights, counts_of(17, 0, 31))
    with profile_kernel() as profile:
        out.backward(torch.ones_like(out))
    found = []
    for launch in profile.launches[-2:]:
        each = {}
        for (_, name), cell in launch.cells.items():
            loaded, stored = each.get(name, (0, 0))
            each[name] = (loaded + cell.bytes_loaded, stored + cell.bytes_stored)
        found.append(each)
    of_x, of_weights = found
    tiles_m, tiles_k = 2 + 0 + 2, 2  # of dx: tiles of 16 rows and 32 columns
    assert of_x["x_ptr"] == (T * N * 2 * tiles_k, 0)  # the gradient of the output takes the place of x
    assert of_x["weights_ptr"] == (tiles_m * K * N * 2, 0)
    assert of_x["out_ptr"] == (0, T * K * 2)
    tile = tuning.grouped_weight_gradient(2, tuning.capability_of(x.device))
    assert of_weights["x_ptr"] == (T * K * 2 * -(-N // tile.n), 0)
    assert of_weights["dout_ptr"] == (T * N * 2 * -(-K // tile.k), 0)
    assert of_weights["dweights_ptr"] == (0, E * K * N * 2)
    assert not profile.out_of_bounds and not profile.races


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x, w, c: (x.double(), w, c), TypeError, "float32, float16 or bfloat16"),
        (lambda x, w, c: (x, w.half(), c), TypeError, "x's dtype float32, got float16"),
        (lambda x, w, c: (x[:, :-1], w, c), ValueError, r"x must have shape \(T, K\)"),
        (lambda x, w, c: (x, w[:, :, :0], c), ValueError, "none of E, K and N zero"),
        (lambda x, w, c: (x, w, c.float()), TypeError, "int32 or int64"),
        (lambda x, w, c: (x, w, [5, 5]), TypeError, "got list"),
        (lambda x, w, c: (x, w, c[:1]), ValueError, "each of 2 experts"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, words):
    x, weights = operands(10, 2, 8, 6)
    with pytest.raises(error, match=words):
        grouped_matmul(*change(x, weights, counts_of(4, 6)))
