"""The arithmetic of long contexts against counted products, saved tensors, and pairs and bytes one by one."""

import pytest
import torch
from test_serving_bounds import RELEASED
from test_transformer_math import saved
from torch.utils.flop_counter import FlopCounterMode

from solutions.lab3_flash_attention import flash_attention
from solutions.lab6_frontiers.context_parallel import ring_bytes
from utils.hardware import gpu
from utils.operators import causal_pairs
from utils.runtime import DEVICE
from utils.serving.config import ModelConfig
from utils.serving.model import Decoder, DecoderLayer
from utils.transformer_math import (
    DEEPSEEK_V3,
    LatentAttention,
    all_to_all_attention_bytes,
    all_to_all_matches_from,
    attention_overtakes,
    cache_overtakes_weights,
    context_parallel_activations,
    decoder_block_activations,
    decoder_flops,
    gqa_cache_numbers,
    gqa_decode_cost,
    multiplied_weights,
    ring_attention_bytes,
    ring_hides_from,
    seen_pairs,
)

LLAMA = RELEASED["Llama 3 8B"]
SMALL = ModelConfig("llama", 50, 48, 80, 3, 4, 2, 16, 64)
MLA = LatentAttention(layers=2, num_heads=6, latent_dim=10, rope_dim=4, head_dim=7, value_dim=5)


@pytest.mark.parametrize("tokens", [1, 5, 12])
@pytest.mark.parametrize("window", [None, 1, 4, 11, 30])
@pytest.mark.parametrize("sinks", [0, 1, 3, 20])
def test_pairs_are_those_that_the_mask_leaves_one_by_one(tokens, window, sinks):
    wide = tokens if window is None else window
    seen = sum(j > i - wide or j < sinks for i in range(tokens) for j in range(i + 1))
    assert seen_pairs(tokens, window, sinks) == seen
    assert window is not None or seen == causal_pairs(tokens, tokens)


@pytest.mark.parametrize("head", [False, True])
def test_flops_of_a_decoder_are_those_of_the_products_that_it_computes(head):
    model, tokens = Decoder(SMALL), 9

    def attend(_layer, q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, *(x.repeat_interleave(2, 1) for x in (k, v))))
        return ((q @ k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1)

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        x = model.hidden(torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), attend)
        if head:
            model.lm_head(x)
    assert counter.get_total_flops() == sum(decoder_flops(SMALL, tokens, causal=False, head=head).values())
    causal = decoder_flops(SMALL, tokens, head=head)["attention"]
    assert causal * 2 * tokens == decoder_flops(SMALL, tokens, causal=False)["attention"] * (tokens + 1)


