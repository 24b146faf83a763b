"""The scheduler playground: at every iteration it is where lab 5's engine is, with the same blocks in its tables."""

# ruff: noqa: F811  (fixtures are imported)

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from explorer_cases import RUN
from living_tab import LivingTab, living_tab  # noqa: F401  (fixtures)

from solutions.lab5_serving import Engine
from solutions.lab5_serving.scheduler import Scheduler
from utils import plots
from utils.serving import MODELS, SamplingParams, load_model
from utils.serving.metrics import RequestRecord
from website import explorers

THOROUGH = pytest.mark.thorough
NAME = "scheduler"
FOUR = "0: 4+8, 0: 4+8, 0: 4+8, 0: 4+8"
FOLDER = Path(explorers.__file__).parent
SETTINGS = explorers.SETTINGS
MANY = ", ".join(f"{k}: {4 + k}+{12 + k}" for k in range(8))

Case = dict[str, Any]


class Waits(Scheduler):
    """Never preempts: a request without a block for its next token stands still."""

    reserve_share = 0.0

    def _make_room(self, request, count, step):
        new = request.slice(self.manager.length(request.id), request.computed + count)
        if not self.manager.can_append(request.id, len(new)):
            return 0
        self.manager.append(request.id, new)
        return count


class Reserves(Scheduler):
    """Admits a request only if all that run can grow to their limit beside it, as the static scheduler does."""

    reserve_share = 0.0

    def _admit(self, step):
        promised = sum(self.manager.blocks_for(r.limit - 1) for r in [*self.running, self.waiting[0]])
        return promised <= self.manager.num_blocks and super()._admit(step)


class Playground(Engine):
    """Lab 5's engine with two more ways to share the blocks."""

    schedulers = Engine.schedulers | {"wait": Waits, "reserve": Reserves}

    def _choose(self, sampling, logits, failed):
        return [0] * len(sampling)  # what the tokens say does not matter here


class Watched:
    """Stands where the model runs, and writes down the block tables while an iteration computes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.seen: dict[str, Any] = {}

    def run(self, step, manager):
        self.seen = {id: (list(manager.table(id)), manager.length(id)) for id in manager.sequences}
        self.free = manager.num_free


@pytest.fixture(scope="module")
def model():
    return load_model(MODELS / "target", dtype=torch.float32)


def drawn(rng: random.Random) -> Case:
    """Requests, a policy and a pool in which the largest of them just fits, or more."""
    count, longest = rng.randint(1, 8), rng.choice((3, 8, 8, 20, 64))
    requests = [
        (rng.choice((0, 0, rng.randint(0, 30))), rng.randint(1, longest), rng.randint(1, longest)) for _ in range(count)
    ]
    batch, size = rng.randint(1, 8), rng.randint(4 if longest > 12 else 1, 16)
    largest = max(math.ceil((prompt + answer - 1) / size) for _, prompt, answer in requests)
    return {
        "requests": requests,
        "policy": rng.choice(("static", "continuous", "continuous", "chunked", "chunked")),
        "memory": rng.choice(("preempt", "preempt", "wait", "wait", "reserve")),
        "batch": batch,
        "budget": rng.randint(batch, 40),
        "blocks": rng.choice((largest, min(40, largest + rng.randint(0, 3)), rng.randint(largest, 40))),
        "block_size": size,
    }


def typed(case: Mapping[str, Any]) -> dict[str, str]:
    """What a reader types to get a case."""
    said = ", ".join(f"{arrival}: {prompt}+{answer}" for arrival, prompt, answer in case["requests"])
    return {name: str(value) for name, value in case.items()} | {"requests": said}


def played(model, case: Case) -> tuple[list[dict[str, Any]], Playground]:
    """What lab 5's engine does in each iteration; it ends where all are answered, or where nothing moves."""
    requests, policy = case["requests"], case["policy"]
    kind = "static" if policy == "static" else {"preempt": "continuous"}.get(case["memory"], case["memory"])
    watched = Watched(case["blocks"], case["block_size"])
    engine = Playground(
        model, max_batch=case["batch"], token_budget=case["budget"] if policy == "chunked" else 4096,
        chunked_prefill=policy == "chunked", scheduler=kind, runner=watched, prefix_caching=False,
    )  # fmt: skip
    coming, came, tokens = dict(enumerate(requests)), [], {i: [] for i in range(len(requests))}
    reach, again, busy, states, stuck = dict.fromkeys(tokens, 0), 0, 0, [], False
    while (coming or engine.has_work) and not stuck:
        k = len(states)
        for i in [i for i, (arrival, _, _) in coming.items() if arrival <= k]:
            _, prompt, answer = coming.pop(i)
            engine.add([1] * prompt, SamplingParams(max_new_tokens=answer, ignore_eos=True), id=str(i))
            came.append(i)
        state: dict[str, Any] = {
            "iteration": k + 1,
            "chunks": [],
            "preempted": [],
            "finished": [],
            "free": case["blocks"],
        }
        watched.seen = {}
        if engine.has_work:
            engine.step()
            engine.manager.check()
            record = engine.history[-1]
            stuck, busy = not record.chunks, busy + record.batch
            for id, start, count in record.chunks:
                again += max(0, min(reach[int(id)], start + count) - start)
                reach[int(id)] = max(reach[int(id)], start + count)
            for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
                if len(request.output) > len(tokens[int(request.id)]):
                    tokens[int(request.id)].append(k + 1)
            for id in record.finished:
                tokens[int(id)].append(k + 1)
            state |= {
                "chunks": [{"request": int(id), "start": start, "count": count} for id, start, count in record.chunks],
                "preempted": [int(id) for id in record.preempted],
                "finished": [int(id) for id in record.finished],
                "free": watched.free,
            }
        tables = [watched.seen.get(str(i), ([], 0)) for i in tokens]
        records = [
            RequestRecord(str(i), requests[i][0], requests[i][1], tuple(times), "length", k + 1)
            for i, times in tokens.items()
        ]
        ttft, tpot = ([v for r in records if not math.isnan(v := getattr(r, name))] for name in ("ttft", "tpot"))
        states.append(
            state
            | {
                "waiting": [int(request.id) for request in engine.scheduler.waiting],
                "running": [int(id) for id in watched.seen],
                "tables": [table for table, _ in tables],
                "stored": [length for _, length in tables],
                "made": [len(times) for times in tokens.values()],
                "ttft": statistics.fmean(ttft) if ttft else None,
                "tpot": statistics.fmean(tpot) if tpot else None,
                "iterations": len(engine.history) - stuck,
                "busy": busy,
                "preemptions": engine.stats()["preemptions"],
                "again": again,
            }
        )
    return states, engine


