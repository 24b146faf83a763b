"""Bounds of serving: the figures of lecture 10, the sizes of released models, and sums that are done one by one."""

import itertools
import math
from dataclasses import replace

import pytest

from utils.hardware import GPUS, gpu
from utils.roofline import ridge
from utils.serving import MODELS as FOLDERS
from utils.serving import ModelConfig
from utils.transformer_math import (
    MODELS,
    SERVED_MODELS,
    ServedModel,
    decode_bounds,
    kv_cache_bytes,
    largest_batch,
    prefill_bounds,
    request_bounds,
    total_parameters,
)

H100 = gpu("H100")
LLAMA = SERVED_MODELS["Llama 3 8B"]
RELEASED = {
    "Llama 2 7B": ModelConfig("llama", 32000, 4096, 11008, 32, 32, 32, 128, 4096),
    "Llama 3 8B": ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192),
    "Llama 3 70B": ModelConfig("llama", 128256, 8192, 28672, 80, 64, 8, 128, 8192),
    "Qwen3 0.6B": ModelConfig("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 32768, qk_norm=True, tied_head=True),
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_model_is_what_its_configuration_describes(name):
    config, model = RELEASED[name], SERVED_MODELS[name]
    assert model == ServedModel.of(config)
    assert model.parameters == config.parameters and model.kv_bytes_per_token("fp32") == config.kv_bytes_per_token(4)


def test_published_counts_of_parameters():
    assert LLAMA.parameters == 8_030_261_248 and SERVED_MODELS["Llama 3 70B"].parameters == 70_553_706_496
    assert SERVED_MODELS["Llama 2 7B"].parameters == 6_738_415_616


def test_a_gpt_multiplies_all_but_its_positions_and_the_shipped_model_all_but_nothing():
    for name, config in MODELS.items():
        model = SERVED_MODELS[name]
        assert model.parameters == total_parameters(config)
        assert model.parameters - model.multiplied == config.context * config.hidden
        assert model.kv_bytes_per_token() == kv_cache_bytes(config)
        untied = ServedModel.of(config.replace(tied=False))
        assert untied.multiplied == model.multiplied and untied.parameters > model.parameters
    shipped = ServedModel.of(ModelConfig.from_folder(FOLDERS / "target"))
    assert shipped.kv_bytes_per_token() == 4096


def test_the_figures_of_lecture_10():
    alone = decode_bounds(LLAMA, H100, 1, 0)
    assert alone.seconds == pytest.approx(4.48e-3, rel=1e-3) and alone.bound_by == "memory"
    assert alone.read_weights / alone.multiply == pytest.approx(ridge(H100), rel=1e-12)  # equation (9)
    assert largest_batch(LLAMA, H100.memory_bytes, 2048) == 238
    assert decode_bounds(LLAMA, H100, 238, 2048).seconds == pytest.approx(23.55e-3, rel=1e-3)
    assert decode_bounds(LLAMA, gpu("H200"), 465, 2048).seconds == pytest.approx(33e-3, rel=0.01)  # exercise 2
    prefill = prefill_bounds(LLAMA, H100, 4800)  # exercise 5
    assert round(1e3 * prefill.multiply) == 73 and round(1e3 * prefill.attend) == 6 and prefill.bound_by == "compute"


def test_formats_of_weights_and_cache_count_apart_as_in_exercise_6():
    assert largest_batch(LLAMA, H100.memory_bytes, 2048, weights="int8") == 268
    assert largest_batch(LLAMA, H100.memory_bytes, 2048, weights="int8", cache="int8") == 536
    step = decode_bounds(LLAMA, H100, 536, 2048, weights="int8", cache="int8")
    assert 536 / step.seconds == pytest.approx(18_100, rel=0.01) and step.multiply > step.read_weights
    assert decode_bounds(LLAMA, H100, 1, 2048, weights="fp8").seconds == pytest.approx(2.3e-3, rel=0.02)


def test_the_mean_gap_is_that_of_steps_done_one_by_one():
    for batch, prompt, new in ((1, 512, 16), (16, 512, 17), (3, 1, 2), (200, 4000, 1000)):
        gaps = [decode_bounds(LLAMA, H100, batch, prompt + i).seconds for i in range(1, new)]
        found = request_bounds(LLAMA, H100, batch, prompt, new)
        assert found.tpot == pytest.approx(sum(gaps) / len(gaps), rel=1e-12)
        assert found.latency == pytest.approx(found.ttft + sum(gaps), rel=1e-12)
        assert found.throughput == pytest.approx(batch * new / found.latency, rel=1e-12)


def test_a_single_new_token_has_no_gap():
    found = request_bounds(LLAMA, H100, 4, 100, 1)
    assert math.isnan(found.tpot) and found.latency == found.ttft


def test_weights_that_do_not_fit_leave_room_for_nobody():
    assert largest_batch(SERVED_MODELS["GPT-3 175B"], H100.memory_bytes, 1) == 0
    exact = LLAMA.weight_bytes() + 3 * 100 * LLAMA.kv_bytes_per_token()
    assert largest_batch(LLAMA, exact, 100) == 3 and largest_batch(LLAMA, exact - 1, 100) == 2


@pytest.mark.parametrize("device", GPUS.values(), ids=lambda d: d.name)
def test_every_gpu_has_bounds_that_grow_with_the_batch(device):
    steps = [decode_bounds(LLAMA, device, b, 1000, arithmetic="fp32").seconds for b in (1, 2, 64, 4096)]
    assert all(0 < a < b for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: decode_bounds(LLAMA, H100, 0, 10), ValueError, "batch must be at least 1"),
        (lambda: decode_bounds(LLAMA, H100, 1.5, 10), TypeError, "batch must be an integer"),
        (lambda: decode_bounds(LLAMA, H100, 1, -1), ValueError, "context must be zero or more"),
        (lambda: decode_bounds(LLAMA, H100, 1, math.inf), ValueError, "context"),
        (lambda: decode_bounds(LLAMA, H100, 1, math.nan), ValueError, "context"),
        (lambda: decode_bounds(LLAMA, H100, 1, True), TypeError, "context must be a number"),
        (lambda: decode_bounds(LLAMA, H100, 1, 1, weights="int3"), ValueError, "unknown dtype 'int3'"),
        (lambda: decode_bounds(LLAMA, gpu("T4"), 1, 1), ValueError, "T4 has no 'bf16' rate"),
        (lambda: decode_bounds(LLAMA, "H100", 1, 1), TypeError, "device must be an entry"),
        (lambda: prefill_bounds(LLAMA, H100, 0), ValueError, "tokens must be at least 1"),
        (lambda: largest_batch(LLAMA, 0, 1), ValueError, "memory_bytes must be positive"),
        (lambda: request_bounds(LLAMA, H100, 1, 1, 0), ValueError, "new must be at least 1"),
        (lambda: replace(LLAMA, kv_heads=5), ValueError, "multiple of kv_heads"),
        (lambda: replace(LLAMA, multiplied=10**12), ValueError, "at most parameters"),
        (lambda: replace(LLAMA, layers=0), ValueError, "layers must be at least 1"),
    ],
)
def test_nonsense_is_refused_with_what_would_be_right(call, error, says):
    with pytest.raises(error, match=says):
        call()
