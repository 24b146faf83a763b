"""Lab 6's attention of long and packed sequences: right, in both passes, and no tile too many."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from paged_cases import normal

from benchmarks.attention_errors import cancelled, largest_error
from solutions import lab3_flash_attention as lab3
from solutions.lab6_frontiers import long_tuning
from solutions.lab6_frontiers.flash_attention import flash_attention
from solutions.lab6_frontiers.visible_tiles import ALIGNMENT, lse_rows, plan_of
from utils import runtime
from utils.checks import cases, tensors
from utils.kernel_profile import profile_kernel
from utils.runtime import DEVICE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 24},
    "sinks": {"causal": True, "window": 24, "sinks": 3},
    "many sinks": {"causal": True, "window": 5, "sinks": 40},
}
#: Masks of a broader sweep.
OTHERS = ("causal", "window", "many sinks")


def seen(Nq, Nk, causal=False, window=None, sinks=0, **_):
    """Bool (Nq, Nk): the pairs of the definition."""
    position, key = torch.arange(Nq)[:, None] + Nk - Nq, torch.arange(Nk)[None, :]
    mask = torch.ones(Nq, Nk, dtype=torch.bool)
    if causal:
        mask &= key <= position
    if window is not None:
        mask &= (key > position - window) | (key < sinks)
    return mask


def plain(q, k, v, do, scale=None, lengths=None, **mask):
    """(o, dq, dk, dv) by PyTorch and its autograd, of (B, H, N, D), or packed (N, H, D) with (Nq, Nk) of documents."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        if lengths is None:
            o = _plain(*leaves, scale, mask)
        else:
            parts = [x.split(each) for x, each in zip(leaves, (lengths[0], lengths[1], lengths[1]), strict=True)]
            o = torch.cat(
                [_plain(*(x.transpose(0, 1) for x in part), scale, mask).transpose(0, 1) for part in zip(*parts)]
            )
        return o, *torch.autograd.grad(o, leaves, do)


def _plain(q, k, v, scale, mask):
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    visible = seen(q.shape[-2], k.shape[-2], **mask).to(q.device)
    blind = ~visible.any(-1, keepdim=True)
    scores = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(blind, 0.0)  # a row of -inf would give NaN
    return torch.softmax(scores, -1).masked_fill(blind, 0.0) @ v


def ours(q, k, v, do, scale=None, lengths=None, **mask):
    """The same by lab 6."""
    if lengths is not None:
        mask |= {f"cu_seqlens_{side}": starts(each) for side, each in zip("qk", lengths, strict=True)}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o = flash_attention(*leaves, scale=scale, **mask)
        return o, *torch.autograd.grad(o, leaves, do)


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def drawn(*, Hq=2, Hkv=1, D=16, dtype=torch.float32, lengths=None, B=2, Nq=50, Nk=70, seed=0):
    """q, k, v and dO: packed documents, or a batch."""
    heads = (Hq, Hkv, Hkv, Hq)
    if lengths is None:
        shapes = [(B, H, N, D) for H, N in zip(heads, (Nq, Nk, Nk, Nq), strict=True)]
    else:
        totals = [sum(lengths[i]) for i in (0, 1, 1, 0)]
        shapes = [(N, H, D) for H, N in zip(heads, totals, strict=True)]
    return [normal(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(shapes)]


def assert_within(inputs, factor=2.0, **options):
    """Errors of all four are at most twice PyTorch's in the same dtype, beyond what cancels (lab 3's rule)."""
    targets = tensors.targets(plain, inputs, options, factor=factor)
    found = ours(*inputs, **options)
    q, k, v, do = (x if x.ndim == 4 else x.transpose(0, 1)[None] for x in inputs)
    floors = cancelled(q, k, v, do, do, scale=options.get("scale"))
    for name, mine, target in zip(("o", "dq", "dk", "dv"), found, targets, strict=True):
        assert mine.dtype == target.dtype and tuple(mine.shape) == target.shape, name
        allowed = target.allowed + floors.get(
            name, 4 * torch.finfo(torch.float32).eps * target.right.abs().max().item()
        )
        assert largest_error(mine, target.right) <= allowed, name
    return found


# ---- right ----


@pytest.mark.parametrize("mask", ["full", "sinks", *(pytest.param(m, marks=pytest.mark.slow) for m in OTHERS)])
def test_documents_of_any_length_see_themselves_only(mask):
    lengths = [0, 37, 53, 1, 29, 0], [10, 40, 53, 1, 9, 4]
    assert_within(drawn(lengths=lengths), lengths=lengths, **MASKS[mask])


@pytest.mark.parametrize(
    "mask", ["sinks", *(pytest.param(m, marks=pytest.mark.slow) for m in ("window", "many sinks"))]
)
def test_windows_and_sinks_of_batches(mask):
    assert_within(drawn(Nq=35, Nk=50), **MASKS[mask])
    assert_within(drawn(Nq=50, Nk=33, B=1), **MASKS[mask])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(18))
