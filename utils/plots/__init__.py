"""Every figure of the course: one look, drawn from real data, with alternative text."""

from utils.plots.animate import Animation, animate, sm_waves_animation
from utils.plots.bars import class_shares, memory_bars
from utils.plots.cluster import rails_plot
from utils.plots.collectives import collective_animation, contributions, moves_between
from utils.plots.curves import Series, sweep
from utils.plots.labels import label_points
from utils.plots.machine import LatencyRange, MemoryLevel, generations, latency_ranges, memory_pyramid
from utils.plots.overlap import overlap_of, overlap_timeline
from utils.plots.parallel import memory_over_ranks, mesh_plot, state_bars
from utils.plots.roofline import Ceilings, Point, roofline_plot
from utils.plots.schedule import bubble_plot, in_flight_plot, pipeline_timeline
from utils.plots.serving import pool_animation, ragged_batch, reservation_plot, slot_timeline, slots_of
from utils.plots.show import png, show
from utils.plots.sm import TileGrid, occupancy_bars, sm_waves, tile_map
from utils.plots.speculation import DraftedRound, drafted_text, overlap_bars
from utils.plots.style import ARITHMETIC, HBM, LIMIT, LINK, ON_CHIP, WASTE, WRONG, figure
from utils.plots.table import table
from utils.plots.warp import Pattern, coalescing_map, warp_timeline
