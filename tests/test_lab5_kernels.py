"""Lab 5's kernels over a paged cache, beyond what the checks of exercises 5.4 and 5.5 hold them to."""

from __future__ import annotations

import math
import random

import pytest
import torch
from paged_cases import LAYOUTS, NO_BLOCK, assert_close, empty_cache, normal, paged, peer, right

from solutions.lab5_serving import tuning
from solutions.lab5_serving.cache_write import write_kv
from solutions.lab5_serving.merge import merge_parts
from solutions.lab5_serving.paged_decode import paged_attention_decode, paged_attention_parts
from solutions.lab5_serving.paged_extend import paged_attention_extend
from utils import runtime
from utils.checks import cases
from utils.kernel_profile import profile_kernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (16, 17, 32, 40, 64, 80, 128, 256)
TILE = runtime.pick(cpu=16, gpu=64)  # tokens of a tile, at most


def slowly(*values: object) -> list:
    """Parameters of a broader sweep, which `make test` runs and `make check` leaves out."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


def starts_of(counts):
    """query_starts of chunks of these lengths, on the device and as a list."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return torch.tensor(starts, dtype=torch.int32, device=runtime.DEVICE), starts


def drawn(number):
    """A random case: q for one query a sequence, a cache, chunks of queries, and how it is split."""
    draw = random.Random(f"paged attention {number}")
    dtype, D = DTYPES[number % 3], HEAD_DIMS[number // 3 % len(HEAD_DIMS)]
    G, group, block_size = draw.choice((1, 2)), draw.randint(1, 8), draw.choice((1, 4, 16))
    edges = (0, 1, block_size - 1, block_size, block_size + 1, TILE, TILE + 1)
    contexts = [draw.choice(edges) if draw.random() < 0.6 else draw.randint(0, 3 * TILE) for _ in range(3)]
    given = paged(contexts, G, D, block_size, dtype, draw.choice(LAYOUTS), number)
    return G * group, given, contexts, draw


# ---- right ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 4, 5, *slowly(*range(6, 18))])
def test_random_decode_steps_err_no_more_than_twice_what_pytorch_does(number):
    H, given, contexts, draw = drawn(number)
    q = normal(len(contexts), H, given.k_cache.shape[3], dtype=given.k_cache.dtype, seed=number)
    for num_splits in (1, draw.randint(2, 9), None):
        found = paged_attention_decode(q, *given.cache, num_splits=num_splits)
        assert found.dtype == q.dtype
        assert_close(found, right(q, given), peer(q, given))


@pytest.mark.parametrize("number", [100, 101, *slowly(*range(102, 114))])
def test_random_chunks_err_no_more_than_twice_what_pytorch_does(number):
    H, given, contexts, draw = drawn(number)
    starts, places = starts_of([draw.choice((0, min(n, 1), n, draw.randint(0, n))) for n in contexts])
    q = normal(places[-1], H, given.k_cache.shape[3], dtype=given.k_cache.dtype, seed=number)
    q = cases.with_layout(q, "strided")
    found = paged_attention_extend(q, *given.cache[:3], starts, given.context_lens)
    assert_close(found, right(q, given, places), peer(q, given, places))


def test_a_part_has_its_logsumexp_and_an_empty_one_has_minus_infinity():
    given, q = paged([0, 3, 2 * TILE], 1), normal(3, 2, 16)
    outputs, logsumexps = paged_attention_parts(q, *given.cache, 4)
    assert (logsumexps[0] == -math.inf).all() and ((logsumexps[1] > -math.inf).sum(1) == 1).all()
    scores = torch.einsum("hd,td->ht", q[2].double(), given.keys[2][:, 0].double()) / 4
    whole = torch.logsumexp(logsumexps[2].double(), -1)
    torch.testing.assert_close(whole, torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merge_parts(outputs, logsumexps).cpu().double(), right(q, given), rtol=1e-5, atol=1e-5)


def test_blocks_that_lie_beyond_2_to_the_31_are_found():
    assert cases.far_fits(torch.float16, rows=4), "needs room for offsets beyond 2^31"
    given, q = paged([5], 1, block_size=4, dtype=torch.float16), normal(1, 2, 16, dtype=torch.float16)
    far = [cases.with_layout(x, "far") for x in given.cache[:2]]
    starts, _ = starts_of([1])
    assert torch.equal(paged_attention_decode(q, *far, *given.cache[2:]), paged_attention_decode(q, *given.cache))
    assert torch.equal(
        paged_attention_extend(q, *far, given.block_tables, starts, given.context_lens),
        paged_attention_extend(q, *given.cache[:3], starts, given.context_lens),
    )
    k, v = normal(1, 1, 16, dtype=torch.float16), normal(1, 1, 16, dtype=torch.float16, seed=1)
    write_kv(k, v, *far, torch.tensor([3 * 4 + 2], device=runtime.DEVICE))
    assert torch.equal(far[0][3, 2], k[0]) and torch.equal(far[1][3, 2], v[0])


def test_a_sequence_does_not_depend_on_its_neighbours_in_the_batch():
    given, q = paged([7, 0, 30, 16], 1), normal(4, 2, 16)
    order = torch.tensor([2, 0, 3, 1], device=runtime.DEVICE)
    for num_splits in (1, 3):
        found = paged_attention_decode(q, *given.cache, num_splits=num_splits)
        moved = paged_attention_decode(
            q[order], *given.cache[:2], given.block_tables[order], given.context_lens[order], num_splits=num_splits
        )
        assert torch.equal(found[order], moved)


@pytest.mark.parametrize("scale", [-0.3, *slowly(0.05, 0.0, 1)])
def test_any_finite_scale_even_one_that_turns_the_order_of_the_scores_round(scale):
    given, q = paged([21, 40], 1), normal(2, 2, 16)
    starts, places = starts_of([1, 1])
    exact = right(q, given, scale=float(scale))
    for num_splits in (1, 2):
        assert_close(paged_attention_decode(q, *given.cache, scale=scale, num_splits=num_splits), exact)
    assert_close(paged_attention_extend(q, *given.cache[:3], starts, given.context_lens, scale=scale), exact)
    assert places[-1] == 2


def test_large_scores_overflow_nowhere():
    given, q = paged([5, 40], 1), normal(2, 2, 16) * 1000
    for num_splits in (1, 3):
        found = paged_attention_decode(q, *given.cache, num_splits=num_splits)
        torch.testing.assert_close(found.cpu().double(), right(q, given), rtol=1e-2, atol=1e-2)


def test_nan_in_a_key_reaches_its_own_sequence_only():
    given, q = paged([20, 20], 1), normal(2, 1, 16)
    given.k_cache[given.block_tables[1, 0], 1, 0, 3] = math.nan
    for num_splits in (1, 2):
        found = paged_attention_decode(q, *given.cache, num_splits=num_splits)
        assert found[0].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize("counts", [(0, 0, 5), (1, 0, 1), *slowly(((16, 0, 17),), ((0, 40, 0),), ((33, 1, 31),))])
def test_every_query_of_ragged_chunks_is_answered_once(counts):
    given, q = paged([45, 45, 45], 1), normal(sum(counts), 3, 16)
    starts, places = starts_of(counts)
    with profile_kernel(check_races=True) as profile:
        found = paged_attention_extend(q, *given.cache[:3], starts, given.context_lens)
    assert not profile.findings and profile.by_argument["o_ptr"].bytes_stored == 4 * q.numel()
    assert_close(found, right(q, given, places))


def test_64_bit_tables_and_lengths_are_taken_too():
    given, q = paged([9, 21]), normal(2, 4, 16)
    wide = paged_attention_decode(q, *given.cache[:2], given.block_tables.long(), given.context_lens.long())
    assert torch.equal(wide, paged_attention_decode(q, *given.cache))


def test_nothing_waits_for_the_gpu(monkeypatch):
    given, q = paged([9, 21]), normal(2, 4, 16)

    def refuse(*_):
        raise AssertionError("reads a tensor's value")

    for name in ("tolist", "cpu", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    if not runtime.INTERPRET:  # the interpreter itself reads numbers
        monkeypatch.setattr(torch.Tensor, "item", refuse)
        graph = torch.cuda.CUDAGraph()
        paged_attention_decode(q, *given.cache, num_splits=2)
        with torch.cuda.graph(graph):
            found = paged_attention_decode(q, *given.cache, num_splits=2)
        given.context_lens.fill_(3)
        graph.replay()
        assert torch.equal(found, paged_attention_decode(q, *given.cache, num_splits=2))
    paged_attention_decode(q, *given.cache)
    paged_attention_extend(q, *given.cache[:3], starts_of([1, 1])[0], given.context_lens)


@pytest.mark.parametrize(("S", "H"), [(0, 4), (2, 0)])
def test_no_sequence_and_no_head_give_nothing(S, H):
    given = paged([3, 3])
    q = normal(S, H, 16)
    tables, lengths = given.block_tables[:S], given.context_lens[:S]
    for num_splits in (1, 2, None):
        assert paged_attention_decode(q, *given.cache[:2], tables, lengths, num_splits=num_splits).shape == q.shape
    assert paged_attention_extend(q, *given.cache[:2], tables, starts_of([1] * S)[0], lengths).shape == q.shape


# ---- merging -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_of_a_merge_has_the_dtype_that_is_asked_for(dtype):
    outputs, logsumexps = normal(1, 2, 3, 16), normal(1, 2, 3, seed=1)
    found = merge_parts(outputs, logsumexps, dtype=dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, merge_parts(outputs, logsumexps).to(dtype))


# ---- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, *slowly(torch.float16, torch.bfloat16)])
def test_a_token_is_written_to_its_slot_and_nowhere_else(layout, dtype):
    k, v = normal(4, 3, 20, dtype=dtype), normal(4, 3, 20, dtype=dtype, seed=1)
    k_cache, v_cache = (empty_cache((5, 4, 3, 20), dtype, layout) for _ in range(2))
    slots = torch.tensor([7, -1, 0, 19], device=runtime.DEVICE)
    with profile_kernel(check_races=True) as profile:
        write_kv(
            cases.with_layout(k, "padded"), v.transpose(0, 1).contiguous().transpose(0, 1), k_cache, v_cache, slots
        )
    assert not profile.findings, profile.report()
    for cache, x in ((k_cache, k), (v_cache, v)):
        flat = cache.reshape(20, 3, 20)
        assert torch.equal(flat[[7, 0, 19]], x[[0, 2, 3]])
        assert flat.isfinite().sum() == 3 * 60
    moved = 3 * 60 * dtype.itemsize  # a token without a slot is not even loaded
    assert {name: counters.bytes_loaded for name, counters in profile.by_argument.items() if counters.bytes_loaded} == {
        "k_ptr": moved, "v_ptr": moved, "slots_ptr": 4 * 8
    }  # fmt: skip
    assert profile.bytes_stored == 2 * moved


def test_a_step_without_tokens_writes_nothing():
    cache = empty_cache((2, 4, 1, 16), torch.float32, "token-major")
    none = torch.zeros(0, 1, 16, device=runtime.DEVICE)
    write_kv(none, none, cache, cache.clone(), torch.zeros(0, dtype=torch.int64, device=runtime.DEVICE))
    assert cache.isnan().all()


# ---- no byte more --------------------------------------------------------------------------------------------------


def test_extend_reads_no_block_that_no_query_of_a_tile_sees():
    given, q = paged([3 * TILE], 1), normal(2 * TILE, 1, 16)
    starts, _ = starts_of([2 * TILE])
    with profile_kernel(check_races=True) as profile:
        paged_attention_extend(q, *given.cache[:3], starts, given.context_lens)
    assert not profile.findings, profile.report()
    tile = tuning.extend(16, q.dtype, 1, tuning.capability_of(runtime.DEVICE))
    seen = sum(TILE + min(first + tile.m, 2 * TILE) for first in range(0, 2 * TILE, tile.m))
    assert profile.by_argument["k_cache_ptr"].bytes_loaded == seen * 16 * 4
    assert profile.bytes_stored == 4 * q.numel()


# ---- numbers that tune ---------------------------------------------------------------------------------------------


def test_more_rows_or_a_shorter_context_are_split_less():
    for sms in (1, 2, 108, 132):
        for longest in (0, 16, 1024, 65536, 1 << 20):
            chosen = [tuning.splits(rows, longest, sms) for rows in range(1, 2000, 7)]
            assert chosen == sorted(chosen, reverse=True) and min(chosen) >= 1 and chosen[-1] == 1
        for rows in (1, 8, 64):
            chosen = [tuning.splits(rows, longest, sms) for longest in range(0, 1 << 17, 999)]
            assert chosen == sorted(chosen)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda a: a | {"q": a["q"].double()}, TypeError, "q must be float32, float16 or bfloat16, got float64"),
        (lambda a: a | {"q": a["q"][0]}, ValueError, r"q must have shape \(S, H, D\), got \(4, 16\)"),
        (lambda a: a | {"k_cache": a["k_cache"].half()}, TypeError, "k_cache must have q's dtype float32, got float16"),
        (lambda a: a | {"k_cache": None}, TypeError, "k_cache must be a torch.Tensor, got NoneType"),
        (lambda a: a | {"v_cache": a["v_cache"][:1]}, ValueError, "v_cache must have shape .* as k_cache"),
        (lambda a: a | {"q": a["q"][:, :3]}, ValueError, "the heads of q must be a multiple .* got 3 and 2"),
        (lambda a: a | {"q": a["q"][..., :15]}, ValueError, "q must have the caches' head_dim 16"),
        (lambda a: a | {"block_tables": a["block_tables"].float()}, TypeError, "must be int32 or int64, got float32"),
        (lambda a: a | {"block_tables": a["block_tables"][:1]}, ValueError, "block_tables must have shape"),
        (lambda a: a | {"context_lens": a["context_lens"][:1]}, ValueError, "context_lens must have shape"),
        (lambda a: a | {"context_lens": a["context_lens"].to("meta")}, ValueError, "context_lens must be on"),
        (lambda a: a | {"scale": math.inf}, ValueError, "scale must be finite, got inf"),
        (lambda a: a | {"num_splits": 0}, ValueError, "num_splits must be at least 1, got 0"),
        (lambda a: a | {"num_splits": 2.0}, TypeError, "num_splits must be a whole number or None, got float"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, text):
    names = ("k_cache", "v_cache", "block_tables", "context_lens")
    arguments = {"q": normal(2, 4, 16), **dict(zip(names, paged([3, 9]).cache, strict=True))}
    with pytest.raises(error, match=text):
        paged_attention_decode(**change(arguments))


@pytest.mark.parametrize(
    ("size", "text"), [((2, 3, 2, 16), "block_size must be a power of two, got 3"), ((2, 4, 2, 8), "head_dim must be")]
)
def test_a_cache_that_no_kernel_takes_is_refused(size, text):
    cache = torch.zeros(size, device=runtime.DEVICE)
    given = paged([3, 9])
    with pytest.raises(ValueError, match=text):
        paged_attention_decode(normal(2, 4, size[3]), cache, cache, *given.cache[2:])


def test_chunks_and_slots_that_do_not_fit_are_refused_by_name():
    given, q = paged([3, 9]), normal(2, 4, 16)
    with pytest.raises(ValueError, match=r"query_starts must have shape \(3,\) for 2 sequences, got \(2,\)"):
        paged_attention_extend(q, *given.cache[:3], starts_of([2])[0], given.context_lens)
    k = normal(2, 2, 16)
    slots = torch.zeros(3, dtype=torch.int64, device=runtime.DEVICE)
    with pytest.raises(ValueError, match=r"slots must have shape \(2,\) for 2 tokens, got \(3,\)"):
        write_kv(k, k, *given.cache[:2], slots)
    with pytest.raises(ValueError, match=r"k must have shape \(2, 2, 16\)"):
        write_kv(normal(2, 4, 16), normal(2, 4, 16), *given.cache[:2], slots[:2])
    with pytest.raises(TypeError, match="v must have k's dtype float32, got float16"):
        write_kv(k, k.half(), *given.cache[:2], slots[:2])
    with pytest.raises(ValueError, match="logsumexps must have shape"):
        merge_parts(normal(1, 2, 3, 16), normal(1, 2, 4))
    with pytest.raises(TypeError, match="dtype must be float32, float16 or bfloat16, got float64"):
        merge_parts(normal(1, 2, 3, 16), normal(1, 2, 3), dtype=torch.float64)


def test_the_poison_of_these_tests_is_found_when_it_is_read():
    given, q = paged([3], 1, block_size=4), normal(1, 1, 16)
    given.context_lens += 1  # one too far: an unused slot
    assert paged_attention_decode(q, *given.cache).isnan().any()
    given.context_lens += 1  # the next block
    assert given.block_tables[0, 1] == NO_BLOCK
    if runtime.INTERPRET:
        with profile_kernel() as profile:
            paged_attention_decode(q, *given.cache)
        assert profile.out_of_bounds
