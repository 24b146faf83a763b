"""Every formula against the real module: parameters, FLOPs and saved tensors counted."""

import math
import random

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from utils.gpt import GPT, GPT_1_4B, TINY, GPTConfig, batch
from utils.hardware import gpu
from utils.transformer_math import (
    BF16_MOMENTS,
    FP32_ADAM,
    FP32_GRADIENTS,
    MIXED_ADAM,
    MIXED_MOMENTUM,
    MODELS,
    PURE_BF16,
    Placement,
    Precision,
    activations,
    block_activations,
    block_parameters,
    communication_volume,
    fewest_ranks,
    forward_flops,
    kv_cache_bytes,
    largest_model,
    memory_per_rank,
    parameters,
    pipeline_volume,
    ring_seconds,
    ring_volume,
    rule_of_thumb,
    tensor_parallel_step_bytes,
    tensor_parallel_step_seconds,
    tensor_parallel_volume,
    tokens_to_hide,
    total_parameters,
    trainable_parameters,
    training_flops,
    training_seconds,
    two_level_seconds,
)

SEED = 20265
GPT3 = MODELS["GPT-3 175B"]


def configs(count=6):
    """Configurations of all kinds."""
    draw, found = random.Random(SEED), []
    for _ in range(count):
        heads = draw.randint(1, 5)
        flags = {name: draw.random() < 0.5 for name in ("tied", "bias", "frozen_positions", "unused_parameter")}
        sizes = (draw.randint(5, 90), draw.randint(3, 20), draw.randint(1, 4), heads, heads * draw.randint(1, 9))
        found.append(GPTConfig(*sizes, draw.randint(1, 5), **flags))
    return found


def elements(modules, names):
    return sum(p.numel() for m in modules for name, p in m.named_parameters() if name.split(".")[0] in names)


# ---- parameters ----


@pytest.mark.parametrize("config", configs(), ids=str)
def test_parameters_are_those_of_the_module_component_by_component(config):
    model, found = GPT(config, device="meta"), parameters(config)
    assert found["attention"] == elements(model.blocks, ["attention"])
    assert found["mlp"] == elements(model.blocks, ["mlp"])
    assert found["norms"] == elements(model.blocks, ["norm_1", "norm_2"]) + elements([model], ["norm"])
    assert found["embedding"] == model.embedding.weight.numel() and found["positions"] == model.positions.numel()
    assert total_parameters(config) == sum(p.numel() for p in model.parameters())
    assert trainable_parameters(config) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(block_parameters(config).values()) == sum(p.numel() for p in model.blocks[0].parameters())


def test_published_models_have_their_published_sizes():
    sizes = {name: total_parameters(config) for name, config in MODELS.items()}
    assert sizes["GPT-2 small"] == 124_439_808 and sizes["GPT-2 XL"] == 1_557_611_200
    assert sizes["GPT-3 175B"] == pytest.approx(174.6e9, rel=1e-4)  # Brown et al. 2020, table D.1: 174,600 million
    assert sizes["GPT-3 6.7B"] == pytest.approx(6.66e9, rel=1e-3) and sizes["GPT-3 13B"] == pytest.approx(
        12.85e9, rel=1e-3
    )


@pytest.mark.parametrize("config", [GPT3, MODELS["GPT-2 XL"]], ids=["GPT-3", "GPT-2 XL"])
def test_the_count_is_equation_2_of_narayanan_et_al_and_the_last_norm(config):
    v, s, layers, h = config.vocabulary, config.context, config.layers, config.hidden
    published = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert total_parameters(config) == pytest.approx(published + 2 * h, rel=1e-12)


def test_keys_and_values_of_gpt3_take_4_7_megabytes_a_token():
    assert kv_cache_bytes(GPT3) == 4_718_592
    model, kept = GPT(TINY), []
    for block in model.blocks:
        block.attention.qkv.register_forward_hook(lambda m, i, out: kept.extend(out.chunk(3, dim=-1)[1:]))
    model(batch(TINY, 2)[0])
    assert sum(t.numel() * t.element_size() for t in kept) == kv_cache_bytes(TINY, 2 * TINY.context, element_size=4)


# ---- FLOPs ----


@pytest.mark.parametrize("config", configs(4), ids=str)
def test_flops_are_those_that_pytorch_counts_forward_and_backward(config):
    model, (tokens, targets) = GPT(config), batch(config, 2, length=3)
    model.positions.requires_grad_(True)  # so that the first block has an input that wants a gradient, as when trained
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(tokens, targets)
        forward = counter.get_total_flops()
        loss.backward()
    assert forward == sum(forward_flops(config, 2, 3).values())
    assert counter.get_total_flops() == sum(training_flops(config, 2, 3).values())