def test_random_cases_err_no_more_than_twice_what_pytorch_does(number):
    draw = random.Random(f"long {number}")
    D, (Hq, Hkv) = draw.choice((16, 17, 40, 64, 80)), draw.choice(((2, 2), (4, 2), (3, 1)))
    mask = {"causal": draw.random() < 0.8}
    if mask["causal"]:
        mask |= {"window": draw.choice((None, 1, 7, 16, 33, 200)), "sinks": draw.choice((0, 1, 4, 16, 17))}
    lengths = None
    if packed := draw.random() < 0.6:
        count = draw.randint(1, 4)
        lengths = [[draw.choice((0, 1, 15, 16, 17, draw.randint(2, 60))) for _ in range(count)] for _ in range(2)]
        lengths[0][0], lengths[1][0] = lengths[0][0] or 5, lengths[1][0] or 5
        if draw.random() < 0.5:
            lengths[1] = lengths[0]
    inputs = drawn(Hq=Hq, Hkv=Hkv, D=D, dtype=DTYPES[number % 3], lengths=lengths, B=draw.randint(1, 2),
                   Nq=draw.randint(1, 60), Nk=draw.randint(1, 60), seed=10 * number)  # fmt: skip
    layout = draw.choice(("contiguous", "transposed", "padded", "strided") if packed else cases.LAYOUTS[:-1])
    inputs = [cases.with_layout(x, layout) if draw.random() < 0.7 else x for x in inputs]
    scale = draw.choice((None, None, 0.5, -0.3))
    assert_within(inputs, scale=scale, lengths=lengths, **mask)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 15, 16, 17, 31, 33, 47, 48])
def test_windows_that_end_where_tiles_do(window):
    lengths = [64, 64, 34, 33], [64, 65, 48, 64]
    assert_within(drawn(Hq=1, lengths=lengths), lengths=lengths, causal=True, window=window, sinks=window % 2)


@pytest.fixture
def as_on_hopper(monkeypatch):
    """Kernels as Hopper has them: tiles through descriptors, anchored rows, early loads, no masks of L and delta.

    On a GPU kernels are as they are there.
    """
    if not runtime.INTERPRET:
        return
    chosen = long_tuning.flash

    def flash(name, head_dim, dtype, causal, capability, described=False, window=None, length=None, anchored=True):
        tile = chosen(name, head_dim, dtype, causal, capability)
        if not described:
            return tile
        anchored = name == "forward" and anchored and (window is None or window >= tile.m)
        return tile._replace(descriptors=True, anchored=anchored, loads_first=True, masked=False)

    monkeypatch.setattr(long_tuning, "flash", flash)


@pytest.mark.parametrize("mask", ["full", "many sinks", "wide window"])
def test_documents_through_descriptors(mask, as_on_hopper):
    lengths = [0, 37, 53, 1, 29, 0], [10, 40, 53, 1, 9, 4]
    mask = MASKS.get(mask, {"causal": True, "window": 33, "sinks": 1})
    with profile_kernel(check_races=True) as profile:
        assert_within(drawn(Hq=4, Hkv=2, lengths=lengths), lengths=lengths, **mask)
    assert not profile.findings, profile.report()


@pytest.mark.parametrize("window", [1, 40, 200])
def test_windows_through_descriptors(window, as_on_hopper):
    with profile_kernel(check_races=True) as profile:
        assert_within(drawn(Nq=75, Nk=90, B=1), causal=True, window=window, sinks=window % 3)
        assert_within(drawn(Nq=64, Nk=41), causal=True, window=window, scale=-0.3)
    assert not profile.findings, profile.report()


