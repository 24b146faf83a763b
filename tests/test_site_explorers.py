"""The explorers compute what `utils` computes, on hundreds of random inputs each, and refuse nonsense.

Their formulas run in Chromium. Inputs are drawn from fixed seeds, written as a reader would type them, and read by the
page's own code; all of an explorer's inputs are computed in one call.
"""

# ruff: noqa: F811  (fixtures are imported)

from __future__ import annotations

import inspect
import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
from explorer_cases import CASE, DEVICES, NAMES, RUN, WEBSITE, Tab, agree, site, tab  # noqa: F401  (fixtures)

from utils import living, operators, roofline, units
from utils import transformer_math as tm
from utils.hardware import GPUS, gpu
from utils.living import tables
from utils.operators import ELEMENT_SIZE
from utils.transformer_math import memory
from website import explorers

CASES = 600


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_explorer_computes_what_utils_computes(tab: Tab, name: str):
    make, kinds = CASE[name]
    rng = random.Random(f"{name}, seed 1729")
    cases = [make(rng, kind) for kind in itertools.islice(itertools.cycle(kinds), CASES)]
    found = tab.open(f"{name}-light").evaluate(RUN, [name, [asked for asked, _ in cases]])
    assert len(found) == CASES
    for (asked, expected), each in zip(cases, found, strict=True):
        if name == "memory":
            each = each | {"stages": dict(enumerate(each["stages"]))}
        agree(each, expected, str(asked))
    gpus = DEVICES if name == "roofline" else GPUS
    every_value = dict.fromkeys(("dtype", "sent", "weights", "cache"), ELEMENT_SIZE) | {"gpu": gpus}
    every_value |= {"rate": ("fp64", "fp32", "bf16", "fp8"), "link": ("nvlink", "pcie", "network", "own")}
    for field, every in every_value.items():
        drawn = {asked[field] for asked, _ in cases if field in asked}
        assert not drawn or drawn >= set(every), (field, set(every) - drawn)


@pytest.mark.slow
def test_ties_fall_to_the_same_side_as_in_utils(tab: Tab):
    b200, h100, llama = gpu("B200"), gpu("H100"), tm.SERVED_MODELS["Llama 3 8B"]

    def run(name: str, **asked: object) -> dict[str, Any]:
        inputs = [{key: str(value) for key, value in asked.items()}]
        return tab.open(f"{name}-light").evaluate(RUN, [name, inputs])[0]

    at_the_ridge = operators.elementwise(7, "bf16", flops_per_element=1125)
    assert at_the_ridge.intensity == roofline.ridge(b200)
    found = run("roofline", gpu="B200", op="elementwise", elements=7, flops_per_element=1125, inputs=1)
    assert found["boundBy"] == roofline.bound_by(at_the_ridge, b200) == "memory"
    found = run("roofline", gpu="B200", op="matmul", dtype="tf32", k=550, n=550)
    assert found["crossover"] is None is roofline.crossover_batch(550, 550, b200, "tf32")
    for psi, stage in ((5 * 10**9, 0), (20 * 10**9, 1)):  # all of the memory; all of it by what is not divided
        fewest = run("memory", psi=psi)["stages"][stage]["fewest"]
        assert fewest == tm.fewest_ranks(psi, h100.memory_bytes, stage) and fewest in (1, None)
    step = tm.decode_bounds(llama, b200, 1125, 1.5, weights="fp64")
    assert step.read_weights == step.multiply and step.bound_by == "memory"
    found = run("serving", gpu="B200", weights="fp64", batch=1125, prompt=1, new=1)["step"]
    assert found["readWeights"] == found["multiply"] and found["boundBy"] == "memory"


