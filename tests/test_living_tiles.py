"""The tile and traffic sandbox: its bytes, what it holds on the chip and its roofline are those of `utils`."""

# ruff: noqa: F811  (fixtures are imported)

from __future__ import annotations

import random
import re

import pytest
from living_tab import LivingTab, living_tab  # noqa: F401  (fixtures)

from utils import attention_math as am
from utils import roofline
from utils.hardware import GPUS, gpu
from utils.operators import Cost, matmul, tiled_matmul_bytes

CASES = 500
NAME = "tiles"
TILES = (16, 32, 64, 128, 256)


def drawn(rng: random.Random) -> dict[str, object]:
    """A setting, as the fields name its parts."""
    device = rng.choice(list(GPUS))
    dtype = rng.choice([d for d in ("fp32", "bf16", "fp16", "fp8") if d in gpu(device).peak_flops])
    common = {"gpu": device, "dtype": dtype, "stages": rng.randint(1, 8)}
    common |= {"block_m": rng.choice(TILES), "block_n": rng.choice(TILES)}
    if rng.random() < 0.4:
        sizes = {name: rng.choice((rng.randint(1, 300), rng.randint(1, 65536))) for name in ("m", "k", "n")}
        return {"kernel": "matmul", "block_k": rng.choice(TILES), **sizes, **common}
    sizes = {name: rng.choice((rng.randint(1, 300), rng.randint(1, 65536))) for name in ("queries", "keys", "heads")}
    return {"kernel": "attention", "head_dim": rng.choice(TILES), "causal": rng.random() < 0.5, **sizes, **common}


def expected(v: dict) -> tuple[int, int, int, dict[str, int], dict[str, int]]:
    """FLOPs, bytes asked for, least bytes, and what a program holds in shared memory and in registers."""
    if v["kernel"] == "matmul":
        least, size = matmul(v["m"], v["k"], v["n"], v["dtype"]), {"fp32": 4, "fp8": 1}.get(v["dtype"], 2)
        asked = tiled_matmul_bytes(v["m"], v["k"], v["n"], v["block_m"], v["block_n"], v["dtype"])
        shared = {"A": v["block_m"] * v["block_k"], "B": v["block_k"] * v["block_n"]}
        shared = {name: each * size * v["stages"] for name, each in shared.items()}
        return least.flops, asked, least.bytes, shared, {"C": 4 * v["block_m"] * v["block_n"]}
    shape = am.AttentionShape(1, v["heads"], v["queries"], v["head_dim"], num_keys=v["keys"])
    traffic = am.flash2_traffic(shape, v["block_m"], v["block_n"], v["dtype"], causal=v["causal"])
    least = am.flash2_bytes(shape, v["queries"], v["dtype"])
    held = am.on_chip_bytes(v["block_m"], v["block_n"], v["head_dim"], v["dtype"], v["stages"])
    flops = am.attention_flops(shape, causal=v["causal"])
    return flops, traffic.total, least, held["shared memory"], held["registers"]


def close(value: float) -> object:
    """Equal to nine digits, however small the value is."""
    return pytest.approx(value, rel=1e-9, abs=0)


@pytest.mark.slow
def test_500_random_settings_give_the_numbers_of_utils(living_tab: LivingTab):
    rng = random.Random(1729)
    cases = [drawn(rng) for _ in range(CASES)]
    asked = [{k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in case.items()} for case in cases]
    for case, found in zip(cases, living_tab.run(NAME, asked), strict=True):
        flops, total, least, shared, registers = expected(case)
        device, cost = gpu(case["gpu"]), Cost(flops, total)
        assert (found["flops"], found["bytes"], found["least"]) == (close(flops), close(total), close(least)), case
        for place, parts in (("shared", shared), ("registers", registers)):
            assert {part["name"]: part["value"] for part in found[place]} == parts, (place, case)
        fits = (
            device.max_shared_memory_per_block // sum(shared.values()),
            4 * device.registers_per_sm // sum(registers.values()),
        )
        assert found["programs"] == min(fits)
        bound = roofline.time_bounds(cost, device, case["dtype"]).overlapped
        assert found["seconds"] == close(bound)
        reach = roofline.attainable(cost.intensity, device, case["dtype"])
        assert found["attainable"] == close(reach)


@pytest.mark.parametrize(
    ("m", "k", "n", "block_m", "block_n"), [(64, 32, 48, 16, 16), (65, 7, 33, 32, 16), (3, 5, 2, 16, 32)]
)
def test_the_formula_of_a_tiled_product_counts_what_a_walk_over_its_tiles_loads(m, k, n, block_m, block_n):
    loaded = 0
    for row in range(0, m, block_m):
        for column in range(0, n, block_n):
            loaded += (min(block_m, m - row) + min(block_n, n - column)) * k
    assert tiled_matmul_bytes(m, k, n, block_m, block_n, "fp32") == 4 * (loaded + m * n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "fields"), [("attention", ("queries", "keys", "heads", "stages")), ("matmul", ("m", "k", "n", "stages"))]
)
def test_nonsense_gets_a_message_and_the_results_are_withdrawn(living_tab: LivingTab, kernel, fields):
    page = living_tab.open(NAME, kernel=kernel)
    for field in fields:
        for wrong in ("", "0", "-1", "1.5", "many", "1e30", "NaN"):
            page.locator(f"#mlf-{NAME}-{field}").fill(wrong)
            assert len(page.locator(f"#mlf-{NAME}-{field}-error").inner_text()) > 10, (field, wrong)
            assert not page.locator(".mlf-results").is_visible(), (field, wrong)
        page.locator(f"#mlf-{NAME}-{field}").fill("1")
        assert page.locator(".mlf-results").is_visible(), field
    page.locator(f"#mlf-{NAME}-gpu").select_option("T4")
    assert "T4 has no bf16 rate" in page.locator(f"#mlf-{NAME}-dtype-error").inner_text()
    living_tab.check()


