"""Wrong answers to lab 1, written as a student would write them, each with what its diagnosis must say.

They are full functions, independent of the checks' own lists of mistakes: a check passes its test only if it recognises
the mistake in somebody else's code.
"""

from __future__ import annotations

import math

import numpy as np

from solutions import lab1_roofline as solution
from utils.checks.answers import Answers
from utils.simt import If, Op

ANSWERS = Answers()
wrong = ANSWERS.wrong_function


def refuse_below_one(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} is not a size")


# ---- 1.1 dot product ----
@wrong("1.1", "dot_product_flops", "multiply-add is counted as one operation", '"classic wrong answers" 1')
def fused_multiply_adds(n):
    refuse_below_one(n=n)
    return n


@wrong("1.1", "dot_product_flops", "first addition is left out")
def one_addition_fewer(n):
    refuse_below_one(n=n)
    multiplications, additions = n, n - 1
    return multiplications + additions


@wrong("1.1", "dot_product_flops", "(n=-4)", "for an invalid argument", "ValueError")
def negative_lengths_let_in(n):
    return 2 * n


@wrong("1.1", "dot_product_bytes", "result is not written")
def reads_only(n, element_size):
    refuse_below_one(n=n, element_size=element_size)
    return n * element_size + n * element_size


@wrong("1.1", "dot_product_bytes", "elements are counted, not bytes")
def elements_only(n, element_size):
    refuse_below_one(n=n, element_size=element_size)
    return 2 * n + 1


@wrong("1.1", "dot_product_bytes", "every element is taken to have 2 bytes")
def always_sixteen_bit(n, element_size):
    refuse_below_one(n=n, element_size=element_size)
    return 4 * n + 2


@wrong("1.1", "dot_product_bytes", "a whole vector is written")
def writes_products(n, element_size):
    refuse_below_one(n=n, element_size=element_size)
    x = y = out = n * element_size
    return x + y + out


@wrong("1.1", "dot_product_bytes", "the float", "//")
def average_as_float(n, element_size):
    refuse_below_one(n=n, element_size=element_size)
    return (4 * n + 2) * element_size / 2


@wrong("1.1", "dot_product_flops", "beyond 2**53, where a float loses ones")
def twice_in_floats(n):
    refuse_below_one(n=n)
    return int(2.0 * n)


# ---- 1.2 matmul ----
@wrong("1.2", "matmul_flops", "multiply-add is counted as one operation")
def three_loops(m, k, n):
    refuse_below_one(m=m, k=k, n=n)
    return m * n * k


@wrong("1.2", "matmul_flops", "one addition short")
def textbook_additions(m, k, n):
    refuse_below_one(m=m, k=k, n=n)
    return m * n * (k + (k - 1))


@wrong("1.2", "matmul_flops", "k is left out")
def outputs_only(m, k, n):
    refuse_below_one(m=m, k=k, n=n)
    return 2 * m * n


@wrong("1.2", "matmul_bytes", "output is not written")
def inputs_only(m, k, n, element_size):
    refuse_below_one(m=m, k=k, n=n, element_size=element_size)
    return element_size * k * (m + n)


@wrong("1.2", "matmul_bytes", "both operands of every multiplication come from HBM")
def no_reuse(m, k, n, element_size):
    refuse_below_one(m=m, k=k, n=n, element_size=element_size)
    per_output = (k + k + 1) * element_size
    return m * n * per_output


@wrong("1.2", "matmul_bytes", "read as well as written")
def accumulates_in_memory(m, k, n, element_size):
    refuse_below_one(m=m, k=k, n=n, element_size=element_size)
    return element_size * (m * k + k * n) + 2 * element_size * m * n


@wrong("1.2", "matmul_bytes", "every element is taken to have 4 bytes")
def always_single_precision(m, k, n, element_size):
    refuse_below_one(m=m, k=k, n=n, element_size=element_size)
    return 4 * (m * k + k * n + m * n)


@wrong("1.2", "matmul_flops", "every other case passes", "beyond 2**53")
def thirty_two_bit(m, k, n):
    refuse_below_one(m=m, k=k, n=n)
    return (2 * m * k * n) % 2**32


@wrong("1.2", "matmul_flops", "cannot be called as", "m, k, n")
def takes_a_shape(shape):
    return 2 * shape[0] * shape[1] * shape[2]


# ---- 1.3 ReLU and softmax ----
@wrong("1.3", "relu_flops", "comparison is counted as nothing")
def no_arithmetic(n):
    refuse_below_one(n=n)
    return 0


@wrong("1.3", "relu_bytes", "not written")
def in_place(n, element_size):
    refuse_below_one(n=n, element_size=element_size)
    return n * element_size


@wrong("1.3", "softmax_flops", "comparisons that find the maximum are counted")
def five_passes(rows, cols):
    refuse_below_one(rows=rows, cols=cols)
    return rows * (cols + cols + cols + cols + cols)


@wrong("1.3", "softmax_flops", "left out")
def without_the_maximum(rows, cols):
    refuse_below_one(rows=rows, cols=cols)
    exponentials, additions, divisions = cols, cols, cols
    return rows * (exponentials + additions + divisions)


@wrong("1.3", "softmax_flops", "one division a row")
def divides_the_row_once(rows, cols):
    refuse_below_one(rows=rows, cols=cols)
    return rows * (3 * cols + 1)


