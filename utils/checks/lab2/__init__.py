"""Checks of lab 2, Triton kernels: one function an exercise."""

from __future__ import annotations

from utils.checks.lab2.bias_relu import check_bias_relu
from utils.checks.lab2.gelu import check_gelu
from utils.checks.lab2.matmul import check_grouped_matmul, check_tiled_matmul
from utils.checks.lab2.softmax import check_softmax_long, check_softmax_short
from utils.checks.lab2.weighted_sum import check_weighted_sum, check_weighted_sum_backward

__all__ = [
    "check_bias_relu",
    "check_gelu",
    "check_grouped_matmul",
    "check_softmax_long",
    "check_softmax_short",
    "check_tiled_matmul",
    "check_weighted_sum",
    "check_weighted_sum_backward",
]