@pytest.mark.interpreted
def test_a_row_that_outgrows_its_anchor_is_computed_again(as_on_hopper):
    q, k, v, do = drawn(Hkv=2, B=1, Nq=64, Nk=64)
    flops = []
    for factor in (1.0, 200.0):
        k[:, :, 20:24] *= factor  # scores of 200 and more, in a tile before the one of the second row's anchor
        with profile_kernel() as profile:
            o = flash_attention(q, k, v, causal=True, window=50)
        flops.append(profile.flops)
        right = plain(*(x.double() for x in (q, k, v, do)), causal=True, window=50)[0]
        torch.testing.assert_close(o.double(), right, rtol=1e-4, atol=1e-4)
    assert flops[1] > flops[0]


def test_packed_documents_are_what_each_gives_alone():
    lengths = [30, 17, 45]
    q, k, v, do = drawn(Hq=4, Hkv=2, lengths=(lengths, lengths))
    together = ours(q, k, v, do, lengths=(lengths, lengths), causal=True)
    parts = [x.split(lengths) for x in (q, k, v, do)]
    for s, alone in enumerate(zip(*parts, strict=True)):
        found = ours(*(x.transpose(0, 1)[None] for x in alone), causal=True)  # lab 3's
        for mine, theirs in zip(together, found, strict=True):
            torch.testing.assert_close(mine.split(lengths)[s], theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_without_sinks_it_is_lab_3s_window_and_with_a_wide_one_lab_3s_causal_attention():
    q, k, v, do = drawn(Hq=2, Hkv=2, Nq=40, Nk=61)
    o, lse = lab3.window_attention(q, k, v, 24)
    theirs = o, *lab3.window_attention_backward(q, k, v, o, lse, do, 24)
    for mine, other in zip(ours(q, k, v, do, causal=True, window=24), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    wide = ours(q, k, v, do, causal=True, window=2**40, sinks=2**40)
    for mine, other in zip(wide, ours(q, k, v, do, causal=True), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mask", "hopper"), [("causal", False), ("causal", True), ("full", True), ("sinks", True)])
def test_what_stands_in_another_document_does_not_matter(mask, hopper, request):
    if hopper:
        request.getfixturevalue("as_on_hopper")
    lengths = [21, 18, 40], [21, 18, 40]
    inputs = drawn(lengths=lengths)
    clean = ours(*inputs, lengths=lengths, **MASKS[mask])
    poisoned = [x.clone() for x in inputs]
    for x in poisoned:
        x[21:39] = math.nan
    for mine, theirs in zip(ours(*poisoned, lengths=lengths, **MASKS[mask]), clean, strict=True):
        for rows in (slice(0, 21), slice(39, None)):
            assert torch.equal(mine[rows], theirs[rows])


def test_queries_that_see_no_key_give_zeros_and_take_no_gradient():
    lengths = [40, 3, 5], [9, 0, 5]
    inputs = drawn(lengths=lengths)
    o, dq, _, _ = ours(*inputs, lengths=lengths, causal=True)
    for x in (o, dq):
        assert (x[:31] == 0).all() and (x[40:43] == 0).all() and (x[31:40] != 0).any() and (x[43:] != 0).any()
    o, dq, dk, dv = ours(*drawn(Nq=50, Nk=20), causal=True, window=4)
    assert (o[:, :, :30] == 0).all() and (dq[:, :, :30] == 0).all()
    lengths = [0, 5], [7, 5]
    _, _, dk, dv = ours(*drawn(lengths=lengths), lengths=lengths)
    assert (dk[:7] == 0).all() and (dv[:7] == 0).all()


def test_only_gradients_that_are_asked_for_are_computed():
    q, k, v, do = drawn(Hkv=2)
    q.requires_grad_()
    o = flash_attention(q, k, v, True, window=8)
    with profile_kernel() as profile:
        o.backward(do)
    assert [launch.kernel for launch in profile.launches] == ["flash_delta_kernel", "flash_dq_kernel"]


def test_results_lie_in_memory_as_their_inputs_do():
    lengths = [9, 12], [9, 12]
    for mine, given in zip(ours(*(x := drawn(lengths=lengths)), lengths=lengths), x[:1] + x[:3], strict=True):
        assert mine.stride() == given.stride()


def test_no_heads_and_no_batch_give_nothing():
    assert flash_attention(*(normal(0, 2, 5, 16) for _ in range(3)), causal=True, window=2).shape == (0, 2, 5, 16)
    assert flash_attention(*(normal(5, 0, 16) for _ in range(3)), cu_seqlens_q=starts([5])).shape == (5, 0, 16)


@pytest.mark.parametrize(
    ("given", "rows"), [({"window": 256}, 64), ({"window": 1024}, 128), ({"length": 200}, 64), ({"length": 3000}, 128),
                        ({"window": 1024, "length": 200}, 64), ({}, 128)]
)  # fmt: skip
def test_on_hopper_tiles_have_fewer_queries_where_a_query_sees_few_keys(given, rows, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRET", False)
    assert long_tuning.flash("forward", 128, torch.bfloat16, True, (9, 0), True, **given).m == rows


# ---- the order of tiles ----


@pytest.mark.parametrize("unused", [0, 100])  # rows behind the last document
@pytest.mark.parametrize("of_keys", [False, True])
def test_a_plan_holds_each_tile_once_and_those_with_the_most_work_first(of_keys, unused):
    draw = random.Random(f"plan {of_keys}")
    lengths = [draw.choice((0, 1, 15, 16, 17, draw.randint(2, 40))) for _ in range(130)] + [1100]
    rows, block = sum(lengths) + unused, 16
    found = plan_of(starts(lengths), starts(lengths), of_keys, rows, block).tolist()
    documents = list(zip(starts(lengths).tolist(), lengths))  # (the last start belongs to no document)
    tiles = [(first, n, first, n, start) for first, n in documents for start in range(0, n, block)]
    filled = found[: len(tiles)]
    assert sorted(tuple(row[:5]) for row in filled) == sorted(tiles)
    assert all(row[:6] == [0] * 6 for row in found[len(tiles) :]) and len(found) == rows // block + len(lengths)
    places = sorted((first, n, place * ALIGNMENT) for first, n, _, _, _, place, *_ in filled)
    ends = [place + -(-n // ALIGNMENT) * ALIGNMENT for _, n, place in places]
    assert all(end <= after[2] or place[0] == after[0] for end, place, after in zip(ends, places, places[1:]))
    assert max(ends) <= lse_rows(rows, len(lengths))
    work = [n - start if of_keys else start + block for _, n, _, _, start, *_ in filled]
    assert all(earlier > later - block for earlier, later in itertools.pairwise(work))


@pytest.mark.parametrize("hopper", [False, True])
def test_more_documents_than_a_plan_looks_at_at_once(hopper, request):
    if hopper:
        request.getfixturevalue("as_on_hopper")
    lengths = [1 + 5 * (i % 70 == 0) for i in range(150)]
    inputs = drawn(Hq=1, lengths=(lengths, lengths))
    assert_within(inputs, lengths=(lengths, lengths), causal=True)


# ---- no tile too many ----


def tiles_with_a_pair(lengths, mask, m, n):
    """Tiles of m x n scores in which some query sees some key, over all documents."""
    count = 0
    for Nq, Nk in zip(*lengths, strict=True):
        pairs = seen(Nq, Nk, **mask)
        padded = torch.nn.functional.pad(pairs, (0, -Nk % n, 0, -Nq % m))
        count += padded.unflatten(0, (-1, m)).unflatten(2, (-1, n)).any(3).any(1).sum().item() if Nq and Nk else 0
    return count


def slowly(*values):
    """Parameters of a broader sweep, which `make test` runs and `make check` leaves out."""
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize(
    ("mask", "packed"),
    [
        ("sinks", True),
        *slowly(*((mask, True) for mask in MASKS if mask != "sinks"), ("sinks", False), ("window", False)),
    ],
)
def test_each_pass_multiplies_the_tiles_with_a_visible_pair_and_no_other(mask, packed):
    lengths = ([66, 0, 33, 40], [66, 5, 64, 21]) if packed else ([75, 75], [130, 130])
    mask, D, Hq = MASKS[mask], 16, 2
    inputs = drawn(Hq=Hq, Hkv=1, D=D, lengths=lengths if packed else None, Nq=75, Nk=130)
    with profile_kernel(check_races=True) as profile:
        ours(*inputs, lengths=lengths if packed else None, **mask)
    assert not profile.findings, profile.report()
    for name, kernel, products in (("forward", "flash_forward_kernel", 2), ("dq", "flash_dq_kernel", 3),
                                   ("dkdv", "flash_dkdv_kernel", 4)):  # fmt: skip
        tile = long_tuning.flash(name, D, torch.float32, mask.get("causal", False), None)
        tiles = tiles_with_a_pair(lengths, mask, tile.m, tile.n)
        assert profile.by_kernel[kernel].flops == products * 2 * tile.m * tile.n * D * Hq * tiles, name


@pytest.mark.interpreted
def test_of_a_window_of_whole_tiles_each_row_of_tiles_has_the_windows_keys_its_own_and_the_sinks():
    N, D, window, sinks = 160, 16, 64, 16
    tile = long_tuning.flash("forward", D, torch.float32, True, None)
    with profile_kernel() as profile:
        flash_attention(*drawn(Hq=1, B=1, D=D, Nq=N, Nk=N)[:3], True, None, window, sinks)
    rows, growing = N // tile.m, window // tile.m  # rows of tiles, and of those that the window does not cut
    tiles = sum(tile.m * (row + 1) for row in range(growing)) // tile.n
    tiles += (rows - growing) * (window + tile.m) // tile.n
    tiles += (rows - growing - 1) * sinks // tile.n  # where the window begins behind the first tile
    assert profile.flops == 4 * tile.m * tile.n * D * tiles


# ---- refused ----

PACKED = {"cu_seqlens_q": [0, 5, 12]}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"window": 3}, ValueError, "a window needs causal=True, got window=3"),
        ({"causal": True, "window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"causal": True, "window": 2.0}, TypeError, "window must be a whole number, got float"),
        ({"sinks": -1}, ValueError, "sinks must be at least 0, got -1"),
        ({"sinks": None}, TypeError, "sinks must be a whole number, got NoneType"),
        ({"cu_seqlens_k": [0, 12]}, ValueError, "cu_seqlens_k needs cu_seqlens_q"),
        (PACKED | {"cu_seqlens_k": [0, 12]}, ValueError, "cu_seqlens_k must have 3 entries as cu_seqlens_q, got 2"),
        ({"cu_seqlens_q": [0, 5, 11]}, ValueError, r"cu_seqlens_q must rise from 0 to the 12 rows, got \[0, 5, 11\]"),
        ({"cu_seqlens_q": [1, 5, 12]}, ValueError, "cu_seqlens_q must rise from 0"),
        ({"cu_seqlens_q": [0, 13, 12]}, ValueError, "cu_seqlens_q must rise from 0"),
        (PACKED | {"cu_seqlens_k": [0, 3, 13]}, ValueError, "cu_seqlens_k must rise from 0 to the 12 rows"),
        ({"cu_seqlens_q": [12]}, ValueError, r"cu_seqlens_q must have shape \(documents \+ 1,\), got \(1,\)"),
        (PACKED | {"scale": math.nan}, ValueError, "scale must be finite"),
    ],
)
def test_what_does_not_fit_is_refused(options, error, text):
    packed = any("cu_seqlens" in name for name in options)
    shape = (12, 2, 16) if packed else (1, 2, 12, 16)
    given = {
        name: torch.tensor(value, dtype=torch.int32) if "cu_seqlens" in name else value
        for name, value in options.items()
    }
    with pytest.raises(error, match=text):
        flash_attention(*(normal(*shape) for _ in range(3)), **given)


def test_tensors_that_do_not_fit_documents_are_refused():
    q, ends = normal(12, 2, 16), starts([5, 7])
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32, got int64"):
        flash_attention(q, q, q, cu_seqlens_q=ends.long())
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be a torch\.Tensor, got list"):
        flash_attention(q, q, q, cu_seqlens_q=[0, 5, 12])
    with pytest.raises(ValueError, match=r"with cu_seqlens k must have shape \(total, H, D\), got \(1, 2, 12, 16\)"):
        flash_attention(q, q.transpose(0, 1)[None], q, cu_seqlens_q=ends)
    with pytest.raises(ValueError, match="heads of q must be a multiple"):
        flash_attention(q, normal(12, 3, 16), normal(12, 3, 16), cu_seqlens_q=ends)
    with pytest.raises(TypeError, match=r"k must be a torch\.Tensor, got NoneType"):
        flash_attention(q, None, q, cu_seqlens_q=ends)
    with pytest.raises(ValueError, match="q must have four axes"):
        flash_attention(q, q, q)