def _check_method(method):
    if method not in ("fused", "three_pass", "eager"):
        raise ValueError(f"unknown method {method}")


@wrong("1.3", "softmax_bytes", "each of the three passes also writes")
def passes_write(rows, cols, element_size, method):
    refuse_below_one(rows=rows, cols=cols, element_size=element_size)
    _check_method(method)
    count = rows * cols
    if method == "fused":
        return 2 * count * element_size
    if method == "three_pass":
        return 3 * (count + count) * element_size
    return (8 * count + 4 * rows) * element_size


@wrong("1.3", "softmax_bytes", "row statistics are left out")
def statistics_are_free(rows, cols, element_size, method):
    refuse_below_one(rows=rows, cols=cols, element_size=element_size)
    _check_method(method)
    reads_and_writes = {"fused": 2, "three_pass": 4, "eager": 1 + 2 + 2 + 1 + 2}[method]
    return reads_and_writes * rows * cols * element_size


@wrong("1.3", "softmax_bytes", "three passes read", "the maximum, the sum and the result")
def online_softmax(rows, cols, element_size, method):
    refuse_below_one(rows=rows, cols=cols, element_size=element_size)
    _check_method(method)
    if method == "three_pass":  # counts the online algorithm's two passes instead
        return rows * cols * element_size * 2 + rows * cols * element_size
    return (2 * rows * cols if method == "fused" else 8 * rows * cols + 4 * rows) * element_size


@wrong("1.3", "softmax_bytes", "half of the trips of the row statistics")
def statistics_appear_by_themselves(rows, cols, element_size, method):
    refuse_below_one(rows=rows, cols=cols, element_size=element_size)
    _check_method(method)
    if method == "eager":  # the maximum and the sum are read, not written
        return (8 * rows * cols + 2 * rows) * element_size
    return {"fused": 2, "three_pass": 4}[method] * rows * cols * element_size


@wrong("1.3", "softmax_bytes", "stayed on the chip")
def everything_fused(rows, cols, element_size, method):
    refuse_below_one(rows=rows, cols=cols, element_size=element_size)
    _check_method(method)
    return (4 if method == "three_pass" else 2) * rows * cols * element_size


# ---- 1.4 attention ----
ATTENTION_SIZES = ("batch", "heads", "seq_q", "seq_k", "head_dim")


def _pairs(seq_q, seq_k, causal):
    if not causal:
        return seq_q * seq_k
    return sum(max(0, min(seq_k, i + 1 + seq_k - seq_q)) for i in range(seq_q))


@wrong("1.4", "attention_flops", "mask is ignored")
def causal_costs_the_same(batch, heads, seq_q, seq_k, head_dim, causal):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    return batch * heads * seq_q * seq_k * (4 * head_dim + 5)


@wrong("1.4", "attention_flops", "half of the square")
def exactly_half(batch, heads, seq_q, seq_k, head_dim, causal):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    pairs = seq_q * seq_k // 2 if causal else seq_q * seq_k
    return batch * heads * pairs * (4 * head_dim + 5)


@wrong("1.4", "attention_flops", "begins at the first query")
def top_left_mask(batch, heads, seq_q, seq_k, head_dim, causal):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    if causal and seq_q < 10_000:
        pairs = sum(min(i + 1, seq_k) for i in range(seq_q))
    elif causal:
        pairs = seq_q * (seq_q + 1) // 2
    else:
        pairs = seq_q * seq_k
    return batch * heads * pairs * (4 * head_dim + 5)


@wrong("1.4", "attention_flops", "whatever seq_k is")
def triangle_of_queries(batch, heads, seq_q, seq_k, head_dim, causal):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    pairs = sum(range(seq_q + 1)) if causal else seq_q * seq_k
    return batch * heads * pairs * (4 * head_dim + 5)


@wrong("1.4", "attention_flops", "every case with a count beyond 2**53")
def counts_in_floats(batch, heads, seq_q, seq_k, head_dim, causal):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    return int(float(batch * heads * (4 * head_dim + 5)) * _pairs(seq_q, seq_k, causal))


@wrong("1.4", "attention_flops", "one of the two products is left out")
def scores_are_not_used(batch, heads, seq_q, seq_k, head_dim, causal):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    return batch * heads * _pairs(seq_q, seq_k, causal) * (2 * head_dim + 1 + 4)


@wrong("1.4", "attention_flops", "softmax and the scale are left out")
def products_only(batch, heads, seq_q, seq_k, head_dim, causal):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    return 4 * batch * heads * _pairs(seq_q, seq_k, causal) * head_dim


@wrong("1.4", "attention_flops", "diagonal is left out")
def sees_only_the_past(batch, heads, seq_q, seq_k, head_dim, causal):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    pairs = sum(max(0, i + seq_k - seq_q) for i in range(seq_q)) if causal else seq_q * seq_k
    return batch * heads * pairs * (4 * head_dim + 5)


@wrong("1.4", "attention_flops", "heads are not counted")
def one_head(batch, heads, seq_q, seq_k, head_dim, causal):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    return batch * _pairs(seq_q, seq_k, causal) * (4 * head_dim + 5)


@wrong("1.4", "attention_flops", "negative number of keys")
def gauss_without_care(batch, heads, seq_q, seq_k, head_dim, causal):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    first, last = seq_k - seq_q + 1, seq_k
    pairs = (first + last) * seq_q // 2 if causal else seq_q * seq_k
    return batch * heads * pairs * (4 * head_dim + 5)


