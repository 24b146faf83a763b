"""Lab 3's attention: right on any shape, stride, dtype and group of heads, no byte more than needed, no race."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import attention_errors
from solutions import lab3_flash_attention as lab
from solutions.lab3_flash_attention import tiles, tuning
from utils import reference, runtime
from utils.checks import cases
from utils.kernel_profile import profile_kernel

import triton.language as tl  # isort: skip

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(runtime.DEVICE)


def inputs(B=1, Hq=2, Hkv=None, Nq=50, Nk=None, D=32, dtype=torch.float32, seed=0):
    """q, k, v, dO and dL."""
    Hkv, Nk = Hkv or Hq, Nk or Nq
    q, do = draw(B, Hq, Nq, D, dtype=dtype, seed=seed), draw(B, Hq, Nq, D, dtype=dtype, seed=seed + 1)
    k, v = draw(B, Hkv, Nk, D, dtype=dtype, seed=seed + 2), draw(B, Hkv, Nk, D, dtype=dtype, seed=seed + 3)
    return q, k, v, do, draw(B, Hq, Nq, seed=seed + 4)


def five(q, k, v, do, dlse, causal=False, scale=None):
    """o, lse, dq, dk, dv."""
    return attention_errors.our_attention(q, k, v, do, dlse, causal, scale)


def assert_right(q, k, v, do, dlse, causal=False, scale=None, tolerance=1e-5):
    found = five(q, k, v, do, dlse, causal, scale)
    right = attention_errors.plain_attention(*(x.cpu().double() for x in (q, k, v, do, dlse)), causal, scale)
    for name, mine, expected in zip(attention_errors.OUTPUTS, found, right, strict=True):
        assert attention_errors.largest_error(mine, expected) <= tolerance * (
            1 + expected[expected.isfinite()].abs().max()
        ), name
    return found


@pytest.fixture
def descriptors(monkeypatch):
    """Each kernel's tiles through descriptors; those of the interpreter, on which the checks run, take pointers."""
    for name in ("forward", "dkdv", "dq"):
        chosen = getattr(tuning, name)
        monkeypatch.setattr(tuning, name, lambda *args, chosen=chosen: chosen(*args)._replace(descriptors=True))


def take_loop(monkeypatch, anchored):
    """Let the forward kernel try its anchored loop first, or leave it out; the tile is the same."""
    chosen = tuning.forward
    monkeypatch.setattr(tuning, "forward", lambda *args: chosen(*args)._replace(anchored=anchored))


@pytest.fixture
def anchored(monkeypatch):
    """The forward kernel with its anchored loop, which the interpreter leaves out by default."""
    take_loop(monkeypatch, True)


# ---- right ---------------------------------------------------------------------------------------------------------


