"""The explorers compute what `utils` computes, on hundreds of random inputs each, and refuse what it refuses.

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

from utils import operators, roofline, units
from utils import transformer_math as tm
from utils.hardware import GPUS, gpu
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
    found = tab.open("all").evaluate(RUN, [name, [asked for asked, _ in cases]])
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
    tab.open("all")

    def run(name: str, **asked: object) -> dict[str, Any]:
        return tab.page.evaluate(RUN, [name, [{key: str(value) for key, value in asked.items()}]])[0]

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
    found = tab.open("all").evaluate("(all) => all.map(([v, u, d]) => MLF.units.quantity(v, u, d))", asked)
    assert found == [units.quantity(value, unit, digits) for value, unit, digits in asked]
    counts = [0, 7, 999, 1000, 2**80, -12345]
    found = tab.page.evaluate("(all) => all.map((v) => MLF.units.quantity(BigInt(v), 'B'))", [str(c) for c in counts])
    assert found == [units.quantity(count, "B") for count in counts]


# ---- what the pages are made from ----


def test_every_operator_of_utils_is_there_with_its_arguments():
    public = {name for name, f in inspect.getmembers(operators, inspect.isfunction)
              if not name.startswith("_") and inspect.signature(f).return_annotation == "Cost"}  # fmt: skip
    assert public == set(explorers.OPERATORS)
    for name, operator in explorers.OPERATORS.items():
        arguments = set(inspect.signature(getattr(operators, name)).parameters) - {"dtype"}
        assert {size.get("argument", size["id"]) for size in operator["sizes"]} == arguments, name


def test_figures_are_those_of_utils_and_each_has_a_source():
    data = explorers.data()
    assert set(data["devices"]) == set(DEVICES)
    for name, device in data["devices"].items():
        real = DEVICES[name]
        assert device["memoryBandwidth"] == real.memory_bandwidth and device["peakFlops"] == dict(real.peak_flops)
        rates = [device["memoryBandwidth"], *device["peakFlops"].values()]
        assert all(float(rate).is_integer() for rate in rates), "the page compares them exactly, as BigInt"
        for figure in ("memoryBandwidth", "peakFlops", "memoryBytes", "linkBandwidth", "pcieBandwidth"):
            assert (figure in device) == bool(device["sources"].get(figure)) or device["kind"] == "CPU", (name, figure)
    recipes = {name for name, value in vars(memory).items() if isinstance(value, memory.Precision)}
    assert {constant for constant, _ in explorers._RECIPES.values()} == recipes
    assert {name: model["parameters"] for name, model in data["models"].items()} == {
        name: model.parameters for name, model in tm.SERVED_MODELS.items()
    }


def test_pages_have_every_figure_filled_in_and_an_unknown_one_is_an_error(site: Path):
    text = "".join(page.read_text("utf-8") for page in (site / "explorers").glob("*.md"))
    assert not re.search(r"\{\{", re.sub(r"\$\$.*?\$\$", "", text, flags=re.S))
    raw = "".join(page.read_text("utf-8") for page in (WEBSITE / "pages" / "explorers").glob("*.md"))
    asked = set(re.findall(r"\{\{(?:set:)?([\w.]+)\}\}", raw))
    assert asked == set(explorers.answers()) | set(explorers.SETTINGS), "a figure that no page shows, or the reverse"
    with pytest.raises(KeyError):
        explorers.fill("{{no.such.figure}}", explorers.answers())
