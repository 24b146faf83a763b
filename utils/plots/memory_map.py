"""Where KV memory goes: slot by slot at one step, as shares of the whole, and block by block over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.plots.animate import Animation, animate
from utils.plots.check import require_between, require_entries
from utils.plots.labels import legend_below
from utils.plots.marks import box, centred, heading, lanes
from utils.plots.style import HBM, IDLE, INK, LIMIT, SMALL, WASTE, WASTE_HATCH, bare, figure, mix, styled
from utils.units import number

if TYPE_CHECKING:
    from utils.serving.allocation import MemoryTrace

#: Every slot is of one kind; used slots of neighbours differ a little, so that requests can be told apart.
USED = (HBM, mix(HBM, 0.72))
COLOURS = {"used": HBM, "reserved": mix(HBM, 0.25), "internal": "#8F8F8F", "external": IDLE}
NAMES = {
    "used": "holds a token",
    "reserved": "will hold one",
    "internal": "internal waste",
    "external": "external waste",
}
#: Tokens of a block.
BLOCK = 16
#: Shades of the requests in a history of blocks.
SHADES = tuple(mix(HBM, share) for share in (1.0, 0.55, 0.8, 0.38)) + tuple(
    mix(HBM, share, "#000000") for share in (0.7, 0.5)
)


def slot_kinds(trace: MemoryTrace, step: int) -> np.ndarray:
    """The kind of each slot at a step, (capacity,) of int: 0 external, 1 and 2 used, 3 reserved, 4 internal waste."""
    require_entries("slot_kinds (simulate with keep_maps=True) and its maps", trace.maps)
    require_between("step", [step], 0, trace.steps - 1)
    kinds = np.zeros(trace.capacity, np.int8)
    for piece in trace.maps[step]:
        if isinstance(piece, tuple):
            block, request, tokens = piece
            start = block * BLOCK
            kinds[start : start + tokens] = 1 + request % 2
            kinds[start + tokens : start + BLOCK] = 4
        else:
            kinds[piece.start : piece.start + piece.tokens] = 1 + piece.id % 2
            kinds[piece.start + piece.tokens : piece.start + piece.needed] = 3
            kinds[piece.start + piece.needed : piece.start + piece.asked] = 4
    return kinds


_PALETTE = np.array(
    [to_rgb(c) for c in (COLOURS["external"], *USED, COLOURS["reserved"], COLOURS["internal"])], np.float32
)


@styled
def memory_map(
    traces: Mapping[str, MemoryTrace], steps: Mapping[str, int], *, row: int = 2048, title: str, subtitle: str = ""
) -> Figure:
    """Draw the whole memory of several policies at a step of each, ``row`` slots a line.

    Args:
        traces: name -> simulation with maps.
        steps: name -> the step to draw.
    """
    lines = [-(-trace.capacity // row) for trace in traces.values()]
    height = 0.75 + sum(0.085 * n + 0.32 for n in lines)
    fig, axes = figure(title, subtitle=subtitle, height=height, rows=len(traces), grid="none")
    said = []
    for ax, (name, trace) in zip(np.atleast_1d(axes), traces.items(), strict=True):
        shown = _draw_map(ax, trace, steps[name], row)
        heading(ax, name, shown, pad=3)
        said.append(f"{name}: {shown}")
    legend_below(np.atleast_1d(axes)[-1], _handles(), drop=0.12)
    fig.alt = f"{title.rstrip('.')}. Every slot of the cache, coloured by what it is for. {'; '.join(said)}."
    return fig


def _draw_map(ax: Axes, trace: MemoryTrace, step: int, row: int) -> str:
    """Draw a map on bare axes; return its shares in words."""
    bare(ax)
    kinds = slot_kinds(trace, step)
    full = np.full(-(-len(kinds) // row) * row, -1, np.int64)
    full[: len(kinds)] = kinds
    image = np.where(full[:, None] < 0, np.float32(1), _PALETTE[full])
    ax.imshow(image.reshape(-1, row, 3), aspect="auto", interpolation="nearest", extent=(0, row, len(full) // row, 0))
    for line in range(1, len(full) // row):
        ax.axhline(line, color="white", linewidth=0.8)
    used = float(trace.used[step]) / trace.capacity
    count = "1 request" if trace.running[step] == 1 else f"{trace.running[step]} requests"
    return f"{count}, {number(100 * used, 3)} % of the slots hold a token"


def memory_animation(
    traces: Mapping[str, MemoryTrace],
    frames: Sequence[int],
    *,
    row: int = 2048,
    title: str,
    alt: str,
) -> Animation:
    """Play the memories of several policies beside each other over the same steps."""
    lines = max(-(-trace.capacity // row) for trace in traces.values())
    captions = [
        f"Step {step}. "
        + "; ".join(f"{name}: {t.running[step]} requests run, {t.waiting[step]} wait" for name, t in traces.items())
        for step in frames
    ]
    draws = [partial(_draw_frame, traces=traces, step=step, row=row) for step in frames]
    return animate(
        draws, title=title, alt=alt, captions=captions,
        subtitle=f"a line is {row:,} slots; requests with even and with odd numbers have two shades",
        height=0.45 + len(traces) * (0.085 * lines + 0.3), seconds_per_frame=0.5, dpi=115,
    )  # fmt: skip


def _draw_frame(ax: Axes, *, traces: Mapping[str, MemoryTrace], step: int, row: int) -> None:
    bare(ax)
    share = 1 / len(traces)
    for k, (name, trace) in enumerate(traces.items()):
        inner = ax.inset_axes((0, 1 - (k + 1) * share, 1, 0.80 * share))
        heading(inner, name, _draw_map(inner, trace, step, row), pad=3)
    legend_below(inner, _handles(), drop=0.05)


def _handles() -> list[Patch]:
    return [Patch(facecolor=COLOURS[kind], label=label) for kind, label in NAMES.items()]


@styled
def share_bars(
    shares: Mapping[str, Mapping[str, float]],
    *,
    published: Mapping[str, float] | None = None,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draw what share of memory is used, reserved, wasted inside and outside of pieces, a bar for each policy.

    Args:
        shares: policy -> kind -> share of all slots; the kinds are those of ``MemoryTrace.shares``.
        published: policy -> used share that others found, marked with a black line.

    Raises:
        ValueError: shares that do not add up to 1.
    """
    fig, ax = figure(title, subtitle=subtitle, height=0.95 + 0.36 * len(shares), grid="none")
    said = []
    for y, (name, parts) in enumerate(shares.items()):
        if abs(sum(parts.values()) - 1) > 1e-6:
            raise ValueError(f"the shares of {name!r} must add up to 1, got {sum(parts.values()):g}")
        left = 0.0
        for kind in NAMES:
            part = parts[kind]
            hatch = WASTE_HATCH if kind in ("internal", "external") else ""
            face = mix(WASTE, 0.8) if kind == "internal" else COLOURS[kind]
            look = {"edgecolor": "#9A9A9A" if hatch else "white", "hatch": hatch if kind == "internal" else ""}
            box(ax, left, y - 0.34, part, 0.68, face, linewidth=0.4, **look)
            if part > 0.045:
                ink = "white" if kind == "used" else INK
                ground = {"facecolor": face, "edgecolor": "none", "pad": 1.0}
                text = f"{number(100 * part, 3)} %"
                mark = min(max((published or {}).get(name, left), left), left + part)
                start, end = max((left, mark), (mark, left + part), key=lambda piece: piece[1] - piece[0])
                centred(ax, (start + end) / 2, y, text, color=ink, bbox=ground)
            left += part
        said.append(f"{name}: " + ", ".join(f"{NAMES[k]} {number(100 * parts[k], 3)} %" for k in NAMES))
        if published and name in published:
            ax.plot([published[name]] * 2, [y - 0.46, y + 0.46], color=LIMIT, linewidth=2.0, zorder=5)
            said[-1] += f", published {number(100 * published[name], 3)} % used"
    lanes(ax, list(shares), 1)
    ax.set_xticks([])
    handles = [
        Patch(facecolor=mix(WASTE, 0.8) if kind == "internal" else COLOURS[kind], label=label,
              hatch=WASTE_HATCH if kind == "internal" else "", edgecolor="#9A9A9A", linewidth=0)
        for kind, label in NAMES.items()
    ]  # fmt: skip
    if published:
        handles.append(Patch(facecolor=LIMIT, label="published"))
    legend_below(ax, handles, drop=0.14)
    fig.alt = f"{title.rstrip('.')}. {'; '.join(said)}."
    return fig