@pytest.mark.slow
def test_numbers_are_printed_as_utils_prints_them(tab: Tab):
    rng = random.Random(5)
    values = [0.0, 0.125, 10000.5, 10001.5, 9.99996, 999999.5, 1e-4, 9.9999e-5, 123456.7, 1e7, 2.5, -1365.333, 1e22]
    values += [rng.choice((1, -1)) * 10 ** rng.uniform(-14, 22) for _ in range(400)] + [
        k / 8 for k in range(0, 90000, 997)
    ]
    asked = [
        (v, u, d)
        for v in values
        for u, d in ((rng.choice(("B", "s", "FLOP/s", "", "FLOP/B")), rng.choice((2, 3, 4, 5))),)
    ]
    found = tab.open("roofline-light").evaluate("(all) => all.map(([v, u, d]) => MLF.units.quantity(v, u, d))", asked)
    assert found == [units.quantity(value, unit, digits) for value, unit, digits in asked]
    counts = [0, 7, 999, 1000, 2**80, -12345]
    found = tab.tab.evaluate("(all) => all.map((v) => MLF.units.quantity(BigInt(v), 'B'))", [str(c) for c in counts])
    assert found == [units.quantity(count, "B") for count in counts]


# ---- what the pages are made from ----


def test_every_operator_of_utils_is_there():
    public = {name for name, f in inspect.getmembers(operators, inspect.isfunction)
              if not name.startswith("_") and inspect.signature(f).return_annotation == "Cost"}  # fmt: skip
    assert public == set(tables.OPERATORS)


def test_every_figure_has_a_source_and_rates_are_whole():
    data = tables.data()
    assert set(data["devices"]) == set(DEVICES)
    for name, device in data["devices"].items():
        rates = [device["memoryBandwidth"], *device["peakFlops"].values()]
        assert all(float(rate).is_integer() for rate in rates), "the page compares them exactly, as BigInt"
        for figure in ("memoryBandwidth", "peakFlops", "memoryBytes", "linkBandwidth", "pcieBandwidth"):
            assert (figure in device) == bool(device["sources"].get(figure)) or device["kind"] == "CPU", (name, figure)
    recipes = {name for name, value in vars(memory).items() if isinstance(value, memory.Precision)}
    assert {constant for constant, _ in tables._RECIPES.values()} == recipes


def test_pages_have_every_figure_filled_in_and_an_unknown_one_is_an_error(site: Path):
    text = "".join(page.read_text("utf-8") for page in (site / "explorers").glob("*.md"))
    assert not re.search(r"\{\{", re.sub(r"\$\$.*?\$\$", "", text, flags=re.S))
    raw = "".join(page.read_text("utf-8") for page in (WEBSITE / "pages" / "explorers").glob("*.md"))
    asked = set(re.findall(r"\{\{(?:set:)?([\w.]+)\}\}", raw))
    assert asked == set(explorers.answers()) | set(explorers.SETTINGS), "a figure that no page shows, or the reverse"
    with pytest.raises(KeyError):
        explorers.fill("{{no.such.figure}}", explorers.answers())


# ---- refusals ----

NUMBERS = {
    "roofline": ["m", "k", "n", "peak", "beta"],
    "memory": ["psi", "ranks", "reserve", "tokens"],
    "serving": ["batch", "prompt", "new"],
}
NONSENSE = ["4q", "k", "2^", "4kk", "1^1^1", "99^99",
            "", "   ", "many", "-5", "−5", "1e400", "1e30", "NaN", "Infinity", "0x10", "1,5", "1 2", "--3", "1e", ".",
            "٣", "<b>4</b>", "4;5", "1e-400000", "12,34,567"]  # fmt: skip
FRACTIONS = ["0", "1.5", "1e-3", "4096.0001"]  # fine where a number need not be whole
FINE = {"4,096": 4096, "1 024": 1024, "+5": 5, "4096.0": 4096, "1e3": 1000, "2_048": 2048, " 16 ": 16, "0.5e1": 5,
        "4k": 4000, "4Ki": 4096, "1.5M": 1_500_000, "0.5B": 500_000_000, "0.25 billion": 250_000_000, "2^12": 4096,
        "2**12": 4096}  # fmt: skip


