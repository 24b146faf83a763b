"""Figures: one look, alternative text always, small opaque PNGs, drawn from real data, clear errors for bad input."""

import base64
import gzip
import io
import os
import re
import shutil
import subprocess
import sys
from functools import cache, partial
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.patches import Patch
from PIL import Image

from tests.drawn import player_data
from utils import plots
from utils.hardware import GPUS, gpu
from utils.plots import labels, style
from utils.plots.animate import animate
from utils.plots.ticks import binary_bytes
from utils.simt import If, Op, occupancy, run_warp, schedule_tiles

H100 = gpu("H100")


def warp():
    branch = If(lambda lane: lane < 4, [Op("A"), Op("B")], [Op("X"), Op("Y")])
    return plots.warp_timeline(run_warp([branch, Op("Z")]), title="A branch")


def coalescing():
    patterns = {"stride 1": range(32), "column": range(0, 32 * 512, 512), "same": [7] * 32, "odd lanes": [None, 5] * 16}
    return plots.coalescing_map([plots.Pattern(name, indices) for name, indices in patterns.items()], title="Four")


def pyramid():
    level = plots.MemoryLevel
    return plots.memory_pyramid(
        [level("registers", H100.sms * H100.registers_per_sm * 4, latency=1),
         level("L2", H100.l2_bytes, latency=(260, 280), measured_latency=265.5),
         level("HBM", H100.memory_bytes, bandwidth=H100.memory_bandwidth, colour=plots.HBM, note="off chip")],
        title="Levels", subtitle="the whole chip",
    )  # fmt: skip


def latencies():
    each = plots.LatencyRange
    return plots.latency_ranges(
        [each("L1", 33, 33, "A100"), each("L1", 38, 41, "H100", True), each("L2", 200, 280, "all")], title="Latencies"
    )


def roofline():
    points = [
        plots.Point("softmax", 1.25, 2.8e12),
        plots.Point("matmul", 1365.0, 640e12),
        plots.Point("ReLU", 0.25),
    ]
    return plots.roofline_plot(
        H100, points, measured=plots.Ceilings(700e12, 3.0e12, "measured"), subtitle="H100, a date",
        lower_roofs={"fp32 cores": 67e12}, title="Three points",
    )  # fmt: skip


def sweep():
    x = 2.0 ** np.arange(10, 20)
    series = [
        plots.Series("recorded", x * 1e6, x * 0.9e6, x * 1.1e6, colour=plots.HBM),
        plots.Series("now", x * 1.1e6, kind="live"),
        plots.Series("model", [1e9, 2e9], kind="model", x=[1024, 2**19]),
    ]
    return plots.sweep(
        x, series, title="Larger copies are faster", xlabel="bytes", ylabel="bandwidth", x_unit="B", y_unit="B/s",
        limits={"data sheet": 3.35e12}, marks={"L2": 2**16},
    )  # fmt: skip


def occupancies():
    kernels = {f"{r} registers": occupancy(H100, 256, r) for r in (32, 128)}
    return plots.occupancy_bars(kernels, H100, title="Warp slots")


def tiles():
    return plots.tile_map([plots.TileGrid(n, n, 256, 128, 108) for n in (1792, 1793)], title="One row more")


def classes():
    rows = {
        "FLOPs": {"contraction": 998.0, "normalisation": 1.7, "element-wise": 0.3},
        "time": {"contraction": 3, "new": 2},
    }
    return plots.class_shares(rows, totals={"time": "5 ms"})


def memory():
    rows = {"DDP": {"weights": 15e9, "optimizer": 90e9}, "ZeRO": {"weights": 15e9, "optimizer": 1e9}}
    return plots.memory_bars(rows, marks={"DDP": (80e9, "H100")}, title="Sharding makes it fit")


DRAWERS = {
    "warp": warp, "coalescing": coalescing, "pyramid": pyramid, "latencies": latencies, "roofline": roofline,
    "sweep": sweep, "occupancies": occupancies, "tiles": tiles, "classes": classes, "memory": memory,
    "waves": lambda: plots.sm_waves(schedule_tiles(120, 108), 108),
    "generations": lambda: plots.generations([GPUS[n] for n in ("P100", "V100", "A100", "H100")], title="Growth"),
}  # fmt: skip


def decode(data):
    return Image.open(io.BytesIO(data))


