"""Small exact models of what a GPU does with a warp, a memory access, a block and a grid.

``warp``: divergence. ``memory``: coalescing into sectors, shared-memory bank conflicts. ``occupancy``: blocks on an SM.
``waves``: tiles of an output and their turns on the SMs. ``ring``: tiles passed on through barriers.
Each is a count, not an estimate of time.
"""

from utils.simt.memory import (
    BANK_BYTES,
    LINE_BYTES,
    NUM_BANKS,
    SECTOR_BYTES,
    WARP_SIZE,
    Access,
    access_pattern,
    bank_conflicts,
    bank_passes,
    sectors,
    touched_sectors,
)
from utils.simt.occupancy import Occupancy, occupancy
from utils.simt.warp import If, Loop, Op, Step, WarpTrace, run_warp
from utils.simt.waves import Placement, Waves, schedule_tiles, tile_efficiency, tiles, waves
