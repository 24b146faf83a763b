"""Lab 6, frontiers: fewer bits in products, weights, the cache and the engine; experts; long sequences."""

from utils.formats import Quantized, quantize

from .block_scaled_simple import block_scaled_matmul
from .context_parallel import all_to_all_attention, ring_attention
from .dispatch_simple import combine, dispatch, exchange_rows
from .documents_simple import document_attention
from .draft_tree import Tree, expected_accepted, expected_tokens, grow
from .encoder import encode
from .engine import Engine
from .experts_simple import expert_matmul
from .flash_attention import flash_attention
from .fp8_cache import Fp8Cache, dequantize_cache, empty_fp8_cache, quantize_cache
from .fp8_decode_simple import fp8_decode
from .fp8_write import write_kv
from .fused_quantize import rms_norm_quantized, swiglu_quantized
from .grouped_matmul import grouped_matmul
from .int4_matmul import int4_matmul
from .int4_packing import PackedInt4, pack_int4
from .int4_simple import int4_linear
from .low_bit_runner import LowBitRunner
from .mixture_of_experts import MixtureOfExperts, MoEConfig
from .mla_decode import mla_decode
from .overlapped_engine import OverlappedEngine
from .overlapped_runner import OverlappedRunner
from .paged_attention_fp8 import paged_attention_decode
from .paged_extend_fp8 import paged_attention_extend
from .quantize_kernels import quantize_blocks, quantize_rows
from .ring_simple import merge_parts, ring_forward
from .router import Router
from .scaled_matmul import scaled_matmul
from .shared_prefix import Group, find_groups, kv_bytes_read, partial_bytes, whole_blocks
from .shared_prefix_attention import shared_prefix_attention
from .shared_prefix_runner import SharedPrefixRunner
from .simulated_device import SimulatedRunner, VirtualClock, device_gaps, waiting_share
from .square_blocks import SquareBlocks
from .tensor_parallel_decoder import TensorParallelDecoder, TensorParallelRunner, shard, share_of
from .tensor_parallel_engine import RankFailed, TensorParallelEngine
from .tree_attention import paged_attention_tree
from .tree_engine import TreeEngine
from .tree_sampling import draw_candidates, tree_sample, verify_trees

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
