"""The roofline under one's hand: roofs and point are dragged, and recorded kernels stand where their records say."""

# ruff: noqa: F811  (fixtures are imported)

from __future__ import annotations

import math
import re

import pytest
from living_tab import LivingTab, living_tab  # noqa: F401  (fixtures)

from utils import operators, records, roofline
from utils.hardware import gpu
from utils.living.kernels import recorded

THOROUGH = pytest.mark.thorough
NAME = "roofline"
H100 = gpu("H100")


def test_recorded_kernels_are_those_of_the_records_and_none_beats_its_roof():
    groups = recorded()
    points = [point for group in groups.values() for point in group["points"]]
    for point in points:
        record = records.load(point["record"])
        assert (point["device"], point["date"], point["gpu"]) == (record.device, record.date, "H100")
        assert point["flopsPerSecond"] <= roofline.attainable(point["intensity"], H100, point["unit"]), point
    of_pytorch = {item["name"]: item for item in records.load("operators").results["points"] if item["flops"]}
    assert {point["name"] for point in groups["operators"]["points"]} == set(of_pytorch)
    for point in groups["operators"]["points"]:
        item = of_pytorch[point["name"]]
        assert math.isclose(point["flopsPerSecond"], item["flops_per_second"]) and point["seconds"] == item["seconds"]
        assert math.isclose(point["intensity"], item["intensity"])
        if "set" in point:
            sizes = dict(point["set"])
            make, dtype, _ = getattr(operators, sizes.pop("op")), sizes.pop("dtype"), sizes.pop("rate")
            cost = make(**{"n" if name == "elements" else name: value for name, value in sizes.items()}, dtype=dtype)
            assert math.isclose(cost.intensity, item["intensity"]), "the operator goes to where the kernel stands"
    gelus = {point["name"]: point for point in groups["gelu"]["points"]}
    assert gelus["GeLU, Triton"]["intensity"] == 11 * gelus["GeLU, formula"]["intensity"], "2 accesses instead of 22"