def test_flops_by_component_are_those_of_the_module_of_that_name():
    model = GPT(TINY)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, depth=4) as counter:
        model(batch(TINY, 2)[0])
    counts = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    ours = forward_flops(TINY, 2)
    ends = {part: sum(v for k, v in counts.items() if k.endswith(part)) for part in (".attention", ".mlp", ".head")}
    assert ends == {".attention": ours["attention"] + ours["scores"], ".mlp": ours["mlp"], ".head": ours["head"]}


def test_checkpointing_computes_the_blocks_once_more_and_the_head_not():
    config = TINY.replace(checkpointing=True)
    model = GPT(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*batch(config, 2)).backward()
    down = 2 * 2 * config.context * config.feed_forward * config.hidden * config.layers
    # the last product of a block is no input of the backward pass: PyTorch stops before it
    assert counter.get_total_flops() == sum(training_flops(config, 2).values()) - down


@pytest.mark.parametrize(("batch_size", "seq_len"), [(1, 2048), (1536, 2048), (3, 100)])
def test_with_checkpointing_the_sum_is_equation_3_of_narayanan_et_al(batch_size, seq_len):
    v, layers, h, s = GPT3.vocabulary, GPT3.layers, GPT3.hidden, seq_len
    published = 96 * batch_size * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    found = sum(training_flops(GPT3, batch_size, seq_len, checkpointing=True).values())
    assert found == pytest.approx(published, rel=1e-12)


def test_a_causal_mask_keeps_the_pairs_on_and_below_the_diagonal():
    n = TINY.context
    full, causal = forward_flops(TINY, 2), forward_flops(TINY, 2, causal=True)
    assert causal["scores"] * n * n == full["scores"] * int(torch.ones(n, n).tril().sum())
    assert causal["mlp"] == full["mlp"]


def test_the_rule_of_thumb_is_gpt3s_published_compute_and_near_the_exact_sum():
    tokens = 300_000_000_000
    assert rule_of_thumb(174_600_000_000, tokens) == pytest.approx(3.14e23, rel=2e-3)  # Brown et al. 2020, table D.1
    exact = sum(training_flops(GPT3, 1).values()) / GPT3.context
    assert 1 < exact / rule_of_thumb(total_parameters(GPT3), 1) < 1.03
    assert rule_of_thumb(10, 3, checkpointing=True) == 240


def test_gpt3_on_1024_a100_takes_34_days_at_140_teraflops():
    flops = rule_of_thumb(175_000_000_000, 300_000_000_000, checkpointing=True)
    seconds = training_seconds(flops, 1024, gpu("A100").peak_flops["bf16"], 140e12 / gpu("A100").peak_flops["bf16"])
    assert round(seconds / 86400) == 34  # Narayanan et al. 2021, section 5.1
    with pytest.raises(ValueError, match="utilisation must be above 0 and at most 1, got"):
        training_seconds(1.0, 1, 1.0, 1.5)


# ---- memory of the model's state ----


def test_7_5_billion_parameters_on_64_ranks_are_the_published_120_31_4_16_6_and_1_9_gb():
    found = [sum(memory_per_rank(7_500_000_000, 64, stage).values()) / 1e9 for stage in range(4)]
    assert [round(value, 1) for value in found] == [120, 31.4, 16.6, 1.9]  # Rajbhandari et al. 2020, figure 1


def test_the_components_of_each_stage_are_divided_from_their_stage_on():
    psi, n = 1000, 8
    assert memory_per_rank(psi, n, 1) == {
        "parameters": 2000, "gradients": 2000, "master": 500, "momentum": 500, "variance": 500,
    }  # fmt: skip
    assert memory_per_rank(psi, n, 2)["gradients"] == 250 and memory_per_rank(psi, n, 2)["parameters"] == 2000
    assert set(memory_per_rank(psi, n, 3, FP32_ADAM).values()) == {0, 500}
    for stage in range(4):
        assert sum(memory_per_rank(psi, 1, stage).values()) == 16 * psi


def test_the_sixteen_bytes_are_those_of_real_tensors_after_a_step():
    model = GPT(TINY, dtype=torch.bfloat16)
    trained = [p for p in model.parameters() if p.requires_grad]
    model(*batch(TINY, 2)).backward()
    master = [p.detach().float().requires_grad_() for p in trained]
    for p, copy in zip(trained, master):
        copy.grad = p.grad.float()
    optimizer = torch.optim.AdamW(master)
    optimizer.step()
    sizes = {
        "parameters": sum(p.nbytes for p in trained),
        "gradients": sum(p.grad.nbytes for p in trained),
        "master": sum(p.nbytes for p in master),
        "momentum": sum(optimizer.state[p]["exp_avg"].nbytes for p in master),
        "variance": sum(optimizer.state[p]["exp_avg_sq"].nbytes for p in master),
    }
    assert sizes == memory_per_rank(trainable_parameters(TINY), 1, 0)


