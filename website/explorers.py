"""Stages the living figures for the site: their scripts, the data that they compute with, the answers on their pages.

A page in ``pages/explorers`` holds ``{{living:NAME}}`` where its figure stands, and asks questions. ``{{name}}`` stands
for a number that is computed here from `utils`, ``{{set:name}}`` for a link that sets the living figure to what a
question is about.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from utils import attention_math as am
from utils import living, roofline, schedules
from utils import transformer_math as tm
from utils.hardware import gpu
from utils.living.kernels import recorded
from utils.living.tables import NETWORK, data
from utils.operators import tiled_matmul_bytes
from utils.transformer_math import SERVED_MODELS, STAGES
from utils.units import number, quantity

STATIC = "_static/living"

# ---- questions and answers ----

_FEW_ROWS, _PROMPT, _NEW = 16, 1792, 256
_FULL = tm.largest_batch(SERVED_MODELS["Llama 3 8B"], gpu("H100").memory_bytes, _PROMPT + _NEW)
_REQUESTS = {"gpu": "H100", "prompt": _PROMPT, "new": _NEW}
_STEP = {"mode": "data", "ranks": 4, "psi": "7B", "tokens": 2048, "gpu": "H100", "link": "nvlink", "latency": 5}
_PIPELINE = {"mode": "pipeline", "ratio": 2, "last": 1}
_FOUR = {"requests": "0: 4+8, 0: 4+8, 0: 4+8, 0: 4+8", "policy": "continuous", "memory": "wait", "batch": 4}
#: What the questions of the pages are about: settings of the explorers by name.
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "ridge": {"gpu": "H100", "op": "matmul", "dtype": "bf16", "m": 256, "k": 4096, "n": 4096},
    "scores": {"gpu": "H100", "op": "attention", "dtype": "bf16", "materialize": 1, "causal": 0},
    "newer": {"gpu": "H200", "op": "matmul", "dtype": "bf16", "m": _FEW_ROWS, "k": 4096, "n": 4096},
    "stages": {"model": "GPT-3 13B", "ranks": 8, "gpu": "H100", "stage": 1},
    "large": {"model": "GPT-3 175B", "ranks": 1024, "gpu": "H100", "stage": 2},
    "network": {"model": "own", "psi": "7.5e9", "ranks": 64, "gpu": "H100", "stage": 3, "link": "network"},
    "full": {"model": "Llama 3 8B", "batch": _FULL, **_REQUESTS},
    "eight": {"model": "Llama 3 8B", "batch": 1, **_REQUESTS, "weights": "int8"},
    "grouped": {"model": "Llama 2 7B", "batch": 16, **_REQUESTS},
    "forgotten": {"scores": "-29, -30, -20, -20", "tile": 2, "rescale": 0},
    "single": {"scores": "-29, -30, -20, -20", "tile": 1, "rescale": 1},
    "walk": {"kernel": "attention", "block_m": 64, "block_n": 64, "head_dim": 64, "queries": 1024, "keys": 1024},
    "ridged": {"kernel": "attention", "block_m": 256, "block_n": 64, "head_dim": 64, "queries": 8192, "keys": 8192},
    "wide": {"kernel": "attention", "block_m": 256, "block_n": 256, "head_dim": 256, "stages": 2},
    "product": {"kernel": "matmul", "block_m": 128, "block_n": 128, "m": 4096, "k": 4096, "n": 4096},
    "twice": {"gpu": "H100", "op": "matmul", "dtype": "bf16", "m": 64, "k": 4096, "n": 4096, "beta": 2},
    "shortest": {"gpu": "H100", "op": "matmul", "dtype": "bf16", "m": 256, "k": 256, "n": 256, "kernels": "operators"},
    "one_bucket": _STEP | {"buckets": 1},
    "few_tokens": _STEP | {"buckets": 6, "tokens": 1024},
    "small_ring": {"mode": "ring", "ranks": 8, "size": 1, "gpu": "H100", "link": "nvlink", "latency": 5},
    "eight_stages": _PIPELINE | {"schedule": "one_f_one_b", "stages": 8, "micro": 8},
    "two_chunks": _PIPELINE | {"schedule": "interleaved", "stages": 8, "micro": 8, "chunks": 2},
    "slow_last": _PIPELINE | {"schedule": "one_f_one_b", "stages": 4, "micro": 8, "last": 1.5},
    "masked": {"scores": "-inf, -inf, 2, 1", "tile": 2, "rescale": 1},
    "batched": {
        "requests": "0: 1+6, 0: 1+8, 0: 1+5, 0: 1+7, 0: 1+6, 0: 1+5, 0: 1+8",
        "policy": "static",
        "batch": 4,
        "blocks": 40,
    },
    "deadlocked": {**_FOUR, "blocks": 24, "block_size": 1},
    "coarse": {**_FOUR, "blocks": 6, "block_size": 4},
    "long": {"requests": "0: 2+20, 0: 2+20, 4: 40+4", "policy": "chunked", "batch": 4, "budget": 8, "blocks": 40},
    "preempted": {
        "requests": "0: 6+14, 0: 6+14, 0: 6+14",
        "policy": "continuous",
        "memory": "preempt",
        "blocks": 8,
        "block_size": 4,
    },
}


def _product(device: str, rows: int) -> float:
    return roofline.time_bounds(roofline.matmul(rows, 4096, 4096), gpu(device)).overlapped


def _roofline_answers() -> dict[str, str]:
    h100, sizes = gpu("H100"), (4, 32, 4096, 128)
    textbook, flash = (roofline.attention(*sizes, materialize=each) for each in (True, False))
    slow, fast = (roofline.time_bounds(each, h100).overlapped for each in (textbook, flash))
    rows = roofline.crossover_batch(4096, 4096, h100)
    return {
        "ridge.rows": number(rows),
        "ridge.intensity": number(roofline.matmul(256, 4096, 4096).intensity, 4),
        "ridge.ridge": number(roofline.ridge(h100), 4),
        "scores.intensity": number(textbook.intensity, 3),
        "scores.flash": number(flash.intensity, 3),
        "scores.slow": quantity(slow, "s", 4),
        "scores.fast": quantity(fast, "s", 4),
        "scores.times": number(slow / fast, 2),
        "newer.few": number(_product("H100", _FEW_ROWS) / _product("H200", _FEW_ROWS), 3),
        "newer.many": number(_product("H100", 4096) / _product("H200", 4096), 3),
    }


def _dragged_answers() -> dict[str, str]:
    h100, product = gpu("H100"), roofline.matmul(64, 4096, 4096)
    points = [point for point in recorded()["operators"]["points"] if point["unit"] == "bf16"]
    shares = {
        point["name"]: point["flopsPerSecond"] / roofline.attainable(point["intensity"], h100) for point in points
    }
    least = min(shares, key=shares.__getitem__)
    return {
        "twice.times": number(roofline.ridge(h100) / product.intensity, 3),
        "twice.intensity": number(product.intensity, 3),
        "shortest.name": least,
        "shortest.share": number(100 * shares[least], 2),
        "shortest.seconds": quantity(next(p["seconds"] for p in points if p["name"] == least), "s", 3),
    }


def _parallel_answers() -> dict[str, str]:
    h100 = gpu("H100")
    link = {"bandwidth": h100.link_bandwidth / 2, "latency": 5e-6}
    given = {"peak_flops": h100.peak_flops["bf16"], **link}
    step = {k: tm.data_parallel_step(7 * 10**9, 4, k, 2048, **given) for k in (1, 12, 96)}
    few = tm.data_parallel_step(7 * 10**9, 4, 6, 1024, **given)
    ring = {n: tm.ring_seconds("all_reduce", 10**6, n, *link.values()) for n in (8, 64)}
    wide, twice, chunked = schedules.one_f_one_b(8, 8), schedules.one_f_one_b(8, 16), schedules.interleaved(8, 8, 2)
    assert math.isclose(schedules.simulate(twice).bubble, schedules.simulate(chunked).bubble)
    slow = {m: schedules.simulate(schedules.one_f_one_b(4, m), [1, 1, 1, 1.5], [2, 2, 2, 3]).bubble for m in (8, 64)}
    even = schedules.simulate(schedules.one_f_one_b(4, 64)).bubble

    def percent(share: float) -> str:
        return f"{number(100 * share, 3)} %"

    return {
        **{f"one_bucket.exposed{k}": quantity(each.exposed, "s", 3) for k, each in step.items()},
        "few_tokens.exposed": quantity(few.exposed, "s", 3),
        "few_tokens.tokens": number(math.ceil(few.communication * given["peak_flops"] / (4 * 7e9)), 4),
        "small_ring.few": quantity(ring[8], "s", 3),
        "small_ring.many": quantity(ring[64], "s", 3),
        "small_ring.times": number(ring[64] / ring[8], 3),
        "eight_stages.bubble": percent(schedules.simulate(wide).bubble),
        "eight_stages.held": number(max(twice.peak_in_flight)),
        "two_chunks.bubble": percent(schedules.simulate(chunked).bubble),
        "slow_last.bubble": percent(slow[8]),
        "slow_last.many": percent(slow[64]),
        "slow_last.even": percent(even),
    }


def _memory_answers() -> dict[str, str]:
    h100, psi, ranks = gpu("H100"), 7_500_000_000, 64
    medium = tm.total_parameters(tm.MODELS["GPT-3 13B"])
    kept = [sum(tm.memory_per_rank(medium, 8, stage).values()) for stage in STAGES]
    fewest = [tm.fewest_ranks(medium, h100.memory_bytes, stage) for stage in STAGES]
    gpt3 = tm.total_parameters(tm.MODELS["GPT-3 175B"])
    peak = h100.peak_flops["bf16"]
    sent = 2 * sum(tm.communication_volume(psi, ranks, 3).values()) / NETWORK
    step = tm.rule_of_thumb(psi, 8192) / peak
    shares = 3 * (ranks - 1) / ranks
    hide = (tm.tokens_to_hide(peak, link, volume=shares) for link in (NETWORK, h100.link_bandwidth / 2))
    return {
        **{f"stages.kept{stage}": quantity(float(size), "B", 3) for stage, size in enumerate(kept)},
        **{f"stages.fewest{stage}": "no number" if n is None else number(n) for stage, n in enumerate(fewest)},
        "large.parameters": quantity(2.0 * gpt3, "B", 3),
        "large.fewest": number(tm.fewest_ranks(gpt3, h100.memory_bytes, 3)),
        "network.sent": quantity(sent, "s", 3),
        "network.step": quantity(step, "s", 3),
        **dict(zip(("network.tokens", "nvlink.tokens"), (number(each, 4) for each in hide), strict=True)),
    }


def _serving_answers() -> dict[str, str]:
    h100, llama, old = gpu("H100"), SERVED_MODELS["Llama 3 8B"], SERVED_MODELS["Llama 2 7B"]
    tokens, middle = _PROMPT + _NEW, _PROMPT + _NEW / 2
    alone, full = (tm.decode_bounds(llama, h100, batch, middle) for batch in (1, _FULL))
    eight = [tm.decode_bounds(llama, h100, batch, middle, weights="int8") for batch in (1, _FULL)]
    return {
        "full.batch": number(_FULL),
        "full.tpot": number(full.seconds / alone.seconds, 3),
        "full.rate": number(_FULL * alone.seconds / full.seconds, 3),
        "full.first": quantity(tm.prefill_bounds(llama, h100, _PROMPT, _FULL).seconds, "s", 3),
        "eight.alone": number(alone.seconds / eight[0].seconds, 3),
        "eight.full": number(full.seconds / eight[1].seconds, 3),
        "eight.batch": number(tm.largest_batch(llama, h100.memory_bytes, tokens, weights="int8")),
        "grouped.old": number(tm.largest_batch(old, h100.memory_bytes, tokens)),
        "grouped.bytes": quantity(float(old.kv_bytes_per_token()), "B", 3),
        "grouped.today": quantity(float(llama.kv_bytes_per_token()), "B", 3),
    }


def _softmax_answers() -> dict[str, str]:
    first, second = 1 + math.exp(-1), 2.0  # the sums of the two tiles, each relative to its own maximum
    right = first * math.exp(-9) + second
    return {"forgotten.sum": number(right / (first + second), 3)}


def _tile_answers() -> dict[str, str]:
    shape = am.AttentionShape(1, 32, 1024, 64)
    columns = {bn: am.flash2_traffic(shape, 64, bn).total for bn in (16, 256)}
    assert columns[16] == columns[256], "without a mask the bytes do not depend on BLOCK_N"
    few, many = (am.flash2_traffic(shape, bm, 64).total for bm in (64, 128))
    long = am.AttentionShape(1, 32, 8192, 64)
    flops = am.attention_flops(long)
    held = sum(am.on_chip_bytes(256, 256, 256, stages=2)["registers"].values())
    tiles = [tiled_matmul_bytes(4096, 4096, 4096, side, side) for side in (64, 128)]
    return {
        "walk.times": number(few / many, 3),
        "ridged.intensity": number(flops / am.flash2_traffic(long, 256, 64).total, 3),
        "wide.registers": quantity(float(held), "B", 3),
        "product.times": number(tiles[0] / tiles[1], 3),
    }


def answers() -> dict[str, str]:
    """The figures in the pages' answers, by name, as text; computed from `utils`."""
    parts = (_roofline_answers, _dragged_answers, _memory_answers, _serving_answers, _softmax_answers, _tile_answers)
    return {name: text for part in (*parts, _parallel_answers) for name, text in part().items()}


