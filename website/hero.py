"""The figure on the home page: attention twice, as eager PyTorch runs it and as the course's kernel walks it.

Every number comes from ``utils.attention_math`` (bytes by formula) or from a record (times, peak memory, what the
GPU's counters saw). ``_generated/hero.html`` is the figure as it stands without scripts; ``static/home.js`` plays it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from utils import records
from utils.attention_math import AttentionShape, flash2_traffic, on_chip_bytes, standard_attention
from utils.hardware import gpu
from utils.units import number, quantity
from website import facts

FILE = "_generated/hero.html"
TITLE = "The same attention on the same GPU. Only one of them stores its scores."
#: Tiles along a side of the drawing; each stands for many of the kernel's.
TILES = 8
SHORTEST = 2048


@dataclass(frozen=True)
class Length:
    """Attention of ``n`` tokens, forward: eager (E) beside the course's kernel (F). Seconds, bytes.

    Attributes:
        eager_seconds, seconds: measured; None where eager attention did not fit.
        eager_peak, peak: measured, beyond what was there before the call; None likewise.
        eager_kernels: name and HBM bytes of each kernel by formula.
        scores: bytes of one N x N matrix, over all heads.
        least: bytes of Q, K, V read once, O and the logsumexp written once.
        counted: HBM bytes by the GPU's counters of eager and of ours, for the one length where they were read.
    """

    n: int
    eager_seconds: float | None
    seconds: float
    eager_peak: int | None
    peak: int
    eager_kernels: tuple[tuple[str, int], ...]
    scores: int
    reads: tuple[int, int, int]
    writes: int
    counted: tuple[int, int] | None

    @property
    def eager_bytes(self) -> int:
        """HBM bytes of eager attention by formula."""
        return sum(size for _, size in self.eager_kernels)

    @property
    def least(self) -> int:
        """HBM bytes that no kernel can avoid."""
        return sum(self.reads) + self.writes


def shape_at(n: int) -> AttentionShape:
    """The recorded shape with ``n`` tokens."""
    shape = records.load("attention_memory").results["shape"]
    return AttentionShape(shape["batch"], shape["heads"], n, shape["head_dim"])


def lengths() -> list[Length]:
    """Each recorded length from 2,048 tokens on at which the course's kernel was timed, shortest first."""
    found = records.load("attention_memory").results
    times = {(t["way"], t["seq_len"]): t["seconds"] for t in found["times"] if t["pass"] == "forward"}
    peaks = {(m["way"], m["seq_len"]): m["peak_bytes"] for m in found["memory"] if m["pass"] == "forward"}
    counted = AttentionShape(**records.load("attention_traffic").results["large_shape"])
    made = []
    for n in sorted(n for way, n in times if way == "ours" and n >= SHORTEST):
        shape = shape_at(n)
        kernels = tuple((kernel.name, kernel.cost.bytes) for kernel in standard_attention(shape, found["dtype"]))
        once = flash2_traffic(shape, n, n, found["dtype"])  # one tile of queries: K and V come from HBM once
        made.append(Length(
            n, times.get(("eager", n)), times["ours", n], peaks.get(("eager", n)), peaks["ours", n], kernels,
            shape.score_elements * 2, (once.q, once.k, once.v), once.stored, counters() if shape == counted else None,
        ))  # fmt: skip
    return made


def counters() -> tuple[int, int]:
    """HBM bytes, read and written, by the GPU's counters: of eager attention and of the course's kernel.

    What the multiprocessors wrote last is still in the L2 cache when the counters are read, and reaches HBM later: all
    of it counts as written.
    """
    rows = {row["name"]: row for row in records.load("attention_traffic").results["large"]}
    eager, ours = (
        row["hbm_bytes_read"] + max(row["hbm_bytes_written"], row["sm_bytes_written"])
        for row in (rows["eager"], rows["ours"])
    )
    return eager, ours


def on_chip() -> tuple[tuple[int, int], dict[str, int]]:
    """The kernel's tile (queries, keys) on the recorded GPU, and bytes that a program holds on the chip, by tensor."""
    found = records.load("attention_blocks").results
    head_dim = records.load("attention_memory").results["shape"]["head_dim"]
    tile = next(p["tile"] for p in found["points"] if p["chosen"] and p["head_dim"] == head_dim)
    places = on_chip_bytes(tile[0], tile[1], head_dim, found["dtype"], stages=tile[3])
    return (tile[0], tile[1]), {name: size for place in places.values() for name, size in place.items()}


