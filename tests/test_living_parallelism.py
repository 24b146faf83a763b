"""The parallelism timeline computes what `utils` computes on 501 random inputs, refuses nonsense, needs no pointer."""

# ruff: noqa: F811  (fixtures are imported)

from __future__ import annotations

import math
import random
import re
import statistics
from typing import Any

import pytest
from explorer_cases import link_of, typed, whole
from living_tab import LivingTab, living_tab  # noqa: F401  (fixtures)
from parameters import thorough_but

from utils import schedules
from utils import transformer_math as tm
from utils.hardware import GPUS
from utils.operators import ELEMENT_SIZE
from utils.plots.collectives import check_states, moves_between

NAME = "parallelism"
CASES = 501
MODES = ("ring", "data", "pipeline")
DEVICES = [device for device in GPUS.values() if {"bf16", "fp16"} & set(device.peak_flops)]


def near(found: Any, expected: Any, place: str) -> None:
    """Assert that what JavaScript found is what Python expects, to 1e-9; lists and dicts part by part."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            near(found[key], value, f"{place}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), place
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            near(one, other, f"{place}[{i}]")
    elif isinstance(expected, str):
        assert found == expected, place
    else:
        assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12), (place, found, expected)


def ring_case(rng: random.Random) -> tuple[dict[str, str], dict[str, Any]]:
    device = rng.choice(DEVICES)
    link, bandwidth = link_of(rng, device)
    ranks, megabytes, latency = rng.randint(2, 64), round(10 ** rng.uniform(-5, 6), 6), round(rng.uniform(0, 50), 2)
    size = megabytes * 1e6
    seconds = tm.ring_seconds("all_reduce", size, ranks, bandwidth, latency * 1e-6)
    asked = {"mode": "ring", "gpu": device.name, "ranks": ranks, "size": megabytes, "latency": latency}
    volume = tm.ring_volume("all_reduce", size, ranks)
    return asked | link, {
        "seconds": seconds, "sentBytes": volume, "busBandwidth": volume / seconds, "messageBytes": size / ranks,
        "message": latency * 1e-6 + size / (ranks * bandwidth), "even": ranks * bandwidth * latency * 1e-6,
    }  # fmt: skip


def data_case(rng: random.Random) -> tuple[dict[str, str], dict[str, Any]]:
    device, psi, tokens = rng.choice(DEVICES), whole(rng, 1e13), whole(rng, 1e6)
    ranks, buckets, overlap = rng.randint(2, 64), whole(rng, 256), rng.random() < 0.8
    sent, latency = rng.choice(("bf16", "fp32")), rng.choice((0, round(rng.uniform(0, 50), 2)))
    link, bandwidth = link_of(rng, device)
    peak = device.peak_flops.get("bf16") or device.peak_flops["fp16"]
    step = tm.data_parallel_step(
        psi, ranks, buckets, tokens, peak_flops=peak, bandwidth=bandwidth, latency=latency * 1e-6,
        element_size=ELEMENT_SIZE[sent], overlap=overlap,
    )  # fmt: skip
    asked = {"mode": "data", "gpu": device.name, "psi": psi, "tokens": tokens, "ranks": ranks, "buckets": buckets,
             "overlap": overlap, "sent": sent, "latency": latency}  # fmt: skip
    expected = {name: getattr(step, name) for name in ("forward", "backward", "arithmetic", "seconds", "communication")}
    expected |= {"buckets": [vars(bucket) for bucket in step.buckets]}
    expected |= {"sentBytes": tm.ring_volume("all_reduce", ELEMENT_SIZE[sent] * psi, ranks)}
    if not latency:
        volume = 3 * (ranks - 1) / ranks
        expected["tokensToHide"] = tm.tokens_to_hide(peak, bandwidth, volume=volume, element_size=ELEMENT_SIZE[sent])
    # differences of nearly equal times: held against the step, not against themselves
    return {**asked, **link}, {**expected, "shares": (step.exposed / step.seconds, step.hidden / step.seconds)}


def pipeline_case(rng: random.Random) -> tuple[dict[str, str], dict[str, Any]]:
    make = rng.choice(("naive", "gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_2"))
    p, v = whole(rng, 16), rng.randint(1, 4)
    m = p * rng.randint(1, min(4, 64 // p)) if make == "interleaved" else whole(rng, 40)
    ratio, last = (round(rng.uniform(0.1, 10), 3) if rng.random() < 0.5 else kind for kind in (2, 1))
    if make == "interleaved":
        order = schedules.interleaved(p, m, v)
    elif make == "zero_bubble_2":
        order = schedules.zero_bubble(p, m, extra_memory=True)
    else:
        order = getattr(schedules, make)(p, m)
    forward = [1.0] * (p - 1) + [float(last)]
    found = schedules.simulate(order, forward, [each * ratio for each in forward])
    work = [{"stage": w.stage, "kind": w.action.kind, "micro": w.action.micro_batch, "chunk": w.action.chunk,
             "start": w.start, "end": w.end} for w in found.work]  # fmt: skip
    asked = {"mode": "pipeline", "schedule": make, "stages": p, "micro": m, "chunks": v, "ratio": ratio, "last": last}
    return asked, {
        "work": work, "makespan": found.makespan, "busy": found.busy, "bubble": found.bubble,
        "idleFraction": found.idle_fraction, "ownBubble": found.own_bubble, "peaks": found.peak_in_flight,
    }  # fmt: skip


CASE = {"ring": ring_case, "data": data_case, "pipeline": pipeline_case}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_timeline_computes_what_utils_computes(living_tab: LivingTab, mode: str):
    rng = random.Random(f"{mode}, seed 1729")
    cases = [CASE[mode](rng) for _ in range(CASES // 3)]
    inputs = [{name: typed(value) for name, value in asked.items()} for asked, _ in cases]
    found = living_tab.run(NAME, inputs)
    for (asked, expected), each in zip(cases, found, strict=True):
        if mode == "data":
            each["shares"] = [each["exposed"] / each["seconds"], each["hidden"] / each["seconds"]]
        near(each, expected, str(asked))
    drawn = {asked.get("schedule") for asked, _ in cases}
    assert mode != "pipeline" or len(drawn) == 6


@pytest.mark.slow
def test_the_rings_chunks_travel_as_a_real_ring_moves_them(living_tab: LivingTab):
    page = living_tab.open(NAME)
    for ranks in (2, 3, 4, 5, 6):
        found = page.evaluate("(n) => MLF.schedules.ringStates(n)", ranks)
        states = [[[frozenset(r for r in range(ranks) if held >> r & 1) for held in row] for row in state]
                  for state in found["states"]]  # fmt: skip
        assert check_states(states) == ranks and len(states) == 2 * (ranks - 1) + 1
        for before, after, sent in zip(states, states[1:], found["sent"], strict=False):
            moved = {(move.source, move.target, move.chunk) for move in moves_between(before, after)}
            assert moved == {(each["source"], each["target"], each["chunk"]) for each in sent}
            assert all(target == (source + 1) % ranks for source, target, _ in moved)
        assert all(held == frozenset(range(ranks)) for row in states[-1] for held in row)


# ---- refusals ----

WHOLE = ["", "  ", "many", "-5", "1.5", "1e400", "NaN", "0x10", "<b>4</b>", "3 stages", "1e-400000"]
FIELDS = [
    ("ring", {"ranks": ["1", "65", *WHOLE], "size": ["", "-1", "x", "1e30"], "latency": ["", "-1", "1e9", "five"]}),
    ("data", {"ranks": ["0"], "buckets": ["0", "257", *WHOLE], "psi": ["0", "1e15", "", "70 Bananas"],
              "tokens": ["0", "", "1e10"], "latency": ["-0.1"]}),
    ("pipeline", {"stages": ["0", "17", *WHOLE], "micro": ["0", "65", *WHOLE], "ratio": ["0", "", "11", "x"],
                  "last": ["0", "", "-1", "1e3"]}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "wrong"), FIELDS)
def test_nonsense_gets_a_message_and_the_results_are_withdrawn(living_tab: LivingTab, mode: str, wrong):
    page = living_tab.open(NAME, mode=mode)
    before = page.locator(".mlf-results").inner_text()
    for name, texts in wrong.items():
        field, own = page.locator(f"#mlf-{NAME}-{name}"), page.locator(f"#mlf-{NAME}-{name}").input_value()
        for text in texts:
            field.fill(text)
            assert field.get_attribute("aria-invalid") == "true", (name, text)
            assert len(page.locator(f"#mlf-{NAME}-{name}-error").inner_text()) > 10, (name, text)
            assert not page.locator(".mlf-results").is_visible() and page.locator(".mlf-notice").is_visible()
        field.fill(own)
        assert page.locator(".mlf-results").inner_text() == before
    living_tab.check()


@pytest.mark.slow
def test_what_does_not_go_together_says_so(living_tab: LivingTab):
    page = living_tab.open(NAME, mode="pipeline", schedule="interleaved", stages=4, micro=8)
    page.locator(f"#mlf-{NAME}-micro").fill("9")
    assert "multiple of the 4 stages" in page.locator(f"#mlf-{NAME}-micro-error").inner_text()
    page.locator(f"#mlf-{NAME}-stages").fill("3")  # the micro-batches follow
    assert page.locator(f"#mlf-{NAME}-micro").input_value() == "9" and page.locator(".mlf-results").is_visible()
    page.locator(f"#mlf-{NAME}-stages").fill("16")
    assert page.locator(f"#mlf-{NAME}-micro").input_value() == "16"
    page.locator(f"#mlf-{NAME}-mode").select_option("data")
    page.locator(f"#mlf-{NAME}-gpu").select_option("L4")
    assert "L4 has no NVLink" in page.locator(f"#mlf-{NAME}-link-error").inner_text()
    living_tab.check()


EXTREMES = {
    "ring": ({"ranks": 2, "size": 0.000001, "latency": 0}, {"ranks": 64, "size": 1e9, "latency": 1e6}),
    "data": ({"ranks": 2, "buckets": 1, "psi": 1, "tokens": 1, "latency": 0},
             {"ranks": 64, "buckets": 256, "psi": "1e14", "tokens": "1e9", "latency": 1e6}),
    "pipeline": ({"stages": 1, "micro": 1, "ratio": 0.1, "last": 0.1},
                 {"stages": 16, "micro": 64, "chunks": 4, "ratio": 10, "last": 10}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_least_and_the_largest_inputs_draw_numbers_only(living_tab: LivingTab, mode: str):
    schedule = ("naive", "interleaved", "zero_bubble_2") if mode == "pipeline" else ("",)
    for settings in EXTREMES[mode]:
        for each in schedule:
            page = living_tab.open(NAME, mode=mode, **settings, **({"schedule": each} if each else {}))
            for key in ("Home", "End"):
                page.get_by_role("button", name="Play").focus()
                page.keyboard.press(key)
                drawn = page.locator(".mlf-results").evaluate("(each) => each.outerHTML")
                assert not re.search(r"NaN|Infinity|undefined|null|∞", drawn), (mode, settings, each)
            assert page.locator(".mlf-results").is_visible()
    living_tab.check()


# ---- in the hand ----


@pytest.mark.slow
def test_a_keyboard_slides_steps_and_moves_the_moment(living_tab: LivingTab):
    page = living_tab.open(NAME, mode="data", step=0)
    said = page.locator(".mlf-reading")
    assert said.inner_text() == "After 0 s the forward pass runs; the link is idle."
    moment = page.get_by_role("slider", name="moment that is shown")
    moment.focus()
    page.keyboard.press("ArrowRight")
    assert "the backward pass computes bucket 1; the link is idle" in said.inner_text()
    page.keyboard.press("ArrowRight")
    assert "computes bucket 2; on the link is bucket 1, message 1 of 6 (reduce-scatter)" in said.inner_text()
    assert page.evaluate("document.activeElement.dataset.handle") == "time", "the handle keeps the focus"
    assert moment.get_attribute("aria-valuetext") == said.inner_text()
    page.keyboard.press("End")
    assert "the optimizer can step" in said.inner_text()
    buckets = page.get_by_role("slider", name="Buckets, slider")
    buckets.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(f"#mlf-{NAME}-buckets").input_value() == "8"
    assert buckets.get_attribute("aria-valuetext") == "8"
    page.locator(f"#mlf-{NAME}-buckets").fill("100")  # between two of the slider's numbers
    assert "100 all-reduces" in page.locator(".mlf-facts").inner_text()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.id") == f"mlf-{NAME}-ranks"
    page.locator(f"#mlf-{NAME}-overlap").focus()
    page.keyboard.press("Space")
    assert page.locator(".mlf-verdict").inner_text().startswith("Nothing is hidden.")
    seen = set()
    page.locator("body").focus()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate(
                "(({ id, ariaLabel, textContent }) => id || ariaLabel || textContent)(document.activeElement)"
            )
        )
    visible = page.locator(".mlf-explorer :is(select, input, button, summary, [role=slider]):visible").count()
    assert len(seen) >= visible, "every control is reached by Tab"
    living_tab.check()


@pytest.mark.slow
def test_the_micro_batches_slide_in_multiples_of_the_stages_where_they_must(living_tab: LivingTab):
    page = living_tab.open(NAME, mode="pipeline", schedule="interleaved", stages=4, micro=8)
    page.get_by_role("slider", name="Micro-batches m, slider").focus()
    for expected in ("12", "16"):
        page.keyboard.press("ArrowRight")
        assert page.locator(f"#mlf-{NAME}-micro").input_value() == expected
    page.wait_for_function("document.querySelector('.mlf-chosen').innerText.includes('9.38 %')")  # when the hand rests
    assert page.locator(".mlf-chosen").inner_text().startswith("interleaved 1F1B, v = 2")
    living_tab.check()


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize("mode", thorough_but(MODES, "data"))
def test_the_moment_follows_the_pointer_60_times_a_second(living_tab: LivingTab, mode: str, record_property):
    page = living_tab.open(NAME, mode=mode, ranks=8, micro=32, stages=8, step=0)
    page.set_viewport_size({"width": 1000, "height": 900})
    knob, said = page.get_by_role("slider", name="moment that is shown"), page.locator(".mlf-reading")
    before, box = said.inner_text(), knob.locator("circle").first.bounding_box()
    frame = living_tab.frame(knob, 300, 0)
    record_property("milliseconds_a_frame", frame)
    assert frame < living_tab.budget()
    assert said.inner_text() != before
    assert abs(knob.locator("circle").first.bounding_box()["x"] - box["x"] - 300) < 40
    living_tab.check()


#: Milliseconds of each of ``count`` moves of a slider: the script, which draws at once, and the layout that it makes
#: necessary.
SLID = """async ([name, count]) => {
  const range = [...document.querySelectorAll("input[type=range]")].find((each) => each.ariaLabel === name);
  const taken = [];
  for (let k = 0; k < count; k += 1) {
    const [before, begin] = [document.querySelector(".mlf-plot svg"), performance.now()];
    range.value = 1 + (k % 14);
    range.dispatchEvent(new Event("input", { bubbles: true }));
    document.body.offsetHeight;
    if (document.querySelector(".mlf-plot svg") !== before) taken.push(performance.now() - begin);
    await new Promise(requestAnimationFrame);
  }
  return taken;
}"""


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize(
    ("mode", "slider"),
    [("ring", "Ranks N"), ("data", "Ranks N"), ("data", "Buckets"), ("pipeline", "Stages p"),
     ("pipeline", "Micro-batches m")],
)  # fmt: skip
def test_a_slider_draws_60_times_a_second(living_tab: LivingTab, mode: str, slider: str, record_property):
    page = living_tab.open(NAME, mode=mode)
    page.wait_for_timeout(200)
    taken = page.evaluate(SLID, [f"{slider}, slider", 28])
    assert len(taken) == 28
    frame = statistics.median(taken)
    record_property("milliseconds_a_frame", frame)
    assert frame < living_tab.budget()
    living_tab.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"mode": "ring", "ranks": 12, "step": 0}, {"mode": "ring", "ranks": 64},
     {"mode": "data", "ranks": 12, "buckets": 64, "tokens": 512}, {"mode": "data", "buckets": 1, "overlap": 0},
     {"mode": "pipeline", "schedule": "interleaved", "stages": 16, "micro": 64, "chunks": 4},
     {"mode": "pipeline", "schedule": "zero_bubble", "stages": 8, "micro": 16}],
)  # fmt: skip
def test_nothing_is_cut_or_lies_on_something_else(living_tab: LivingTab, settings):
    living_tab.open(NAME, **settings)
    assert living_tab.crowded(390, 700, 1000, 1440) == []


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("mode", MODES)
def test_it_fits_a_phone_and_axe_finds_nothing_grave(living_tab: LivingTab, mode: str, theme: str):
    living_tab.open(NAME, theme, mode=mode, ranks=12, micro=16, stages=8, schedule="zero_bubble")
    assert living_tab.fits(390) and living_tab.fits(1440)
    living_tab.check()
    assert living_tab.grave() == []
