"""Lab 1, the roofline: what operators cost, what a GPU allows, and what a warp and a kernel waste.

Edit the modules beside this file; the notebook explains the exercises and checks your functions.
"""

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
from .prediction import measured_bandwidth, measured_peak, operator_cost, predict_operator, predict_seconds
from .rates import attainable_rate, ridge_point, smallest_compute_bound_batch
from .residual import given_residual_add, residual_add, residual_add_bytes, walk_sectors
from .warp import sectors_touched, useful_fraction, warp_cycles, wasted_lane_cycles
from .waves import last_wave_utilisation, num_tiles, num_waves, tiled_matmul_seconds
