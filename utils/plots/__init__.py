"""Every figure of the course: one look, drawn from real data, with alternative text."""

from utils.plots.animate import Animation, animate, sm_waves_animation
from utils.plots.bars import class_shares, memory_bars
from utils.plots.blocks import PoolState, block_animation, block_tables, pool_state
from utils.plots.cache import DecodeStep, decode_animation, request_timeline
from utils.plots.collectives import Move, collective_animation, contributions, moves_between
from utils.plots.curves import Series, sweep
from utils.plots.labels import label_points
from utils.plots.machine import LatencyRange, MemoryLevel, generations, latency_ranges, memory_pyramid
from utils.plots.memory_map import block_history, memory_animation, memory_map, share_bars
from utils.plots.overlap import Overlap, StreamSpan, overlap_of, overlap_timeline
from utils.plots.parallel import memory_over_ranks, mesh_plot, state_bars
from utils.plots.roofline import Ceilings, Point, roofline_plot
from utils.plots.schedule import bubble_plot, in_flight_plot, pipeline_timeline
from utils.plots.serving import SlotGrid, pool_animation, ragged_batch, reservation_plot, slot_timeline, slots_of
from utils.plots.show import png, show
from utils.plots.sm import TileGrid, occupancy_bars, sm_waves, tile_map
from utils.plots.speculation import DraftedRound, drafted_text, overlap_bars
from utils.plots.style import ARITHMETIC, HBM, LIMIT, LINK, ON_CHIP, WASTE, WRONG, figure, tidy
from utils.plots.table import Table, table
from utils.plots.warp import Pattern, coalescing_map, warp_timeline