#: Settings in which further fields are there, and those fields; first the fields that are there as a page opens.
FIELDS = [
    *((name, "", fields) for name, fields in NUMBERS.items()),
    ("roofline", "#op=attention", ["batch", "heads", "seq_len", "head_dim", "kv_heads", "kv_len"]),
    ("roofline", "#op=elementwise", ["elements", "flops_per_element", "inputs", "outputs"]),
    ("roofline", "#op=layer_norm", ["rows", "cols"]),
    ("memory", "#link=own", ["bandwidth"]),
    ("serving", "#model=own", ["psi", "layers", "heads", "kv_heads", "head_dim"]),
]
#: `make test` tries one of them.
TRIED = [pytest.param(*each, marks=() if each is FIELDS[3] else pytest.mark.thorough) for each in FIELDS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "address", "fields"), TRIED)
def test_nonsense_gets_a_message_and_the_results_are_withdrawn(tab: Tab, name: str, address: str, fields: list[str]):
    page = tab.open(f"{name}-light", address)
    shown = page.locator(".mlf-explorer input[type=text]:visible").evaluate_all("(all) => all.map((each) => each.name)")
    assert set(fields) <= set(shown) <= {*fields, *(("peak", "beta") if name == "roofline" else NUMBERS[name])}
    before = tab.results()
    assert len(before) > 200
    for field in fields:
        own = tab.field(name, field).input_value()
        texts = (
            ["", "x", "-1", "1e30"]
            if address
            else NONSENSE + (FRACTIONS if field not in ("reserve", "peak", "beta") else [])
        )
        for text in texts:
            tab.field(name, field).fill(text)
            assert tab.field(name, field).get_attribute("aria-invalid") == "true", (field, text)
            message = page.locator(f"#mlf-{name}-{field}-error")
            assert f"mlf-{name}-{field}-error" in tab.field(name, field).get_attribute("aria-describedby")
            assert message.is_visible() and message.get_attribute("role") == "status" and len(message.inner_text()) > 10
            assert not page.locator(".mlf-results").is_visible() and page.locator(".mlf-notice").is_visible()
            assert not re.search(r"NaN|Infinity|undefined|∞", page.locator(".mlf-notice").inner_text())
        tab.field(name, field).fill(own)
        assert tab.field(name, field).get_attribute("aria-invalid") is None
        assert tab.results() == before and not page.locator(".mlf-notice").is_visible()
    tab.check()