def slowly(*values: object) -> list:
    """Parameters of a broader sweep, which `make test` runs and `make check` leaves out."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


@pytest.mark.parametrize("number", [*range(4), *slowly(*range(4, 15))])
def test_random_cases_err_no_more_than_twice_what_pytorch_does(number):
    point = attention_errors.case(10_000 + number, longest=runtime.pick(cpu=50, gpu=512))
    assert attention_errors.within(point), point


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Nq", "Nk"), [(1, 97), (70, 33), (33, 70), *slowly((64, 64), (1, 1), (17, 15))])
def test_lengths_that_divide_nothing_and_more_queries_than_keys(Nq, Nk, causal, descriptors):
    assert_right(*inputs(Hq=1, Nq=Nq, Nk=Nk, D=16), causal)


@pytest.mark.parametrize("D", [17, *slowly(40, 59, 80, 256)])
def test_head_dimensions_that_are_no_power_of_two(D, descriptors):
    assert_right(*inputs(Hq=1, Nq=37, Nk=41, D=D), causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 2), *slowly((3, 1))])
def test_query_heads_that_share_a_key_head(Hq, Hkv, causal, descriptors):
    found = assert_right(*inputs(2, Hq, Hkv, 21, 35, 16), causal)
    assert found[3].shape == (2, Hkv, 35, 16)


@pytest.mark.parametrize("scale", [0.05, 1.0, -0.3, 0.0, 1])
def test_any_finite_scale_even_one_that_turns_the_order_of_the_scores_round(scale):
    assert_right(*inputs(Nq=37, Nk=41, D=16), causal=True, scale=scale)


@pytest.mark.parametrize("layout", ["transposed", "padded", *slowly("strided", "offset", "expanded")])
def test_every_layout_gives_the_same_numbers(layout, descriptors):
    plain = inputs(2, 2, 1, 21, 35, 24, torch.float16)
    moved = [cases.with_layout(x, layout) for x in plain]
    expected = five(*(x.contiguous() for x in moved), causal=True)
    for mine, theirs in zip(five(*moved, causal=True), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_heads_that_lie_beyond_2_to_the_31_are_found(descriptors):
    assert cases.far_fits(torch.float16), "needs room for offsets beyond 2^31"
    q, k, v, do, dlse = inputs(3, 1, 1, 20, 20, 16, torch.float16)
    far = [cases.with_layout(x, "far") for x in (q, k, v, do)]
    for mine, theirs in zip(five(*far, dlse), five(q, k, v, do, dlse), strict=True):
        assert torch.equal(mine, theirs)


def test_rows_of_one_head_that_lie_beyond_2_to_the_31_are_found():
    assert cases.far_fits(torch.float16), "needs room for offsets beyond 2^31"
    q, k, v, do, dlse = inputs(1, 1, 1, 3, 3, 16, torch.float16)
    far = [cases.with_layout(x[0, 0], "far")[None, None] for x in (q, k, v, do)]
    assert tiles.index_dtype(far[0]) == tl.int64 and tiles.index_dtype(q) == tl.int32
    for mine, theirs in zip(five(*far, dlse, causal=True), five(q, k, v, do, dlse, causal=True), strict=True):
        assert torch.equal(mine, theirs)


def test_results_lie_in_memory_as_their_inputs_do():
    q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(2, 4, 2, 9, 11, 16)[:4])
    o, _, dq, dk, dv = five(q, k, v, do, draw(2, 4, 9))
    for mine, theirs in ((o, q), (dq, q), (dk, k), (dv, v)):
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("D", [16, *slowly(40)])
def test_a_row_that_sees_no_key_gives_zeros_not_nan(D, descriptors):
    q, k, v, do, dlse = inputs(1, 4, 2, 70, 30, D)
    dlse[:, :, :40] = math.nan  # whatever the gradient of a constant -inf is: it goes nowhere
    o, lse, dq, dk, dv = five(q, k, v, do, dlse, causal=True)
    assert (o[:, :, :40] == 0).all() and (lse[:, :, :40] == -math.inf).all() and (dq[:, :, :40] == 0).all()
    seeing = five(q[:, :, 40:], k, v, do[:, :, 40:], dlse[:, :, 40:], causal=True)
    for mine, theirs in zip((o[:, :, 40:], lse[:, :, 40:], dq[:, :, 40:], dk, dv), seeing, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_the_logsumexp_alone():
    q, k, v, _, dlse = inputs(Nq=37, Nk=41, D=16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dq, dk, dv = torch.autograd.grad(lab.flash_attention_with_lse(*leaves)[1], leaves, dlse)
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(-1, -2) / 4
    right = torch.autograd.grad(torch.logsumexp(scores, -1), exact[:2], dlse.cpu().double())
    for mine, expected in zip((dq, dk), right, strict=True):
        torch.testing.assert_close(mine.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert (dv == 0).all()


def test_only_the_gradients_that_are_asked_for_are_computed():
    q, k, v, do, _ = inputs(Nq=20, D=16)
    (dq,) = torch.autograd.grad(lab.flash_attention(q.requires_grad_(), k, v), q, do)
    with profile_kernel() as profile:
        q, k, v = q.detach(), k.requires_grad_(), v.detach()
        (dk,) = torch.autograd.grad(lab.flash_attention(q, k, v), k, do)
    assert set(profile.by_kernel) == {"flash_forward_kernel", "delta_kernel", "dkdv_kernel"}
    exact = reference.attention_backward(q, k, v, do)
    torch.testing.assert_close(dq.cpu().double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dk.cpu().double(), exact[1], rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_expanded_from_one_number_arrives():
    q, k, v, _, _ = inputs(Nq=20, D=16)
    leaf = v.requires_grad_()
    (dv,) = torch.autograd.grad(lab.flash_attention(q, k, leaf).sum(), leaf)
    right = reference.attention_backward(q, k, v, torch.ones_like(q))[2]
    torch.testing.assert_close(dv.cpu().double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_give_the_same_bits(dtype, descriptors):
    args = inputs(2, 2, 1, 21, 35, 24, dtype)
    first, second = (five(*args, causal=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_derivative_is_refused_rather_than_wrong():
    q, k, v, _, _ = (x.requires_grad_() for x in inputs(Nq=8, D=16))
    (dq,) = torch.autograd.grad((lab.flash_attention(q, k, v) ** 2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_large_scores_overflow_nowhere():
    q, k, v, do, dlse = inputs(Nq=40, D=16)
    for causal in (False, True):
        found = five(q * 100, k * 100, v, do, dlse * 0, causal)
        o, lse = reference.attention(q * 100, k * 100, v, causal)
        torch.testing.assert_close(found[0].cpu().double(), o, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(found[1].cpu().double(), lse, rtol=1e-5, atol=1e-3)
        assert all(x.isfinite().all() for x in found)


def test_nan_in_a_key_reaches_every_query_that_sees_it_and_no_other():
    q, k, v, _, _ = inputs(1, 1, 1, 40, 40, 16)
    k[0, 0, 25, 3] = math.nan
    o, lse = lab.flash_forward(q, k, v, causal=True)
    assert o[0, 0, :25].isfinite().all() and lse[0, 0, :25].isfinite().all()
    assert o[0, 0, 25:].isnan().all() and lse[0, 0, 25:].isnan().all()


@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 0, 5, 16)])
def test_no_batch_and_no_heads_give_nothing(shape):
    q = torch.zeros(shape, device=runtime.DEVICE)
    o, lse, *gradients = five(q, q, q, q, torch.zeros(shape[:3], device=runtime.DEVICE))
    assert o.shape == shape and lse.shape == shape[:3] and all(x.shape == shape for x in gradients)
    o, lse = lab.tiled_attention(q, q, q)
    assert o.shape == shape and lse.shape == shape[:3]


# ---- in plain PyTorch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Hq", "Hkv", "Nq", "Nk"), [(4, 2, 50, 70), (2, 2, 70, 50), (3, 1, 1, 33), (1, 1, 64, 64)])
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), *slowly((64, 64), (7, 5))])
def test_tiled_attention_gives_the_reference_whatever_the_tiles(Hq, Hkv, Nq, Nk, causal, block_m, block_n):
    q, k, v, do, _ = inputs(2, Hq, Hkv, Nq, Nk, 20)
    o, lse = lab.tiled_attention(q, k, v, causal, None, block_m, block_n)
    gradients = lab.tiled_attention_backward(q, k, v, o, lse, do, causal, None, block_m, block_n)
    right = (*reference.attention(q, k, v, causal), *reference.attention_backward(q, k, v, do, causal))
    for mine, expected in zip((o, lse, *gradients), right, strict=True):
        assert attention_errors.largest_error(mine, expected) < 1e-5


def test_merging_parts_in_any_order_gives_the_softmax_of_the_whole():
    x, v = draw(3, 40).cpu().double(), draw(40, 8, seed=1).cpu().double()
    x[0, :10], x[1] = -math.inf, -math.inf

    def part(columns):
        m = x[:, columns].amax(-1)
        p = torch.exp(x[:, columns] - torch.where(m.isinf(), 0.0, m)[:, None])
        return m, p.sum(-1), p @ v[columns]

    a, b, c = part(slice(0, 10)), part(slice(10, 25)), part(slice(25, 40))
    left = lab.merge_outputs(lab.merge_outputs(a, b), c)
    for other in (lab.merge_outputs(a, lab.merge_outputs(b, c)), lab.merge_outputs(lab.merge_outputs(c, a), b)):
        torch.testing.assert_close(left, other)
    torch.testing.assert_close(left, part(slice(0, 40)))
    assert left[0][1] == -math.inf and left[1][1] == 0 and (left[2][1] == 0).all()
    torch.testing.assert_close(lab.merge(*a[:2], *b[:2]), lab.merge_outputs(a, b)[:2])


# ---- no byte more --------------------------------------------------------------------------------------------------


def forward_bytes(B, Hq, Nq, Nk, D, dtype, causal):
    """Bytes that the forward kernel loads and stores, by argument: q, o and L once, k and v once a tile of queries."""
    anchored = Nk >= tuning.ANCHORED_FROM
    tile = tuning.forward(D, dtype, causal, tuning.capability_of(runtime.DEVICE), True, anchored)
    element_size = dtype.itemsize
    keys = 0
    for first in range(0, Nq, tile.m):
        seen = min(Nk, max(0, first + tile.m + Nk - Nq)) if causal else Nk
        keys += min(Nk, -(-seen // tile.n) * tile.n)
    loaded = {"q_ptr": Nq * D, "k_ptr": keys * D, "v_ptr": keys * D}
    return {name: B * Hq * n * element_size for name, n in loaded.items()}, B * Hq * Nq * (D * element_size + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("Hq", "Hkv", "Nq", "Nk", "D"), [(2, 2, 64, 64, 16), *slowly((4, 2, 50, 70, 40), (1, 1, 70, 33, 24))]
)
def test_forward_traffic_is_the_formula_exactly(Hq, Hkv, Nq, Nk, D, causal, dtype, descriptors):
    q, k, v, _, _ = inputs(2, Hq, Hkv, Nq, Nk, D, dtype)
    with profile_kernel() as profile:
        lab.flash_forward(q, k, v, causal)
    assert not profile.findings, profile.report()
    loaded, stored = forward_bytes(2, Hq, Nq, Nk, D, dtype, causal)
    assert {name: profile.by_argument[name].bytes_loaded for name in loaded} == loaded
    assert profile.bytes_loaded == sum(loaded.values()) and profile.bytes_stored == stored


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Hq", "Hkv", "Nq", "Nk", "D"), [*slowly((2, 1, 50, 70, 40)), (1, 1, 70, 33, 24)])
def test_no_race_no_access_out_of_bounds_and_nothing_read_before_it_is_written(Hq, Hkv, Nq, Nk, D, causal, descriptors):
    args = inputs(2, Hq, Hkv, Nq, Nk, D)
    with profile_kernel(check_races=True) as profile:
        five(*args, causal=causal)
    assert set(profile.by_kernel) == {"flash_forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"}
    assert not profile.findings, profile.report()


@pytest.mark.parametrize("together", [2, *slowly(1, 5, 100)])
def test_every_tile_has_one_program_however_many_heads_run_side_by_side(together, monkeypatch):
    monkeypatch.setattr(tuning, "nheads_in_l2", lambda kernel, rows, causal: together)
    q, k, v, _, _ = inputs(1, 7, 7, 100, 40, 16)
    with profile_kernel(check_races=True) as profile:
        o, _ = lab.flash_forward(q, k, v)
    assert not profile.findings and profile.by_argument["o_ptr"].bytes_stored == 4 * q.numel()
    torch.testing.assert_close(o.cpu().double(), reference.attention(q, k, v)[0], rtol=1e-5, atol=1e-5)


# ---- anchored ------------------------------------------------------------------------------------------------------


def forward_both(monkeypatch, q, k, v, causal=False):
    """o and L of the anchored loop, and those of the inner loop."""
    take_loop(monkeypatch, True)
    found = lab.flash_forward(q, k, v, causal)
    take_loop(monkeypatch, False)
    return found, lab.flash_forward(q, k, v, causal)


@pytest.mark.parametrize("number", [*range(2), *slowly(*range(2, 8))])
def test_anchored_random_cases_err_no_more_than_twice_what_pytorch_does(number, anchored):
    point = attention_errors.case(20_000 + number, longest=runtime.pick(cpu=50, gpu=512))
    assert attention_errors.within(point), point


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_what_is_not_finite_is_the_same_with_an_anchor(tensor, value, monkeypatch):
    q, k, v, _, _ = inputs(1, 1, 1, 50, 70, 16)
    {"k": k, "v": v}[tensor][0, 0, 40, 3] = value
    (o, lse), (right, right_lse) = forward_both(monkeypatch, q, k, v, causal=True)
    torch.testing.assert_close(o, right, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(lse, right_lse, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.slow
def test_the_loads_of_the_next_tile_come_first_and_the_gradients_stay(monkeypatch):
    args = inputs(2, 4, 2, 50, 70, 24)
    right = five(*args, causal=True)
    chosen = tuning.dkdv
    for change in ({"loads_first": True}, {"masked": False}, {"loads_first": True, "masked": False}):
        monkeypatch.setattr(tuning, "dkdv", lambda *args, change=change: chosen(*args)._replace(**change))
        assert all(torch.equal(a, b) for a, b in zip(five(*args, causal=True), right, strict=True))


@pytest.mark.slow
def test_a_tile_is_chosen_by_what_descriptors_can_describe_and_short_rows_are_not_anchored(monkeypatch):
    asked = []
    for name in ("forward", "dkdv", "dq"):
        chosen = getattr(tuning, name)
        monkeypatch.setattr(tuning, name, lambda *args, chosen=chosen: asked.append(args[4:]) or chosen(*args))
    for Nk, D, with_layout, described in (
        (128, 16, lambda x: x, True),
        (129, 16, lambda x: x, True),
        (40, 20, lambda x: x, False),  # rows of 40 bytes
        (40, 16, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
        (40, 16, lambda x: x.mT.contiguous().mT, False),
    ):
        q, k, v, do, dlse = inputs(1, 2, 2, 40, Nk, D, torch.bfloat16)
        five(with_layout(q), k, v, do, dlse)
        assert asked == [(described, Nk >= 129), (described,), (described,)], (Nk, D)
        asked.clear()


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda q, k, v: (q.double(), k, v), TypeError, "q must be float32, float16 or bfloat16, got float64"),
        (lambda q, k, v: (q, k.half(), v), TypeError, "k must have q's dtype float32, got float16"),
        (lambda q, k, v: (q, [1.0], v), TypeError, "k must be a torch.Tensor, got list"),
        (lambda q, k, v: (q[0], k, v), ValueError, r"q must have four axes, \(B, H, N, D\), got shape \(4, 5, 16\)"),
        (lambda q, k, v: (q[..., :8], k[..., :8], v[..., :8]), ValueError, "head_dim must be from 16 to 256, got 8"),
        (
            lambda q, k, v: (q, k, v[:, :, :3]),
            ValueError,
            r"v must have k's shape \(1, 2, 6, 16\), got \(1, 2, 3, 16\)",
        ),
        (lambda q, k, v: (q[:, :3], k, v), ValueError, "multiple of those of k and v, got 3 and 2"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), ValueError, "k must hold at least one row on axis 2"),
        (lambda q, k, v: (q, k.expand(3, 2, 6, 16), v), ValueError, r"k must have shape \(1, Hkv, Nk, 16\) to fit q"),
        (lambda q, k, v: (q, k, v.to("meta")), ValueError, "v must be on"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, text):
    q, k, v, _, _ = inputs(1, 4, 2, 5, 6, 16)
    for function in (lab.flash_attention, lab.flash_forward):
        with pytest.raises(error, match=text):
            function(*change(q, k, v))


@pytest.mark.parametrize(("scale", "error"), [("1", TypeError), (True, TypeError), (math.nan, ValueError)])
def test_a_scale_that_is_no_finite_number_is_refused(scale, error):
    q, k, v, _, _ = inputs(1, 4, 2, 5, 6, 16)
    with pytest.raises(error, match="scale must be"):
        lab.flash_attention(q, k, v, scale=scale)