# ---- the look ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWERS.values(), ids=DRAWERS)
def test_every_drawer_gives_a_small_opaque_figure_with_alternative_text_from_its_data(draw, texts):
    fig = draw()
    assert len(fig.alt) > 40 and "\n" not in fig.alt and re.search(r"\d", fig.alt)
    data = plots.png(fig)
    image = decode(data)
    assert image.width == int(style.WIDTH * style.DPI) and image.width / image.height > 0.9
    assert "transparency" not in image.info
    assert image.convert("RGB").getpixel((1, 1)) == (255, 255, 255)
    assert len(data) < 120_000
    texts.clear()
    assert data == plots.png(fig)
    assert len(texts) > 4
    for text, size, font, box in texts:
        assert size >= 8.5 and font == "DejaVu Sans", text
        assert box is None or (box[0] >= -1 and box[2] <= image.width + 1), f"{text!r} is cut off: {box}"
        assert box is None or (box[1] >= -1 and box[3] <= image.height + 1), f"{text!r} is cut off: {box}"
    boxes = [(text, box) for text, _, _, box in texts if box and text.strip()]
    for k, (text, a) in enumerate(boxes):
        for other, b in boxes[:k]:
            apart = a[0] > b[2] - 2 or b[0] > a[2] - 2 or a[1] > b[3] - 3 or b[1] > a[3] - 3
            assert apart, f"{text!r} at {a} covers {other!r} at {b}"


@pytest.fixture
def texts(monkeypatch):
    """Every text that is drawn: its size in points, its font, its box in pixels (None when it is turned)."""
    draw_text, seen = RendererAgg.draw_text, []

    def record(self, gc, x, y, s, prop, angle, ismath=False, mtext=None):
        width, height, descent = self.get_text_width_height_descent(s, prop, ismath)
        box = None if angle else (x, y - height + descent, x + width, y + descent)
        seen.append((s, prop.get_size_in_points(), prop.get_name(), box))
        return draw_text(self, gc, x, y, s, prop, angle, ismath, mtext)

    monkeypatch.setattr(RendererAgg, "draw_text", record)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["warp", "classes"])
def test_a_figure_does_not_depend_on_the_readers_own_matplotlib_settings(name):
    expected = plots.png(DRAWERS[name]())
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "font.family": "serif", "lines.linewidth": 9}):
        assert plots.png(DRAWERS[name]()) == expected


def test_the_colours_keep_the_meaning_that_the_style_gives_them():
    fixed = {"ARITHMETIC": "#0072B2", "HBM": "#D55E00", "ON_CHIP": "#009E73", "LINK": "#CC79A7", "WRONG": "#E69F00"}
    assert {name: getattr(plots, name) for name in fixed} == fixed
    image = decode(plots.png(warp())).convert("RGB")
    assert (0x00, 0x72, 0xB2) in {colour for _, colour in image.getcolors(1 << 24)}


@pytest.mark.slow
def test_shading_colours_and_alternative_text_of_a_roofline_go_by_the_same_ridge():
    reached = plots.Ceilings(700e12, 3.0e12, "measured")
    ridge = H100.peak_flops["bf16"] / H100.memory_bandwidth
    points = [plots.Point("between\nthe ridges", (reached.ridge + ridge) / 2, 1e14), plots.Point("right", 400.0, 1e14)]
    fig = plots.roofline_plot(H100, points, measured=reached, lower_roofs={"fp32 cores": 67e12}, title="One ridge")
    (ax,) = fig.axes
    dots = {line.get_xdata()[0]: line.get_mec() for line in ax.lines if line.get_marker() == "o"}
    assert [dots[point.intensity] for point in points] == [plots.HBM, plots.ARITHMETIC]
    memory, compute = (area.get_datalim(ax.transData) for area in ax.collections[:2])
    assert memory.x1 == pytest.approx(ridge) == compute.x0
    assert re.search(r"between the ridges: [^,]*, [^,]*, memory-bound.* right: [^,]*, [^,]*, compute-bound", fig.alt)
    assert "Thin roof of the fp32 cores: 67 TFLOP/s" in fig.alt


def test_a_long_title_is_wrapped_into_lines_of_like_length():
    lines = style.balanced("From P100 to B200: 16-bit arithmetic 106 times, memory bandwidth 10.9 times as much", 74)
    assert len(lines) == 2 and abs(len(lines[0]) - len(lines[1])) < 15
    _, two = style.balanced("Lab 3's loop with a running maximum, N = 4,096", 44)
    assert two.endswith("N\xa0=\xa04,096"), "a value stays with its name"


