"""Attention on paper: the formulas against counting by hand, the published figures, and a kernel that was profiled."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention_blocks
from solutions.lab3_flash_attention import flash_forward
from utils import attention_math as am
from utils import reference, runtime
from utils.example_kernels import flash_attention_forward_traffic
from utils.kernel_profile import profile_kernel

SMALL = am.AttentionShape(batch=2, heads=3, seq_len=10, head_dim=4, num_keys=14)


def test_the_forward_pass_moves_four_times_the_scores_and_its_inputs_and_output_once():
    n2, nd, kd = 2 * 3 * 10 * 14, 2 * 3 * 10 * 4, 2 * 3 * 14 * 4
    cost = am.standard_cost(SMALL, "fp32")
    assert cost.bytes == 4 * (4 * n2 + 2 * nd + 2 * kd)
    assert cost.flops == 2 * 2 * n2 * 4


def test_every_kernel_reads_what_an_earlier_one_wrote_or_an_input():
    for masked in (False, True):
        for dropout in (False, True):
            known = {"Q", "K", "V", "dO"}
            for each in am.standard_attention(SMALL, backward=True, masked=masked, dropout=dropout):
                assert {array.name for array in each.reads} <= known, each.name
                known |= {array.name for array in each.writes}
            assert {"O", "dQ", "dK", "dV"} <= known


def test_the_published_bytes_lie_between_the_textbook_and_an_eager_implementation():
    textbook = am.standard_cost(am.GPT2_MEDIUM, backward=True).bytes
    eager = am.standard_cost(am.GPT2_MEDIUM, backward=True, masked=True, dropout=True).bytes
    assert textbook == pytest.approx(25.2e9, rel=2e-3) and eager == pytest.approx(44.6e9, rel=2e-3)
    assert textbook < am.PUBLISHED["standard"]["bytes"] < eager


def test_the_published_flash_bytes_lie_between_two_tiles_of_keys():
    wide, narrow = (am.flash1_bytes(am.GPT2_MEDIUM, block, backward=True) for block in (384, 256))
    assert wide == pytest.approx(4.0e9, rel=1e-2) and narrow == pytest.approx(5.1e9, rel=1e-2)
    assert wide < am.PUBLISHED["flash"]["bytes"] < narrow
    assert am.flash1_bytes(am.GPT2_MEDIUM, 384, backward=True, statistics=True) - wide == 18 * 4 * am.GPT2_MEDIUM.rows


def test_the_published_flops_do_not_follow_from_the_configuration_but_their_difference_is_a_product():
    both = [am.FORWARD_MATMULS + n for n in (am.STANDARD_BACKWARD_MATMULS, am.FLASH_BACKWARD_MATMULS)]
    standard, flash = (am.attention_flops(am.GPT2_MEDIUM, n) for n in both)
    assert (round(standard / 1e9), round(flash / 1e9)) == (825, 962)
    assert flash / standard == pytest.approx(7 / 6)
    one = am.GPT2_MEDIUM.matmul_flops() / am.GPT2_MEDIUM.heads  # of one head of the batch
    assert am.PUBLISHED["flash"]["flops"] - am.PUBLISHED["standard"]["flops"] == pytest.approx(one, rel=0.01)


def test_the_first_papers_rule_gives_384_keys_for_192_kib_and_a_head_of_64():
    assert am.flash1_blocks(192 * 1024, 64) == (64, 384)
    assert am.flash1_blocks(1000, 64) == (2, 2)


@pytest.mark.parametrize(("n", "keys", "block_m"), [(1024, 1024, 64), (100, 333, 64), (1, 77, 16), (500, 20, 128)])
def test_the_second_papers_traffic_is_the_example_kernels_where_key_tiles_are_whole_or_masked(n, keys, block_m):
    shape = am.AttentionShape(2, 3, n, 64, num_keys=keys)
    exact = flash_attention_forward_traffic(2, 3, n, 64, 2, num_keys=keys, tile=(block_m, 32, 4, 1))
    assert am.flash2_bytes(shape, block_m, "bf16") == exact.bytes_moved
    traffic = am.flash2_traffic(shape, block_m, 32)
    assert (traffic.loaded, traffic.stored, traffic.flops) == (exact.bytes_loaded, exact.bytes_stored, exact.flops)


@pytest.mark.parametrize("n", [1, 100, 1024])
def test_causal_traffic_is_the_example_kernels(n):
    exact = flash_attention_forward_traffic(2, 3, n, 64, 2, causal=True, tile=(64, 32, 4, 1))
    traffic = am.flash2_traffic(am.AttentionShape(2, 3, n, 64), 64, 32, causal=True)
    assert (traffic.loaded, traffic.stored, traffic.flops) == (exact.bytes_loaded, exact.bytes_stored, exact.flops)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nq", "nk", "heads", "kv_heads", "head_dim", "causal"),
    [(70, 70, 2, 2, 64, False), (70, 70, 2, 2, 64, True), (37, 90, 4, 2, 40, True), (90, 37, 2, 1, 16, True)],
)
def test_lab_3s_kernel_moves_exactly_what_the_formula_says(nq, nk, heads, kv_heads, head_dim, causal):
    q = torch.randn(2, heads, nq, head_dim, device=runtime.DEVICE)
    k, v = (torch.randn(2, kv_heads, nk, head_dim, device=runtime.DEVICE) for _ in range(2))
    with attention_blocks.tile_of_forward((32, 16, 4, 1)), profile_kernel() as profile:
        flash_forward(q, k, v, causal)
    shape = am.AttentionShape(2, heads, nq, head_dim, num_keys=nk, kv_heads=kv_heads)
    traffic = am.flash2_traffic(shape, 32, 16, "fp32", causal=causal)
    assert (profile.bytes_loaded, profile.bytes_stored) == (traffic.loaded, traffic.stored)
    assert profile.flops == traffic.flops and profile.findings == []
    for name in ("q", "k", "v", "o", "lse"):
        moved = profile.by_argument[f"{name}_ptr"]
        assert moved.bytes_loaded + moved.bytes_stored == getattr(traffic, name), name


def test_grouped_heads_share_keys_in_memory_but_each_reads_them():
    shape = am.AttentionShape(1, 8, 64, 16, kv_heads=2)
    assert shape.key_elements == 2 * 64 * 16
    assert am.flash2_bytes(shape, 64, "bf16") == am.flash2_bytes(am.AttentionShape(1, 8, 64, 16), 64, "bf16")


@pytest.mark.parametrize(("n", "keys"), [(1, 1), (5, 5), (3, 7), (7, 3), (64, 63)])
def test_visible_pairs_are_those_of_the_reference_mask(n, keys):
    assert am.visible_pairs(n, keys) == int(reference.causal_mask(n, keys).sum())


@pytest.mark.parametrize(("n", "keys", "m", "k"), [(64, 64, 16, 16), (50, 70, 16, 32), (70, 50, 32, 16), (5, 5, 8, 8)])
def test_causal_tiles_say_what_the_mask_leaves_of_each(n, keys, m, k):
    mask = reference.causal_mask(n, keys)
    for i, row in enumerate(am.causal_tiles(n, keys, m, k)):
        for j, kind in enumerate(row):
            part = mask[i * m : (i + 1) * m, j * k : (j + 1) * k]
            assert kind == ("full" if part.all() else "diagonal" if part.any() else "skip")


def test_what_lies_on_the_chip_is_counted_tensor_by_tensor():
    held = am.on_chip_bytes(128, 64, 64, "bf16", stages=2)
    assert held["shared memory"] == {"Q": 16384, "K": 16384, "V": 16384}
    assert held["registers"] == {"S, P": 32768, "O": 32768, "m, d": 1024}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: am.AttentionShape(0, 1, 1, 1), "batch must be at least 1, got 0"),
        (lambda: am.AttentionShape(1, 8, 1, 1, kv_heads=3), "multiple of kv_heads, got 8 and 3"),
        (lambda: am.flash1_bytes(SMALL, 0), "block_n must be at least 1"),
        (lambda: am.standard_cost(SMALL, "fp12"), "unknown dtype 'fp12'"),
        (lambda: am.causal_tiles(4, 4, 0, 4), "block_m must be at least 1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