def computed(tab: LivingTab, cases: list[Case]) -> list[Any]:
    """What the figure computes; as JSON, since so much of it takes minutes otherwise."""
    return json.loads(
        tab.open(NAME).evaluate(f"(asked) => JSON.stringify(({RUN})(asked))", [NAME, [*map(typed, cases)]])
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=THOROUGH)])
def test_random_inputs_are_at_every_iteration_where_lab_5s_engine_is(living_tab: LivingTab, model, count):
    rng = random.Random(1917)
    cases = [drawn(rng) for _ in range(count)]
    seen = dict.fromkeys(("deadlock", "preempted", "chunked", "idle"), 0)
    for case, found in zip(cases, computed(living_tab, cases), strict=True):
        states, engine = played(model, case)
        for step, state in zip(found["steps"], states, strict=True):
            means = {name: state.pop(name) for name in ("ttft", "tpot")}
            assert {name: step[name] for name in state} == state, case
            for name, value in means.items():
                assert step[name] == (value if value is None else pytest.approx(value, rel=1e-9)), (name, case)
        assert found["isStuck"] == engine.has_work
        if not found["isStuck"]:
            total = sum(prompt + answer - 1 for _, prompt, answer in case["requests"])
            assert states[-1]["again"] == engine.stats()["computed_tokens"] - total
        worked = [step for step in found["steps"] if step["chunks"]]
        if not any(step["stalled"] for step in found["steps"]):
            grid = plots.slots_of([record for record in engine.history if record.chunks], case["batch"])
            seats = [[cell and int(cell.request) for cell in column] for column in zip(*grid.rows, strict=True)]
            assert [step["seats"] for step in worked] == seats
        seen["deadlock"] += found["isStuck"]
        seen["preempted"] += states[-1]["preemptions"] > 0
        seen["chunked"] += any(
            0 < c["start"] < case["requests"][c["request"]][1] for step in worked for c in step["chunks"]
        )
        seen["idle"] += len(states) > len(engine.history)
    assert min(seen.values()) >= count // 40, seen