def start_length() -> Length:
    """The length that the figure opens with: where the counters were read."""
    return next(length for length in lengths() if length.counted)


# ---- the figure ------------------------------------------------------------------------------------------------------

_CELL, _PITCH, _LEFT, _TOP = 27, 29, 50, 64


def _rect(kind: str, x: float, y: float, width: float, height: float, **data: int) -> str:
    marks = "".join(f' data-{name}="{value}"' for name, value in data.items())
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="3"{marks}/>'


def _panel(way: str, title: str, desc: str) -> str:
    """One panel: strips of Q, K, V and O around the scores. ``way`` is "eager" or "flash"."""
    body, side = [], TILES * _PITCH - 2
    for i in range(TILES):
        at = i * _PITCH
        body.append(_rect("io hbm", 22, _TOP + at, 14, _CELL, q=i))
        body.append(_rect("io hbm", _LEFT + at, 14, _CELL, 14, v=i))
        body.append(_rect("io hbm", _LEFT + at, 36, _CELL, 14, k=i))
        body.append(_rect("io hbm", _LEFT + side + 14, _TOP + at, 14, _CELL, o=i))
    for tile in range(TILES * TILES):
        row, column = divmod(tile, TILES)
        x, y = _LEFT + column * _PITCH, _TOP + row * _PITCH
        body.append(_rect("s on" if way == "eager" else "s done", x, y, _CELL, _CELL, s=tile))
        if way == "eager":
            body.append(_rect("p on", x + 6, y + 6, _CELL - 12, _CELL - 12, p=tile))
    middle = _TOP + side / 2
    names = (("Q", 11, middle + 6), ("K", _LEFT - 9, 48), ("V", _LEFT - 9, 26), ("O", _LEFT + side + 39, middle + 6))
    body += [f'<text x="{x}" y="{y}" text-anchor="middle">{name}</text>' for name, x, y in names]
    width, height = _LEFT + side + 50, _TOP + side + 4
    return (
        f'<svg class="walk" data-way="{way}" viewBox="0 0 {width} {height}" role="img" aria-labelledby="hero-{way}-t '
        f'hero-{way}-d"><title id="hero-{way}-t">{escape(title)}</title><desc id="hero-{way}-d">{escape(desc)}</desc>'
        f"{''.join(body)}</svg>"
    )


def _meters(way: str, length: Length) -> str:
    eager = way == "eager"
    values = {
        "time": ("Time", length.eager_seconds if eager else length.seconds, length.eager_seconds, "s"),
        "bytes": ("HBM traffic", length.eager_bytes if eager else length.least, length.eager_bytes, "B"),
        "memory": ("Memory beyond Q, K, V", length.eager_peak if eager else length.peak, length.eager_peak, "B"),
    }
    items = []
    for name, (label, value, whole, unit) in values.items():
        share = round(100 * value / whole, 2)
        items.append(
            f'<div class="meter {name}"><dt>{label}</dt><dd><b data-{name}>{quantity(float(value), unit, 3)}</b>'
            f'<span class="bar" aria-hidden="true"><i style="width:{share}%"></i></span></dd></div>'
        )
    return f"<dl>{''.join(items)}</dl>"


def data() -> dict[str, object]:
    """What the script needs: the lengths, and how they are drawn."""
    return {
        "tiles": TILES,
        "start": start_length().n,
        "heads": shape_at(SHORTEST).heads,
        "gpuBytes": int(gpu("H100").memory_bytes),
        "lengths": [asdict(length) for length in lengths()],
    }


