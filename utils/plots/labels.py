"""Labels beside the things they name, without collisions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.legend import Legend
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox, ScaledTranslation

from utils.plots.style import INK, SMALL

# right of the point reads best, then below and above it, then left; sixteen directions in that order
_ANGLES = (0, -30, 30, -60, 60, -90, 90, -15, 15, -45, 45, -120, 120, -150, 150, 180)
_DISTANCES = (7, 11, 18, 28, 40, 54, 70, 90)
_ROUNDS = 3
_FREE = 11  # points; beyond this a label gets a leader


def spread(positions: Sequence[float], gap: float, low: float = -np.inf, high: float = np.inf) -> list[float]:
    """Move one-dimensional positions as little as needed until neighbours are ``gap`` apart, within [low, high]."""
    order = np.argsort(positions, kind="stable")
    placed = np.asarray(positions, float)[order]
    groups = [[i] for i in range(len(placed))]
    centres = list(placed)
    merged = True
    while merged:  # neighbours that overlap become one block, centred on the mean of what its members wanted
        merged = False
        for i in range(len(groups) - 1):
            reach = gap * (len(groups[i]) + len(groups[i + 1])) / 2
            if centres[i + 1] - centres[i] < reach - 1e-9:
                groups[i] += groups.pop(i + 1)
                centres.pop(i + 1)
                centres[i] = float(np.mean(placed[groups[i]]))
                half = gap * (len(groups[i]) - 1) / 2
                centres[i] = min(max(centres[i], low + half), high - half)
                merged = True
                break
    result = np.empty(len(placed))
    for group, centre in zip(groups, centres, strict=True):
        for k, member in enumerate(group):
            result[order[member]] = centre + gap * (k - (len(group) - 1) / 2)
    return [float(v) for v in result]


def label_points(
    ax: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    *,
    colours: Sequence[str] | None = None,
    avoid: Sequence[tuple[Sequence[float], Sequence[float]]] = (),
    keep_clear: Sequence[Bbox] = (),
) -> list[Annotation]:
    """Write each text near its point so that no text covers a point, another text or one of the lines to ``avoid``.

    Args:
        points: data coordinates.
        avoid: polylines in data coordinates (xs, ys) that no label should cross.
        keep_clear: boxes in pixels that stay free, such as those of texts that are already there.

    Returns the annotations; a label that had to move away from its point gets a thin leader.
    """
    if len(points) != len(texts):
        raise ValueError(f"{len(points)} points need as many texts, got {len(texts)}")
    fig = ax.figure
    fig.draw_without_rendering()  # settles the layout, which the boxes depend on
    renderer = fig.canvas.get_renderer()
    pixel = fig.dpi / 72
    centres = ax.transData.transform(np.asarray(points, float).reshape(-1, 2))
    notes = [
        ax.annotate(text, point, (0, 0), textcoords="offset points", size=SMALL, linespacing=1.1, va="bottom",
                    color=colours[i] if colours else INK)
        for i, (text, point) in enumerate(zip(texts, points, strict=True))
    ]  # fmt: skip
    for note in notes:
        note.set_in_layout(False)
    sizes = np.array([note.get_window_extent(renderer).size for note in notes]).reshape(-1, 2)
    fixed = np.array([box.extents for box in keep_clear]).reshape(-1, 4)
    frame = ax.get_window_extent(renderer).extents
    for i, (place, led) in enumerate(_arrange(centres, sizes, frame, fixed, _samples(ax, avoid), pixel)):
        notes[i].set_position(tuple((place[:2] - centres[i]) / pixel))
        if led:
            _leader(ax, points[i], centres[i], place, pixel, colours[i] if colours else INK)
    return notes


def _samples(ax: Axes, lines: Sequence[tuple[Sequence[float], Sequence[float]]]) -> np.ndarray:
    """Points every few pixels along polylines, in pixels."""
    found = [np.empty((0, 2))]
    for xs, ys in lines:
        corners = ax.transData.transform(np.column_stack([xs, ys]))
        for a, b in itertools.pairwise(corners):
            steps = max(2, int(np.hypot(*(b - a)) / 4))
            found.append(a + (b - a) * np.linspace(0, 1, steps)[:, None])
    return np.concatenate(found)


def _arrange(
    centres: np.ndarray, sizes: np.ndarray, frame: np.ndarray, fixed: np.ndarray, obstacles: np.ndarray, pixel: float
) -> list[tuple[np.ndarray, bool]]:
    """For each label its box (x0, y0, x1, y1 in pixels) and whether it needs a leader.

    Labels are placed one by one, each where it costs least, and then may move again when the others stand; of several
    orders to do so the cheapest outcome is kept.
    """
    if not len(centres):
        return []
    candidates = [_candidates(c, size, pixel) for c, size in zip(centres, sizes, strict=True)]
    paths = [_path(c, boxes) for c, boxes in zip(centres, candidates, strict=True)]
    led = np.repeat(np.array(_DISTANCES) > _FREE, len(_ANGLES))
    alone = [
        _cost_alone(
            candidates[i], paths[i], led, frame, centres, np.delete(centres, i, axis=0), obstacles, fixed, pixel
        )
        for i in range(len(centres))
    ]
    orders = [-sizes[:, 0], centres[:, 1], -centres[:, 1], centres[:, 0], -centres[:, 0]]
    best: tuple[float, dict[int, int]] = (np.inf, {})
    for order in (np.argsort(key, kind="stable") for key in orders):
        chosen: dict[int, int] = {}
        for _ in range(_ROUNDS):
            total = 0.0
            for i in order:
                others = [k for k in chosen if k != i]
                taken = np.array([candidates[k][chosen[k]] for k in others]).reshape(-1, 4)
                lines = [paths[k][chosen[k]] for k in others if led[chosen[k]]]
                cost = alone[i] + 40 * _hits(candidates[i], taken, 2 * pixel)
                cost += 30 * led * _run_through(paths[i], taken, pixel)
                cost += 6 * np.minimum(4, _contains(candidates[i], np.concatenate([np.empty((0, 2)), *lines]), pixel))
                chosen[i] = int(np.argmin(cost))
                total += float(cost[chosen[i]])
        if total < best[0]:
            best = (total, chosen)
    return [(candidates[i][k], bool(led[k])) for i, k in sorted(best[1].items())]


def _candidates(centre: np.ndarray, size: np.ndarray, pixel: float) -> np.ndarray:
    """Boxes around a point, nearest distance first: (len(_DISTANCES) * len(_ANGLES), 4)."""
    angles = np.radians(_ANGLES)
    dx, dy = np.cos(angles).round(6), np.sin(angles).round(6)
    side = np.where(dx > 0.2, 0, np.where(dx < -0.2, 1, 0.5))
    reach = np.array(_DISTANCES)[:, None] * pixel
    x = centre[0] + dx * reach - size[0] * side
    y = centre[1] + dy * reach - size[1] * (1 - dy) / 2
    return np.stack([x, y, x + size[0], y + size[1]], axis=-1).reshape(-1, 4)


def _cost_alone(
    boxes: np.ndarray,
    paths: np.ndarray,
    led: np.ndarray,
    frame: np.ndarray,
    centres: np.ndarray,
    others: np.ndarray,
    obstacles: np.ndarray,
    fixed: np.ndarray,
    pixel: float,
) -> np.ndarray:
    """What each candidate costs before the other labels stand: distance, the frame, points, lines and fixed boxes."""
    outside = (boxes[:, :2] < frame[:2]).any(axis=1) | (boxes[:, 2:] > frame[2:]).any(axis=1)
    cost = 0.12 * np.repeat(_DISTANCES, len(_ANGLES)) + 0.05 * np.tile(np.arange(len(_ANGLES)), len(_DISTANCES))
    cost += 50 * outside + 40 * _hits(boxes, fixed, 2 * pixel)
    cost += 20 * _contains(boxes, centres, 5 * pixel) + np.minimum(25, 3 * _contains(boxes, obstacles, 2 * pixel))
    cost = cost + 8 * (~led & (_gap(boxes, others) <= 1.25 * np.repeat(_DISTANCES, len(_ANGLES)) * pixel))
    leader = 4.0 + 30 * _run_through(paths, fixed, pixel)
    leader = leader + 6 * _near(paths, others, 5 * pixel) + 0.8 * _near(paths, obstacles, 2.5 * pixel)
    return cost + led * leader


def _hits(boxes: np.ndarray, taken: np.ndarray, pad: float) -> np.ndarray:
    """How many of the ``taken`` boxes each box overlaps, with ``pad`` pixels of air."""
    a, b = boxes[:, None], taken[None]
    apart = (a[..., :2] - pad > b[..., 2:]) | (a[..., 2:] + pad < b[..., :2])
    return (~apart.any(axis=-1)).sum(axis=1)


def _contains(boxes: np.ndarray, points: np.ndarray, pad: float) -> np.ndarray:
    """How many of the points lie within ``pad`` pixels of each box."""
    a, b = boxes[:, None], points[None]
    return ((b > a[..., :2] - pad) & (b < a[..., 2:] + pad)).all(axis=-1).sum(axis=1)


def _gap(boxes: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Distance in pixels from each box to the nearest of the points: a label should be nearest to its own."""
    if not len(points):
        return np.full(len(boxes), np.inf)
    a, b = boxes[:, None], points[None]
    away = np.maximum(np.maximum(a[..., :2] - b, b - a[..., 2:]), 0)
    return np.hypot(away[..., 0], away[..., 1]).min(axis=1)


