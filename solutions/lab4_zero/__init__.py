"""Lab 4, training on many ranks: collectives, data parallelism, ZeRO, tensor and pipeline parallelism.

Edit the modules beside this file; the notebook explains the exercises and checks your functions.
"""

from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from .distributed_data_parallel import DistributedDataParallel
from .fully_sharded import FullyShardedDataParallel
from .memory import bytes_per_rank
from .mesh import parallel_mesh, share_of_batch, tensor_data_parallel_gpt, tensor_pipeline_gpt
from .pipeline import Pipeline
from .pipeline_order import gpipe_order, one_f_one_b_order
from .pipeline_stages import split_gpt
from .precision import MasterWeightOptimizer
from .prefetch import PrefetchZero3
from .saved_tensor_meter import SavedTensorMeter
from .tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelAttention,
    TensorParallelMLP,
    copy_to_tp_region,
    reduce_from_tp_region,
)
from .tensor_parallel_gpt import clip_grad_norm, full_parameters, tensor_parallel_gpt
from .training_state import TrainingState
from .vocabulary_parallel import partition_vocab, vocabulary_parallel_loss
from .zero1 import Zero1Optimizer
from .zero2 import Zero2
from .zero3 import Zero3