@pytest.mark.parametrize("config", [LLAMA, SMALL, RELEASED["Qwen3 0.6B"]], ids=["8B", "small", "0.6B"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_attention_overtakes_at_the_first_context_where_it_takes_as_many_flops(config, causal, head):
    n = attention_overtakes(config, causal=causal, head=head)
    at, before = (decoder_flops(config, tokens, causal=causal, head=head) for tokens in (n, n - 1))
    assert at["attention"] >= at["weights"] and before["attention"] < before["weights"]


def test_in_llama_3_8b_causal_attention_overtakes_near_53_000_tokens_and_the_cache_near_122_000():
    assert attention_overtakes(LLAMA) == 53_247
    assert multiplied_weights(LLAMA) == 53_248 * 32 * 4096
    tokens = cache_overtakes_weights(LLAMA)
    assert tokens * LLAMA.kv_bytes_per_token(2) >= 2 * LLAMA.parameters > (tokens - 1) * LLAMA.kv_bytes_per_token(2)
    assert tokens == 122_533
    assert cache_overtakes_weights(LLAMA, weight_size=0.5) == pytest.approx(tokens / 4, abs=1)


def test_a_window_makes_attention_linear():
    near, far = (decoder_flops(LLAMA, n, window=4096, sinks=4)["attention"] for n in (2**17, 2**18))
    assert far - near == 2**17 * 4100 * 4 * 32 * 4096


def test_refused_sizes_of_a_mask_and_of_numbers():
    with pytest.raises(ValueError, match="sinks must not be negative, got -1"):
        seen_pairs(4, 2, -1)
    with pytest.raises(TypeError, match=r"sinks must be an integer, got 1\.0"):
        seen_pairs(4, 2, 1.0)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        seen_pairs(4, 0)
    with pytest.raises(ValueError, match="a window needs causal=True, got window=3"):
        decoder_flops(SMALL, 4, causal=False, window=3)
    with pytest.raises(ValueError, match="cache_size must be positive, got 0"):
        cache_overtakes_weights(SMALL, cache_size=0)


# ---- latent attention ----


def absorbed(queries, context):
    """Products and bytes of the absorbed form, as PyTorch computes them."""
    rows = queries * MLA.num_heads
    q, cache = torch.zeros(rows, MLA.cache_numbers), torch.zeros(context, MLA.cache_numbers)
    with FlopCounterMode(display=False) as counter:
        o = (q @ cache.T) @ cache[:, : MLA.latent_dim]
    return counter.get_total_flops(), 4 * (q.numel() + cache.numel() + o.numel())


def expanded(queries, context):
    """Products where keys and values of every head are projected first."""
    latent = torch.zeros(context, MLA.latent_dim)
    with FlopCounterMode(display=False) as counter:
        for _ in range(MLA.num_heads):
            k, v = (
                latent @ torch.zeros(MLA.latent_dim, MLA.head_dim),
                latent @ torch.zeros(MLA.latent_dim, MLA.value_dim),
            )
            k = torch.cat((k, torch.zeros(context, MLA.rope_dim)), 1)
            _ = (torch.zeros(queries, k.shape[1]) @ k.T) @ v
    return counter.get_total_flops()


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("context", [1, 8])
def test_costs_of_latent_attention_are_those_of_the_products_that_compute_it(queries, context):
    cost = MLA.decode_cost(context, queries=queries, element_size=4)
    assert (cost.flops, cost.bytes) == absorbed(queries, context)
    assert MLA.expanded_flops(context, queries=queries) == expanded(queries, context)


def test_costs_of_grouped_heads_are_those_of_the_products_that_compute_them():
    group, context, d = 3, 8, 16
    q, k, v = torch.zeros(group, d), torch.zeros(context, d), torch.zeros(context, d)
    with FlopCounterMode(display=False) as counter:
        o = (q @ k.T) @ v
    cost = gqa_decode_cost(2 * group, 2, d, context, element_size=4)
    assert cost.flops == 2 * counter.get_total_flops()
    assert cost.bytes == 2 * 4 * sum(x.numel() for x in (q, k, v, o))
    assert gqa_cache_numbers(2, d) * context == 2 * (k.numel() + v.numel())
    with pytest.raises(ValueError, match="num_heads must be a multiple of kv_heads, got 3 and 2"):
        gqa_decode_cost(3, 2, 16, 1)


def test_intensity_of_latents_is_near_two_for_each_head_and_that_of_groups_the_group():
    assert DEEPSEEK_V3.decode_cost(10**9).intensity == pytest.approx(DEEPSEEK_V3.intensity_limit())
    assert DEEPSEEK_V3.intensity_limit() == pytest.approx(2 * 128 * 1088 / 1152)
    assert gqa_decode_cost(32, 8, 128, 10**9).intensity == pytest.approx(4)
    h100 = gpu("H100")
    ridge = h100.peak_flops["bf16"] / h100.memory_bandwidth
    assert DEEPSEEK_V3.intensity_limit() < ridge < DEEPSEEK_V3.intensity_limit(queries=2)


def test_the_cache_of_deepseek_v3_is_smaller_than_that_of_its_heads_would_be():
    assert DEEPSEEK_V3.cache_bytes() == 61 * 576 * 2
    assert gqa_cache_numbers(128, 128) / DEEPSEEK_V3.cache_numbers == pytest.approx(56.9, abs=0.05)
    assert DEEPSEEK_V3.score_scale() == pytest.approx(192**-0.5)


@pytest.mark.parametrize("sizes", [MLA, DEEPSEEK_V3], ids=["small", "v3"])
def test_projecting_first_pays_from_so_many_queries_on(sizes):
    queries, context = sizes.fewest_queries_to_expand(), 1000
    for more, pays in ((0, True), (-1, False)):
        q = queries + more
        assert (sizes.expanded_flops(context, queries=q) <= sizes.decode_cost(context, queries=q).flops) is pays
    assert LatentAttention(1, 1, 4, 4, 16, 16).fewest_queries_to_expand() == 0


# ---- a sequence spread over ranks ----


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("backward", [False, True])
def test_the_ring_sends_what_lab_6_sends(ranks, backward):
    sent = ring_bytes([12 // ranks] * ranks, 0, 1, 2, 16, 2, backward)
    assert ring_attention_bytes(12, ranks, 2, 16, backward=backward) == sent


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_to_all_sends_each_number_whose_head_or_token_lies_elsewhere(ranks):
    tokens, heads, kv_heads, d = 12, 8, 4, 16
    sent = 0
    for x in (heads, kv_heads, kv_heads, heads):  # q, k, v there, o back: rank 0 sends its tokens or its heads
        elsewhere = sum(t < tokens // ranks and h >= x // ranks for t in range(tokens) for h in range(x))
        sent += elsewhere * d * 2
    assert all_to_all_attention_bytes(tokens, ranks, heads, kv_heads, d) == sent
    with pytest.raises(ValueError, match="ranks must divide num_heads and kv_heads, got 3, 8 and 4"):
        all_to_all_attention_bytes(12, 3, 8, 4, 16)


@pytest.mark.parametrize("causal", [False, True])
def test_sending_takes_as_long_as_computing_at_the_stated_number_of_tokens(causal):
    peak, link, h, g, d, ranks = 400e12, 50e9, 32, 8, 128, 8
    n = ring_hides_from(peak, link, num_heads=h, kv_heads=g, causal=causal)
    assert 4 * n * n * h * d / (2 if causal else 1) / peak == pytest.approx(2 * n * g * d * 2 / link)
    n = all_to_all_matches_from(peak, link, ranks, num_heads=h, kv_heads=g, causal=causal)
    flops = 4 * (n * ranks) ** 2 * h * d / ranks / (2 if causal else 1)
    unit = all_to_all_attention_bytes(1, ranks, h, g, d)
    assert flops / peak == pytest.approx(unit * n * ranks / link)
    with pytest.raises(ValueError, match="bandwidth must be positive, got 0"):
        ring_hides_from(peak, 0, num_heads=h, kv_heads=g)


def test_with_as_many_key_heads_and_no_mask_a_ring_hides_from_peak_over_bandwidth():
    assert ring_hides_from(312e12, 100e9, num_heads=8, kv_heads=8, causal=False) == pytest.approx(3120)  # Liu 2023, 3


class FusedNorm(torch.autograd.Function):
    """RMSNorm as a kernel of its own would save it: the input and 1 / rms. (No gradient: none is asked for here.)"""

    @staticmethod
    def forward(ctx, x):
        scale = x.float().square().mean(-1).add(1e-6).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale[..., None].to(x.dtype)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_block_of_the_llama_kind_keeps_the_bytes_that_autograd_saves(dtype):
    layer, tokens = DecoderLayer(SMALL, 0).to(DEVICE, dtype), 10
    layer.input_layernorm.forward = layer.post_attention_layernorm.forward = FusedNorm.apply

    def attend(_layer, q, k, v):
        return flash_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), causal=True)[0].transpose(0, 1)

    x = torch.randn(tokens, SMALL.hidden_size, dtype=dtype, device=DEVICE, requires_grad=True)
    cos, sin = torch.ones(2, tokens, 1, SMALL.head_dim, dtype=dtype, device=DEVICE)
    own = [*layer.parameters(), cos]  # cos and sin share a storage
    found, _ = saved(lambda: layer(x, cos, sin, attend), own)
    assert found == sum(decoder_block_activations(SMALL, tokens, element_size=x.element_size()).values())


def test_ranks_keep_an_equal_part_of_a_sequence_each():
    whole = context_parallel_activations(LLAMA, 2**20)
    eighth = context_parallel_activations(LLAMA, 2**20, 8)
    assert whole["blocks"] == 8 * eighth["blocks"] == 32 * sum(decoder_block_activations(LLAMA, 2**20).values())
    again = context_parallel_activations(LLAMA, 2**20 + 1, 8, checkpointing=True)
    assert again["blocks"] == 32 * (2**17 + 1) * 4096 * 2
    assert again["recomputed"] == sum(decoder_block_activations(LLAMA, 2**17 + 1).values())
