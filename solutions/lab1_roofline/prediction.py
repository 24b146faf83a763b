"""Predicting how long an operator takes on a GPU, from counts and two measured roofs (exercise 1.6)."""

from collections.abc import Mapping, Sequence

from .operators import (
    attention_bytes,
    attention_flops,
    dot_product_bytes,
    dot_product_flops,
    matmul_bytes,
    matmul_flops,
    relu_bytes,
    relu_flops,
    softmax_bytes,
    softmax_flops,
)

ELEMENT_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2}

# FLOPs an element, tensors read, tensors written
ELEMENT_WISE = {"copy": (0, 1, 1), "transpose": (0, 1, 1), "add": (1, 2, 1), "axpy": (2, 2, 1), "gelu": (9, 1, 1)}

Point = Mapping[str, object]
"""A measurement: a dictionary with the keys kind, params, dtype, flops, bytes and seconds (and more that do not matter
here), such as ``{"kind": "add", "params": {"n": 10}, "dtype": "bf16", "flops": 10, "bytes": 60, "seconds": 2e-6}``."""


def operator_cost(kind: str, params: Mapping[str, int], dtype: str) -> tuple[int, int]:
    """FLOPs and bytes of an operator as it was measured; given. It calls what you wrote in exercises 1.1 to 1.4.

    Raises:
        ValueError: the kind is unknown.
    """
    size, sizes = ELEMENT_SIZE[dtype], dict(params)
    if kind in ELEMENT_WISE:
        flops, read, written = ELEMENT_WISE[kind]
        n = sizes["n"] if "n" in sizes else sizes["rows"] * sizes["cols"]
        return flops * n, (read + written) * n * size
    if kind == "relu":
        return relu_flops(**sizes), relu_bytes(**sizes, element_size=size)
    if kind == "dot":
        return dot_product_flops(**sizes), dot_product_bytes(**sizes, element_size=size)
    if kind == "softmax":
        return softmax_flops(**sizes), softmax_bytes(**sizes, element_size=size, method="fused")
    if kind == "layer_norm":
        n = sizes["rows"] * sizes["cols"]
        return 7 * n, (2 * n + 2 * sizes["cols"]) * size
    if kind in ("matmul", "batched_matmul"):
        batch = sizes.pop("batch", 1)
        return batch * matmul_flops(**sizes), batch * matmul_bytes(**sizes, element_size=size)
    if kind in ("flash_attention", "eager_attention"):
        causal, seq_len = bool(sizes.pop("causal", 0)), sizes.pop("seq_len")
        sizes |= {"seq_q": seq_len, "seq_k": seq_len}
        moved = attention_bytes(**sizes, element_size=size, materialize=kind == "eager_attention")
        return attention_flops(**sizes, causal=causal), moved
    raise ValueError(f"kind must be an operator that was measured, got {kind!r}")


def predict_seconds(flops: int, bytes_moved: int, peak_flops: float, bandwidth: float) -> float:
    """Seconds that an operator takes when arithmetic and traffic overlap.

    Args:
        flops: its operations, at least 0.
        bytes_moved: its bytes, at least 1.
        peak_flops: FLOP/s that the GPU reaches.
        bandwidth: bytes/s that the GPU reaches.

    Raises:
        ValueError: a count is negative, or a rate is not above zero.
    """
    if flops < 0 or bytes_moved < 1:
        raise ValueError(f"an operator needs flops >= 0 and bytes_moved >= 1, got {flops} and {bytes_moved}")
    if not (peak_flops > 0 and bandwidth > 0):
        raise ValueError(f"rates must be above zero, got {peak_flops} FLOP/s and {bandwidth} bytes/s")
    ### BEGIN SOLUTION 1.6: seconds of an operator
    return max(flops / peak_flops, bytes_moved / bandwidth)
    ### END SOLUTION


def measured_bandwidth(points: Sequence[Point]) -> float:
    """The highest bytes/s that any of the measured operators reached: the memory roof as this GPU really has it.

    Raises:
        ValueError: there are no points.
    """
    if not points:
        raise ValueError(f"points must hold at least one measurement, got {points!r}")
    ### BEGIN SOLUTION 1.6: the measured bandwidth
    return max(point["bytes"] / point["seconds"] for point in points)
    ### END SOLUTION


def measured_peak(points: Sequence[Point], dtype: str) -> float:
    """The highest FLOP/s that any of the measured operators in ``dtype`` reached: the compute roof.

    ``"bf16"`` and ``"fp16"`` run on the same tensor cores at the same rate: a point of either counts for both.

    Raises:
        ValueError: no point can tell about ``dtype``.
    """
    if dtype not in ELEMENT_SIZE:
        raise ValueError(f"dtype must be one of {', '.join(ELEMENT_SIZE)}, got {dtype!r}")
    ### BEGIN SOLUTION 1.6: the measured peak
    alike = {"bf16", "fp16"} if dtype in ("bf16", "fp16") else {dtype}
    rates = [point["flops"] / point["seconds"] for point in points if point["dtype"] in alike]
    if not rates:
        raise ValueError(f"no point was measured in {dtype}")
    return max(rates)
    ### END SOLUTION


def predict_operator(kind: str, params: Mapping[str, int], dtype: str, points: Sequence[Point]) -> float:
    """Seconds that an operator takes on the GPU on which ``points`` were measured; the operator is not among them.

    Args:
        kind: as :func:`operator_cost` takes it.
        params: the operator's sizes.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        points: measurements of other operators on that GPU.
    """
    ### BEGIN SOLUTION 1.6: seconds of an operator that was not seen
    flops, bytes_moved = operator_cost(kind, params, dtype)
    return predict_seconds(flops, bytes_moved, measured_peak(points, dtype), measured_bandwidth(points))
    ### END SOLUTION
