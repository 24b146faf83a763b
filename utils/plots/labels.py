"""Labels beside the things they name, without collisions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from utils.plots.style import INK, SMALL

# right of the point reads best, then below and above it, then left; sixteen directions in that order
_ANGLES = (0, -30, 30, -60, 60, -90, 90, -15, 15, -45, 45, -120, 120, -150, 150, 180)
_DIRECTIONS = [(round(np.cos(np.radians(a)), 6), round(np.sin(np.radians(a)), 6)) for a in _ANGLES]
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
    size: float = SMALL,
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
    frame = ax.get_window_extent(renderer)
    obstacles = _samples(ax, avoid)
    notes = [
        ax.annotate(text, point, (0, 0), textcoords="offset points", size=size, linespacing=1.1, va="bottom",
                    color=colours[i] if colours else INK)
        for i, (text, point) in enumerate(zip(texts, points, strict=True))
    ]  # fmt: skip
    for note in notes:
        note.set_in_layout(False)
    boxes = [note.get_window_extent(renderer) for note in notes]
    places = _arrange(centres, boxes, frame, list(keep_clear), obstacles, pixel)
    for i, (place, distance) in enumerate(places):
        notes[i].set_position(((place.x0 - centres[i][0]) / pixel, (place.y0 - centres[i][1]) / pixel))
        if distance > _FREE:
            _leader(ax, points[i], centres[i], place, pixel, colours[i] if colours else INK)
    return notes


def _arrange(
    centres: np.ndarray, boxes: Sequence[Bbox], frame: Bbox, fixed: list[Bbox], obstacles: np.ndarray, pixel: float
) -> list[tuple[Bbox, float]]:
    """Place the long labels first, then give each label a few chances to move to a cheaper place among the others."""
    order = np.argsort([-box.width for box in boxes], kind="stable")
    chosen: dict[int, tuple[Bbox, float]] = {}
    for _ in range(_ROUNDS):
        for i in order:
            others = [chosen[k] for k in chosen if k != i]
            taken = fixed + [place for place, _ in others]
            lines = [_path(centres[k], chosen[k][0]) for k in chosen if k != i and chosen[k][1] > _FREE]
            blocked = np.concatenate([obstacles, *lines])
            best = None
            for rank, (distance, (dx, dy)) in enumerate(itertools.product(_DISTANCES, _DIRECTIONS)):
                side = 0 if dx > 0.2 else 1 if dx < -0.2 else 0.5
                x = centres[i][0] + dx * distance * pixel - boxes[i].width * side
                y = centres[i][1] + dy * distance * pixel - boxes[i].height * (1 - dy) / 2
                place = Bbox.from_bounds(x, y, boxes[i].width, boxes[i].height)
                cost = 0.12 * distance + 0.05 * (rank % len(_DIRECTIONS))
                cost += _cost(place, frame, taken, centres, blocked, pixel)
                if distance > _FREE:
                    cost += 4 + _crossings(centres[i], place, taken, np.delete(centres, i, axis=0), blocked, pixel)
                if best is None or cost < best[0]:
                    best = (cost, place, distance)
            chosen[i] = best[1:]
    return [chosen[i] for i in range(len(boxes))]


def _samples(ax: Axes, lines: Sequence[tuple[Sequence[float], Sequence[float]]]) -> np.ndarray:
    """Points every few pixels along polylines, in pixels."""
    found = [np.empty((0, 2))]
    for xs, ys in lines:
        corners = ax.transData.transform(np.column_stack([xs, ys]))
        for a, b in itertools.pairwise(corners):
            steps = max(2, int(np.hypot(*(b - a)) / 4))
            found.append(a + (b - a) * np.linspace(0, 1, steps)[:, None])
    return np.concatenate(found)


def _cost(
    place: Bbox, frame: Bbox, taken: Sequence[Bbox], others: np.ndarray, obstacles: np.ndarray, pixel: float
) -> float:
    pad = 2 * pixel
    grown = Bbox.from_extents(place.x0 - pad, place.y0 - pad, place.x1 + pad, place.y1 + pad)
    cost = 0.0
    outside = max(frame.x0 - place.x0, place.x1 - frame.x1, frame.y0 - place.y0, place.y1 - frame.y1, 0)
    cost += 50 * (outside > 0)
    cost += 40 * sum(grown.overlaps(t) for t in taken)
    cost += 20 * _inside(others, grown, 3 * pixel)
    return cost + min(25, 3 * _inside(obstacles, grown, 0))


def _crossings(
    centre: np.ndarray, place: Bbox, taken: Sequence[Bbox], others: np.ndarray, obstacles: np.ndarray, pixel: float
) -> float:
    """Cost of a leader from the point to the label: texts and points that it would run through, lines it crosses."""
    path = _path(centre, place)
    cost = 30.0 * sum(_inside(path, box, pixel) > 0 for box in taken)
    for points, reach, weight in ((others, 5 * pixel, 6), (obstacles, 2.5 * pixel, 0.8)):
        if len(points):
            near = np.hypot(*(path[:, None] - points[None]).transpose(2, 0, 1)).min(axis=1) < reach
            cost += weight * int(near.sum())
    return cost


def _path(centre: np.ndarray, place: Bbox) -> np.ndarray:
    """Points along the leader, in pixels."""
    end = np.clip(centre, (place.x0, place.y0), (place.x1, place.y1))
    return centre + (end - centre) * np.linspace(0.05, 1, 32)[:, None]


def _inside(points: np.ndarray, box: Bbox, pad: float) -> int:
    if not len(points):
        return 0
    x, y = points[:, 0], points[:, 1]
    return int(((x > box.x0 - pad) & (x < box.x1 + pad) & (y > box.y0 - pad) & (y < box.y1 + pad)).sum())


def _leader(ax: Axes, point: tuple[float, float], centre: np.ndarray, place: Bbox, pixel: float, colour: str) -> None:
    end = (np.clip(centre[0], place.x0, place.x1), np.clip(centre[1], place.y0, place.y1))
    line = ax.annotate(
        "", point, xytext=((end[0] - centre[0]) / pixel, (end[1] - centre[1]) / pixel), textcoords="offset points",
        arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3},
    )  # fmt: skip
    line.set_in_layout(False)
