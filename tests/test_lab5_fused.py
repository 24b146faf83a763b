"""The fused decoder of lab 5 and its kernels against the plain decoder, and compiled for GPUs that are not here."""

from __future__ import annotations

import pytest
import torch
from serving_runs import BLOCK_SIZE, FAMILIES, SEED, held, request, right_logits, tiny_model

from solutions.lab5_serving import BlockManager, Chunk, ModelRunner, Step
from solutions.lab5_serving import fused_layers as fused
from solutions.lab5_serving.fused_decoder import FusedDecoder, join
from utils import runtime
from utils.compile_only import Request as Compile
from utils.compile_only import resource_usages
from utils.serving.model import rotate

# ---- fused layers ----------------------------------------------------------------------------------------------------


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(dtype).to(runtime.DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_norm_adds_to_the_stream_and_normalises_the_sum(dtype):
    x, residual, weight = normal(3, 24, dtype=dtype), 2 * normal(3, 24, dtype=dtype).flip(0), normal(24, dtype=dtype)
    norm = tiny_model(dtype=dtype, layers=1).norm
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(fused.rms_norm(x, weight, norm.eps), norm(x), **tolerance)
    total = residual + x
    found = fused.rms_norm(x, weight, norm.eps, residual=residual)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    torch.testing.assert_close(found, norm(total), **tolerance)


def test_the_fused_gate_is_silu_times_up():
    gate_up = normal(3, 2 * 40)
    right = torch.nn.functional.silu(gate_up[:, :40]) * gate_up[:, 40:]
    torch.testing.assert_close(fused.silu_and_multiply(gate_up), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_norm", [False, True])
def test_queries_turn_in_place_and_keys_and_values_go_to_their_slots(monkeypatch, with_norm):
    monkeypatch.setattr(fused, "HEAD_TILE", 2 * 16)  # several programs a token
    model = tiny_model(layers=1)
    attention, positions = model.layers[0].self_attn, torch.tensor([5, 0, 63], device=runtime.DEVICE)
    qkv = normal(3, 8 * 16)
    q, k, v = (part.unflatten(1, (-1, 16)).clone() for part in qkv.split([64, 32, 32], 1))
    angles = positions[:, None, None].float() * model.frequencies
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps) if with_norm else None
    if with_norm:
        q, k = attention.q_norm(q), attention.k_norm(k)
    tables = FusedDecoder(model, 64)
    caches = [torch.zeros(3, 2, BLOCK_SIZE, 16, device=runtime.DEVICE).transpose(1, 2) for _ in range(2)]
    slots = torch.tensor([9, -1, 0], dtype=torch.int32, device=runtime.DEVICE)
    found = fused.rotate_and_store(qkv, positions.int(), slots, tables.cos, tables.sin, *caches, 4, norms)
    torch.testing.assert_close(found, rotate(q, cos, sin), rtol=1e-5, atol=1e-5)
    for cache, right in zip(caches, (rotate(k, cos, sin), v), strict=True):
        torch.testing.assert_close(cache[2, 1], right[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cache[0, 0], right[2], rtol=1e-5, atol=1e-5)
        cache[2, 1], cache[0, 0] = 0, 0
        assert not cache.any()  # the token without a slot is nowhere


def test_joined_weights_live_in_one_place_and_stay_the_models_own():
    model = tiny_model("qwen2", layers=1)
    attention = model.layers[0].self_attn
    modules = (attention.q_proj, attention.k_proj, attention.v_proj)
    before = torch.cat([module.weight for module in modules])
    joined = join(modules)
    assert torch.equal(joined, before)
    joined[64] = 7.0
    assert torch.equal(attention.k_proj.weight[0], torch.full((24,), 7.0, device=runtime.DEVICE))
    assert join(modules).data_ptr() == joined.data_ptr()  # a second time nothing moves
    assert join(modules, "bias").shape == (96,) and join((model.lm_head,), "bias") is None


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_decoder_over_the_labs_kernels_is_the_decoder(family):
    model, manager = tiny_model(family), BlockManager(40, BLOCK_SIZE)
    runner = ModelRunner(model, 40, BLOCK_SIZE, attention="triton", fused=True, cuda_graphs=True)
    long, short = requests = request("long", 11), request("short", 4)
    held(manager, *requests)
    right = [right_logits(model, each.tokens) for each in requests]
    runner.run(Step([Chunk(long, 0, 5)]), manager)
    runner.run(Step([Chunk(long, 5, 5), Chunk(short, 0, 3)]), manager)
    found = runner.run(Step([Chunk(short, 3, 1), Chunk(long, 10, 1)]), manager)
    torch.testing.assert_close(found, torch.stack([right[1][-1], right[0][-1]]), rtol=1e-4, atol=1e-4)
    everything = runner.run(Step([Chunk(long, 0, 11)]), manager, rows="all")
    torch.testing.assert_close(everything, right[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_fused_decoder_errs_in_bfloat16_no_more_than_the_decoder():
    wide, narrow = tiny_model(), tiny_model(dtype=torch.bfloat16)
    for name, weight in wide.named_parameters():
        weight.copy_(narrow.get_parameter(name).float())
    manager, asked = BlockManager(40, BLOCK_SIZE), request("asked", 9)
    held(manager, asked)
    runner = ModelRunner(narrow, 40, BLOCK_SIZE, fused=True)
    step = Step([Chunk(asked, 0, 9)])
    right = right_logits(wide, asked.tokens)
    errors = [
        float((found.float() - right).norm() / right.norm())
        for found in (runner.run(step, manager, rows="all"), right_logits(narrow, asked.tokens))
    ]
    assert errors[0] <= 2 * errors[1] + 1e-3, errors


# ---- compiled for a GPU ----------------------------------------------------------------------------------------------


#: Strides of a contiguous cache, as a tuple.
CACHE = ("i32:16", "i32:16", "i32:16", 1)


def compiled(capability: int, dtype: str) -> list[Compile]:
    """The three kernels with the sizes of Qwen3-0.6B, as they are launched."""
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr"), f"*{dtype}")
    strides = dict.fromkeys(("stride_x", "stride_r", "stride_y"), "i32")
    norm = {**pointers, **strides, "eps": "fp32"}
    names = ["qkv", "q_weight", "k_weight", "k_cache", "v_cache"]
    rotation = {f"{name}_ptr": f"*{dtype}" for name in names}
    rotation |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions_ptr": "*i32", "slots_ptr": "*i32"}
    rotation |= {"stride_t": "i32", "stride_k": CACHE, "stride_v": CACHE, "eps": "fp32"}
    sizes = {
        "H": 16, "G": 8, "HALF": 64, "BLOCK_HEADS": 32, "BLOCK_HALF": 64, "BLOCK_SIZE": 16,
    }  # fmt: skip
    gate = {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "stride_x": "i32", "stride_y": "i32"}

    def aligned(signature):
        return [name for name, kind in signature.items() if kind not in ("fp32", CACHE)]

    found = [
        Compile(fused.rms_norm_kernel, norm, {"SIZE": 1024, "BLOCK": 1024, "ADD": add}, capability, 2, 3, aligned(norm))
        for add in (False, True)
    ]
    found += [
        Compile(
            fused.rotate_and_store_kernel, rotation, sizes | {"NORM": with_norm}, capability, 4, 3, aligned(rotation)
        )
        for with_norm in (False, True)
    ]
    constants = {"SIZE": 3072, "BLOCK": 1024}
    return [*found, Compile(fused.silu_and_multiply_kernel, gate, constants, capability, 4, 3, aligned(gate))]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_fused_kernels_compile_and_spill_nothing(capability):
    for used in resource_usages(compiled(capability, "bf16")):
        assert used.stack_bytes == 0, used
        assert used.registers * used.threads <= 65536, used