def setting(state: Mapping[str, object]) -> str:
    """The part of a page's address that sets its explorer: ``#gpu=H100&op=matmul``."""
    return f"#{urlencode({name: str(value) for name, value in state.items()})}"


def markup(name: str, root: str = "../_static/living", settings: str | None = None, still: str = "") -> str:
    """The HTML of a living figure on a page of the site.

    Args:
        name: One of ``living.FIGURES``.
        root: Address of the figures' files, as the page sees it.
        settings: JSON, escaped, of what the figure starts with where it is embedded in a lecture; None on its own page.
        still: HTML that is shown without scripts; else a sentence that says so.
    """
    given = "" if settings is None else f' data-settings="{settings}"'
    still = still or (
        '<p class="mlf-notice">This figure computes in your browser and needs JavaScript, which is off here. '
        "Questions, answers and formulas do without it, and the lectures compute the same in Python.</p>"
    )
    scripts = ("data.js", *living.files(name))
    return "\n".join(
        [
            f'<link rel="stylesheet" href="{root}/{living.STYLE}">',
            f'<div class="mlf-explorer" id="{name}" data-living="{name}"{given}>{still}</div>',
            *(f'<script defer src="{root}/{script}"></script>' for script in scripts),
        ]
    )


def fill(text: str, shown: Mapping[str, str]) -> str:
    """A page with its figures, numbers and links put in; KeyError for a name that nobody computes."""

    def replace(found: re.Match[str]) -> str:
        kind, name = found[1], found[2]
        if kind == "living:":
            return f"```{{raw}} html\n{markup(name)}\n```"
        if kind == "set:":
            address = setting(SETTINGS[name]).replace("&", "&amp;")
            return f'<a class="mlf-try" href="{address}">Set the figure to this</a>'
        return shown[name]

    return re.sub(r"\{\{(set:|living:)?([\w.]+)\}\}", replace, text)


def write(source: Path) -> None:
    """Stage the figures' files and data, and fill in their pages, which lie in ``source/explorers`` already."""
    target = source / STATIC
    target.mkdir(parents=True, exist_ok=True)
    for file in [*living.FOLDER.glob("*.js"), living.FOLDER / living.STYLE]:
        shutil.copy2(file, target)
    plain = json.dumps(data(), ensure_ascii=False, indent=1)
    (target / "data.js").write_text(
        f"/* Generated from utils by website/explorers.py. */\nglobalThis.MLF_DATA = {plain};\n", "utf-8"
    )
    shown = answers()
    for page in sorted((source / "explorers").glob("*.md")):
        page.write_text(fill(page.read_text("utf-8"), shown), "utf-8")
