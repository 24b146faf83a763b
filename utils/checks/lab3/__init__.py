"""Lab 3's checks, one for each exercise."""

from utils.checks.lab3.backward import check_delta, check_dkdv, check_dq
from utils.checks.lab3.forward import check_flash_causal, check_flash_forward
from utils.checks.lab3.merge import check_merge
from utils.checks.lab3.operator import check_flash_attention, check_speed
from utils.checks.lab3.tiled import check_tiled_attention

__all__ = [
    "check_delta",
    "check_dkdv",
    "check_dq",
    "check_flash_attention",
    "check_flash_causal",
    "check_flash_forward",
    "check_merge",
    "check_speed",
    "check_tiled_attention",
]
