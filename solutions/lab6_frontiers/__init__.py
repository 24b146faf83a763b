"""Lab 6, frontiers: matrix products and quantising kernels of 8-bit numbers with scales."""

from utils.formats import Quantized, quantize

from .fused_quantize import rms_norm_quantized, swiglu_quantized
from .quantize_kernels import quantize_blocks, quantize_rows
from .scaled_matmul import scaled_matmul
from .square_blocks import SquareBlocks