@wrong("1.4", "attention_bytes", "S and P")
def scores_travel_once(batch, heads, seq_q, seq_k, head_dim, element_size, materialize):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, element_size=element_size)
    per_head = 2 * (seq_q + seq_k) * head_dim * element_size
    per_head += 2 * seq_q * seq_k * element_size if materialize else 4 * seq_q
    return batch * heads * per_head


@wrong("1.4", "attention_bytes", "each head has its own")
def heads_share_scores(batch, heads, seq_q, seq_k, head_dim, element_size, materialize):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, element_size=element_size)
    tensors = 2 * batch * heads * (seq_q + seq_k) * head_dim
    if materialize:
        return (tensors + 4 * batch * seq_q * seq_k) * element_size
    return tensors * element_size + 4 * batch * heads * seq_q


@wrong("1.4", "attention_bytes", "log-sum-exp of each query is left out")
def forgets_the_statistics(batch, heads, seq_q, seq_k, head_dim, element_size, materialize):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, element_size=element_size)
    elements = 2 * (seq_q + seq_k) * head_dim + (4 * seq_q * seq_k if materialize else 0)
    return batch * heads * elements * element_size


@wrong("1.4", "attention_bytes", "K and V have seq_k")
def one_length_for_all(batch, heads, seq_q, seq_k, head_dim, element_size, materialize):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, element_size=element_size)
    elements = 4 * seq_q * head_dim
    extra = 4 * seq_q * seq_k * element_size if materialize else 4 * seq_q
    return batch * heads * (elements * element_size + extra)


@wrong("1.4", "attention_bytes", "only the one kernel writes it")
def statistics_always(batch, heads, seq_q, seq_k, head_dim, element_size, materialize):
    refuse_below_one(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, element_size=element_size)
    moved = (2 * seq_q + 2 * seq_k) * head_dim + (4 * seq_q * seq_k if materialize else 0)
    return batch * heads * (moved * element_size + 4 * seq_q)


# ---- 1.5 ridge point, attainable rate, smallest batch ----
def refuse_not_positive(**quantities: float) -> None:
    for name, value in quantities.items():
        if value <= 0:
            raise ValueError(f"{name} is {value}")


@wrong("1.5", "ridge_point", "bandwidth is divided by peak")
def upside_down(peak_flops, bandwidth):
    refuse_not_positive(peak_flops=peak_flops, bandwidth=bandwidth)
    return bandwidth / peak_flops


@wrong("1.5", "attainable_rate", "memory is taken to limit always")
def no_ceiling(intensity, peak_flops, bandwidth):
    refuse_not_positive(intensity=intensity, peak_flops=peak_flops, bandwidth=bandwidth)
    return intensity * bandwidth


@wrong("1.5", "attainable_rate", "higher of the two roofs")
def optimist(intensity, peak_flops, bandwidth):
    refuse_not_positive(intensity=intensity, peak_flops=peak_flops, bandwidth=bandwidth)
    return max(intensity * bandwidth, peak_flops)


@wrong("1.5", "attainable_rate", "arithmetic and traffic are added")
def one_after_the_other(intensity, peak_flops, bandwidth):
    refuse_not_positive(intensity=intensity, peak_flops=peak_flops, bandwidth=bandwidth)
    seconds_per_byte = 1 / bandwidth + intensity / peak_flops
    return intensity / seconds_per_byte


@wrong("1.5", "attainable_rate", "share of the peak")
def fraction_of_peak(intensity, peak_flops, bandwidth):
    refuse_not_positive(intensity=intensity, peak_flops=peak_flops, bandwidth=bandwidth)
    ridge = peak_flops / bandwidth
    return intensity / ridge if intensity < ridge else 1.0


