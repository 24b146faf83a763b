"""Operator costs against closed formulas and brute force; roofs, ridge, bounds and the crossover batch."""

import dataclasses
import math
import random
from fractions import Fraction

import pytest

from utils import roofline
from utils.hardware import GPUS, cpu, gpu, tpu
from utils.roofline import (
    ELEMENT_SIZE,
    Cost,
    attainable,
    attention,
    bound_by,
    crossover_batch,
    dot_product,
    matmul,
    ridge,
    time_bounds,
)

H100 = gpu("H100")
SEED = 20261


def sizes(count, highest, draws=20):
    generator = random.Random(SEED)
    return [tuple(generator.randint(1, highest) for _ in range(count)) for _ in range(draws)]


def loop_attention(batch, heads, kv_heads, queries, keys, head_dim, causal, materialize, size):
    """Count attention one score at a time."""
    flops = 0
    for query in range(queries):
        for key in range(keys):
            if not causal or key <= query + keys - queries:
                flops += 2 * head_dim + 2 * head_dim + 5
    elements = batch * head_dim * (2 * heads * queries + 2 * kv_heads * keys)
    scores = batch * heads * queries * keys
    moved = (elements + 4 * scores) * size if materialize else elements * size + 4 * batch * heads * queries
    return Cost(batch * heads * flops, moved)


# ---- costs ----


@pytest.mark.parametrize(("n",), sizes(1, 10_000))
def test_a_dot_product_costs_2n_flops_and_2n_plus_1_elements(n):
    assert dot_product(n, "fp16") == Cost(2 * n, 4 * n + 2)
    assert dot_product(n, "fp16").intensity < 0.5


@pytest.mark.parametrize(("m", "k", "n"), sizes(3, 300))
def test_a_matmul_is_its_dot_products_with_each_matrix_moved_once(m, k, n):
    for dtype, size in ELEMENT_SIZE.items():
        assert matmul(m, k, n, dtype) == Cost(m * n * 2 * k, size * (m * k + k * n + m * n))


def test_a_matmul_with_few_rows_has_an_intensity_near_their_number():
    assert matmul(64, 2**20, 2**20).intensity == pytest.approx(64, rel=1e-3)
    assert matmul(1, 4096, 4096).intensity == pytest.approx(1, rel=1e-3)
    assert matmul(1, 4096, 4096).intensity < 1


@pytest.mark.parametrize(
    ("name", "flops", "elements"),
    [("copy", 0, 2), ("relu", 1, 2), ("add", 1, 3), ("gelu", 9, 2)],
)
def test_an_elementwise_operator_costs_a_multiple_of_its_size(name, flops, elements):
    for (n,) in sizes(1, 5000, draws=5):
        for dtype, size in ELEMENT_SIZE.items():
            assert getattr(roofline, name)(n, dtype) == Cost(flops * n, elements * n * size)


def test_relu_has_an_eighth_of_a_flop_per_byte_in_fp32_and_a_quarter_in_fp16():
    assert roofline.relu(1000, "fp32").intensity == 0.125
    assert roofline.relu(1000, "fp16").intensity == 0.25


def test_softmax_and_layer_norm_read_and_write_once():
    assert roofline.softmax(7, 13, "fp32") == Cost(4 * 91, 8 * 91)
    assert roofline.layer_norm(7, 13, "bf16") == Cost(7 * 91, 4 * 91 + 4 * 13)


@pytest.mark.parametrize(("batch", "kv_heads", "group", "queries", "keys", "head_dim"), sizes(6, 9, draws=30))
def test_attention_equals_a_count_score_by_score(batch, kv_heads, group, queries, keys, head_dim):
    heads = kv_heads * group
    for causal in (False, True):
        for materialize in (False, True):
            counted = attention(
                batch, heads, queries, head_dim, "bf16", causal, materialize, kv_heads=kv_heads, kv_len=keys
            )
            expected = loop_attention(batch, heads, kv_heads, queries, keys, head_dim, causal, materialize, 2)
            assert counted == expected, (causal, materialize)


def test_flash_attention_moves_what_grows_with_n_and_materialised_attention_its_square():
    short, long = (attention(1, 16, n, 64, materialize=False).bytes for n in (1024, 4096))
    assert long == 4 * short
    short, long = (attention(1, 16, n, 64, materialize=True).bytes for n in (1024, 4096))
    assert 15 < long / short < 16


def test_a_causal_mask_leaves_just_over_half_of_a_square_and_nothing_above_it():
    assert roofline.causal_pairs(4, 4) == 10
    assert roofline.causal_pairs(1, 7) == 7
    assert roofline.causal_pairs(3, 5) == 3 + 4 + 5
    assert roofline.causal_pairs(5, 3) == 1 + 2 + 3


def test_costs_add_up_and_repeat():
    a, b = Cost(3, 5), Cost(10, 20)
    assert a + b == Cost(13, 25) == sum([a, b])
    assert 4 * a == a * 4 == a + a + a + a
    assert Cost(0, 0).intensity == 0
    assert Cost(1, 0).intensity == math.inf


# ---- roofs ----


def test_the_ridge_of_an_h100_is_295_flops_per_byte():
    assert ridge(H100) == pytest.approx(295.22, abs=0.01)
    assert ridge(tpu("TPU v6e")) == pytest.approx(918e12 / 1638e9)
    assert ridge(cpu("EPYC 9654"), "fp32") == pytest.approx(16, rel=0.01)


