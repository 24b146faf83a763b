"""Lab 6's decode attention over latents: the absorbed form is the defined one, and the kernel computes it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from paged_cases import assert_close, normal, paged

from solutions.lab6_frontiers import long_tuning
from solutions.lab6_frontiers.mla_decode import mla_decode
from solutions.lab6_frontiers.mla_torch import absorb_queries, expand_latents, latent_attention, project_values
from utils.kernel_profile import profile_kernel
from utils.reference import attention
from utils.runtime import DEVICE

LATENT, ROPE = 32, 16
LAYOUTS = ("token-major", "padded", "strided")


class Case:
    """Queries of H heads, and contexts of latents with keys in a paged cache with NaN wherever nobody may read."""

    def __init__(self, contexts, H=4, latent=LATENT, rope=ROPE, block_size=4, dtype=torch.float32,
                 layout="token-major", seed=0):  # fmt: skip
        given = paged(contexts, 1, latent + rope, block_size, dtype, layout, seed)
        self.cache, self.tables, self.lengths = given.k_cache.squeeze(2), given.block_tables, given.context_lens
        self.tokens = [each.squeeze(1) for each in given.keys]  # (context, latent + rope)
        self.q_latent = normal(len(contexts), H, latent, dtype=dtype, seed=seed + 100)
        self.q_rope = normal(len(contexts), H, rope, dtype=dtype, seed=seed + 101)
        self.latent, self.scale = latent, 1 / math.sqrt(latent + rope)

    def __call__(self, **options):
        given = self.q_latent, self.q_rope, self.cache, self.tables, self.lengths, self.scale
        return mla_decode(*given, **options)

    def in_torch(self, dtype):
        """The same in PyTorch, in ``dtype``."""
        found = torch.zeros(self.q_latent.shape, dtype=dtype, device=DEVICE)
        for s, tokens in enumerate(self.tokens):
            if len(tokens):
                latents, keys = tokens.to(dtype).split([self.latent, tokens.shape[1] - self.latent], 1)
                q = self.q_latent[s].to(dtype), self.q_rope[s].to(dtype)
                found[s] = latent_attention(*q, latents, keys, self.scale)
        return found

    def holds(self, **options):
        found = self(**options)
        assert found.dtype == self.q_latent.dtype and found.shape == self.q_latent.shape
        assert_close(found, self.in_torch(torch.float64).cpu(), self.in_torch(self.q_latent.dtype))


def test_absorbed_projections_give_what_keys_and_values_of_every_head_give():
    S, H, N, latent, rope, dim, value = 2, 3, 11, 20, 6, 8, 5
    draw = torch.Generator().manual_seed(5)
    made = {"generator": draw, "dtype": torch.float64}
    q, q_rope = torch.randn(S, H, dim, **made), torch.randn(S, H, rope, **made)
    latents, keys = torch.randn(S, N, latent, **made), torch.randn(S, N, rope, **made)
    w_uk, w_uv = torch.randn(H, dim, latent, **made), torch.randn(H, value, latent, **made)
    k, v = expand_latents(latents, keys, w_uk, w_uv)
    assert k.shape == (S, H, N, dim + rope) and v.shape == (S, H, N, value)
    scale = 1 / math.sqrt(dim + rope)
    scores = scale * torch.einsum("shd,shnd->shn", torch.cat((q, q_rope), -1), k)
    defined = torch.einsum("shn,shnv->shv", scores.softmax(-1), v)
    absorbed = project_values(latent_attention(absorb_queries(q, w_uk), q_rope, latents, keys, scale), w_uv)
    torch.testing.assert_close(absorbed, defined, rtol=1e-12, atol=1e-12)
    same, _ = attention(torch.cat((q, q_rope), -1)[:, :, None], k, torch.nn.functional.pad(v, (0, dim + rope - value)))
    torch.testing.assert_close(absorbed, same[:, :, 0, :value], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_ragged_contexts_are_attended_to_in_one_part_and_in_several(dtype, num_splits):
    Case([0, 1, 16, 17, 37], H=5, dtype=dtype).holds(num_splits=num_splits)


def test_more_heads_than_a_program_takes():
    Case([19, 3], H=37).holds(num_splits=2)


def test_the_sizes_of_deepseek_v3():
    Case([40], H=16, latent=512, rope=64, block_size=16, dtype=torch.bfloat16).holds(num_splits=2)


@pytest.mark.parametrize(
    ("rows", "longest", "parts"),
    [
        (128, 8192, 1),  # 0.97 of a wave
        (119, 65536, 1),  # 0.90
        (250, 65536, 1),  # 0.95 of two
        (32, 8192, 4),  # 128 programs, where 5 parts are 160 and run in two waves
        (64, 8192, 2),
        (8, 8192, 16),
        (1, 8192, 32),
        (1, 100, 1),
        (0, 8192, 32),
        (1, 10**6, 64),
    ],
)
def test_parts_fill_waves_of_an_h200(monkeypatch, rows, longest, parts):
    monkeypatch.setattr(long_tuning, "SHORTEST_PART", 256)
    assert long_tuning.mla_splits(rows, longest, 132) == parts


def test_no_count_of_parts_takes_less_time_than_the_chosen_one_but_a_tenth_where_one_is_enough(monkeypatch):
    monkeypatch.setattr(long_tuning, "SHORTEST_PART", 256)
    draw = random.Random("parts")
    for _ in range(300):
        rows, longest, sms = draw.randint(1, 400), draw.randint(1, 40_000), draw.choice((78, 114, 132, 144))
        chosen = long_tuning.mla_splits(rows, longest, sms)
        most = max(1, min(longest // 256, 64))
        # waves of programs, each of which takes its tokens' time and that of 256 more if contexts are split
        times = {p: math.ceil(rows * p / sms) * (longest / p + 256 * (p > 1)) for p in range(1, most + 1)}
        enough = 0.9 if chosen == 1 and rows >= 0.9 * sms * math.ceil(rows / sms) else 1
        assert times[chosen] * enough <= min(times.values())
        assert not any(time == times[chosen] for p, time in times.items() if p < chosen)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_random_cases(number):
    draw = random.Random(f"mla {number}")
    latent, rope = draw.choice((16, 17, 40, 64)), draw.choice((16, 24, 33))
    edges = (0, 1, 4, 5, 16, 17)
    contexts = [draw.choice(edges) if draw.random() < 0.5 else draw.randint(0, 48) for _ in range(draw.randint(1, 3))]
    dtype = (torch.float32, torch.float16, torch.bfloat16)[number % 3]
    case = Case(
        contexts, draw.randint(1, 20), latent, rope, draw.choice((1, 4, 16)), dtype, draw.choice(LAYOUTS), number
    )
    if draw.random() < 0.5:
        case.q_latent, case.q_rope = (
            x.transpose(0, 1).contiguous().transpose(0, 1) for x in (case.q_latent, case.q_rope)
        )
    case.holds(num_splits=draw.choice((None, 1, 2, 5)))


@pytest.mark.interpreted
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("H", [5, 40])
def test_each_number_of_the_cache_is_read_once_for_a_block_of_heads(H, num_splits):
    contexts, size = [7, 33, 0, 40], 2
    case = Case(contexts, H, dtype=torch.float16)
    with profile_kernel(check_races=True) as profile:
        case(num_splits=num_splits)
    assert not profile.findings, profile.report()
    head_blocks = -(-H // long_tuning.mla_decode(H, torch.float16, None).m)
    read = {name: counters.bytes_loaded for name, counters in profile.launches[0].by_argument.items()}
    assert read["cache_ptr"] == head_blocks * sum(contexts) * (LATENT + ROPE) * size
    assert read["q_latent_ptr"] == num_splits * len(contexts) * H * LATENT * size
    assert read["q_rope_ptr"] == num_splits * len(contexts) * H * ROPE * size
    if num_splits == 1:
        assert profile.bytes_stored == len(contexts) * H * LATENT * size


def test_an_empty_sequence_gives_zeros_and_no_sequence_nothing():
    assert (Case([0, 0])(num_splits=3) == 0).all() and (Case([0])(num_splits=1) == 0).all()
    assert Case([])().shape == (0, 4, LATENT)
    assert Case([3], H=0)().shape == (1, 0, LATENT)


def test_large_scores_do_not_overflow():
    case = Case([30, 9])
    case.q_latent *= 300
    case.holds(num_splits=2)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"scale": None}, TypeError, "scale must be a number: 1 / sqrt"),
        ({"scale": math.inf}, ValueError, "scale must be finite, got inf"),
        ({"q_rope": torch.zeros(2, 4, 16).half()}, TypeError, "q_rope must have q_latent's dtype float32"),
        ({"q_rope": torch.zeros(2, 3, 16)}, ValueError, r"q_rope must have \(2, 4\) as its first axes"),
        ({"q_rope": torch.zeros(2, 4, 8)}, ValueError, "last axis of q_rope must be from 16 to 128, got 8"),
        ({"q_rope": torch.zeros(2, 4, 17)}, ValueError, r"must have 32 \+ 17 numbers on its last axis"),
        ({"q_latent": torch.zeros(2, 4, 513)}, ValueError, "last axis of q_latent must be from 16 to 512, got 513"),
        ({"q_latent": torch.zeros(2, 4)}, ValueError, r"q_latent must have shape \(S, H, latent_dim\)"),
        ({"cache": torch.zeros(9, 3, 48)}, ValueError, "block_size must be a power of two, got 3"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, ValueError, r"context_lens must have shape \(2,\)"),
        ({"num_splits": 0}, ValueError, "num_splits must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change, error, text):
    case = Case([3, 5])
    options = {"num_splits": change.pop("num_splits")} if "num_splits" in change else {}
    for name, value in change.items():
        setattr(case, name, value.to(DEVICE) if isinstance(value, torch.Tensor) else value)
    with pytest.raises(error, match=text):
        case(**options)
