"""Lab 6's engine: 4-bit weights and an 8-bit cache give the tokens of a model that dequantises both."""

from __future__ import annotations

import copy
import random
from functools import cache

import pytest
import torch
from parameters import thorough_but
from torch import nn

from solutions.lab6_frontiers.engine import Engine, default_num_fp8_blocks, fp8_block_bytes
from solutions.lab6_frontiers.fp8_cache import scale_of
from solutions.lab6_frontiers.int4_model import Int4Weight, quantize_weights
from solutions.lab6_frontiers.low_bit_runner import LowBitRunner
from utils.formats import quantize
from utils.serving import Decoder, ModelConfig, SamplingParams, causal_attention, generate

BLOCK_SIZE = 4


@cache
def wide_model(dtype: torch.dtype = torch.float32, bias: bool = False) -> Decoder:
    """A random decoder whose layers have multiples of 128 inputs; its logits are wide: rounding decides on no token."""
    config = ModelConfig(
        "qwen2" if bias else "qwen3", vocab_size=61, hidden_size=128, intermediate_size=128, num_layers=2, num_heads=8,
        num_kv_heads=4, head_dim=16, max_seq_len=96, qk_norm=not bias, qkv_bias=bias, eos_token_ids=(7,),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model = Decoder(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            scale = 1 if "embed" in name else (4 if "lm_head" in name else 1) / weight.shape[1] ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        elif "q_norm" in name or "k_norm" in name:
            weight.fill_(1.5)
        elif "bias" in name:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model.to(dtype)


def dequantized(model: Decoder) -> Decoder:
    """A decoder with the numbers that 4-bit weights stand for, as ordinary weights."""
    dense = copy.deepcopy(model)
    for module in dense.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(quantize(module.weight, "int4", 128).dequantize())
    return dense


def through_fp8(layer, q, k, v):
    """Attention of one whole sequence whose keys and values have been in blocks of e4m3."""
    seen = []
    for x in (k, v):
        blocks = torch.cat([x, x.new_zeros(-len(x) % BLOCK_SIZE, *x.shape[1:])]).unflatten(0, (-1, BLOCK_SIZE)).float()
        scale = scale_of(blocks.abs().amax((1, 3)))[:, None, :, None]
        kept = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
        seen.append(kept.flatten(0, 1)[: len(x)].to(q.dtype))
    return causal_attention(q, *seen)


def expected(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, the whole sequence computed anew for each."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[len(prompt) :][-1:] != [7]:
        hidden = model.hidden(torch.tensor(tokens), torch.arange(len(tokens)), through_fp8)
        tokens.append(int(model.logits(hidden[-1]).argmax()))
    return tokens[len(prompt) :]


def prompts_of(count: int, longest: int = 14, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    shared = [draw.randrange(8, 61) for _ in range(6)]
    return [shared * (i % 2) + [draw.randrange(8, 61) for _ in range(draw.randint(1, longest))] for i in range(count)]


def said(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    return [generation.tokens for generation in engine.generate(prompts, SamplingParams(max_new_tokens=count))]


@pytest.mark.parametrize("bias", [False, True])
def test_each_request_gets_the_tokens_of_a_model_that_dequantises(bias):
    model, prompts = wide_model(bias=bias), prompts_of(6)
    dense = dequantized(model)
    engine = Engine(
        model, weights="int4", cache="fp8", num_blocks=16, block_size=BLOCK_SIZE, max_batch=4, token_budget=9
    )
    assert said(engine, prompts, 16) == [expected(dense, prompt, 16) for prompt in prompts]
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["cached_tokens"] > 0 and engine.manager.num_used == 0


def test_weights_alone_give_what_plain_generation_gives_with_dequantised_ones():
    model, prompts = wide_model(), prompts_of(4)
    engine = Engine(model, weights="int4", num_blocks=16, block_size=BLOCK_SIZE, max_batch=3, token_budget=8)
    params = SamplingParams(max_new_tokens=12)
    assert said(engine, prompts, 12) == [generate(dequantized(model), prompt, params).tokens for prompt in prompts]


def test_a_cache_alone_leaves_the_weights_as_they_are():
    model, prompts = wide_model(), prompts_of(4)
    engine = Engine(model, cache="fp8", num_blocks=16, block_size=BLOCK_SIZE, max_batch=3, token_budget=8)
    assert said(engine, prompts, 12) == [expected(model, prompt, 12) for prompt in prompts]
    assert engine.model is model


def test_without_either_it_is_lab_5s_engine():
    model, prompts = wide_model(), prompts_of(3)
    params = SamplingParams(max_new_tokens=8)
    assert said(Engine(model), prompts, 8) == [generate(model, prompt, params).tokens for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("fused", thorough_but([False, True], True))
def test_kernels_give_the_tokens_that_plain_pytorch_gives(fused):
    model, prompts = wide_model(torch.float16), prompts_of(3, longest=6)
    made = []
    for options in ({"attention": "triton", "fused": fused, "cuda_graphs": fused}, {"attention": "torch"}):
        runner = LowBitRunner(model, 16, BLOCK_SIZE, weights="int4", cache="fp8", **options)
        made.append(said(Engine(model, runner=runner, max_batch=3, token_budget=8), prompts, 4))
    assert made[0] == made[1]


@pytest.mark.slow
def test_kernels_with_4_bit_weights_and_a_cache_of_16_give_the_tokens_that_plain_pytorch_gives():
    model, prompts = wide_model(torch.float16, bias=True), prompts_of(2, longest=6)
    made = []
    for options in ({"attention": "triton", "fused": True, "cuda_graphs": False}, {"attention": "torch"}):
        runner = LowBitRunner(model, 16, BLOCK_SIZE, weights="int4", **options)
        made.append(said(Engine(model, runner=runner, max_batch=2, token_budget=8), prompts, 3))
    assert made[0] == made[1]


def test_the_model_that_is_given_stays_as_it_is_and_shares_what_is_not_quantised():
    model = wide_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = quantize_weights(model, kernels=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert made.embed_tokens.weight is model.embed_tokens.weight and made.lm_head.weight is model.lm_head.weight
    assert isinstance(made.layers[0].mlp.down_proj.weight, Int4Weight)
    assert made.layers[0].mlp.down_proj.weight.packed.nbytes * 8 == 4.25 * 128 * 128


def test_a_4_bit_weight_is_for_products_only():
    weight = quantize_weights(wide_model(), kernels=False).layers[0].self_attn.q_proj.weight
    assert weight.shape == (128, 128)
    with pytest.raises(TypeError, match="can be multiplied by F"):
        torch.add(torch.zeros(128, 128), weight)


def test_blocks_of_8_bits_are_half_as_large():
    model = wide_model()
    size = fp8_block_bytes(model.config, 16)
    assert size == 16 * model.config.kv_bytes_per_token(1) + 2 * 4 * 2 * 4
    runner = LowBitRunner(model, 5, 16, cache="fp8")
    held = (runner.key_cache, runner.value_cache, runner.k_scale, runner.v_scale)
    assert sum(tensor.nbytes for tensor in held) == 5 * size
    assert default_num_fp8_blocks(model, 16, 2) == 2 * 6


def test_copied_blocks_bring_their_scales():
    runner = LowBitRunner(wide_model(), 5, 16, cache="fp8")
    for scales in (runner.k_scale, runner.v_scale):
        scales[:, 1] = 8.0
    runner.key_cache[:, 1] = torch.ones(()).to(torch.float8_e4m3fn)
    runner.copy_blocks([(1, 3)])
    assert runner.k_scale[:, 3].eq(8).all() and runner.v_scale[:, 3].eq(8).all() and runner.k_scale[:, 2].eq(1).all()
    assert runner.key_cache[:, 3].float().eq(1).all() and runner.key_cache[:, 2].float().eq(0).all()


def test_what_is_not_known_or_does_not_fit_is_refused():
    model = wide_model()
    with pytest.raises(ValueError, match="weights must be None or 'int4', got 'int8'"):
        Engine(model, weights="int8")
    with pytest.raises(ValueError, match="cache must be None or 'fp8', got 'int4'"):
        Engine(model, cache="int4")
    with pytest.raises(ValueError, match="a runner brings its weights"):
        Engine(model, cache="fp8", runner=LowBitRunner(model, 4))
    with pytest.raises(ValueError, match="num_blocks must be an integer"):
        LowBitRunner(model, 0, cache="fp8")
    config = ModelConfig("qwen3", 61, 64, 128, 1, 4, 2, 16, 96)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj has 64 inputs, .* groups of 128"):
        Engine(Decoder(config), weights="int4")
