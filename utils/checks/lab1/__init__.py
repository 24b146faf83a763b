"""Checks of lab 1, the roofline: one function an exercise."""

from utils.checks.lab1.attention import check_attention
from utils.checks.lab1.divergence import check_divergence
from utils.checks.lab1.layer import check_layer
from utils.checks.lab1.operators import check_dot_product, check_matmul
from utils.checks.lab1.passes import check_relu_softmax
from utils.checks.lab1.prediction import check_prediction
from utils.checks.lab1.rates import check_ridge
from utils.checks.lab1.sectors import check_sectors
from utils.checks.lab1.waves import check_waves

__all__ = [
    "check_attention",
    "check_divergence",
    "check_dot_product",
    "check_layer",
    "check_matmul",
    "check_prediction",
    "check_relu_softmax",
    "check_ridge",
    "check_sectors",
    "check_waves",
]