def _run_through(paths: np.ndarray, taken: np.ndarray, pad: float) -> np.ndarray:
    """How many of the ``taken`` boxes each leader runs through."""
    p, b = paths[:, :, None], taken[None, None]
    return ((p > b[..., :2] - pad) & (p < b[..., 2:] + pad)).all(axis=-1).any(axis=1).sum(axis=1)


def _near(paths: np.ndarray, points: np.ndarray, reach: float) -> np.ndarray:
    """How many points of each leader come within ``reach`` pixels of one of ``points``."""
    if not len(points):
        return np.zeros(len(paths), int)
    squared = [((path[:, None] - points[None]) ** 2).sum(axis=-1).min(axis=1) for path in paths]
    return (np.array(squared) < reach**2).sum(axis=1)


def _path(centre: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Points along the leaders from a point to each of its boxes: (boxes, 24, 2)."""
    ends = np.clip(centre, boxes[:, :2], boxes[:, 2:])
    return centre + (ends - centre)[:, None] * np.linspace(0.05, 1, 24)[:, None]


def _leader(
    ax: Axes, point: tuple[float, float], centre: np.ndarray, place: np.ndarray, pixel: float, colour: str
) -> None:
    end = (np.clip(centre, place[:2], place[2:]) - centre) / pixel
    line = ax.annotate(
        "", point, xytext=tuple(end), textcoords="offset points",
        arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3},
    )  # fmt: skip
    line.set_in_layout(False)


def legend_below(ax: Axes, handles: Sequence[Artist], *, drop: float = 0.47, loc: str = "upper left") -> Legend:
    """A legend under the axes, in one line, or in as few more as the figure's width asks for.

    Args:
        drop: inches from the axes' lower edge down to it, whatever their height.
        loc: "upper left" or "upper right", the edge of the axes that it starts or ends at.
    """
    below = ax.transAxes + ScaledTranslation(0, -drop, ax.figure.dpi_scale_trans)
    corner = (1.005, 0) if loc == "upper right" else (-0.01, 0)
    ax.figure.draw_without_rendering()  # settles where the axes start and end
    renderer = ax.figure.canvas.get_renderer()
    for lines in range(1, len(handles) + 1):
        legend = ax.legend(
            handles=handles, loc=loc, bbox_to_anchor=corner, bbox_transform=below, ncol=-(-len(handles) // lines),
            frameon=False, fontsize=SMALL, handlelength=1.0, handleheight=1.0, columnspacing=1.2, borderaxespad=0,
        )  # fmt: skip
        taken = legend.get_window_extent(renderer)
        if taken.x0 >= 0 and taken.x1 <= ax.figure.bbox.width:
            break
    return legend