@styled
def block_history(
    held: Sequence[Mapping[int, tuple[str, int]]], num_blocks: int, block_size: int, *, title: str, subtitle: str = ""
) -> Figure:
    """Draw who holds which block over the steps of an engine: a row a block, a column a step.

    Args:
        held: for each step, block -> (request, tokens in it). A block that is not full is drawn as high as it is full.

    Raises:
        ValueError: a block outside of the pool, more tokens than a block has slots.
    """
    requests = list(dict.fromkeys(id for step in held for id, _ in step.values()))
    fig, ax = figure(title, subtitle=subtitle, height=0.9 + 0.2 * num_blocks, grid="none")
    box(ax, 0, 0, len(held), num_blocks, "#F4F4F4")
    for x, step in enumerate(held):
        for block, (id, tokens) in step.items():
            if not 0 <= block < num_blocks or not 0 <= tokens <= block_size:
                raise ValueError(f"block {block} with {tokens} tokens is not in a pool of {num_blocks} x {block_size}")
            share = tokens / block_size
            shade = SHADES[requests.index(id) % len(SHADES)]
            box(ax, x, block, 1.02, 0.92 * share, shade)
            if share < 1:
                box(ax, x, block + 0.92 * share, 1.02, 0.92 * (1 - share), WASTE)
    for id, x, block in _returns(held):  # its name where it begins, and where it comes back
        shade = SHADES[requests.index(id) % len(SHADES)]
        ground = {"facecolor": shade, "edgecolor": "white", "linewidth": 0.6, "boxstyle": "round,pad=0.18"}
        dark = requests.index(id) % len(SHADES) in (0, 2, 4, 5)
        ink = "white" if dark else INK
        ax.text(x + 0.6, block + 0.46, id, size=SMALL, va="center", color=ink, weight="bold", bbox=ground)
    ax.set_xlim(0, len(held))
    ax.set_ylim(num_blocks, 0)
    ax.set_yticks([b + 0.46 for b in range(num_blocks)], [str(b) for b in range(num_blocks)])
    ax.set_ylabel("block")
    ax.set_xlabel("step")
    most = max(len(step) for step in held)
    begun = [id for id, _, _ in _returns(held)]
    back = [id for id in requests if begun.count(id) > 1]
    fig.alt = (
        f"{title.rstrip('.')}. {len(held)} steps of a pool of {num_blocks} blocks, at most {most} held at a time, "
        f"by requests {', '.join(requests)}"
        + (f"; {', '.join(back)} lost their blocks and came back." if back else ".")
    )
    return fig


def _returns(held: Sequence[Mapping[int, tuple[str, int]]]) -> list[tuple[str, int, int]]:
    """Each request's beginnings: (id, step, its lowest block then), whenever it held no block the step before."""
    found, before = [], set()
    for x, step in enumerate(held):
        now = {id for id, _ in step.values()}
        found += [(id, x, min(b for b, (who, _) in step.items() if who == id)) for id in sorted(now - before)]
        before = now
    return found