@pytest.mark.slow
def test_it_gives_the_figures_of_lecture_11_and_of_its_page(living_tab: LivingTab, model):
    text = " ".join((FOLDER / "pages/explorers" / f"{NAME}.md").read_text("utf-8").split())
    four = SETTINGS["deadlocked"]
    asked = [
        SETTINGS["batched"], SETTINGS["batched"] | {"policy": "continuous"}, four, four | {"memory": "reserve"},
        four | {"memory": "preempt"}, SETTINGS["coarse"], SETTINGS["coarse"] | {"memory": "preempt"}, SETTINGS["long"],
        SETTINGS["long"] | {"policy": "continuous"}, SETTINGS["preempted"],
    ]  # fmt: skip
    found = living_tab.run(NAME, [{name: str(value) for name, value in each.items()} for each in asked])
    static, continuous, waits, reserves, preempts, coarse, blocks, chunked, whole, again = (
        each["steps"] for each in found
    )
    assert (len(static), static[7]["busy"], len(continuous), continuous[7]["busy"]) == (16, 26, 15, 32)
    assert (
        "16 and 15. Static batching uses 26 of 32 slots in its first eight iterations, continuous batching all 32."
        in text
    )
    assert found[2]["isStuck"] and waits[-1]["iterations"] == 3 and waits[-1]["stored"] == [6] * 4
    assert "After iteration 3: each request holds 6 blocks" in text
    assert (len(reserves), len(preempts), preempts[-1]["again"]) == (16, 13, 14)
    assert (
        "answered in 16 iterations. If the newest is preempted, it takes 13, and 14 tokens are computed again." in text
    )
    assert found[5]["isStuck"] and coarse[-1]["iterations"] == 5 and "Later: after iteration 5." in text
    assert (len(blocks), blocks[-1]["preemptions"], blocks[-1]["again"]) == (15, 2, 12), "as lecture 11 says"
    most, first = (lambda steps: max(sum(c["count"] for c in step["chunks"]) for step in steps),
                   lambda steps: next(step["iteration"] for step in steps if step["made"][2]) - 4)  # fmt: skip
    assert (most(chunked), first(chunked), most(whole), first(whole)) == (8, 7, 42, 1)
    assert (
        "more than 8 tokens" in text and "comes 7 iterations after its arrival" in text and "computes 42 tokens" in text
    )
    assert (again[-1]["preemptions"], again[-1]["again"]) == (2, 24) and "here 24 tokens in 2 preemptions" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "texts"),
    [
        ("requests", ["", ",", "4", "a+b", "1: 2", "0: 0+4", "0: 4+0", "-1: 4+4", "100: 4+4", "0: 65+4", "0: 4+65",
                      "1.5: 4+4", ", ".join(["1+1"] * 9), "<b>", "0: 64+64"]),
        ("batch", ["", "0", "9", "two", "1.5", "-1"]),
        ("blocks", ["", "0", "41", "x", "1"]),
        ("block_size", ["", "0", "65", "4,5", "1"]),
        ("budget", ["", "0", "3", "513", "all"]),
    ],
)  # fmt: skip
def test_nonsense_gets_a_message_and_the_results_are_withdrawn(living_tab: LivingTab, field, texts):
    page = living_tab.open(NAME, policy="chunked")
    for wrong in texts:
        page.locator(f"#mlf-{NAME}-{field}").fill(wrong)
        assert len(page.locator(".mlf-error:not(:empty)").inner_text()) > 10, wrong
        assert not page.locator(".mlf-results").is_visible(), wrong
    living_tab.check()


@pytest.mark.slow
def test_what_the_engine_refuses_is_refused_with_its_numbers(living_tab: LivingTab, model):
    page = living_tab.open(NAME, requests="0: 4+8")
    page.locator(f"#mlf-{NAME}-blocks").fill("2")
    said = page.locator(f"#mlf-{NAME}-blocks-error").inner_text()
    with pytest.raises(ValueError, match=r"may grow to 12 tokens .*, 3 blocks of 4; the pool has 2"):
        played(model, {"requests": [(0, 4, 8)], "policy": "continuous", "memory": "preempt", "batch": 4, "budget": 8,
                       "blocks": 2, "block_size": 4})  # fmt: skip
    assert said == "R1 may grow to 12 tokens, 3 blocks of 4; the pool has 2, so the engine refuses it."


