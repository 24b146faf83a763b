"""The example backward pass: right gradients, its traffic by formula, and the planted race found."""

from __future__ import annotations

import pytest
import torch
from parameters import thorough_but

from utils import example_kernels as ek
from utils import reference, runtime
from utils.compile_only import Request, resource_usages
from utils.example_kernels.attention_backward import GPU_TILES, WAYS
from utils.kernel_profile import profile_kernel


def case(shape, dtype=torch.float32, num_keys=None, causal=False, seed=7):
    generator = torch.Generator().manual_seed(seed)
    B, H, N, D = shape
    sizes = (N, num_keys or N, num_keys or N, N)
    q, k, v, do = (torch.randn(B, H, n, D, generator=generator).to(dtype).to(runtime.DEVICE) for n in sizes)
    return q, k, v, *ek.flash_attention_forward(q, k, v, causal=causal), do


@pytest.mark.parametrize("way", ["second pass", "atomics"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_right_ways_give_the_gradients_and_are_clean(way, causal, dtype):
    q, k, v, o, lse, do = case((1, 2, 83, 32), dtype, causal=causal)
    with profile_kernel() as profile:
        found = ek.flash_attention_backward(q, k, v, o, lse, do, causal, way=way)
    tolerance = 2e-6 if dtype == torch.float32 else 0.03
    for mine, right in zip(found, reference.attention_backward(q, k, v, do, causal), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.cpu().double(), right, rtol=tolerance, atol=tolerance)
    assert profile.findings == []


def test_keys_may_outnumber_queries_and_the_scale_is_free():
    q, k, v, _, _, do = case((1, 1, 20, 16), num_keys=75)
    o, lse = ek.flash_attention_forward(q, k, v, scale=0.7)
    found = ek.flash_attention_backward(q, k, v, o, lse, do, scale=0.7)
    for mine, right in zip(found, reference.attention_backward(q, k, v, do, scale=0.7), strict=True):
        torch.testing.assert_close(mine.cpu().double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_len", [1, 64, 83])
def test_the_planted_race_is_found_where_two_tiles_of_keys_meet(causal, seq_len):
    q, k, v, o, lse, do = case((1, 2, seq_len, 16), causal=causal)
    with profile_kernel() as profile:
        ek.flash_attention_backward(q, k, v, o, lse, do, causal, way="race", tile=(32, 32, 4, 1))
    assert {finding.argument for finding in profile.findings} == ({"dq_ptr"} if seq_len > 32 else set())
    assert len(profile.races) == len(profile.findings)
    for race in profile.races:  # the same head, another tile of keys
        assert race.program[1] == race.other_program[1] and race.program[0] != race.other_program[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("causal", "tile"), [(False, (32, 32, 4, 1)), (True, (32, 32, 4, 1)), (True, (32, 16, 4, 1))])
def test_the_traffic_equals_its_formula(way, causal, tile):
    q, k, v, o, lse, do = case((2, 1, 70, 32), torch.bfloat16, causal=causal)
    with profile_kernel(check_races=False) as profile:
        ek.flash_attention_backward(q, k, v, o, lse, do, causal, way=way, tile=tile)
    traffic = ek.flash_attention_backward_traffic(2, 1, 70, 32, 2, causal, way, tile)
    assert (profile.bytes_loaded, profile.bytes_stored, profile.flops) == (
        traffic.bytes_loaded,
        traffic.bytes_stored,
        traffic.flops,
    )
    assert profile.bytes_atomic == traffic.bytes_atomic


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"way": "luck"}, "way must be one of 'second pass', 'atomics', 'race', got 'luck'"),
        (
            {"do": torch.zeros(1, 1, 20, 32, device=runtime.DEVICE)[..., ::2]},
            r"do must be contiguous with shape \(1, 1, 20, 16\)",
        ),
        ({"lse": torch.zeros(1, 1, 19)}, r"lse must be contiguous with shape \(1, 1, 20\), got \(1, 1, 19\)"),
    ],
)
def test_a_bad_argument_is_refused_by_value(change, message):
    names = ("q", "k", "v", "o", "lse", "do")
    arguments = dict(zip(names, case((1, 1, 20, 16)), strict=True)) | change
    arguments = {name: x.to(runtime.DEVICE) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(ValueError, match=message):
        ek.flash_attention_backward(**arguments)


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", thorough_but((64, 128), 64))
def test_no_configuration_spills_and_all_fit_on_a_hopper(head_dim):
    pointers = ("q_ptr", "k_ptr", "v_ptr", "do_ptr")
    types = dict.fromkeys(pointers, "*bf16") | {"lse_ptr": "*fp32", "delta_ptr": "*fp32"}
    types |= {"N_q": "i32", "N_k": "i32", "scale": "fp32", "scale_log2": "fp32"}
    requests = []
    block_m, block_n, warps, stages = GPU_TILES[head_dim]
    constants = {"HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n, "CAUSAL": True, "PRECISION": "ieee"}
    for mode, dq in (("none", "*bf16"), ("atomic", "*fp32")):
        requests.append(
            Request(
                ek.flash_attention_backward_kernel,
                {**types, "dq_ptr": dq, "dk_ptr": "*bf16", "dv_ptr": "*bf16"},
                {**constants, "DQ": mode},
                num_warps=warps,
                num_stages=stages,
            )
        )
    requests.append(
        Request(
            ek.flash_attention_dq_kernel,
            {**types, "dq_ptr": "*bf16"},
            constants,
            num_warps=warps,
            num_stages=stages,
        )
    )
    for usage in resource_usages(requests):
        assert not usage.spills and usage.shared_bytes <= 227 * 1024, usage