@pytest.mark.parametrize("name", GPUS)
def test_the_roofs_meet_at_the_ridge(name):
    for dtype, rate in GPUS[name].peak_flops.items():
        at = ridge(GPUS[name], dtype)
        assert attainable(at, GPUS[name], dtype) == pytest.approx(rate)
        assert attainable(at / 2, GPUS[name], dtype) == pytest.approx(rate / 2)
        assert attainable(at * 100, GPUS[name], dtype) == rate
    assert attainable(0, GPUS[name], "fp32") == 0


@pytest.mark.parametrize(("m", "k", "n"), sizes(3, 4096))
def test_time_lies_between_the_longer_and_the_sum(m, k, n):
    cost = matmul(m, k, n)
    overlapped, serial = time_bounds(cost, H100)
    compute, memory = roofline.compute_time(cost, H100), roofline.memory_time(cost, H100)
    assert overlapped == max(compute, memory)
    assert serial == pytest.approx(compute + memory)
    assert overlapped <= serial <= 2 * overlapped
    assert cost.flops / overlapped == pytest.approx(attainable(cost.intensity, H100))
    assert bound_by(cost, H100) == ("compute" if cost.intensity > ridge(H100) else "memory")


def test_the_exact_ridge_counts_as_memory_bound():
    device = dataclasses.replace(H100, peak_flops={"bf16": 300.0}, memory_bandwidth=2.0)
    assert bound_by(Cost(150, 1), device) == "memory"
    assert bound_by(Cost(151, 1), device) == "compute"


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
def test_the_crossover_batch_is_where_a_search_finds_it(dtype):
    generator = random.Random(SEED)
    found = 0
    for _ in range(30):
        d, f = generator.randint(64, 3000), generator.randint(64, 3000)
        crossover = crossover_batch(d, f, H100, dtype)
        if crossover is None:
            assert bound_by(matmul(10**9, d, f, dtype), H100, dtype) == "memory"
            continue
        found += 1
        assert bound_by(matmul(crossover, d, f, dtype), H100, dtype) == "compute"
        assert crossover == 1 or bound_by(matmul(crossover - 1, d, f, dtype), H100, dtype) == "memory"
    assert found > 5


def test_the_crossover_batch_nears_the_ridge_as_the_matrix_grows():
    batches = [crossover_batch(n, n, H100) for n in (1024, 4096, 16384, 2**20)]
    assert batches == sorted(batches, reverse=True)
    assert batches[-1] == 296
    assert batches[1] == 345
    assert crossover_batch(512, 512, H100) is None


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: matmul(-1, 2, 3), r"m must be at least 1, got -1"),
        (lambda: matmul(1, 0, 3), r"k must be at least 1, got 0"),
        (lambda: dot_product(0), r"n must be at least 1, got 0"),
        (lambda: roofline.relu(-5), r"n must be at least 1, got -5"),
        (lambda: roofline.softmax(3, -2), r"cols must be at least 1, got -2"),
        (lambda: attention(1, 0, 8, 8), r"heads must be at least 1, got 0"),
        (lambda: attention(1, 6, 8, 8, kv_heads=4), r"heads must be a multiple of kv_heads, got 6 and 4"),
        (lambda: roofline.copy(4, "float16"), r"unknown dtype 'float16'; known: fp64, .*bf16"),
        (lambda: ridge(H100, "fp4"), r"H100 has no 'fp4' rate; it has: fp64"),
        (lambda: ridge(gpu("P100"), "bf16"), r"P100 has no 'bf16' rate"),
        (lambda: attainable(-1.0, H100), r"intensity must be zero or more FLOP/B, got -1.0"),
        (lambda: attainable(float("nan"), H100), r"intensity must be zero or more FLOP/B, got nan"),
        (lambda: Cost(-1, 0), r"flops must not be negative, got -1"),
        (lambda: crossover_batch(0, 4, H100), r"d must be at least 1, got 0"),
    ],
)
def test_bad_values_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: matmul(1.5, 2, 3), r"m must be an integer, got 1.5"),
        (lambda: matmul(True, 2, 3), r"m must be an integer, got True"),
        (lambda: Cost(1.0, 2), r"flops must be an integer, got 1.0"),
        (lambda: ridge("H100"), r"gpu must be an entry of the hardware table, such as gpu\('H100'\), got 'H100'"),
        (
            lambda: roofline.memory_time(Cost(1, 2), "H100"),
            r"gpu must be an entry of the hardware table, .* got 'H100'",
        ),
        (lambda: time_bounds((1, 2), H100), r"cost must be a Cost\(flops, bytes\), got \(1, 2\)"),
        (lambda: bound_by(7, H100), r"cost must be a Cost\(flops, bytes\), got 7"),
        (lambda: attainable("3", H100), r"intensity must be a number of FLOP/B, got '3'"),
        (lambda: roofline.class_seconds([1], H100), r"operators must be of type Operator, .* got 1"),
    ],
)
def test_bad_types_are_refused_by_name(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_the_bound_is_exact_in_rational_arithmetic():
    for m, k, n in sizes(3, 2000, draws=50):
        cost = matmul(m, k, n)
        exact = Fraction(cost.flops, cost.bytes) > Fraction(989e12) / Fraction(3.35e12)
        assert bound_by(cost, H100) == ("compute" if exact else "memory")