@pytest.mark.slow
def test_a_keyboard_steps_drags_and_leads_into_a_deadlock_and_out_of_it(living_tab: LivingTab):
    page = living_tab.open(NAME, requests=FOUR, memory="wait", blocks=6, block_size=4, step=0)
    said, deadlock = page.locator(".mlf-player .mlf-reading"), page.locator(".mlf-deadlock")
    handles = {f"R{k}: {what}" for k in range(1, 5) for what in ("arrival", "prompt", "answer")}
    steps = {"Back to the start", "One step back", "Play", "One step forward", "step"}
    fields = {"requests", "policy", "batch", "memory", "blocks", "block_size"}
    assert living_tab.tabbed() == handles | steps | fields | {"Add a request", "Remove the last", "Start again"}
    assert said.inner_text() == "Nothing is computed yet. R1, R2, R3 and R4 wait."
    page.get_by_role("button", name="One step forward").focus()
    page.keyboard.press("ArrowRight")
    assert said.inner_text().startswith("Iteration 1 computes 16 tokens: R1, R2, R3 and R4 prefill.")
    page.keyboard.press("ArrowRight")
    assert "R3 and R4 stand still: no block is free for the next token." in said.inner_text()
    assert not deadlock.is_visible()
    page.keyboard.press("End")
    assert "R1, R2, R3 and R4 hold all 6 blocks and cannot go on without another." in deadlock.inner_text()
    page.locator(f"#mlf-{NAME}-memory").focus()
    page.keyboard.press("p")
    assert not deadlock.is_visible() and said.inner_text().startswith("Iteration 15 "), "it stays at the end"
    page.locator(f"#mlf-{NAME}-policy").focus()
    page.keyboard.press("s")
    assert said.inner_text().startswith("Iteration 16 ") and not page.locator(f"#mlf-{NAME}-memory").is_visible()
    page.keyboard.press("c")
    requests = page.locator(f"#mlf-{NAME}-requests")
    for handle, key, text in (
        ("R2: arrival", "ArrowRight", "0: 4+8, 1: 4+8, 0: 4+8, 0: 4+8"),
        ("R3: prompt", "ArrowLeft", "0: 4+8, 1: 4+8, 0: 3+8, 0: 4+8"),
        ("R4: answer", "PageUp", "0: 4+8, 1: 4+8, 0: 3+8, 0: 4+12"),
    ):
        page.get_by_role("slider", name=handle).focus()
        page.keyboard.press(key)
        assert requests.input_value() == text
        assert page.evaluate("document.activeElement.ariaLabel") == handle, "the handle keeps the focus"
    for button, count in (("Add a request", 5), ("Remove the last", 4)):
        page.get_by_role("button", name=button).focus()
        page.keyboard.press("Enter")
        assert len(requests.input_value().split(",")) == count
    page.get_by_role("button", name="Start again").focus()
    page.keyboard.press("Enter")
    assert requests.input_value() == FOUR
    living_tab.check()


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize(
    ("handle", "across"),
    [
        ("R3: arrival", 110),
        pytest.param("R3: answer", -60, marks=THOROUGH),
        pytest.param("R8: prompt", 60, marks=THOROUGH),
    ],
)
def test_eight_requests_follow_the_pointer_60_times_a_second(living_tab: LivingTab, record_property, handle, across):
    page = living_tab.open(NAME, requests=MANY, batch=8, blocks=40)
    knob = page.get_by_role("slider", name=handle)
    before, frame = knob.get_attribute("aria-valuenow"), living_tab.frame(knob, across=across, down=0)
    assert knob.get_attribute("aria-valuenow") != before
    record_property("milliseconds_a_frame", frame)
    assert frame < living_tab.budget()
    living_tab.check()


@pytest.mark.slow
@pytest.mark.parametrize("handle", ["R8: arrival", "R8: prompt", "R1: answer"])
def test_a_handle_stays_under_the_pointer_though_the_schedule_grows_by_it(living_tab: LivingTab, handle):
    page = living_tab.open(NAME, requests=MANY, batch=2, blocks=40)
    knob = page.get_by_role("slider", name=handle)
    knob.scroll_into_view_if_needed()
    box = knob.locator(".mlf-knob").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    for across in (10, 20, 30, 10, -10):
        page.mouse.move(x + across, y)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        box = knob.locator(".mlf-knob").bounding_box()
        assert abs(box["x"] + box["width"] / 2 - x - across) <= 16, (handle, across, "no further than to the next step")
    page.mouse.up()
    living_tab.check()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "settings",
    [
        {"requests": FOUR, "memory": "wait", "blocks": 6, "block_size": 4},
        {
            "requests": ", ".join(["3: 30+34"] * 8),
            "memory": "reserve",
            "batch": 8,
            "blocks": 40,
            "block_size": 2,
            "step": 40,
        },
    ],
    ids=["deadlock", "many"],
)
def test_it_fits_a_phone_and_axe_finds_nothing_grave(living_tab: LivingTab, theme, settings):
    living_tab.open(NAME, theme, **settings)
    for width in (390, 1000, 1440):
        assert living_tab.fits(width)
    assert living_tab.crowded(390, 700, 1000, 1440) == []
    living_tab.check()
    assert living_tab.grave() == []
