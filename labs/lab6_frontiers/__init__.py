"""Lab 6, frontiers: fewer bits in products, weights, the cache and the engine; experts; long sequences."""

from utils.formats import Quantized, quantize

from .block_scaled_simple import block_scaled_matmul
from .dispatch_simple import combine, dispatch, exchange_rows
from .documents_simple import document_attention
from .encoder import encode
from .experts_simple import expert_matmul
from .fp8_cache import Fp8Cache, dequantize_cache, empty_fp8_cache, quantize_cache
from .fp8_decode_simple import fp8_decode
from .int4_simple import int4_linear
from .ring_simple import merge_parts, ring_forward

#: The modules that students get: those of the exercises, and what they are given.
HANDED_OUT = (
    "block_scaled_simple.py",
    "dispatch_simple.py",
    "documents_simple.py",
    "encoder.py",
    "experts_simple.py",
    "fp8_cache.py",
    "fp8_decode_simple.py",
    "int4_simple.py",
    "ring_simple.py",
    "simple_arguments.py",
)