@pytest.mark.parametrize("colour", [plots.HBM, plots.WRONG, style.mix(plots.ARITHMETIC, 0.3), "#FFFFFF", plots.LIMIT])
def test_coloured_letters_stand_out_on_white(colour):
    channels = [int(style.ink(colour)[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    assert 1.05 / (0.05 + np.dot([0.2126, 0.7152, 0.0722], linear)) >= 4.5


@pytest.mark.parametrize(("count", "lines"), [(2, 1), (6, 2), (12, 3)])
def test_a_legend_below_the_axes_takes_as_few_lines_as_the_width_asks_for(count, lines):
    fig, ax = plots.figure("A legend")
    legend = labels.legend_below(ax, [Patch(label=f"what part {k} is") for k in range(count)])
    fig.draw_without_rendering()
    boxes = [text.get_window_extent() for text in legend.get_texts()]
    assert len({round(box.y0) for box in boxes}) == lines
    assert min(box.x0 for box in boxes) > 0 and max(box.x1 for box in boxes) < fig.bbox.width


def test_a_marks_label_never_reaches_the_names_of_the_curves_or_the_next_mark():
    marks = {"L1 of an SM": 100, "half": 128, "all of the L2": 900}
    fig = plots.sweep(
        [2**k for k in range(11)], [plots.Series("measured", [2.0**k for k in range(11)])], title="Marks",
        xlabel="x", ylabel="y", marks=marks,
    )  # fmt: skip
    fig.draw_without_rendering()
    frame = fig.axes[0].get_window_extent()
    boxes = {note.get_text(): note.get_window_extent() for note in fig.axes[0].texts}
    first, second, third = (boxes[name] for name in marks)
    assert frame.x0 < first.x0 and first.x1 < second.x0 and second.x1 < third.x0 and third.x1 < frame.x1


@pytest.mark.parametrize(("title", "height"), [("", 3), ("  ", 3), (None, 3), ("A title", 0.1), ("A title", 40)])
def test_a_figure_without_title_or_of_impossible_height_is_refused(title, height):
    with pytest.raises(ValueError, match=r"title|height"):
        plots.figure(title, height=height)


# ---- alternative text ----------------------------------------------------------------------------------------------


@pytest.fixture
def published(monkeypatch):
    """What show publishes, without a notebook."""
    outputs = []
    monkeypatch.setattr(
        sys.modules["utils.plots.show"], "display", lambda data, metadata=None: outputs.append((data, metadata))
    )
    return outputs


@pytest.mark.slow
def test_show_publishes_png_and_alternative_text_and_releases_the_figure(published):
    fig = warp()
    alt = fig.alt
    plots.show(fig)
    data, metadata = published[0]
    assert decode(base64.b64decode(data["image/png"])).format == "PNG"
    assert metadata["image/png"]["alt"] == alt
    assert data["text/plain"] == "<figure>"
    assert not fig.axes
    plots.show(warp())
    assert published[1] == published[0]
    drawn = ElementTree.fromstring(gzip.decompress(base64.b64decode(metadata["image/png"]["svgz"])))
    assert drawn.tag.endswith("svg") and "text" not in {each.tag.rpartition("}")[2] for each in drawn.iter()}


def test_a_figure_of_very_many_marks_has_no_outlines(published, monkeypatch):
    monkeypatch.setattr(sys.modules["utils.plots.show"], "LARGEST_SVG", 1000)
    plots.show(warp())
    assert set(published[0][1]["image/png"]) == {"alt", "width"}


@pytest.mark.parametrize("alt", ["", "   ", "a figure", "\n\n  figure  \n\n"])
def test_an_alternative_text_that_says_nothing_is_refused(alt, published):
    fig, _ = plots.figure("A title")
    with pytest.raises(ValueError, match="alt must say"):
        plots.show(fig, alt=alt)
    with pytest.raises(ValueError, match="alt must say"):
        plots.show(fig)
    assert not published


def test_show_refuses_what_is_no_figure():
    with pytest.raises(TypeError, match="figure"):
        plots.show([1, 2, 3], alt="three numbers, one after the other")
    with pytest.raises(TypeError, match="alt"):
        plots.show(plots.figure("A title")[0], alt=3)


# ---- details -------------------------------------------------------------------------------------------------------


def test_labels_that_would_overlap_are_spread_as_little_as_needed():
    assert labels.spread([0, 10], 4) == [0, 10]
    assert labels.spread([5, 5], 4) == [3, 7]
    placed = labels.spread([3, 1, 2, 9], 2, 0, 10)
    assert sorted(placed)[0] >= 0 and np.diff(sorted(placed)).min() >= 2 - 1e-9
    assert np.argsort(placed).tolist() == np.argsort([3, 1, 2, 9]).tolist()


def test_the_labels_of_crowded_points_do_not_overlap():
    _, ax = plots.figure("Twelve points in a crowd")
    rng = np.random.default_rng(7)
    points = [(float(x), float(y)) for x, y in rng.uniform(0.3, 0.7, (12, 2))]
    ax.set(xlim=(0, 1), ylim=(0, 1))
    boxes = [note.get_window_extent() for note in plots.label_points(ax, points, [f"point {k}" for k in range(12)])]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.slow
def test_a_curve_named_within_the_axes_keeps_clear_of_a_marks_label_and_line():
    x = [2.0**k for k in range(10)]
    measured = plots.Series("measured", [0.45, 0.8, 1.3, 1.9, 2.7, 3.15, 3.05, 3.05, 3.05, 3.0])
    model = plots.Series("the model of a copy", [0.45, 0.8, 1.2, 1.6, 2.1, 2.5, 2.8, 2.9, 2.95, 3.0], kind="model")
    fig = plots.sweep(
        x, [measured, model], title="A copy", xlabel="size", ylabel="rate", yscale="linear", limits={"sheet": 3.35},
        marks={"half of the rate": 6, "twice L2": 50},
    )  # fmt: skip
    fig.draw_without_rendering()
    ax = fig.axes[0]
    box = {note.get_text(): note.get_window_extent() for note in ax.texts}
    names = [box[s.label] for s in (measured, model)]
    assert not any(name.overlaps(box[mark]) for name in names for mark in ("half of the rate", "twice L2"))
    places = [ax.transData.transform((at, 0))[0] for at in (6, 50)]
    assert not any(name.x0 < place < name.x1 for name in names for place in places)


def test_curves_that_meet_at_the_end_are_named_where_they_are_apart():
    x = [1, 2, 4, 8]
    series = [
        plots.Series("steep", [4, 8, 8, 8]),
        plots.Series("slow", [1, 2, 4, 8]),
        plots.Series("flat", [2, 2, 2, 2]),
    ]
    fig = plots.sweep(x, series, title="Two curves meet", xlabel="x", ylabel="y")
    (ax,) = fig.axes
    frame = ax.get_window_extent()
    places = {t.get_text(): t.get_window_extent() for t in ax.texts}
    assert places["flat"].x0 > frame.x1 > places["steep"].x1 and places["slow"].x1 < frame.x1


@pytest.mark.parametrize(("value", "text"), [(32, "32 B"), (2**15, "32 KiB"), (3 * 2**29, "1.5 GiB"), (0.5, "0.5 B")])
def test_bytes_on_a_power_of_two_axis_read_in_binary_units(value, text):
    assert binary_bytes(value) == text


def test_a_table_is_the_same_text_every_time_and_valid_html():
    rows = [{"kernel": "copy <b>", "time": 1.9e-4, "sectors": 1792, "exact": True}, {"kernel": "dot", "sectors": 3}]
    table = plots.table(rows, units={"time": "s"}, caption="Two kernels")
    assert repr(table).splitlines() == [
        "Two kernels",
        "kernel      time  sectors  exact",
        "--------  ------  -------  -----",
        "copy <b>  190 µs    1,792  ✓",
        "dot            –        3  –",
    ]
    page = table._repr_html_()
    check_html(page)
    assert "copy &lt;b&gt;" in page and "color:inherit" in page and '<th scope="col"' in page


# ---- animations ----------------------------------------------------------------------------------------------------


def check_html(text):
    """The tags of HTML, with their attributes; an error for a tag closed twice or never, or with an attribute twice."""
    strict = re.sub(r"<(img|input|br)\b([^>]*)>", r"<\1\2/>", re.sub(r"(?s)(<script>).*?(</script>)", r"\1\2", text))
    return [(each.tag, each.attrib) for each in ElementTree.fromstring(f"<page>{strict}</page>").iter()][1:]


def draw_bars(ax, count):
    ax.set(xlim=(-0.6, 5.6), ylim=(0, 6), xlabel="element", ylabel="value")
    ax.bar(range(count + 1), range(1, count + 2), color=plots.ARITHMETIC)


@cache
def bars(frames=6, **options):
    draws = [partial(draw_bars, count=k) for k in range(frames)]
    return plots.animate(draws, title="Bars rise", alt="Six bars appear one after the other.", height=2, **options)


def waves(**options):
    return plots.sm_waves_animation(schedule_tiles(120, 108), 108, **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bars, waves], ids=["frames", "waves"])
def test_an_animation_is_self_contained_valid_small_and_has_a_fallback_picture(make):
    made = make()
    tags = check_html(made.html)
    images = [attributes for tag, attributes in tags if tag == "img"]
    assert len(images) == 1 and images[0]["alt"] == made.alt and images[0]["src"].startswith("data:image/png;base64,")
    assert decode(base64.b64decode(images[0]["src"].split(",", 1)[1])).width == 1036
    plain = re.sub(r"[A-Za-z0-9+/=]{200,}", "", made.html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bimport\b|fetch|XMLHttp|WebSocket", plain)
    assert len(made.html) < 300_000
    assert 'id="' not in made.html, "two animations on a page must not share an id"
    for feature in ("prefers-reduced-motion", "aria-label", "aria-live", "ArrowRight", "data-lm-suppress-shortcuts"):
        assert feature in made.html


@pytest.mark.slow
def test_animations_are_deterministic_and_different_ones_have_different_keys():
    assert bars().html == bars().html and waves().html == waves().html
    keys = {re.search(r'data-mlf="(\w+)"', each.html)[1] for each in (bars(), bars(5), waves(), waves(title="Other"))}
    assert len(keys) == 4


@pytest.mark.slow
def test_an_animation_shows_itself_in_a_notebook_with_a_still_for_viewers_without_html(published):
    data, metadata = bars()._repr_mimebundle_()
    assert set(data) == {"text/html", "image/png", "text/plain"} and data["text/plain"] == "<animation>"
    assert metadata["image/png"]["alt"] == "Six bars appear one after the other."
    plots.show(bars())
    assert published[0][0]["text/html"] == data["text/html"]


@pytest.mark.slow
def test_frames_stored_as_differences_add_up_to_the_pictures_that_were_drawn():
    stored = player_data(bars())
    canvas = Image.new("RGB", (stored["width"], stored["height"]))
    seen = []
    for x, y, data in stored["frames"]:
        patch = decode(base64.b64decode(data))
        assert len(patch.getpalette()) == 768, "browsers draw an index without a palette entry in black"
        patch = patch.convert("RGBA")
        canvas.paste(patch, (x, y), patch)
        seen.append(np.asarray(canvas).copy())
    blue = [(abs(frame.astype(int) - [0x00, 0x72, 0xB2]).sum(axis=-1) < 12).sum() for frame in seen]
    assert blue == sorted(blue) and len(set(blue)) == 6
    _, _, data = player_data(
        plots.animate([partial(draw_bars, count=5)] * 2, title="Bars rise", alt="b" * 20, height=2)
    )["frames"][0]
    direct = np.asarray(decode(base64.b64decode(data)).convert("RGB"))
    assert tuple(seen[-1][1, 1]) == (255, 255, 255)
    assert abs(seen[-1].astype(int) - direct).max() < 48, "the last frame differs from the same picture drawn alone"


@pytest.mark.slow
def test_the_waves_animation_holds_every_tile_of_the_schedule():
    schedule = schedule_tiles(300, 132, per_sm=2)
    stored = player_data(plots.sm_waves_animation(schedule, 132))
    assert stored["per_sm"] == 2 and stored["sms"] == 132
    assert stored["tiles"] == [[p.sm, p.slot, p.start, p.end] for p in schedule]


def test_text_cannot_break_out_of_the_script():
    made = plots.sm_waves_animation(schedule_tiles(3, 2), 2, title='</script><img src="x"> <!-- "quotes"')
    tags = check_html(made.html)
    assert [tag for tag, _ in tags] == ["figure", "img", "script"]


@pytest.mark.slow
def test_an_animation_that_is_too_large_says_what_to_do(monkeypatch):
    monkeypatch.setitem(animate.__globals__, "LARGEST", 10_000)
    with pytest.raises(ValueError, match="fewer or simpler frames"):
        bars(7)


def test_the_player_is_sound_javascript(tmp_path):
    player = animate.__globals__["_PLAYER"].read_text()
    assert player.count("(") == player.count(")") and player.count("{") == player.count("}")
    node = shutil.which("node")
    if node:
        script = tmp_path / "player.js"
        script.write_text(player + "({}, 'key');")
        result = subprocess.run([node, "--check", str(script)], capture_output=True, text=True, env=dict(os.environ))
        assert result.returncode == 0, result.stderr
