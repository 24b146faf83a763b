"""The parallelism timeline computes what `utils` computes on 501 random inputs, refuses nonsense, needs no pointer."""

# ruff: noqa: F811  (fixtures are imported)

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from explorer_cases import RUN, Tab, link_of, site, tab, typed, whole  # noqa: F401  (fixtures)

from utils import schedules
from utils import transformer_math as tm
from utils.hardware import GPUS
from utils.operators import ELEMENT_SIZE
from utils.plots.collectives import check_states, moves_between

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
def test_the_timeline_computes_what_utils_computes(tab: Tab, mode: str):
    rng = random.Random(f"{mode}, seed 1729")
    cases = [CASE[mode](rng) for _ in range(CASES // 3)]
    inputs = [{name: typed(value) for name, value in asked.items()} for asked, _ in cases]
    found = tab.open("parallelism-light").evaluate(RUN, ["parallelism", inputs])
    for (asked, expected), each in zip(cases, found, strict=True):
        if mode == "data":
            each["shares"] = [each["exposed"] / each["seconds"], each["hidden"] / each["seconds"]]
        near(each, expected, str(asked))
    drawn = {asked.get("schedule") for asked, _ in cases}
    assert mode != "pipeline" or len(drawn) == 6


@pytest.mark.slow
def test_the_rings_chunks_travel_as_a_real_ring_moves_them(tab: Tab):
    page = tab.open("parallelism-light")
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
