"""Parameters, FLOPs, memory and communication of a transformer in training, and bounds of serving it.

Each formula is held against the real module of :mod:`utils.gpt` by a test: parameters are counted, FLOPs come from
``torch.utils.flop_counter``, activations from the tensors that autograd saves.
"""

from utils.transformer_math.activations import activations, block_activations
from utils.transformer_math.communication import (
    communication_volume,
    pipeline_volume,
    ring_seconds,
    ring_volume,
    tensor_parallel_step_bytes,
    tensor_parallel_step_seconds,
    tensor_parallel_volume,
    tokens_to_hide,
    two_level_seconds,
)
from utils.transformer_math.context_parallel import (
    all_to_all_attention_bytes,
    all_to_all_matches_from,
    context_parallel_activations,
    decoder_block_activations,
    ring_attention_bytes,
    ring_hides_from,
)
from utils.transformer_math.experts import (
    MOE_MODELS,
    ExpertLayer,
    MoEModel,
    all_to_all_bytes,
    compute_bound_batch,
    moe_decode_bounds,
    rank_imbalance,
    touched_experts,
)
from utils.transformer_math.flops import forward_flops, rule_of_thumb, training_flops, training_seconds
from utils.transformer_math.latent_attention import (
    DEEPSEEK_V3,
    LatentAttention,
    gqa_cache_numbers,
    gqa_decode_cost,
)
from utils.transformer_math.long_context import (
    attention_overtakes,
    cache_overtakes_weights,
    decoder_flops,
    multiplied_weights,
    seen_pairs,
)
from utils.transformer_math.memory import (
    BF16_MOMENTS,
    FP32_ADAM,
    FP32_GRADIENTS,
    MIXED_ADAM,
    MIXED_MOMENTUM,
    PURE_BF16,
    SHARDED_FROM,
    STAGES,
    Precision,
    fewest_ranks,
    largest_model,
    memory_per_rank,
)
from utils.transformer_math.overlap import BucketTimes, DataParallelStep, data_parallel_step
from utils.transformer_math.parameters import (
    MODELS,
    block_parameters,
    kv_cache_bytes,
    parameters,
    total_parameters,
    trainable_parameters,
)
from utils.transformer_math.placement import Coordinates, Placement
from utils.transformer_math.serving_bounds import (
    SERVED_MODELS,
    RequestBounds,
    ServedModel,
    StepBounds,
    decode_bounds,
    largest_batch,
    prefill_bounds,
    request_bounds,
)
