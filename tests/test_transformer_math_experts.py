"""Models with experts: published sizes, experts touched, the batch that is compute-bound, bytes between ranks."""

import math
import random

import pytest

from utils.hardware import gpu
from utils.roofline import ridge
from utils.transformer_math import (
    MOE_MODELS,
    ExpertLayer,
    MoEModel,
    all_to_all_bytes,
    compute_bound_batch,
    moe_decode_bounds,
    rank_imbalance,
    touched_experts,
)

H100 = gpu("H100")


@pytest.mark.parametrize(
    ("name", "every", "active"), [("DeepSeek-V3", 671e9, 37e9), ("Mixtral 8x7B", 47e9, 13e9)]
)  # fmt: skip
def test_published_models_have_their_published_sizes(name, every, active):
    model = MOE_MODELS[name]
    assert round(model.parameters / 1e9) == every / 1e9
    assert round(model.active_parameters / 1e9) == active / 1e9


def test_a_model_whose_token_meets_every_expert_is_dense():
    model = MoEModel(ExpertLayer(hidden=8, inner=5, experts=4, chosen=4, shared=3), 3, 100, 50, 1, 7)
    layers = 3 * 100 + 3 * 8 * 7 + 2 * (4 * 3 * 8 * 5 + 3 * 8 * 3 + 8 * 4)
    assert model.active_parameters == layers + 50 * 8
    assert model.parameters == layers + 2 * 50 * 8
    step = moe_decode_bounds(model, H100, 3)
    assert step.read_weights == pytest.approx(2 * model.active_parameters / H100.memory_bandwidth)
    assert step.multiply == pytest.approx(2 * 3 * model.active_parameters / H100.peak_flops["bf16"])


@pytest.mark.parametrize(("experts", "chosen", "batch"), [(8, 2, 1), (8, 2, 5), (16, 1, 12), (5, 5, 3)])
def test_touched_experts_are_those_of_random_choices(experts, chosen, batch):
    draw, trials = random.Random(3), 4000
    found = sum(len({e for _ in range(batch) for e in draw.sample(range(experts), chosen)}) for _ in range(trials))
    assert found / trials == pytest.approx(touched_experts(experts, chosen, batch), rel=0.02)


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
@pytest.mark.parametrize("name", list(MOE_MODELS))
def test_the_compute_bound_batch_is_the_first_one_that_is(name, weights):
    model = MOE_MODELS[name]
    batch = compute_bound_batch(model, H100, weights=weights)
    before, at = (moe_decode_bounds(model, H100, b, weights=weights) for b in (batch - 1, batch))
    assert before.multiply < before.read_weights and at.multiply >= at.read_weights
    dense = ridge(H100) / (2 if weights == "fp8" else 1)
    ratio = (model.parameters - model.vocabulary * model.moe.hidden) / model.active_parameters
    assert batch == math.ceil(dense * ratio)  # by then every expert is touched


def test_a_batch_that_is_compute_bound_at_once_is_one():
    tiny = MoEModel(ExpertLayer(hidden=8, inner=5, experts=4, chosen=1), 1, 100, 50)
    slow = type(H100)(**{**vars(H100), "peak_flops": {"bf16": 1.0}})
    assert compute_bound_batch(tiny, slow) == 1


def test_the_bytes_of_a_layer_with_even_counts():
    layer = ExpertLayer(hidden=7168, inner=2048, experts=256, chosen=8)
    assert all_to_all_bytes(layer, 4096, 8, 2) == 2 * 4096 * 8 * 7 // 8 * 7168 * 2 + 8 * 224
    assert all_to_all_bytes(layer, 4096, 1, 2, training=True) == 0


@pytest.mark.parametrize(("counts", "ranks", "expected"), [
    ([3, 3, 3, 3], 2, 1), ([6, 2, 2, 2], 4, 2), ([6, 2, 2, 2], 2, 8 / 6), ([0, 0, 0, 9], 4, 4), ([5, 1], 1, 1),
])  # fmt: skip
def test_the_busiest_rank_over_the_mean(counts, ranks, expected):
    assert rank_imbalance(counts, ranks) == pytest.approx(expected)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: rank_imbalance([1, 2, 3], 2), "2 ranks must divide the 3 experts"),
    (lambda: rank_imbalance([0, 0], 2), "above 0 in sum, got 0"),
    (lambda: touched_experts(8, 9, 1), "chosen must be at most experts, got 9 of 8"),
    (lambda: touched_experts(8, 2, 0), "batch must be"),
    (lambda: moe_decode_bounds(MOE_MODELS["Mixtral 8x7B"], H100, 1, arithmetic="int3"), "no 'int3' rate"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