def test_bytes_a_parameter_of_the_variants():
    variants = (MIXED_ADAM, BF16_MOMENTS, FP32_GRADIENTS, FP32_ADAM, PURE_BF16, MIXED_MOMENTUM)
    assert [p.total for p in variants] == [16, 12, 18, 16, 8, 12]
    assert MIXED_ADAM.optimizer == 12


def test_the_largest_model_fits_and_one_parameter_more_does_not():
    memory = gpu("H100").memory_bytes
    for stage in range(4):
        most = largest_model(memory, 48, stage)
        assert sum(memory_per_rank(most, 48, stage).values()) <= memory
        assert sum(memory_per_rank(most + 1, 48, stage).values()) > memory


def test_the_fewest_ranks_suffice_and_one_less_does_not():
    psi = 7_500_000_000
    for stage, memory in ((1, 40e9), (2, 19e9), (3, 17e9)):
        ranks = fewest_ranks(psi, memory, stage)
        assert sum(memory_per_rank(psi, ranks, stage).values()) <= memory
        assert sum(memory_per_rank(psi, ranks - 1, stage).values()) > memory
    assert fewest_ranks(psi, 80e9, 0) is None and fewest_ranks(psi, 30e9, 1) is None
    assert [fewest_ranks(psi, 120e9, stage) for stage in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("stage", [4, -1, True, "1"])
def test_a_stage_that_zero_does_not_have_is_refused(stage):
    with pytest.raises(ValueError, match="stage must be 0"):
        memory_per_rank(10, 2, stage)


def test_a_negative_size_of_a_component_is_refused_by_name():
    with pytest.raises(ValueError, match="bytes of master must not be negative, got -4"):
        Precision(master=-4)
    with pytest.raises(TypeError, match="bytes of gradients must be an integer, got 2"):
        Precision(gradients=2.0)


# ---- activations ----


def saved(function, own):
    """Bytes of all tensors that autograd saves in ``function``, each storage once, without the ``own`` parameters."""
    parameters, found = {p.untyped_storage().data_ptr() for p in own}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor too: no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function()
    return sum(size for size, _ in found.values()), kept


@pytest.mark.parametrize("config", [TINY, *configs(3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_keeps_the_bytes_that_autograd_saves(config, dtype):
    block = GPT(config, dtype=dtype).blocks[0]
    x = torch.randn(3, 2, config.hidden, dtype=dtype, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found, _ = saved(lambda: block(x), block.parameters())
    assert found == sum(block_activations(config, 3, 2, element_size=x.element_size()).values())


def test_a_model_keeps_the_bytes_that_autograd_saves():
    model = GPT(TINY)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found, _ = saved(lambda: model(*batch(TINY, 3, length=11)), model.parameters())
    assert found == sum(activations(TINY, 3, 11, element_size=4).values())


def test_a_checkpointed_model_keeps_its_blocks_inputs_until_the_backward_pass():
    model = GPT(TINY.replace(checkpointing=True))
    found, _ = saved(lambda: model(*batch(TINY, 3)), model.parameters())
    expected = activations(model.config, 3, element_size=4)
    assert found == expected["blocks"] + expected["head"] + expected["tokens"]
    assert expected["blocks"] == TINY.layers * 3 * TINY.context * TINY.hidden * 4
    assert expected["recomputed"] == sum(block_activations(TINY, 3, element_size=4).values())


def test_in_16_bits_a_block_keeps_32_bytes_a_token_and_channel_and_the_attention_weights_if_materialised():
    config = GPT_1_4B
    tokens, c = 2 * config.context, config.hidden
    found = block_activations(config, 2)
    statistics = 2 * 2 * tokens * 4 + found["weights"]
    assert sum(found.values()) - statistics == 32 * tokens * c  # Korthikanti et al. 2022: 34 with two dropout masks
    assert block_activations(config, 2, materialise=True)["weights"] == 2 * 2 * config.heads * config.context**2


# ---- communication ----


def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for n in (1, 2, 3, 7):
        parts = ring_volume("reduce_scatter", 420, n) + ring_volume("all_gather", 420, n)
        assert ring_volume("all_reduce", 420, n) == parts == 2 * 420 * (n - 1) / n
    with pytest.raises(ValueError, match="kind must be one of all_reduce"):
        ring_volume("broadcast", 1, 2)


@pytest.mark.parametrize(("stage", "psi"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_step_sends_two_psi_and_at_stage_3_three_psi(stage, psi):
    n, parameters = 64, 6400
    assert sum(communication_volume(parameters, n, stage).values()) == psi * parameters * (n - 1) / n
    assert sum(communication_volume(parameters, 1, stage).values()) == 0


def test_a_ring_takes_one_latency_a_step_and_the_bandwidth_of_its_volume():
    assert ring_seconds("all_reduce", 8_000_000, 4, 1e9) == pytest.approx(0.012)
    assert ring_seconds("all_reduce", 0, 4, 1e9, latency=1e-6) == pytest.approx(6e-6)
    assert ring_seconds("all_gather", 0, 4, 1e9, latency=1e-6) == pytest.approx(3e-6)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_two_levels_send_an_eighth_over_a_card_and_are_one_level_where_there_is_one(kind):
    both = two_level_seconds(kind, 8e9, machines=4, gpus=8, inside=math.inf, network=1e9)
    assert both == pytest.approx(ring_seconds(kind, 1e9, 4, 1e9))
    assert two_level_seconds(kind, 8e9, 1, 8, 2e9, 1.0) == pytest.approx(ring_seconds(kind, 8e9, 8, 2e9))
    assert two_level_seconds(kind, 8e9, 4, 1, 1.0, 2e9) == pytest.approx(ring_seconds(kind, 8e9, 4, 2e9))
    with pytest.raises(ValueError, match="kind must be one of"):
        two_level_seconds("broadcast", 1, 2, 2, 1.0, 1.0)


def test_a_tensor_parallel_block_all_reduces_four_activations():
    assert tensor_parallel_volume(TINY, 2, tensor=3) == pytest.approx(
        TINY.layers * 4 * 2 * (2 / 3) * 2 * TINY.context * TINY.hidden
    )
    assert tensor_parallel_volume(TINY, 2, tensor=1) == 0
    assert pipeline_volume(TINY, 2, 5, virtual=3) == 2 * 3 * 2 * 5 * TINY.hidden


def test_a_step_of_a_served_model_all_reduces_two_activations_a_layer():
    # 80 layers of 8,192 in bfloat16 on 8 ranks: 160 all-reduces of 16 KiB a token, of which a ring sends 7/4
    assert tensor_parallel_step_bytes(1, 8, 8192, 80) == 160 * 16384 * 7 / 4
    assert tensor_parallel_step_bytes(64, 8, 8192, 80) == 64 * tensor_parallel_step_bytes(1, 8, 8192, 80)
    assert tensor_parallel_step_bytes(5, 2, 24, 3, element_size=4) == 6 * 5 * 24 * 4
    assert tensor_parallel_step_bytes(5, 1, 24, 3) == 0
    with pytest.raises(ValueError, match="ranks"):
        tensor_parallel_step_bytes(5, 0, 24, 3)


def test_the_all_reduces_of_a_step_take_their_bytes_and_a_latency_for_each_message():
    assert tensor_parallel_step_seconds(64, 8, 8192, 80, 450e9) == pytest.approx(
        tensor_parallel_step_bytes(64, 8, 8192, 80) / 450e9
    )
    assert tensor_parallel_step_seconds(1, 4, 24, 3, 1e30, 1e-6) == pytest.approx(6 * 2 * 3 * 1e-6)
    assert tensor_parallel_step_seconds(1, 1, 24, 3, 450e9, 1e-6) == 0
    with pytest.raises(ValueError, match="hidden"):
        tensor_parallel_step_seconds(1, 2, 0, 3, 450e9)


def test_communication_hides_when_a_rank_has_as_many_tokens_as_it_computes_flops_for_a_byte_sent():
    assert tokens_to_hide(400e12, 200e9) == pytest.approx(2000)
    psi, tokens = 7e9, tokens_to_hide(400e12, 200e9, volume=2)
    assert 6 * psi * tokens / 400e12 == pytest.approx(2 * psi * 2 / 200e9)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        tokens_to_hide(0, 1)


# ---- placement ----


def placed(**changes):
    return Placement(**({"config": GPT3, "tensor": 8, "pipeline": 8, "data": 16, "global_batch": 1536} | changes))


def test_every_rank_has_coordinates_of_its_own_and_ranks_of_a_layer_are_neighbours():
    place = Placement(TINY, tensor=5, pipeline=5, data=3, global_batch=6)
    found = {place.coordinates(rank) for rank in range(place.gpus)}
    assert len(found) == 75
    assert all(place.rank(*place.coordinates(rank)) == rank for rank in range(75))
    assert [place.rank(2, 1, part) for part in range(5)] == list(range(35, 40))
    with pytest.raises(ValueError, match="replica must be between 0 and 2, got 3"):
        place.rank(0, 3, 0)
    with pytest.raises(ValueError, match="rank must be between 0 and 74, got 75"):
        place.coordinates(75)


def test_the_parts_of_gpt3_add_up_to_the_model_and_what_is_held_twice():
    place = placed(tensor=1, pipeline=1, data=1)
    assert place.parameters(0) == total_parameters(GPT3)
    stages = placed(tensor=1, pipeline=8)
    copy = GPT3.vocabulary * GPT3.hidden
    assert sum(stages.parameters(s) for s in range(8)) == total_parameters(GPT3) + copy
    split = placed(tensor=8, pipeline=1)
    whole = GPT3.layers * (2 + 4) * GPT3.hidden + 2 * GPT3.hidden + GPT3.context * GPT3.hidden
    padding = (-GPT3.vocabulary % 8) * GPT3.hidden
    assert 8 * split.parameters(0) == total_parameters(GPT3) + 7 * whole + padding


def test_gpt3_on_1024_gpus_fits_into_80_gb_only_when_optimizer_or_activations_give_way():
    memory = gpu("A100").memory_bytes
    used = {zero: sum(placed(zero=zero, sequence_parallel=True).memory(0).values()) for zero in (0, 1)}
    assert used[1] < used[0] and used[1] < memory
    assert sum(placed(tensor=1, pipeline=1, data=1024, global_batch=1024, zero=3).memory(0).values()) < sum(
        placed(tensor=1, pipeline=1, data=1024, global_batch=1024, zero=1).memory(0).values()
    )
    checkpointed = placed(config=GPT3.replace(checkpointing=True))
    assert checkpointed.memory(0)["activations"] < placed().memory(0)["activations"] / 5


def test_the_pipeline_of_a_placement_is_the_simulated_one():
    place = placed()
    assert place.micro_batches == 96 and place.bubble == 7 / 96
    assert place.in_flight == tuple(range(8, 0, -1))
    assert placed(chunks=2).bubble == 7 / 192 and placed(chunks=2).in_flight[0] == 23
    assert placed(chunks=2).memory(0)["activations"] == 23 * 6 * placed().block_activations()


def test_activations_of_a_split_block_are_those_of_korthikanti_et_al_without_masks():
    tokens, c = GPT3.context, GPT3.hidden
    for t in (1, 2, 8):
        statistics = 2 * 2 * tokens * 4 + GPT3.heads * tokens * 4 / t
        assert placed(tensor=t).block_activations() == pytest.approx(tokens * c * (8 + 24 / t) + statistics)
        both = placed(tensor=t, sequence_parallel=True).block_activations()
        assert both == pytest.approx((32 * tokens * c + 2 * 2 * tokens * 4 + GPT3.heads * tokens * 4) / t)


def test_what_a_gpu_sends_adds_up_over_the_stages():
    place = placed(zero=1)
    width = GPT3.context * GPT3.hidden  # a micro-batch is one sequence
    assert sum(place.sent(s)["pipeline"] for s in range(8)) == pytest.approx(7 * 2 * 2 * 96 * width / 8)
    assert place.sent(3)["tensor"] == pytest.approx(2 * 96 * 12 * 4 * 2 * 7 / 8 * width)
    assert place.sent(3)["data"] == pytest.approx(2 * 2 * place.parameters(3) * 15 / 16)
    looped = placed(chunks=2)
    assert sum(looped.sent(s)["pipeline"] for s in range(8)) == pytest.approx(15 * 2 * 2 * 96 * width / 8)
    assert placed(pipeline=1).sent()["pipeline"] == 0 and placed(tensor=1).sent()["tensor"] == 0
    assert math.isclose(place.flops_per_gpu() * 1024, sum(training_flops(GPT3, 1536).values()))
    assert place.tokens == 1536 * 2048 and place.gpus == 1024 and place.layers_per_stage == 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": 7}, "heads by tensor: 96 by 7"),
        ({"pipeline": 7}, "layers by pipeline . chunks: 96 by 7"),
        ({"chunks": 5}, "layers by pipeline . chunks: 96 by 40"),
        ({"data": 7}, "global_batch by data . micro_batch: 1536 by 7"),
    ],
)
def test_a_placement_that_does_not_divide_is_refused_by_what(changes, words):
    with pytest.raises(ValueError, match=f"cannot divide {words}"):
        placed(**changes)