EXTREMES = """([name, least]) => {
  const odd = [];
  const { groups } = MLF.figures[name];
  const fields = groups.flatMap((group) => group.fields);
  const set = (field, text) => {
    const input = document.getElementById(`mlf-${name}-${field.id}`);
    if (field.kind === "flag") input.checked = text === "1"; else input.value = text;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const first = fields.find((field) => field.id === (name === "roofline" ? "op" : "model"));
  for (const option of first.options) {
    set(first, option.value);
    for (const field of fields) {
      if (field.kind === "flag") set(field, least ? "0" : "1");
      if (field.kind === "whole" || field.kind === "number") set(field, String(least ? field.least ?? 1 : field.most));
      if (field.id === "reserve") set(field, "0");
      if (["prompt", "new"].includes(field.id) && option.value !== "own") set(field, "500");
    }
    const results = document.querySelector(".mlf-results");
    if (results.hidden) odd.push([option.value, document.querySelector(".mlf-notice").textContent]);
    for (const word of results.outerHTML.match(/NaN|Infinity|undefined|null|∞/g) || []) odd.push([option.value, word]);
  }
  return odd;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("least", [True, False], ids=["least", "most"])
def test_the_least_and_the_largest_inputs_give_numbers(tab: Tab, name: str, least: bool):
    assert tab.open(f"{name}-light").evaluate(EXTREMES, [name, least]) == []
    tab.check()


@pytest.mark.slow
def test_numbers_as_people_write_them_are_read(tab: Tab):
    page = tab.open("roofline-light")
    for text, value in FINE.items():
        tab.field("roofline", "m").fill(text)
        assert page.locator(".mlf-results").is_visible(), text
        assert f"{2 * value * 4096 * 4096:,} FLOP" in tab.results(), text
    row = page.locator(".mlf-field", has=tab.field("roofline", "m"))
    for text, meant in {"4k": "= 4,000", "4Ki": "= 4,096", "4,000": "", "1e3": ""}.items():
        tab.field("roofline", "m").fill(text)
        assert row.locator(".mlf-meant").inner_text() == meant, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "address", "field", "says"),
    [
        ("roofline", "op=attention&heads=32&kv_heads=5", "kv_heads", "32 is no multiple of 5"),
        ("roofline", "gpu=T4&dtype=bf16", "dtype", "T4 has no bf16 rate; it has: fp64, fp32, fp16, int8"),
        ("roofline", "gpu=A10&rate=fp64", "rate", "A10 has no fp64 rate"),
        ("roofline", "gpu=Voodoo2", "gpu", "“Voodoo2”, which is not in this list"),
        ("roofline", "op=elementwise&outputs=0", "outputs", "at least 1"),
        ("roofline", "m=" + "9" * 400, "m", "Enter a whole number"),
        ("roofline", "m=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E", "m", "is none"),
        ("memory", "gpu=L4&link=nvlink", "link", "L4 has no NVLink"),
        ("memory", "gpu=H100&reserve=80", "reserve", "less than the 80 GB"),
        ("memory", "link=own&bandwidth=0", "bandwidth", "at least 0.001"),
        ("serving", "model=own&heads=7&kv_heads=2", "kv_heads", "7 is no multiple of 2"),
        ("serving", "prompt=8000&new=500", "new", "more than the 8,192 of Llama 3 8B"),
        ("serving", "gpu=V100", "rate", "V100 has no bf16 rate"),
    ],
)
def test_what_does_not_go_together_gets_its_message_beside_the_field(tab: Tab, name, address, field, says):
    page = tab.open(f"{name}-light", f"#{address}")
    assert says in page.locator(f"#mlf-{name}-{field}-error").inner_text()
    assert tab.field(name, field).get_attribute("aria-invalid") == "true"
    assert not page.locator(".mlf-results").is_visible() and page.locator("[aria-invalid]").count() == 1
    tab.check()


# ---- in the hand ----


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_setting_is_in_the_address_and_comes_back_from_it(tab: Tab, name: str):
    state = {
        "roofline": {"gpu": "A100", "op": "softmax", "dtype": "fp32", "rows": "1,000", "cols": "77", "rate": "fp64"},
        "memory": {
            "model": "GPT-3 175B",
            "ranks": "96",
            "stage": "2",
            "reserve": "12.5",
            "link": "own",
            "bandwidth": "33",
        },
        "serving": {"model": "Qwen3 0.6B", "gpu": "L4", "batch": "300", "prompt": "100", "new": "1", "cache": "fp8"},
    }[name]
    page = tab.open(f"{name}-light")
    for field, value in state.items():
        control = tab.field(name, field)
        if control.evaluate("(each) => each.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
    page.wait_for_function("() => location.hash.length > 20")
    page.wait_for_timeout(200)
    address, results = page.evaluate("location.hash"), tab.results()
    tab.open(f"{name}-light", address)
    assert {field: tab.field(name, field).input_value() for field in state} == state
    assert tab.results() == results
    page.get_by_role("button", name="Start again").click()
    assert tab.results() != results
    page.wait_for_timeout(200)  # the address follows
    page.evaluate("(hash) => { location.hash = hash }", address)
    page.wait_for_function("(text) => document.querySelector('.mlf-results').innerText === text", arg=results)
    tab.check()


@pytest.mark.slow
def test_the_questions_links_set_what_their_answers_say(tab: Tab):
    shown = explorers.answers()
    for setting, name, figures in (
        ("ridge", "roofline", ("ridge.rows", "ridge.intensity", "ridge.ridge")),
        ("scores", "roofline", ("scores.slow",)),
        ("stages", "memory", tuple(f"stages.{what}{s}" for s in tm.STAGES for what in ("kept", "fewest"))),
        ("network", "memory", ("network.tokens",)),
        ("full", "serving", ("full.batch",)),
        ("eight", "serving", ("eight.batch",)),
        ("grouped", "serving", ("grouped.old",)),
        ("twice", "roofline", ("twice.intensity",)),
        ("one_bucket", "parallelism", ("one_bucket.exposed1",)),
        ("few_tokens", "parallelism", ("few_tokens.exposed", "few_tokens.tokens")),
        ("small_ring", "parallelism", ("small_ring.few",)),
        ("eight_stages", "parallelism", ("eight_stages.bubble",)),
        ("two_chunks", "parallelism", ("two_chunks.bubble",)),
        ("slow_last", "parallelism", ("slow_last.bubble",)),
    ):
        page = tab.open(f"{name}-light", explorers.setting(explorers.SETTINGS[setting]))
        assert page.locator(".mlf-results").is_visible(), setting
        text = page.locator(".mlf-results").inner_text() + "".join(
            page.locator(".mlf-results svg text").all_text_contents()
        )
        for figure in figures:
            assert shown[figure] in text, (figure, shown[figure])
    for name, setting in explorers.SETTINGS.items():
        pages = ((n, (WEBSITE / f"pages/explorers/{n}.md").read_text("utf-8")) for n in living.FIGURES)
        page = next(n for n, text in pages if f"{{{{set:{name}}}}}" in text)
        tab.open(f"{page}-light", explorers.setting(setting))
        values = {field: tab.field(page, field) for field in setting}
        read = {
            f: c.input_value() if c.get_attribute("type") != "checkbox" else str(int(c.is_checked()))
            for f, c in values.items()
        }
        assert read == {field: str(value) for field, value in setting.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_keyboard_is_enough(tab: Tab, name: str):
    page = tab.open(f"{name}-light")
    visible = page.locator(".mlf-explorer :is(select, input, button, summary):visible").count()
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("(document.activeElement.id || document.activeElement.textContent).trim()"))
    assert len(set(filter(None, seen))) >= visible, "every control is reached by Tab"
    field = NUMBERS[name][1]
    tab.field(name, field).focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("2")
    before = tab.results()
    page.keyboard.press("Backspace")
    assert not page.locator(".mlf-results").is_visible()
    page.keyboard.type("3")
    assert tab.results() != before
    tab.field(name, "gpu").focus()
    page.keyboard.type("H200")
    assert tab.field(name, "gpu").input_value() == "H200"
    slider = page.locator(".mlf-probe input")
    if slider.count():
        slider.focus()
        said = slider.get_attribute("aria-valuetext")
        page.keyboard.press("Home")
        assert slider.get_attribute("aria-valuetext") != said == page.locator(".mlf-reading").inner_text() or said
        assert page.locator(".mlf-reading").inner_text() == slider.get_attribute("aria-valuetext")
    page.get_by_role("button", name="Start again").focus()
    page.keyboard.press("Enter")
    assert tab.field(name, "gpu").input_value() == "H100"
    tab.check()


@pytest.mark.slow
def test_a_pointer_reads_the_plot_and_the_link_can_be_copied(tab: Tab):
    page = tab.open("serving-light")
    box = page.locator(".mlf-plot").first.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 100)
    page.mouse.wheel(0, 0)
    before = page.locator(".mlf-reading").inner_text()
    page.locator(".mlf-plot").first.hover(position={"x": 0.9 * box["width"], "y": 100})
    after = page.locator(".mlf-reading").inner_text()
    assert before != after and "does not fit" in after
    page.get_by_role("button", name="Copy link").click()
    page.wait_for_function("() => document.querySelector('.mlf-said').textContent.length > 5")
    assert "model=Llama+3+8B" in page.evaluate("location.hash")
    tab.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_javascript_the_page_says_so(browser, site: Path, name: str):
    page = browser.new_page(java_script_enabled=False)
    page.goto((site / f"explorers/{name}-light.html").as_uri())
    assert "needs JavaScript" in page.locator("main").inner_text()
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_fits_a_phone_and_axe_finds_nothing_serious_in_light_and_dark(browser, site: Path, name: str):
    """With a field that refuses its value; as it opens, the tests of all pages see it."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for theme in ("light", "dark"):
        tab = Tab(browser, site)
        page = tab.open(f"{name}-{theme}")
        page.locator("summary").click()
        tab.check()  # before axe, which fetches style sheets
        tab.field(name, "gpu").select_option("B200")
        tab.field(name, NUMBERS[name][0]).fill("none")
        for width in (390, 1200):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        grave = [v for v in axe.run(page).response["violations"] if v["impact"] in ("serious", "critical")]
        assert grave == [], [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in grave]
        page.close()