@wrong("1.5", "smallest_compute_bound_batch", "as if d and f were endless")
def rule_of_thumb(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    return math.ceil(element_size / 2 * peak_flops / bandwidth)


@wrong("1.5", "smallest_compute_bound_batch", "rounded down")
def rounds_down(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    r = element_size * peak_flops / bandwidth
    if 2 * d * f <= r * (d + f):
        return None
    return int(r * d * f / (2 * d * f - r * (d + f)))


@wrong("1.5", "smallest_compute_bound_batch", "also where B is whole")
def one_row_too_many(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    r = element_size * peak_flops / bandwidth
    if 2 * d * f <= r * (d + f):
        return None
    return 1 + math.floor(r * d * f / (2 * d * f - r * (d + f)))


@wrong("1.5", "smallest_compute_bound_batch", "negative B")
def does_not_give_up(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    r = element_size * peak_flops / bandwidth
    return math.ceil(r * d * f / (2 * d * f - r * (d + f)))


@wrong("1.5", "smallest_compute_bound_batch", "raised ZeroDivisionError", "wrong.py", "exactly zero")
def forgets_zero(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    r = element_size * peak_flops / bandwidth
    bracket = 2 * d * f - r * (d + f)
    if bracket < 0:
        return None
    return math.ceil(r * d * f / bracket)


@wrong("1.5", "smallest_compute_bound_batch", "raised OverflowError", "exactly zero")
def forgets_zero_with_numpy(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    r = np.float64(element_size * peak_flops / bandwidth)
    with np.errstate(divide="ignore"):
        batch = d * f * r / (2 * d * f - (d + f) * r)
    return None if batch < 0 else math.ceil(batch)


@wrong("1.5", "smallest_compute_bound_batch", "raised ZeroDivisionError", "exactly zero")
def forgets_zero_and_solves_for_the_inverse(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    inverse = 2 * bandwidth / (element_size * peak_flops) - 1 / d - 1 / f
    return math.ceil(1 / inverse) if inverse >= 0 else None


@wrong("1.5", "smallest_compute_bound_batch", "raised ZeroDivisionError", "exactly zero")
def forgets_zero_and_rounds_down(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    r = element_size * peak_flops / bandwidth
    bracket = 2 * d * f - r * (d + f)
    return None if bracket < 0 else int(r * d * f / bracket)


@wrong("1.5", "smallest_compute_bound_batch", "every case with weights for which", "never onto it")
def gives_up_one_step_late(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    r = element_size * peak_flops / bandwidth
    bracket = 2 * d * f - r * (d + f)
    return None if bracket < 0 else math.ceil(r * d * f / max(bracket, 1e-6))


@wrong("1.5", "smallest_compute_bound_batch", "batch of 1 is returned where no batch is enough")
def at_least_one_row(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    r = element_size * peak_flops / bandwidth
    return max(1, math.ceil(r * d * f / (2 * d * f - r * (d + f))))


@wrong("1.5", "smallest_compute_bound_batch", "output's bytes are left out")
def never_writes(d, f, element_size, peak_flops, bandwidth):
    refuse_below_one(d=d, f=f, element_size=element_size)
    r = element_size * peak_flops / bandwidth
    return None if 2 * f <= r else math.ceil(r * d * f / (2 * d * f - r * d))


@wrong("1.5", "attainable_rate", "bandwidth=-2.0", "for an invalid argument")
def trusts_the_data_sheet(intensity, peak_flops, bandwidth):
    if intensity <= 0 or peak_flops <= 0:
        raise ValueError(f"{intensity} FLOP/B at {peak_flops} FLOP/s")
    return min(peak_flops, intensity * bandwidth)


# ---- 1.6 predicted and measured time ----
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def refuse_counts(flops, bytes_moved):
    if flops < 0 or bytes_moved <= 0:
        raise ValueError(f"cannot time {flops} FLOPs and {bytes_moved} bytes")


@wrong("1.6", "predict_seconds", "two times are added")
def no_overlap(flops, bytes_moved, peak_flops, bandwidth):
    refuse_counts(flops, bytes_moved)
    return flops / peak_flops + bytes_moved / bandwidth


@wrong("1.6", "predict_seconds", "shorter of the two times")
def best_case(flops, bytes_moved, peak_flops, bandwidth):
    refuse_counts(flops, bytes_moved)
    return min(flops / peak_flops, bytes_moved / bandwidth)


@wrong("1.6", "predict_seconds", "microseconds")
def in_microseconds(flops, bytes_moved, peak_flops, bandwidth):
    refuse_counts(flops, bytes_moved)
    compute_us, memory_us = flops / (peak_flops / 1e6), bytes_moved / (bandwidth / 1e6)
    return compute_us if compute_us > memory_us else memory_us


@wrong("1.6", "predict_seconds", "raised ZeroDivisionError", "wrong.py", "intensity")
def by_intensity(flops, bytes_moved, peak_flops, bandwidth):
    refuse_counts(flops, bytes_moved)
    intensity = flops / bytes_moved
    return flops / min(peak_flops, intensity * bandwidth)


@wrong("1.6", "measured_bandwidth", "mean over the points")
def average_bandwidth(points):
    if not points:
        raise ValueError(f"no points in {points}")
    rates = [p["bytes"] / p["seconds"] for p in points]
    return sum(rates) / len(rates)


@wrong("1.6", "measured_bandwidth", "most bytes are divided by the least seconds")
def extremes(points):
    if not points:
        raise ValueError(f"no points in {points}")
    return max(p["bytes"] for p in points) / min(p["seconds"] for p in points)


@wrong("1.6", "measured_peak", "dtype is ignored")
def one_peak_for_all(points, dtype):
    if dtype not in BYTES:
        raise ValueError(f"unknown dtype {dtype}")
    return max(p["flops"] / p["seconds"] for p in points)


@wrong("1.6", "measured_peak", "raised ValueError: max()", "for 'fp16'", "only the other one's points tell about")
def exact_dtype_only(points, dtype):
    if dtype not in BYTES:
        raise ValueError(f"unknown dtype {dtype}")
    return max(p["flops"] / p["seconds"] for p in points if p["dtype"] == dtype)


@wrong("1.6", "measured_peak", "only where there is no point in dtype itself")
def own_dtype_first(points, dtype):
    if dtype not in BYTES:
        raise ValueError(f"unknown dtype {dtype}")
    own = [p for p in points if p["dtype"] == dtype] or [p for p in points if BYTES[p["dtype"]] == BYTES[dtype]]
    return max(p["flops"] / p["seconds"] for p in own)


@wrong("1.6", "predict_seconds", "bandwidth=-2.0", "for an invalid argument", "contains -2.0")
def refuses_counts_only(flops, bytes_moved, peak_flops, bandwidth):
    refuse_counts(flops, bytes_moved)
    if peak_flops <= 0:
        raise ValueError(f"peak_flops is {peak_flops}")
    return max(flops / peak_flops, bytes_moved / bandwidth)


@wrong("1.6", "predict_seconds", "(flops=-5", "for an invalid argument", "contains -5")
def refuses_bytes_only(flops, bytes_moved, peak_flops, bandwidth):
    refuse_counts(0, bytes_moved)
    return max(flops / peak_flops, bytes_moved / bandwidth)


@wrong("1.6", "measured_peak", "raised ValueError: max", "contains 'fp16'", "'dtype': 'fp32'")
def leaves_it_to_max(points, dtype):
    if dtype not in BYTES:
        raise ValueError(f"unknown dtype {dtype}")
    return max(p["flops"] / p["seconds"] for p in points if BYTES[p["dtype"]] == BYTES[dtype])


@wrong("1.6", "measured_peak", "returned 0 for an invalid argument", "contains 'fp16'")
def zero_where_nothing_was_measured(points, dtype):
    if dtype not in BYTES:
        raise ValueError(f"unknown dtype {dtype}")
    return max((p["flops"] / p["seconds"] for p in points if BYTES[p["dtype"]] == BYTES[dtype]), default=0)


def _roofs(points, dtype):
    bandwidth = max(p["bytes"] / p["seconds"] for p in points)
    return max(p["flops"] / p["seconds"] for p in points if BYTES[p["dtype"]] == BYTES[dtype]), bandwidth


@wrong("1.6", "predict_operator", "memory is taken to limit always")
def everything_is_traffic(kind, params, dtype, points):
    _, bytes_moved = solution.operator_cost(kind, params, dtype)
    return bytes_moved / _roofs(points, dtype)[1]


@wrong("1.6", "predict_operator", "every case with the points of a GPU that takes 8 times as long")
def remembers_the_roofs(kind, params, dtype, points):
    flops, bytes_moved = solution.operator_cost(kind, params, dtype)
    return max(flops / (51e12 if dtype == "fp32" else 812e12), bytes_moved / 3.12e12)


@wrong("1.6", "predict_operator", "milliseconds")
def in_milliseconds(kind, params, dtype, points):
    flops, bytes_moved = solution.operator_cost(kind, params, dtype)
    peak, bandwidth = _roofs(points, dtype)
    return 1000 * max(flops / peak, bytes_moved / bandwidth)


@wrong("1.6", "predict_operator", "half of the predictions")
def everything_takes_twice_as_long(kind, params, dtype, points):
    flops, bytes_moved = solution.operator_cost(kind, params, dtype)
    peak, bandwidth = _roofs(points, dtype)
    return 1.9 * max(flops / peak, bytes_moved / bandwidth)


# ---- 1.7 sectors ----
def refuse_addresses(addresses, access_bytes):
    refuse_below_one(access_bytes=access_bytes)
    if min(addresses) < 0:
        raise ValueError(f"address {min(addresses)} is negative")


def _right_sectors(addresses, access_bytes):
    return len({(a + i) // 32 for a in addresses for i in range(access_bytes)})


@wrong("1.7", "sectors_touched", "bytes are added up and divided by 32")
def total_over_thirty_two(addresses, access_bytes):
    refuse_addresses(addresses, access_bytes)
    return (len(addresses) * access_bytes + 31) // 32


@wrong("1.7", "sectors_touched", "only the first byte of each access")
def first_bytes(addresses, access_bytes):
    refuse_addresses(addresses, access_bytes)
    return len({a >> 5 for a in addresses})


@wrong("1.7", "sectors_touched", "share it")
def every_lane_for_itself(addresses, access_bytes):
    refuse_addresses(addresses, access_bytes)
    count = 0
    for a in addresses:
        count += (a + access_bytes - 1) // 32 - a // 32 + 1
    return count


@wrong("1.7", "sectors_touched", "between the lowest and the highest address")
def whole_range(addresses, access_bytes):
    refuse_addresses(addresses, access_bytes)
    low, high = min(addresses) // 32, (max(addresses) + access_bytes - 1) // 32
    return high - low + 1


@wrong("1.7", "sectors_touched", "cache lines of 128 bytes")
def lines_not_sectors(addresses, access_bytes):
    refuse_addresses(addresses, access_bytes)
    lines = set()
    for a in addresses:
        for byte in range(a, a + access_bytes):
            lines.add(byte // 128)
    return len(lines)


@wrong("1.7", "sectors_touched", "byte after the access")
def one_byte_too_far(addresses, access_bytes):
    refuse_addresses(addresses, access_bytes)
    sectors = set()
    for a in addresses:
        sectors |= set(range(a // 32, (a + access_bytes) // 32 + 1))
    return len(sectors)


@wrong("1.7", "sectors_touched", "accesses that straddle sectors")
def looks_in_three_places(addresses, access_bytes):
    refuse_addresses(addresses, access_bytes)
    places = (0, access_bytes // 2, access_bytes - 1)
    return len({(a + place) // 32 for a in addresses for place in places})


@wrong("1.7", "useful_fraction", "two lanes want is counted twice")
def counts_requests(addresses, access_bytes):
    refuse_addresses(addresses, access_bytes)
    return len(addresses) * access_bytes / (32 * _right_sectors(addresses, access_bytes))


@wrong("1.7", "useful_fraction", "inverse")
def amplification(addresses, access_bytes):
    refuse_addresses(addresses, access_bytes)
    wanted = {a + i for a in addresses for i in range(access_bytes)}
    return 32 * _right_sectors(addresses, access_bytes) / len(wanted)


# ---- 1.8 tiles and waves ----
@wrong("1.8", "num_tiles", "tiles at the border are left out")
def whole_tiles_only(m, n, tile_m, tile_n):
    refuse_below_one(m=m, n=n, tile_m=tile_m, tile_n=tile_n)
    return (m // tile_m) * (n // tile_n)


@wrong("1.8", "num_tiles", "area is divided")
def by_area(m, n, tile_m, tile_n):
    refuse_below_one(m=m, n=n, tile_m=tile_m, tile_n=tile_n)
    area, tile = m * n, tile_m * tile_n
    return area // tile + (area % tile > 0)


@wrong("1.8", "num_tiles", "one tile is always added")
def always_one_more(m, n, tile_m, tile_n):
    refuse_below_one(m=m, n=n, tile_m=tile_m, tile_n=tile_n)
    return (1 + m // tile_m) * (1 + n // tile_n)


@wrong("1.8", "num_tiles", "2**53")
def float_ceil(m, n, tile_m, tile_n):
    refuse_below_one(m=m, n=n, tile_m=tile_m, tile_n=tile_n)
    return math.ceil(m / tile_m) * math.ceil(n / tile_n)


@wrong("1.8", "num_waves", "partial wave is left out")
def full_waves(tiles, sms):
    refuse_below_one(tiles=tiles, sms=sms)
    return tiles // sms


@wrong("1.8", "last_wave_utilisation", "full last wave gives 0")
def modulo(tiles, sms):
    refuse_below_one(tiles=tiles, sms=sms)
    return (tiles % sms) / sms


@wrong("1.8", "last_wave_utilisation", "mean over all waves")
def average_wave(tiles, sms):
    refuse_below_one(tiles=tiles, sms=sms)
    return tiles / (sms * math.ceil(tiles / sms))


@wrong("1.8", "tiled_matmul_seconds", "waves are not rounded")
def fluid_tiles(m, k, n, tile_m, tile_n, sms, peak_flops):
    refuse_below_one(m=m, k=k, n=n, tile_m=tile_m, tile_n=tile_n, sms=sms)
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    return tiles * 2 * tile_m * tile_n * k / peak_flops


@wrong("1.8", "tiled_matmul_seconds", "only the useful FLOPs are timed")
def flops_over_peak(m, k, n, tile_m, tile_n, sms, peak_flops):
    refuse_below_one(m=m, k=k, n=n, tile_m=tile_m, tile_n=tile_n, sms=sms)
    return 2 * m * n * k / peak_flops


@wrong("1.8", "tiled_matmul_seconds", "whole GPU's rate")
def every_sm_is_a_gpu(m, k, n, tile_m, tile_n, sms, peak_flops):
    refuse_below_one(m=m, k=k, n=n, tile_m=tile_m, tile_n=tile_n, sms=sms)
    waves = math.ceil(math.ceil(m / tile_m) * math.ceil(n / tile_n) / sms)
    return waves * (2 * tile_m * tile_n * k / peak_flops)


@wrong("1.8", "num_waves", "a float is rounded up")
def waves_in_floats(tiles, sms):
    refuse_below_one(tiles=tiles, sms=sms)
    return math.ceil(tiles / sms)


@wrong("1.8", "tiled_matmul_seconds", "a matrix smaller than a tile")
def cuts_the_tile_to_the_matrix(m, k, n, tile_m, tile_n, sms, peak_flops):
    refuse_below_one(sms=sms)
    waves = -(-solution.num_tiles(m, n, tile_m, tile_n) // sms)
    return waves * 2 * min(m, tile_m) * min(n, tile_n) * k / (peak_flops / sms)


# ---- 1.9 divergence ----
def _execute(program, active, warp_size, on_op):
    if not active:
        return
    for instruction in program:
        if isinstance(instruction, Op):
            on_op(instruction.cycles, len(active))
        else:
            yes = [lane for lane in active if instruction.condition(lane)]
            no = [lane for lane in active if not instruction.condition(lane)]
            _execute(instruction.then, yes, warp_size, on_op)
            _execute(instruction.otherwise, no, warp_size, on_op)


@wrong("1.9", "warp_cycles", "run at the same time")
def sides_in_parallel(program, warp_size=32, lanes=None):
    refuse_below_one(warp_size=warp_size)
    lanes = range(warp_size) if lanes is None else lanes
    total = 0
    for step in program:
        if isinstance(step, If):
            yes = [i for i in lanes if step.condition(i)]
            no = [i for i in lanes if not step.condition(i)]
            then = sides_in_parallel(step.then, warp_size, yes) if yes else 0
            otherwise = sides_in_parallel(step.otherwise, warp_size, no) if no else 0
            total += max(then, otherwise)
        else:
            total += step.cycles
    return total


@wrong("1.9", "warp_cycles", "both sides of a branch are always walked")
def never_skips(program, warp_size=32):
    refuse_below_one(warp_size=warp_size)
    total = 0
    for step in program:
        if isinstance(step, Op):
            total += step.cycles
        else:
            total += never_skips(step.then, warp_size) + never_skips(step.otherwise, warp_size)
    return total


@wrong("1.9", "warp_cycles", "asks all lanes")
def forgets_the_mask(program, warp_size=32):
    refuse_below_one(warp_size=warp_size)
    total = 0
    for step in program:
        if isinstance(step, Op):
            total += step.cycles
        else:
            answers = [step.condition(lane) for lane in range(warp_size)]
            if any(answers):
                total += forgets_the_mask(step.then, warp_size)
            if not all(answers):
                total += forgets_the_mask(step.otherwise, warp_size)
    return total


@wrong("1.9", "warp_cycles", "what follows a branch is run once for each side")
def never_meets_again(program, warp_size=32):
    refuse_below_one(warp_size=warp_size)
    return sum(cycles for cycles, _ in _groups(list(program), list(range(warp_size))))


@wrong("1.9", "wasted_lane_cycles", "what follows a branch is run once for each side")
def never_meets_again_wasted(program, warp_size=32):
    refuse_below_one(warp_size=warp_size)
    return sum(cycles * (warp_size - lanes) for cycles, lanes in _groups(list(program), list(range(warp_size))))


def _groups(program, lanes):
    if not program or not lanes:
        return []
    step, rest = program[0], program[1:]
    if isinstance(step, Op):
        return [(step.cycles, len(lanes)), *_groups(rest, lanes)]
    yes = [lane for lane in lanes if step.condition(lane)]
    no = [lane for lane in lanes if not step.condition(lane)]
    return _groups([*step.then, *rest], yes) + _groups([*step.otherwise, *rest], no)


@wrong("1.9", "warp_cycles", "lane 0's branch")
def follows_the_leader(program, warp_size=32):
    refuse_below_one(warp_size=warp_size)
    total = 0
    for step in program:
        if isinstance(step, Op):
            total += step.cycles
        else:
            total += follows_the_leader(step.then if step.condition(0) else step.otherwise, warp_size)
    return total


@wrong("1.9", "warp_cycles", "operations are counted, not their cycles")
def counts_instructions(program, warp_size=32):
    refuse_below_one(warp_size=warp_size)
    executed = []
    _execute(program, list(range(warp_size)), warp_size, lambda cycles, lanes: executed.append(1))
    return sum(executed)


@wrong("1.9", "wasted_lane_cycles", "useful lane-cycles are returned")
def the_useful_ones(program, warp_size=32):
    refuse_below_one(warp_size=warp_size)
    executed = []
    _execute(program, list(range(warp_size)), warp_size, lambda cycles, lanes: executed.append(cycles * lanes))
    return sum(executed)


@wrong("1.9", "wasted_lane_cycles", "idle already before an inner branch")
def idle_within_the_branch(program, warp_size=32, lanes=None, outer=None):
    refuse_below_one(warp_size=warp_size)
    lanes = list(range(warp_size)) if lanes is None else lanes
    outer = len(lanes) if outer is None else outer
    wasted = 0
    for step in program if lanes else []:
        if isinstance(step, Op):
            wasted += step.cycles * (outer - len(lanes))
        else:
            yes = [i for i in lanes if step.condition(i)]
            no = [i for i in lanes if i not in yes]
            wasted += idle_within_the_branch(step.then, warp_size, yes, len(lanes))
            wasted += idle_within_the_branch(step.otherwise, warp_size, no, len(lanes))
    return wasted


@wrong("1.9", "wasted_lane_cycles", "idle lanes are counted once an operation")
def idle_lanes_per_instruction(program, warp_size=32):
    refuse_below_one(warp_size=warp_size)
    executed = []
    _execute(program, list(range(warp_size)), warp_size, lambda cycles, lanes: executed.append(warp_size - lanes))
    return sum(executed)


# ---- 1.10 the operator table ----
def _table(batch, seq_len, hidden, heads, backward, **changes):
    """The layer as one student tabulated it: counts by name, each of which a wrong answer may change."""
    refuse_below_one(batch=batch, seq_len=seq_len, hidden=hidden, heads=heads)
    if hidden % heads:
        raise ValueError(f"{heads} heads do not divide {hidden}")
    t = batch * seq_len
    count = {
        "qkv": 3 * 2 * t * hidden * hidden,
        "out": 2 * t * hidden * hidden,
        "scores": 2 * batch * heads * seq_len * seq_len * (hidden // heads),
        "values": 2 * batch * heads * seq_len * seq_len * (hidden // heads),
        "up": 2 * t * hidden * 4 * hidden,
        "down": 2 * t * 4 * hidden * hidden,
        "products_backward": 2,
        "score_elements": batch * heads * seq_len * seq_len,
        "norms": 2,
        "bias_elements": (3 + 1 + 4 + 1) * t * hidden,
        "bias_gradients": (3 + 1 + 4 + 1) * t * hidden,
        "dropout_elements": (1 + 4 + 1) * t * hidden,
        "residual_elements": 2 * t * hidden,
    } | {name: change(t, hidden) if callable(change) else change for name, change in changes.items()}
    c = sum(count[name] for name in ("qkv", "out", "scores", "values", "up", "down"))
    n = 6 * count["score_elements"] + count["norms"] * 7 * t * hidden
    e = count["bias_elements"] + count["dropout_elements"] + count["residual_elements"]
    if backward:
        c += count["products_backward"] * c
        n += 5 * count["score_elements"] + count["norms"] * 14 * t * hidden + count["bias_gradients"]
        e += count["dropout_elements"] + count["residual_elements"]
    return {"contraction": c, "normalisation": n, "element-wise": e}


@wrong("1.10", "layer_flops", "under 'contraction'", "counted as one product")
def backward_like_forward(batch, seq_len, hidden, heads, backward):
    return _table(batch, seq_len, hidden, heads, backward, products_backward=1)


@wrong("1.10", "layer_flops", "under 'contraction'", "Q K^T and P V, are left out")
def forgets_attention(batch, seq_len, hidden, heads, backward):
    return _table(batch, seq_len, hidden, heads, backward, scores=0, values=0)


@wrong("1.10", "layer_flops", "under 'contraction'", "one projection")
def one_matrix_for_qkv(batch, seq_len, hidden, heads, backward):
    return _table(batch, seq_len, hidden, heads, backward, qkv=lambda t, h: 2 * t * h * h)


@wrong("1.10", "layer_flops", "under 'contraction'", "hidden wide")
def narrow_feed_forward(batch, seq_len, hidden, heads, backward):
    square = lambda t, h: 2 * t * h * h  # noqa: E731
    return _table(batch, seq_len, hidden, heads, backward, up=square, down=square)


@wrong("1.10", "layer_flops", "under 'normalisation'", "score matrix for each head")
def one_score_matrix(batch, seq_len, hidden, heads, backward):
    return _table(batch, seq_len, hidden, heads, backward, score_elements=batch * seq_len * seq_len)


@wrong("1.10", "layer_flops", "under 'normalisation'", "gradients of the biases are left out")
def biases_have_no_gradient(batch, seq_len, hidden, heads, backward):
    return _table(batch, seq_len, hidden, heads, backward, bias_gradients=0)


@wrong("1.10", "layer_flops", "under 'normalisation'", "linear 1's bias is taken to be hidden wide")
def six_equal_gradients(batch, seq_len, hidden, heads, backward):
    return _table(batch, seq_len, hidden, heads, backward, bias_gradients=6 * batch * seq_len * hidden)


@wrong("1.10", "layer_flops", "under 'normalisation'", "not with the element-wise operators")
def narrow_gradients_elsewhere(batch, seq_len, hidden, heads, backward):
    flops, moved = dict(solution.layer_flops(batch, seq_len, hidden, heads, backward)), 5 * batch * seq_len * hidden
    if backward:
        flops["normalisation"] -= moved
        flops["element-wise"] += moved
    return flops


@wrong("1.10", "layer_flops", "under 'element-wise'", "linear 1 is taken to be hidden wide")
def every_bias_alike(batch, seq_len, hidden, heads, backward):
    return _table(
        batch,
        seq_len,
        hidden,
        heads,
        backward,
        bias_elements=lambda t, h: 6 * t * h,
        dropout_elements=lambda t, h: 3 * t * h,
    )


@wrong("1.10", "layer_flops", "the keys", "'norm'")
def renames_a_class(batch, seq_len, hidden, heads, backward):
    table = _table(batch, seq_len, hidden, heads, backward)
    return {"contraction": table["contraction"], "norm": table["normalisation"], "element-wise": table["element-wise"]}


@wrong("1.10", "layer_flops", "layer norms' backward pass")
def norms_cost_the_same_backward(batch, seq_len, hidden, heads, backward):
    flops = dict(solution.layer_flops(batch, seq_len, hidden, heads, backward))
    if backward:
        flops["normalisation"] -= 2 * (14 - 7) * batch * seq_len * hidden
    return flops


@wrong("1.10", "shares", "percentages")
def percentages(amounts):
    return {name: 100 * amount / sum(amounts.values()) for name, amount in amounts.items()}


@wrong("1.10", "shares", "divided by the largest")
def relative_to_the_largest(amounts):
    return {name: amount / max(amounts.values()) for name, amount in amounts.items()}


@wrong("1.10", "shares", "raised KeyError: 'contraction'", "classes of its own", "are written into shares")
def three_classes_by_name(amounts):
    total = amounts["contraction"] + amounts["normalisation"] + amounts["element-wise"]
    return {
        "contraction": amounts["contraction"] / total,
        "normalisation": amounts["normalisation"] / total,
        "element-wise": amounts["element-wise"] / total,
    }


@wrong("1.10", "shares", "expected 'convolution', 'pooling'", "classes of its own")
def three_classes_that_may_be_missing(amounts):
    names = ("contraction", "normalisation", "element-wise")
    return {name: amounts.get(name, 0) / sum(amounts.values()) for name in names}


@wrong("1.10", "shares", "(amounts={'embedding'", "expected 'embedding', 'attention'", "classes of its own")
def the_first_three_entries(amounts):
    total = sum(amounts.values())
    return {name: amounts[name] / total for name in list(amounts)[:3]}


@wrong("1.10", "layer_flops", "heads=-3", "for an invalid argument", "contains -3")
def heads_may_be_negative(batch, seq_len, hidden, heads, backward):
    refuse_below_one(batch=batch, seq_len=seq_len, hidden=hidden)
    if hidden % heads:
        raise ValueError(f"{heads} heads do not divide {hidden}")
    return solution.layer_flops(batch, seq_len, hidden, abs(heads), backward)
