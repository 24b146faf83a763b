"""Animations as self-contained HTML: they play in a notebook and on the site, step by keyboard, and load nothing.

A viewer that strips scripts shows a static picture with alternative text instead. Readers who ask for reduced motion
get an animation that waits for them and moves from step to step.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from utils.plots.show import Animation, checked_alt, palette_of, png
from utils.plots.sm import sm_waves
from utils.plots.style import ARITHMETIC, IDLE, ON_A_PAGE, RC, figure, mix, styled
from utils.units import number

#: An animation is stored in a notebook of at most 2 MB, beside its figures.
LARGEST = 300_000  # bytes
MOST_FRAMES = 120
_PLAYER = Path(__file__).with_name("player.js")
_TRANSPARENT = 255


def animate(
    frames: Sequence[Callable[[Axes], Any]],
    *,
    title: str,
    alt: str,
    captions: Sequence[str] = (),
    subtitle: str = "",
    height: float = 3.0,
    seconds_per_frame: float = 0.8,
    poster: int = -1,
    dpi: int = 141,
) -> Animation:
    """Turn drawing functions into an animation; each draws one frame on empty axes of the course's look.

    Frames are stored as what changes from one to the next, so that a step-by-step diagram of some twenty frames stays
    small. All frames share the position of their axes, so that nothing jumps.

    Args:
        frames: functions that take axes and draw a frame, such as ``[partial(draw_step, step=k) for k in range(8)]``.
        alt: what happens in the animation, for those who cannot see it.
        captions: one sentence a frame, shown below it and read aloud on each step.
        poster: index of the frame that is shown where scripts do not run.
        height: as in :func:`utils.plots.figure`.

    Raises:
        ValueError: fewer than 2 or more than 120 frames, another number of captions than frames, alternative text that
            is too short, or a result above 300 kB (use fewer or simpler frames, or a lower ``dpi``).
    """
    alt = checked_alt(alt)
    frames = list(frames)
    if not 2 <= len(frames) <= MOST_FRAMES:
        raise ValueError(f"an animation needs 2 to {MOST_FRAMES} frames, got {len(frames)}")
    if captions and len(captions) != len(frames):
        raise ValueError(f"give one caption for each of the {len(frames)} frames or none, got {len(captions)}")
    if not 0.05 <= seconds_per_frame <= 10:
        raise ValueError(f"seconds_per_frame must be between 0.05 and 10, got {seconds_per_frame}")
    drawn = []
    for draw in frames:
        fig, ax = figure(title, subtitle=subtitle, height=height, grid="none")
        with rc_context(RC):
            draw(ax)
        drawn.append((fig, ax))
    pictures = _render(drawn, dpi)
    data = {
        "kind": "frames",
        "alt": alt,
        "title": "",
        "width": pictures[0].shape[1],
        "height": pictures[0].shape[0],
        "max_width": ON_A_PAGE,
        "period": seconds_per_frame,
        "captions": list(captions),
        "frames": _patches(pictures),
    }
    return _animation(data, png(drawn[poster][0]), alt)


@styled
def sm_waves_animation(
    schedule: Sequence[Any],
    sms: int,
    *,
    title: str = "",
) -> Animation:
    """Show how tiles take turns on SMs: the output's tiles, the SMs, and how many places are busy over time.

    Args:
        schedule: placements of :func:`utils.simt.schedule_tiles`.
        sms: SMs of the GPU.
    """
    fig = sm_waves(schedule, sms, title=title)
    end = max(row.end for row in schedule)
    in_order = sorted(schedule, key=lambda row: row.tile)
    data = {
        "kind": "waves",
        "alt": fig.alt,
        "title": fig.title,
        "max_width": ON_A_PAGE,
        "sms": sms,
        "per_sm": max(row.slot for row in schedule) + 1,
        "columns": math.ceil(math.sqrt(2 * len(schedule))),
        "sm_columns": math.ceil(math.sqrt(2 * sms)),
        "end": _short(end),
        "end_text": f"{number(_short(end), 4)} tile times",
        "seconds": 6.0,
        "tiles": [[sm, slot, _short(start), _short(stop)] for sm, _, start, stop, slot in in_order],
        "colours": {"busy": ARITHMETIC, "done": mix(ARITHMETIC, 0.35), "idle": IDLE},
    }
    return _animation(data, png(fig), fig.alt)


def _short(value: float) -> float:
    """A time with six significant digits, as an integer where it is one: shorter JSON, the same on every machine."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() else rounded