def captions() -> tuple[str, str]:
    """Where the numbers come from, in a sentence; and how the figure is to be read."""
    start, (tile, held) = start_length(), on_chip()
    times, traffic, shape = records.load("attention_memory"), records.load("attention_traffic"), shape_at(start.n)
    label = (
        f"Times, and memory beyond Q, K and V: measured on {times.label}. Forward pass in {times.results['dtype']}, "
        f"{shape.heads} heads, D = {shape.head_dim}."
    )
    reading = (
        f"Drawn is one of the {shape.heads} heads; a square is an eighth of its queries by an eighth of its keys, and "
        f"the small square in it the probability that is stored beside the score. The kernel of lab 3, with a "
        f"running maximum, works in tiles of {tile[0]} × {tile[1]}, and a program holds {_show(sum(held.values()))} on "
        f"the chip. Rows are drawn one after the other; a GPU walks many at once. Only the ends of a run are measured, "
        f"so its pace is drawn even. "
        f"HBM traffic is by formula: eager attention reads and writes every matrix of each of its kernels; "
        f"FlashAttention reads Q, K and V at least once and writes O once, and what it reads again comes from the L2 "
        f"cache. At N = {number(start.n)} the GPU’s own counters saw {_show(start.counted[0])} and "
        f"{_show(start.counted[1])} ({traffic.results['dtype']}, {traffic.label}), with what is still in the L2 cache "
        f"at the end and goes to HBM later."
    )
    return label, reading


def _show(size: float) -> str:
    return quantity(float(size), "B", 3)


def _way(way: str, name: str, does: str, desc: str, length: Length) -> str:
    """One of the two columns: name, what it does, panel and meters."""
    unfit = '<p class="no-fit" hidden></p>' if way == "eager" else ""
    return (
        f'<section aria-label="{name}"><p class="way">{name}</p><p class="sub">{does}</p>\n'
        f'<div class="stage">{_panel(way, name, desc)}{unfit}</div>{_meters(way, length)}</section>'
    )


def figure() -> str:
    """The figure as HTML, complete without scripts: both runs at their end, with all numbers."""
    start, (label, reading) = start_length(), captions()
    eager_desc = (
        f"The scores of {number(start.n)} queries and as many keys as a square of tiles, all stored in HBM, and with "
        f"them as many probabilities: {_show(2 * start.scores)} over {shape_at(start.n).heads} heads."
    )
    flash_desc = (
        "The same square, empty: no score is ever stored. Each tile of it was on the chip once, with the queries of "
        "its row, the keys and values of its column, and the output of its row, written when the row was done."
    )
    choices = "".join(
        f'<label><input type="radio" name="hero-n" value="{length.n}"{" checked" if length.n == start.n else ""}>'
        f"<span>{number(length.n)}</span></label>"
        for length in lengths()
    )
    key = (("hbm", "in HBM"), ("chip", "on the chip"), ("ghost", "never stored"))
    keys = "".join(f'<span><i class="{kind}"></i>{text}</span>' for kind, text in key)
    counters_say = "<span>, by the GPU’s counters</span>"
    verdicts = (
        ("time", number(start.eager_seconds / start.seconds, 2), "faster"),
        ("bytes", number(start.counted[0] / start.counted[1], 2), f"less HBM traffic{counters_say}"),
        ("memory", number(start.eager_peak / start.peak, 3), "less memory"),
    )
    verdict = " ".join(f'<span data-verdict="{name}"><b>{gain}×</b> {what}</span>' for name, gain, what in verdicts)
    return f"""<figure class="hero" id="hero" aria-labelledby="hero-title">
<p class="hero-title" id="hero-title">{TITLE}</p>
<p class="verdict">{verdict}</p>
<p class="hero-key">{keys}</p>
<div class="hero-panels">
{_way("eager", "Eager attention", "stores every score and probability", eager_desc, start)}
{_way("flash", "FlashAttention", "the kernel that you write in lab 3", flash_desc, start)}
</div>
<div class="hero-controls" hidden>
<div class="buttons" role="group" aria-label="animation"></div>
<fieldset class="lengths"><legend>Tokens N</legend>{choices}</fieldset>
<p class="say" aria-live="polite"></p>
</div>
<figcaption>{label} <a href="notebooks/06_flash_attention_forward.html">Lecture 06</a> derives it.
<details><summary>How to read this figure</summary><p>{reading}</p></details></figcaption>
<script type="application/json" id="hero-data">{json.dumps(data(), separators=(",", ":"))}</script>
</figure>
"""


def write(source: Path) -> None:
    """Write the figure, and the facts below it, into the staged sources."""
    (source / FILE).parent.mkdir(parents=True, exist_ok=True)
    (source / FILE).write_text(figure(), encoding="utf-8")
    facts.write(source)
