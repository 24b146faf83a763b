"""Lab 4, training on many ranks: collectives, data parallelism, ZeRO, tensor and pipeline parallelism.

Edit the modules beside this file; the notebook explains the exercises and checks your functions.
"""

from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .collectives import all_to_all, broadcast, reduce, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from .distributed_data_parallel import DistributedDataParallel
from .fully_sharded import FullyShardedDataParallel
from .memory import bytes_per_rank
from .precision import MasterWeightOptimizer
from .training_state import TrainingState
from .zero1 import Zero1Optimizer
from .zero2 import Zero2

__all__ = [
    "CheckpointError",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "MasterWeightOptimizer",
    "TrainingState",
    "Zero1Optimizer",
    "Zero2",
    "all_to_all",
    "broadcast",
    "bytes_per_rank",
    "load_checkpoint",
    "reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "save_checkpoint",
]
