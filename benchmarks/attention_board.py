"""The leaderboard's file: rows in JSON, read with care, added to in one step, and printed where they compare."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import benchmark_cli
from benchmarks.attention_speed import SHAPE_LAYOUT
from utils import record_schemas, records
from utils.atomic_write import write_atomically
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING

FORMAT = 1
POINT = {
    "direction": TEXT,
    **SHAPE_LAYOUT,
    "flops": SIZE,
    "calls_a_lap": SIZE,
    "timed": {str: {**TIMING, "flops_per_second": POSITIVE}},
    "over": {str: RATIO},
}
ROW = {
    "name": TEXT,
    "target": TEXT,
    "sha256": TEXT,
    "date": TEXT,
    "device": TEXT,
    "versions": {str: TEXT},
    "dtype": TEXT,
    "base": TEXT,
    "points": [POINT],
}
BOARD = {"format": SIZE, "rows": [ROW]}

#: The entrant in a row's points; all others there are the course's and PyTorch's.
YOURS = "yours"


class BoardError(ValueError):
    """A board that cannot be used; the message names the file and what is wrong with it."""


def problem_of(raw: Any) -> str | None:
    """The first thing in which a parsed file is no board."""
    problems = record_schemas.check(raw, BOARD, "board")
    if not problems and raw["format"] != FORMAT:
        return f"board.format must be {FORMAT}"
    if problems:
        return problems[0]
    for number, row in enumerate(raw["rows"]):
        for index, point in enumerate(row["points"]):
            for name, among in ((YOURS, point["over"]), (row["base"], point["timed"])):
                if name not in among:
                    return f"board.rows[{number}].points[{index}] has no {name!r}"
    return None


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a board; none if there is no file yet.

    Raises:
        BoardError: the file is not a board, or its folder cannot be written to.
    """
    if not path.parent.is_dir():
        raise BoardError(f"the folder of {path} is not there: make it, or name another file with --board")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BoardError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        problem = str(error)
    else:
        problem = problem_of(raw)
        if problem is None:
            return raw["rows"]
    raise BoardError(f"{path} is damaged, and left as it is: {problem} (--board names another file)")


def add(path: Path, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add a row to a board, in one step: a failure leaves the file as it was. Return all rows.

    Raises:
        BoardError: the board was damaged meanwhile, or it cannot be written.
    """
    rows = [*read(path), dict(row)]
    if problem := problem_of(json.loads(json.dumps({"format": FORMAT, "rows": rows}))):
        raise BoardError(f"{path} is left as it is: {problem}")
    try:
        write_atomically(path, records.as_text({"format": FORMAT, "rows": rows}).encode())
    except OSError as error:
        raise BoardError(f"{path} cannot be written: {error}") from error
    return rows


# ---- what is printed -------------------------------------------------------------------------------------------------


def mean(ratios: Iterable[float]) -> float:
    """Geometric mean: half and double make one."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def scores(row: Mapping[str, Any], name: str = YOURS) -> dict[str, float] | None:
    """An entrant's speed over the base's: geometric means of each direction and of ``all``, and the ``lowest`` ratio.

    None for who was not measured on every point of the row.
    """
    ratios: dict[str, list[float]] = {}
    for point in row["points"]:
        # forward, the capstone's fast mode is the other one
        usual = name.partition(", fast")[0]
        found = point["over"].get(name) or point["over"].get(usual)
        if name == row["base"]:
            found = {"ratio": 1.0}
        if found is None:
            return None
        ratios.setdefault(point["direction"], []).append(found["ratio"])
    every = [ratio for direction in ratios.values() for ratio in direction]
    return {**{direction: mean(each) for direction, each in ratios.items()}, "all": mean(every), "lowest": min(every)}


def setting(row: Mapping[str, Any]) -> tuple:
    """What two rows must share to be compared: device, dtype, base, and all shapes in all directions."""
    shapes = sorted((p["direction"], p["head_dim"], p["seq_len"], p["causal"], p["batch"]) for p in row["points"])
    return row["device"], row["dtype"], row["base"], tuple(shapes)


def boards(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table for each setting, the fastest first: the newest row of each name, and what the newest row was beside."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(setting(row), []).append(row)
    return "\n\n".join(board(key, group) for key, group in groups.items())


def board(key: tuple, rows: list[Mapping[str, Any]]) -> str:
    """The table of one setting."""
    device, dtype, base, shapes = key
    newest = rows[-1]
    entrants = {row["name"]: (scores(row), row["date"], row["sha256"][:8]) for row in rows}
    others = dict.fromkeys(name for point in newest["points"] for name in point["timed"] if name != YOURS)
    entrants |= {name: (scores(newest, name), newest["date"], "") for name in others}
    ranked = sorted(((found, *rest, name) for name, (found, *rest) in entrants.items() if found), key=rank)
    directions = [name for name in ("forward", "backward") if any(shape[0] == name for shape in shapes)]
    table = []
    for place, (found, date, source, name) in enumerate(ranked, 1):
        ratios = [f"{found[column]:.3f}" for column in ("all", *directions, "lowest")]
        table.append([f"{place:2d} {name}", *ratios, date, source])
    words = f"{device}, {dtype}, {' and '.join(directions)}, {len({shape[1:] for shape in shapes})} shapes"
    text = benchmark_cli.text_table(
        [f"times as fast as {base}", "mean", *directions, "lowest", "date", "source"], table
    )
    return f"{words}\n{text}"


def rank(entrant: tuple) -> float:
    """Sorts the fastest first."""
    return -entrant[0]["all"]