@cache
def _player() -> str:
    """The player's source without comments and indentation."""
    lines = (line.strip() for line in _PLAYER.read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _animation(data: dict[str, Any], poster: bytes, alt: str) -> Animation:
    # "</" would end the script element in the middle of a string
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\!--")
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    image = base64.b64encode(poster).decode()
    width = data["max_width"]
    page = (
        f'<figure data-mlf="{key}" data-lm-suppress-shortcuts="true" style="margin:4px 0;color:inherit">'
        f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{image}" width="{width}" '
        f'style="max-width:100%;height:auto;background:#FFFFFF">'
        f'<script>{_player()}({text},"{key}");</script></figure>'
    )
    if len(page.encode()) > LARGEST:
        size = number(len(page.encode()))
        raise ValueError(f"the animation has {size} bytes, at most {number(LARGEST)}: use fewer or simpler frames")
    return Animation(page, poster, alt)


# ---- frames as differences -----------------------------------------------------------------------------------------


def _render(drawn: Sequence[tuple[Figure, Axes]], dpi: int) -> list[np.ndarray]:
    """RGB pictures (height, width, 3) of the figures, their axes all in the place that suits every frame."""
    places = []
    for fig, ax in drawn:
        fig.draw_without_rendering()
        places.append(ax.get_position().extents)
    corners = np.array(places)
    low, high = corners[:, :2].max(axis=0), corners[:, 2:].min(axis=0)
    pictures = []
    for fig, ax in drawn:
        fig.set_layout_engine("none")
        ax.set_position([*low, *(high - low)])
        fig.set_dpi(dpi)
        fig.canvas.draw()
        pictures.append(np.asarray(fig.canvas.buffer_rgba())[..., :3].copy())
    if len({picture.shape for picture in pictures}) > 1:
        raise ValueError("all frames of an animation must have the same size")
    return pictures


def _patches(pictures: Sequence[np.ndarray]) -> list[list[Any]]:
    """For each frame [x, y, base64 PNG]: the smallest box that holds what changed, transparent where nothing did."""
    sample = np.concatenate([pictures[k] for k in np.linspace(0, len(pictures) - 1, min(8, len(pictures))).astype(int)])
    palette = palette_of(Image.fromarray(sample), _TRANSPARENT)
    colours = palette.getpalette()[: 3 * _TRANSPARENT]
    before, found = None, []
    for picture in pictures:
        indexed = _nearest(picture, np.array(colours, np.int32).reshape(-1, 3))
        changed = np.ones_like(indexed, bool) if before is None else indexed != before
        rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        y0, y1, x0, x1 = (rows[0], rows[-1] + 1, columns[0], columns[-1] + 1) if len(rows) else (0, 1, 0, 1)
        box = np.where(changed, indexed, _TRANSPARENT).astype(np.uint8)[y0:y1, x0:x1]
        image = Image.fromarray(box, "P")
        image.putpalette(colours + [0] * (3 * 256 - len(colours)))  # in full: the transparent index is the last
        raw = io.BytesIO()
        image.save(raw, format="PNG", optimize=True, transparency=_TRANSPARENT)
        found.append([int(x0), int(y0), base64.b64encode(raw.getvalue()).decode()])
        before = indexed
    return found


def _nearest(picture: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Index of the nearest of ``colours`` (n, 3) for each pixel of ``picture`` (height, width, 3)."""
    pixels = picture.reshape(-1, 3).astype(np.int32)
    _, first, inverse = np.unique(pixels @ np.array([1 << 16, 1 << 8, 1]), return_index=True, return_inverse=True)
    distances = ((pixels[first][:, None] - colours[None]) ** 2).sum(axis=-1)
    return distances.argmin(axis=1).astype(np.uint8)[inverse].reshape(picture.shape[:2])
