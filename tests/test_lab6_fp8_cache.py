"""Lab 6's fp8 cache: what is written is what was meant, and attention over it is right, whatever the hardware has."""

from __future__ import annotations

import math
import random

import pytest
import torch
from paged_cases import NO_BLOCK, Paged, assert_close, normal, paged, peer, right

from solutions.lab6_frontiers import fp8_torch, fp8_tuning
from solutions.lab6_frontiers.fp8_cache import (
    LARGEST,
    SMALLEST_SCALE,
    Fp8Cache,
    dequantize_cache,
    empty_fp8_cache,
    quantize_cache,
    scale_of,
)
from solutions.lab6_frontiers.fp8_write import write_kv
from solutions.lab6_frontiers.paged_attention_fp8 import paged_attention_decode
from solutions.lab6_frontiers.paged_extend_fp8 import paged_attention_extend
from utils import runtime
from utils.kernel_profile import profile_kernel

HALVES = (torch.float16, torch.bfloat16)
NAN = 0x7F  # the code


@pytest.fixture(params=[True, False], ids=["with-e4m3", "with-bytes"])
def native(request, monkeypatch):
    """Kernels as on hardware that has the type, and as on hardware that has not."""
    monkeypatch.setattr(fp8_tuning, "converts_e4m3", lambda device: request.param)
    return request.param


