"""Lab 4's checks, one for each exercise; all but 4.2 run the answer on several processes."""

from utils.checks.lab4.data_parallel import check_distributed_data_parallel
from utils.checks.lab4.fully_sharded import check_fully_sharded
from utils.checks.lab4.gradient_shards import check_zero2
from utils.checks.lab4.memory import check_memory
from utils.checks.lab4.optimizer_states import check_zero1
from utils.checks.lab4.ring import check_ring_all_reduce
from utils.checks.lab4.schedule import check_schedule
from utils.checks.lab4.tensor_parallel import check_tensor_parallel

__all__ = [
    "check_distributed_data_parallel",
    "check_fully_sharded",
    "check_memory",
    "check_ring_all_reduce",
    "check_schedule",
    "check_tensor_parallel",
    "check_zero1",
    "check_zero2",
]
