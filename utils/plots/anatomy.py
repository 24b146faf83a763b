"""A GPU from above: the SMs around their shared cache, and one SM from the inside, drawn from the hardware table."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.hardware import GPU
from utils.plots.marks import box, centred
from utils.plots.style import ARITHMETIC, HBM, INK, LIMIT, MUTED, ON_CHIP, SMALL, bare, figure, mix, styled
from utils.units import quantity

_ROWS = 12  # SMs in a column of the drawing


def _box(
    ax: Axes, x: float, y: float, width: float, height: float, colour: str, text: str = "", ink: str = INK
) -> None:
    box(ax, x, y, width, height, colour, edgecolor="white", linewidth=0.8)
    if text:
        centred(ax, x + width / 2, y + height / 2, text, color=ink, linespacing=1.25)


def _tensor_cores(gpu: GPU) -> str:
    return "tensor core" if gpu.compute_capability >= (8, 0) else "2 tensor cores"


def _kib(value: float) -> str:
    return f"{value / 1024:,.0f} KiB"


@styled
def chip_anatomy(gpu: GPU, lanes_per_sm: int) -> Figure:
    """Draw ``gpu``: all its SMs around the L2 cache and the memory on the left, the parts of one SM on the right.

    A scheduler has two tensor cores before Ampere and one, larger, since.

    Args:
        gpu: an entry of the hardware table.
        lanes_per_sm: fp32 lanes of an SM, a multiple of its schedulers.
    """
    if not isinstance(gpu, GPU):
        raise TypeError(f"gpu must be an entry of the hardware table, such as gpu('H100'), got {gpu!r}")
    if lanes_per_sm < 1 or lanes_per_sm % gpu.schedulers_per_sm:
        raise ValueError(f"lanes_per_sm must be a multiple of {gpu.schedulers_per_sm} schedulers, got {lanes_per_sm}")
    fig, (chip, sm) = figure(
        f"{gpu.sms} small processors share one cache and one memory",
        subtitle=f"{gpu.full_name}, as a diagram: numbers from the hardware table, positions not to scale",
        height=3.7,
        columns=2,
        width_ratios=(1, 1.6),
        grid="none",
    )
    bare(chip)
    bare(sm)
    _draw_chip(chip, gpu)
    _draw_sm(sm, gpu, lanes_per_sm)
    lanes = lanes_per_sm // gpu.schedulers_per_sm
    matrix = f" and {_tensor_cores(gpu)}" if gpu.has_tensor_cores else ""
    registers = _kib(4 * gpu.registers_per_sm / gpu.schedulers_per_sm)
    fig.alt = (
        f"Left: {gpu.sms} SMs in two fields around an L2 cache of {gpu.l2_bytes / 2**20:,.0f} MiB, with "
        f"{quantity(gpu.memory_bytes, 'B')} of memory below them. Right: one SM with {gpu.schedulers_per_sm} "
        f"partitions, each with a warp scheduler, {registers} of registers, {lanes} fp32 lanes{matrix}, "
        f"above {_kib(gpu.l1_bytes_per_sm)} of shared memory and L1."
    )
    return fig


def _draw_chip(ax: Axes, gpu: GPU) -> None:
    columns = -(-gpu.sms // _ROWS)
    left = -(-columns // 2)
    cache = 1.6  # width of the L2 in the middle, in SMs
    for i in range(gpu.sms):
        column, row = divmod(i, _ROWS)
        x = column + (cache if column >= left else 0)
        _box(ax, x + 0.08, _ROWS - 1 - row + 0.08, 0.84, 0.84, ARITHMETIC if i == 0 else mix(ARITHMETIC, 0.55))
    _box(ax, left + 0.15, 0, cache - 0.3, _ROWS, ON_CHIP)
    text = f"L2 cache, {gpu.l2_bytes / 2**20:,.0f} MiB"
    middle = left + cache / 2
    centred(ax, middle, _ROWS / 2, text, rotation=90, color="white")
    width = columns + cache
    memory = f"memory: {quantity(gpu.memory_bytes, 'B')}, {quantity(gpu.memory_bandwidth, 'B/s')}"
    _box(ax, 0, -1.9, width, 1.5, HBM, memory, "white")
    ax.text(0.08, _ROWS + 0.25, "one SM, drawn on the right", size=SMALL, color=MUTED)
    ax.annotate("", (0.5, _ROWS - 0.05), (0.5, _ROWS + 0.3), arrowprops={"arrowstyle": "-", "color": MUTED, "lw": 0.8})
    ax.set(xlim=(-0.1, width + 0.1), ylim=(-2.0, _ROWS + 1.0))


def _draw_sm(ax: Axes, gpu: GPU, lanes_per_sm: int) -> None:
    parts = gpu.schedulers_per_sm
    lanes = lanes_per_sm // parts
    across = 8
    depth = -(-lanes // across)
    ax.text(0, 13.25, "one SM", size=SMALL, color=MUTED)
    for part in range(parts):
        x = part * 10.0
        _box(ax, x, 11.5, 9.4, 1.3, mix(LIMIT, 0.72), "scheduler", "white")
        registers = f"registers\n{_kib(4 * gpu.registers_per_sm / parts)}"
        _box(ax, x, 9.0, 9.4, 2.2, mix(ON_CHIP, 0.75), registers, "white")
        height = 3.9 / depth
        for lane in range(lanes):
            row, column = divmod(lane, across)
            width = 9.4 / across
            _box(ax, x + column * width, 8.7 - (row + 1) * height, width, height, mix(ARITHMETIC, 0.55))
        if gpu.has_tensor_cores:
            _box(ax, x, 2.6, 9.4, 1.9, ARITHMETIC, _tensor_cores(gpu), "white")
    width = parts * 10 - 0.6
    _box(ax, 0, 0.5, width, 1.8, ON_CHIP, f"shared memory and L1: {_kib(gpu.l1_bytes_per_sm)}", "white")
    ax.text(
        0, 0.1, f"small squares: {lanes_per_sm} lanes, each one\nfp32 multiply-add per cycle", size=SMALL, color=MUTED,
        va="top", linespacing=1.2,
    )  # fmt: skip
    ax.set(xlim=(-0.3, width + 0.3), ylim=(-1.9, 14.2))
