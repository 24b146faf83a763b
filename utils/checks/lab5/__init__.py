"""Lab 5's checks, one for each exercise."""

from utils.checks.lab5.blocks import check_block_manager
from utils.checks.lab5.cached import check_kv_cache
from utils.checks.lab5.decode_kernel import check_paged_decode
from utils.checks.lab5.merge_kernel import check_merge_parts
from utils.checks.lab5.scheduling import check_schedulers
from utils.checks.lab5.speculation import check_speculative_sampling

__all__ = [
    "check_block_manager",
    "check_kv_cache",
    "check_merge_parts",
    "check_paged_decode",
    "check_schedulers",
    "check_speculative_sampling",
]