#: Settings at the edges of what the fields take, and the one that the lectures and the page begin with.
SETTINGS = [
    {},
    {"causal": 1, "queries": 700, "keys": 3000},
    {"queries": 1, "keys": 8192, "causal": 1},
    {"queries": 256, "keys": 256, "block_m": 256, "block_n": 256, "head_dim": 16},
    {"queries": 1, "keys": 1, "heads": 1, "block_m": 16, "block_n": 256, "head_dim": 256, "stages": 8},
    {"queries": 65536, "keys": 65536, "heads": 65536, "causal": 1},
    {"queries": 8192, "keys": 8192, "block_m": 256, "head_dim": 256, "gpu": "A100"},
    {"kernel": "matmul"},
    {"kernel": "matmul", "m": 65536, "n": 1},
    {"kernel": "matmul", "m": 65536, "k": 65536, "n": 65536, "block_m": 256, "block_n": 256, "dtype": "fp8"},
]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values())) or "first")
def test_nothing_is_cut_or_covered_in_phone_lecture_and_notebook(living_tab: LivingTab, setting):
    page = living_tab.open(NAME, **setting)
    assert living_tab.crowded(390, 806, 1040) == []
    assert not set(re.findall("NaN|Infinity|undefined|null", page.locator(".mlf-results").inner_html()))
    living_tab.check()


@pytest.mark.slow
def test_a_keyboard_reaches_everything_and_moves_every_edge(living_tab: LivingTab):
    page = living_tab.open(NAME)
    fields = {"kernel", "block_m", "block_n", "head_dim", "causal", "queries", "keys", "heads"}
    fields |= {"gpu", "dtype", "stages"}
    assert living_tab.tabbed() == fields | {"BLOCK_M", "BLOCK_N", "head dimension D", "Start again"}
    for name, field in (("BLOCK_M", "block_m"), ("BLOCK_N", "block_n"), ("head dimension D", "head_dim")):
        handle = page.get_by_role("slider", name=name, exact=True)
        handle.focus()
        for key, value in (("ArrowRight", "128"), ("End", "256"), ("ArrowDown", "128"), ("Home", "16")):
            page.keyboard.press(key)
            assert page.locator(f"#mlf-{NAME}-{field}").input_value() == value
            assert page.evaluate("document.activeElement.dataset.handle") == field
    page.locator(f"#mlf-{NAME}-kernel").select_option("matmul")
    assert page.locator(f"#mlf-{NAME}-block_k").is_visible() and not page.locator(f"#mlf-{NAME}-head_dim").is_visible()
    assert page.get_by_role("slider", name="head dimension D").count() == 0
    living_tab.check()


@pytest.mark.slow
@pytest.mark.timed
def test_an_edge_follows_the_pointer_60_times_a_second(living_tab: LivingTab, record_property):
    page = living_tab.open(NAME, causal=1)
    edge = page.get_by_role("slider", name="BLOCK_M", exact=True)
    frame = living_tab.frame(edge, down=80)
    assert edge.get_attribute("aria-valuenow") == "256"
    record_property("milliseconds_a_frame", frame)
    assert frame < living_tab.budget()
    living_tab.check()


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 1024, 65536])
def test_a_handle_stays_under_the_pointer(living_tab: LivingTab, size):
    """Also where a tile is larger than the grid or thinner than a pixel, and where dragging makes the drawing grow."""
    page = living_tab.open(NAME, queries=size, keys=size)
    for name, values in (("BLOCK_M", TILES), ("BLOCK_N", TILES), ("head dimension D", TILES)):
        handle = page.get_by_role("slider", name=name, exact=True)
        handle.focus()
        page.keyboard.press("Home")
        places = []
        for value in values:
            assert handle.get_attribute("aria-valuenow") == str(value)
            box = handle.locator(".mlf-knob").bounding_box()
            places.append((box["x"] + box["width"] / 2, box["y"] + box["height"] / 2))
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Home")
        page.mouse.move(*places[0])
        page.mouse.down()
        for value, place in zip(values, places, strict=True):
            for _ in range(2):
                page.mouse.move(*place)
                page.evaluate("new Promise(requestAnimationFrame)")
            page.evaluate("new Promise(requestAnimationFrame)")
            assert handle.get_attribute("aria-valuenow") == str(value), (name, places)
        page.mouse.up()
    living_tab.check()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "setting", [{"causal": 1, "queries": 700, "keys": 3000}, {"kernel": "matmul", "m": 65536, "n": 1}]
)
def test_it_fits_a_phone_and_axe_finds_nothing_grave(living_tab: LivingTab, theme, setting):
    living_tab.open(NAME, theme, **setting)
    assert living_tab.fits(390) and living_tab.fits(1000)
    living_tab.check()
    assert living_tab.grave() == []