class Case:
    """Sequences in an fp8 cache, the numbers that it holds, and block tables; unused slots are NaN."""

    def __init__(self, contexts, G=2, D=16, block_size=4, dtype=torch.bfloat16, layout="token-major", seed=0):
        given = paged(contexts, G, D, block_size, dtype, layout, seed)
        draw = torch.Generator().manual_seed(seed)
        sizes = torch.exp(torch.randn(len(given.k_cache), 1, G, 1, generator=draw) * 2).to(runtime.DEVICE)
        empty = given.k_cache.isnan().any(-1)
        k, v = (cache.nan_to_num(0.0).float() * sizes for cache in (given.k_cache, given.v_cache))
        self.cache = quantize_cache(k, v)
        keys, values = dequantize_cache(self.cache)
        for codes in self.cache[:2]:
            codes.view(torch.uint8)[empty] = NAN
        self.tables, self.lengths = given.block_tables, given.context_lens
        blocks = [given.block_tables[s, : -(-n // block_size)].long() for s, n in enumerate(contexts)]
        kept = [[x[b].flatten(0, 1)[:n] for b, n in zip(blocks, contexts, strict=True)] for x in (keys, values)]
        self.exact = Paged(keys, values, self.tables, self.lengths, *kept)
        rounded = [[x.to(dtype) for x in each] for each in kept]
        self.rounded = Paged(keys.to(dtype), values.to(dtype), self.tables, self.lengths, *rounded)

    @property
    def scales(self):
        return self.cache.k_scale, self.cache.v_scale

    def decode(self, q, **options):
        return paged_attention_decode(q, *self.cache[:2], self.tables, self.lengths, *self.scales, **options)

    def extend(self, q, starts, **options):
        starts = torch.tensor(starts, dtype=torch.int32, device=runtime.DEVICE)
        return paged_attention_extend(q, *self.cache[:2], self.tables, starts, self.lengths, *self.scales, **options)


def drawn(number):
    """A random case, the query heads, and what else is drawn."""
    draw = random.Random(f"fp8 {number}")
    D = draw.choice((16, 17, 40, 64, 128))
    G, group, block_size = draw.choice((1, 2)), draw.randint(1, 5), draw.choice((1, 4, 16))
    edges = (0, 1, block_size, block_size + 1, 16, 17)
    contexts = [draw.choice(edges) if draw.random() < 0.6 else draw.randint(0, 48) for _ in range(2)]
    case = Case(contexts, G, D, block_size, HALVES[number % 2], draw.choice(("token-major", "strided")), number)
    return case, contexts, G * group, draw


def check(number):
    """A random decode step and random chunks over the same cache."""
    case, contexts, H, draw = drawn(number)
    dtype, D = case.rounded.k_cache.dtype, case.rounded.k_cache.shape[3]
    q = normal(len(contexts), H, D, dtype=dtype, seed=number)
    found = case.decode(q, num_splits=draw.choice((1, 3, None)))
    assert found.dtype == dtype
    assert_close(found, right(q, case.exact), peer(q, case.rounded))
    starts = [0]
    for n in contexts:
        starts.append(starts[-1] + draw.choice((0, min(n, 1), n, draw.randint(0, n))))
    if not starts[-1]:
        return
    q = normal(starts[-1], H, D, dtype=dtype, seed=number + 1)
    assert_close(case.extend(q, starts), right(q, case.exact, starts), peer(q, case.rounded, starts))


# ---- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(10))
def test_random_steps_err_no_more_than_twice_what_pytorch_does(number, native):
    check(number)


@pytest.mark.thorough
def test_200_random_steps_err_no_more_than_twice_what_pytorch_does():
    for number in range(10, 210):
        check(number)


def test_plain_pytorch_gives_the_same():
    case, q = Case([7, 0, 21]), normal(3, 4, 16, dtype=torch.bfloat16)
    theirs = fp8_torch.paged_attention_decode(q, *case.cache[:2], case.tables, case.lengths, *case.scales)
    assert_close(case.decode(q), right(q, case.exact), theirs)
    starts = [0, 3, 3, 9]
    q = normal(9, 4, 16, dtype=torch.bfloat16)
    theirs = fp8_torch.paged_attention_extend(
        q, *case.cache[:2], case.tables, torch.tensor(starts), case.lengths, *case.scales
    )
    assert_close(case.extend(q, starts), right(q, case.exact, starts), theirs)


@pytest.mark.parametrize("size", [2.0**-20, 2.0**20])
def test_queries_and_scales_of_any_size_stay_within_float16(size, native):
    case, q = Case([30], 1), normal(1, 2, 16, dtype=torch.bfloat16)
    q = q * size
    cache = case.cache._replace(k_scale=case.cache.k_scale / size, v_scale=case.cache.v_scale * size)
    large = paged_attention_decode(q, *cache[:2], case.tables, case.lengths, *cache[2:])
    expected = case.decode(q / size)
    torch.testing.assert_close(large / size, expected)


def test_a_block_with_a_small_scale_of_values_counts_beside_one_with_a_large_one():
    case, q = Case([8], 1), torch.zeros(1, 1, 16, dtype=torch.float16, device=runtime.DEVICE)
    case.cache.v_scale.fill_(2.0**-90)
    small = case.decode(q)
    expected = case.cache.values[case.tables[0, :2].long()].float().mean((0, 1)) * 2.0**-90
    torch.testing.assert_close(small.float(), expected.to(small.dtype).float()[None])
    case.cache.v_scale[case.tables[0, 1]] = 1.0
    assert case.decode(q).isfinite().all()


def test_scales_of_values_up_to_the_largest_of_float32(native):
    case, q = Case([40], 1), normal(1, 2, 16, dtype=torch.bfloat16)
    case.cache.values.copy_(torch.full(case.cache.values.shape, 0.5))
    for scale in (2.0**127, 1.5 * 2.0**127):
        case.cache.v_scale.fill_(scale)
        for num_splits in (1, 2):
            found = case.decode(q, num_splits=num_splits)
            torch.testing.assert_close(found, torch.full_like(found, 0.5 * scale))


@pytest.mark.parametrize(
    ("G", "group", "D", "block_size"),
    [(2, 9, 40, 16), (1, 40, 16, 16), (1, 20, 160, 8), (2, 3, 16, 64), (1, 2, 64, 256)],
)
def test_many_heads_and_blocks_of_any_size(G, group, D, block_size, native):
    case, q = Case([150, 64, 1, 97], G, D, block_size), normal(4, G * group, D, dtype=torch.bfloat16)
    for num_splits in (1, 3):
        assert_close(case.decode(q, num_splits=num_splits), right(q, case.exact), peer(q, case.rounded))


@pytest.mark.parametrize("warps", [1, 4])
def test_any_number_of_warps_finds_the_same(warps):
    case, q = Case([150, 64, 0, 97]), normal(4, 4, 16, dtype=torch.bfloat16)
    tile = fp8_tuning.decode(16, 2, 1, 2)._replace(warps=warps, n=64 // warps)
    assert_close(case.decode(q, tile=tile), right(q, case.exact), peer(q, case.rounded))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_finite_scale(scale):
    case, q = Case([21, 40]), normal(2, 4, 16, dtype=torch.float16)
    assert_close(
        case.decode(q, scale=scale), right(q, case.exact, scale=scale), right(q, case.exact, scale=scale).half()
    )


def test_nan_in_a_key_reaches_its_own_sequence_only(native):
    case, q = Case([20, 20], 1), normal(2, 1, 16, dtype=torch.bfloat16)
    case.cache.k_scale[case.tables[1, 0]] = math.nan
    for num_splits in (1, 2):
        found = case.decode(q, num_splits=num_splits)
        assert found[0].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize(("S", "H"), [(0, 4), (2, 0)])
def test_no_sequence_and_no_head_give_nothing(S, H):
    case = Case([3, 3])
    case.tables, case.lengths = case.tables[:S], case.lengths[:S]
    q = normal(S, H, 16, dtype=torch.bfloat16)
    assert case.decode(q).shape == q.shape and case.extend(q, [1] * (S + 1)).shape == q.shape


# ---- writing -------------------------------------------------------------------------------------------------------


def written(k, v, slots, cache, steps):
    """Write the tokens up to each of ``steps``, one step after the other."""
    first = 0
    for end in steps:
        write_kv(k[first:end], v[first:end], *cache[:2], slots[first:end], *cache[2:])
        first = end
    return cache


def tokens_in_blocks(table, count, block_size):
    """The slots of a sequence's first ``count`` tokens."""
    places = [table[t // block_size] * block_size + t % block_size for t in range(count)]
    return torch.tensor(places, device=runtime.DEVICE)


@pytest.mark.parametrize("number", range(4))
def test_tokens_in_any_steps_give_the_scales_and_nearly_the_codes_of_whole_blocks(number, native):
    draw = random.Random(number)
    table, block_size, N, G, D = [4, 1, 3], 4, 11, 2, draw.choice((16, 40))
    sizes = torch.logspace(-3, 3, N)[torch.randperm(N, generator=torch.Generator().manual_seed(number))]
    k, v = (normal(N, G, D, seed=number + i) * sizes[:, None, None].to(runtime.DEVICE) for i in (0, 1))
    k, v = k.to(HALVES[number % 2]), v.to(HALVES[number % 2])
    slots = tokens_in_blocks(table, N, block_size)
    dense = [torch.zeros(6 * block_size, G, D, device=runtime.DEVICE) for _ in range(2)]
    dense[0][slots], dense[1][slots] = k.float(), v.float()
    expected = quantize_cache(*(x.unflatten(0, (6, block_size)) for x in dense))
    steps = sorted({*draw.sample(range(1, N), 5), N})
    made = {
        "whole": written(k, v, slots, empty_fp8_cache(6, block_size, G, D, runtime.DEVICE), [N]),
        "in steps": written(k, v, slots, empty_fp8_cache(6, block_size, G, D, runtime.DEVICE), steps),
    }
    for name, cache in made.items():
        for scale, other in zip(cache[2:], expected[2:], strict=True):
            assert torch.equal(scale[table], other[table])
        for x, y, scale in zip(dequantize_cache(cache), dequantize_cache(expected), cache[2:], strict=True):
            apart = ((x - y)[table].abs() / scale[table][:, None, :, None]).max()
            assert apart <= (0 if name == "whole" else 2**-9), name  # a subnormal number may be rounded twice


def test_the_torch_writer_gives_the_kernels_bits():
    table, N = [2, 0, 1], 10
    k, v = normal(N, 2, 16, dtype=torch.bfloat16), normal(N, 2, 16, dtype=torch.bfloat16, seed=1)
    slots = tokens_in_blocks(table, N, 4)
    ours = written(k, v, slots, empty_fp8_cache(3, 4, 2, 16, runtime.DEVICE), [3, 10])
    theirs = empty_fp8_cache(3, 4, 2, 16, runtime.DEVICE)
    for first, end in ((0, 3), (3, 10)):
        part = slice(first, end)
        fp8_torch.write_kv(k[part], v[part], *theirs[:2], slots[part], *theirs[2:])
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x.float(), y.float())


def test_the_first_token_of_a_block_begins_it_anew():
    cache = empty_fp8_cache(2, 4, 1, 16, runtime.DEVICE)
    x = normal(1, 1, 16, dtype=torch.float16)
    written(x * 1000, x * 1000, torch.tensor([4], device=runtime.DEVICE), cache, [1])
    written(x, x, torch.tensor([4], device=runtime.DEVICE), cache, [1])
    assert torch.equal(cache.k_scale[1], scale_of(x.float().abs().amax((0, 2))))


def test_a_token_without_a_slot_is_written_nowhere():
    cache = empty_fp8_cache(2, 4, 1, 16, runtime.DEVICE)
    x = normal(3, 1, 16, dtype=torch.float16)
    written(x, x, torch.tensor([-1, 0, -1], device=runtime.DEVICE), cache, [3])
    assert cache.keys[0, 0].float().abs().max() > 0 and cache.keys.float()[0, 1:].eq(0).all()
    assert cache.keys[1].float().eq(0).all() and cache.k_scale[1].eq(1).all()


def test_every_code_that_is_narrowed_is_the_one_that_pytorch_gives(native):
    numbers = torch.cat([torch.linspace(-448, 448, 4001), torch.linspace(-0.02, 0.02, 95), torch.tensor([448.0, 0.0])])
    k = torch.zeros(16, 1, 256, dtype=torch.float16)
    k.view(-1)[: len(numbers)] = numbers.half()[: k.numel()]
    k[:, 0, 0] = 448.0  # the scale is 1
    k = k.to(runtime.DEVICE)
    cache = empty_fp8_cache(1, 16, 1, 256, runtime.DEVICE)
    written(k, k, torch.arange(16, device=runtime.DEVICE), cache, [16])
    assert cache.k_scale.item() == 1
    assert torch.equal(cache.keys[0, :, 0].float(), k[:, 0].to(torch.float8_e4m3fn).float())


def test_a_scale_is_the_least_power_of_two_that_a_block_fits_in():
    amax = torch.tensor([0.0, 448.0, 448.1, 447.0, 3e-40, 1.0, 3e38])
    scale = scale_of(amax)
    assert (amax / scale <= LARGEST).all() and (torch.frexp(scale).mantissa == 0.5).all()
    assert scale[0] == scale[4] == SMALLEST_SCALE
    assert scale[1] == scale[3] == 1 and scale[2] == 2
    assert (amax[[1, 2, 3, 5, 6]] / (scale[[1, 2, 3, 5, 6]] / 2) > LARGEST).all()


# ---- no byte more --------------------------------------------------------------------------------------------------


def test_decode_reads_keys_by_token_and_values_by_block():
    contexts, G, D, block_size = [21, 0, 16, 5], 2, 16, 4
    case, q = Case(contexts, G, D, block_size), normal(4, 4, D, dtype=torch.bfloat16)
    assert case.tables[3, 2] == NO_BLOCK
    blocks, tokens = sum(-(-n // block_size) for n in contexts), sum(contexts)
    for parts in (1, 3):
        with profile_kernel(check_races=True) as profile:
            case.decode(q, num_splits=parts)
        assert not profile.findings, profile.report()
        read = {name: counters.bytes_loaded for name, counters in profile.by_argument.items()}
        assert read["k_cache_ptr"] == tokens * G * D
        assert read["v_cache_ptr"] == blocks * block_size * G * D
        assert read["k_scale_ptr"] == read["v_scale_ptr"] == read["block_tables_ptr"] == 4 * blocks * G
        assert read["q_ptr"] == parts * 2 * q.numel() and read["context_lens_ptr"] == parts * 4 * len(contexts) * G
    with profile_kernel() as profile:
        case.decode(q, num_splits=1)
    assert profile.bytes_stored == 2 * q.numel()


@pytest.mark.interpreted
def test_extend_reads_no_block_that_no_query_of_a_tile_sees():
    case, q = Case([48], 1, block_size=16), normal(32, 1, 16, dtype=torch.bfloat16)
    with profile_kernel(check_races=True) as profile:
        case.extend(q, [0, 32])
    assert not profile.findings, profile.report()
    assert profile.by_argument["k_cache_ptr"].bytes_loaded == (32 + 48) * 16  # tiles of 16 queries
    assert profile.by_argument["v_cache_ptr"].bytes_loaded == (32 + 48) * 16
    assert profile.bytes_stored == 2 * q.numel()


def test_writing_moves_each_number_once_and_old_ones_only_where_a_scale_grows():
    G, D, block_size = 2, 16, 4
    x = normal(6, G, D, dtype=torch.bfloat16)
    x[0] *= 0.01
    slots = tokens_in_blocks([1, 0], 6, block_size)
    cache = empty_fp8_cache(2, block_size, G, D, runtime.DEVICE)
    for first, end, begins, rescaled in ((0, 1, 1, 0), (1, 3, 0, 1), (3, 6, 1, 0)):
        part = x[first:end]
        with profile_kernel(check_races=True) as profile:
            write_kv(part, part.clone(), *cache[:2], slots[first:end], *cache[2:])
        assert not profile.findings, profile.report()
        counters = profile.by_argument
        blocks = begins + (first > 0)
        assert counters["k_ptr"].bytes_loaded == counters["v_ptr"].bytes_loaded == 2 * part.numel()
        for name in ("k_cache_ptr", "v_cache_ptr"):
            assert counters[name].bytes_stored == part.numel() + rescaled * G * D
            assert counters[name].bytes_loaded == rescaled * G * D
        for name in ("k_scale_ptr", "v_scale_ptr"):
            assert counters[name].bytes_stored == 4 * G * blocks
            assert counters[name].bytes_loaded == 4 * G * (first > 0)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda a: a | {"q": a["q"].float()}, TypeError, "q must be float16 or bfloat16, got float32"),
        (lambda a: a | {"k_cache": a["k_cache"].half()}, TypeError, "k_cache must be float8_e4m3fn, got float16"),
        (lambda a: a | {"v_cache": a["v_cache"][:1]}, ValueError, "v_cache must have shape .* as k_cache"),
        (lambda a: a | {"k_scale": a["k_scale"].double()}, TypeError, "k_scale must be float32, got float64"),
        (lambda a: a | {"v_scale": a["v_scale"][:, :1]}, ValueError, "v_scale must have shape .* one number for each"),
        (lambda a: a | {"q": a["q"][:, :3]}, ValueError, "the heads of q must be a multiple .* got 3 and 2"),
        (lambda a: a | {"q": a["q"][..., :8]}, ValueError, "q must have the caches' head_dim 16"),
        (lambda a: a | {"block_tables": a["block_tables"].float()}, TypeError, "must be int32 or int64, got float32"),
        (lambda a: a | {"scale": math.inf}, ValueError, "scale must be finite, got inf"),
        (lambda a: a | {"num_splits": 0}, ValueError, "num_splits must be at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, text):
    case = Case([3, 9])
    arguments = {"q": normal(2, 4, 16, dtype=torch.float16), "block_tables": case.tables, "context_lens": case.lengths}
    arguments |= dict(zip(Fp8Cache._fields, case.cache, strict=True))
    arguments["k_cache"], arguments["v_cache"] = arguments.pop("keys"), arguments.pop("values")
    with pytest.raises(error, match=text):
        paged_attention_decode(**change(arguments))


def test_tokens_and_slots_that_do_not_fit_are_refused_by_name():
    case, k = Case([3, 9]), normal(2, 2, 16, dtype=torch.float16)
    slots = torch.zeros(3, dtype=torch.int64, device=runtime.DEVICE)
    with pytest.raises(ValueError, match=r"slots must have shape \(2,\) for 2 tokens, got \(3,\)"):
        write_kv(k, k, *case.cache[:2], slots, *case.scales)
    with pytest.raises(TypeError, match="v must be float16, got bfloat16"):
        write_kv(k, k.bfloat16(), *case.cache[:2], slots[:2], *case.scales)
    with pytest.raises(ValueError, match="must have one shape"):
        quantize_cache(k, k)