@pytest.mark.slow
def test_a_keyboard_moves_the_point_the_roofs_and_from_kernel_to_kernel(living_tab: LivingTab):
    page = living_tab.open(NAME, m=64)
    field = lambda name: page.locator(f"#mlf-{NAME}-{name}")  # noqa: E731
    point = page.get_by_role("slider", name="the product: its rows m")
    point.focus()
    for key, rows in (("ArrowRight", "76"), ("PageUp", "152"), ("ArrowDown", "128"), ("Home", "1"), ("End", "131072")):
        page.keyboard.press(key)
        assert field("m").input_value() == rows
    assert page.evaluate("document.activeElement.dataset.handle") == "point", "the handle keeps the focus"
    page.get_by_role("slider", name="memory bandwidth").focus()
    for _ in range(8):
        page.keyboard.press("ArrowUp")
    assert field("beta").input_value() == "2" and "6.7 TB/s" in page.locator(".mlf-plot").inner_text()
    page.get_by_role("slider", name="bf16 peak").focus()
    page.keyboard.press("PageDown")
    assert field("peak").input_value() == "0.707"
    assert "peak × 0.707, bandwidth × 2" in page.locator("figcaption").inner_text()
    dots = page.get_by_role("listbox", name="recorded kernels").get_by_role("option")
    assert dots.count() == 27 and page.locator(".mlf-dot[tabindex='0']").count() == 1, "one stop for all dots"
    page.locator(".mlf-dot[tabindex='0']").focus()
    said, names = page.locator(".mlf-dots-said"), set()
    for _ in range(dots.count()):
        names.add(said.inner_text())
        page.keyboard.press("ArrowRight")
    assert len(names) == 27 and all("NVIDIA H100 80GB HBM3, 2026-" in each for each in names)
    page.keyboard.press("End")
    assert said.inner_text().startswith("matmul N=8192 (8,192 x 8,192 x 8,192, bf16): 2,730 FLOP/B, 794 TFLOP/s")
    page.keyboard.press("Enter")
    assert [field(name).input_value() for name in "mkn"] == ["8192"] * 3
    field("gpu").select_option("A100")
    assert dots.count() == 0 and "ran on H100: choose it" in said.inner_text()
    assert (field("peak").input_value(), field("beta").input_value()) == ("1", "1"), "a new device has its own roofs"
    living_tab.check()


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize(
    ("settings", "handle", "across", "down", "field"),
    [
        ({"m": 64}, "the product: its rows m", 150, 0, "m"),
        pytest.param({"m": 64, "drag_matmul": "side"}, "the product: m = k = n", -150, 0, "k", marks=THOROUGH),
        pytest.param({"op": "attention"}, "attention: its queries and keys", -200, 0, "kv_len", marks=THOROUGH),
        pytest.param(
            {"op": "elementwise"}, "your operator: its FLOPs an element", 150, 0, "flops_per_element", marks=THOROUGH
        ),
        pytest.param({"kernels": "all"}, "memory bandwidth", 0, -80, "beta", marks=THOROUGH),
        pytest.param({"kernels": "all"}, "bf16 peak", 0, 60, "peak", marks=THOROUGH),
    ],
)  # fmt: skip
def test_what_is_dragged_follows_the_pointer_60_times_a_second(
    living_tab: LivingTab, settings, handle, across, down, field, record_property
):
    page = living_tab.open(NAME, **settings)
    page.set_viewport_size({"width": 1000, "height": 900})
    knob = page.get_by_role("slider", name=handle)
    box, before = knob.locator("circle").first.bounding_box(), page.locator(f"#mlf-{NAME}-{field}").input_value()
    frame = living_tab.frame(knob, across, down)
    record_property("milliseconds_a_frame", frame)
    assert frame < living_tab.budget()
    assert page.locator(f"#mlf-{NAME}-{field}").input_value() != before
    after = knob.locator("circle").first.bounding_box()
    assert abs(after["x"] - box["x"] - across) < 14 and abs(after["y"] - box["y"] - down) < (8 if down else 999)
    living_tab.check()


@pytest.mark.slow
def test_axes_stay_while_something_is_dragged(living_tab: LivingTab):
    page = living_tab.open(NAME, m=64)
    ticks = lambda: page.locator(".mlf-axes text").all_text_contents()  # noqa: E731
    before = ticks()
    for name, keys in (("the product: its rows m", ["End", "Home"]), ("memory bandwidth", ["PageUp"] * 2)):
        page.get_by_role("slider", name=name).focus()
        for key in keys:
            page.keyboard.press(key)
            assert ticks() == before
    page.locator(f"#mlf-{NAME}-op").select_option("gelu")
    assert page.get_by_role("slider").count() == 3, (
        "both roofs and the reading: GeLU's intensity is the same at any size"
    )
    assert "the same at every size" in page.locator(".mlf-dots-said").inner_text()
    living_tab.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"m": 64}, {"m": 1}, {"m": 64, "beta": 4}, {"m": 64, "peak": 0.1}, {"op": "attention", "kernels": "all"},
     {"gpu": "B200"}, {"op": "gelu", "gpu": "A100"}],
)  # fmt: skip
def test_nothing_is_cut_or_lies_on_something_else(living_tab: LivingTab, settings):
    living_tab.open(NAME, **settings)
    assert living_tab.crowded(390, 700, 1000, 1440) == []


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_a_phone_and_axe_finds_nothing_grave(living_tab: LivingTab, theme):
    page = living_tab.open(NAME, theme, kernels="all", beta=4)
    assert living_tab.fits(390) and living_tab.fits(1440)
    page.locator(".mlf-dot[tabindex='0']").focus()
    page.keyboard.press("End")
    assert re.search(r"\d+(\.\d+)? % of its \w+ roof", page.locator(".mlf-dots-said").inner_text())
    living_tab.check()
    assert living_tab.grave() == []
