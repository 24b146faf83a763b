"""Random inputs of the site's explorers with what `utils` makes of them, and pages to run the explorers in."""

from __future__ import annotations

import math
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.site_server import Visit
from utils import living, operators, roofline
from utils import transformer_math as tm
from utils.hardware import CPU, CPUS, GPUS, TPUS
from utils.living import tables
from utils.operators import ELEMENT_SIZE
from utils.transformer_math import memory
from website import explorers

WEBSITE = Path(explorers.__file__).parent
NAMES = ("roofline", "memory", "serving")
DEVICES = {**GPUS, **TPUS, **CPUS}

#: A page around an explorer: what Sphinx puts into the theme's page, without the theme.
PAGE = """<!doctype html><html lang="en" data-theme="{theme}"><head><meta charset="utf-8"><title>{name}</title>
<meta name="viewport" content="width=device-width"><style>:root[data-theme=dark] {{ --pst-color-text-base: #ced6dd;
--pst-color-text-muted: #9ca4af; --pst-color-background: #121212; --pst-color-on-background: #222832;
--pst-color-border: #48566b; --pst-color-primary: #7dc7f5 }} body {{ margin: 1rem;
background: var(--pst-color-background, #fff); color: var(--pst-color-text-base, #222832) }}
</style></head><body><main><h1>{name}</h1>{block}</main></body></html>"""

#: Runs an explorer on texts as a reader types them; a BigInt comes back as "123n", whatever is a function not at all.
RUN = """([name, inputs]) => {
  const { groups, compute } = MLF.figures[name];
  const fields = groups.flatMap((group) => group.fields);
  const plain = (value) => typeof value === "bigint" ? `${value}n` : Array.isArray(value) ? value.map(plain)
    : value && typeof value === "object" ? Object.fromEntries(Object.entries(value)
      .filter(([key, each]) => key !== "device" && typeof each !== "function").map(([key, each]) => [key, plain(each)]))
    : value;
  return inputs.map((input) => {
    const text = { ...Object.fromEntries(fields.map((field) => [field.id, field.initial])), ...input };
    const active = fields.filter((field) => !field.when || field.when(text));
    return plain(compute(Object.fromEntries(active.map((field) => [field.id, MLF.parse(field, text[field.id])]))));
  });
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The explorers' part of a staged site, and a bare page around each explorer (``roofline-dark.html``)."""
    source = tmp_path_factory.mktemp("site")
    shutil.copytree(WEBSITE / "pages" / "explorers", source / "explorers")
    explorers.write(source)
    for name in living.FIGURES:
        block = re.search(
            r"^```\{raw\} html\n(.*?)^```", (source / f"explorers/{name}.md").read_text("utf-8"), re.S | re.M
        )
        for theme in ("light", "dark"):
            page = PAGE.format(name=name, theme=theme, block=block[1])
            (source / f"explorers/{name}-{theme}.html").write_text(page, "utf-8")
    return source


class Tab(Visit):
    """A tab that opens the pages of :func:`site` from their files."""

    def __init__(self, browser: Any, site: Path) -> None:
        super().__init__(browser, site.as_uri(), viewport={"width": 1200, "height": 900})

    def open(self, name: str, address: str = "") -> Any:
        self.tab.goto("about:blank")
        self.tab.goto(f"{self.home}/explorers/{name}.html{address}")
        return self.tab

    def field(self, name: str, field: str) -> Any:
        return self.tab.locator(f"#mlf-{name}-{field}")

    def results(self) -> str:
        return self.tab.locator(".mlf-results").inner_text()

    def check(self) -> None:
        assert not self.wrong, self.wrong


@pytest.fixture(scope="module")
def tab(browser: Any, site: Path) -> Iterator[Tab]:
    opened = Tab(browser, site)
    yield opened
    opened.check()
    opened.tab.close()


def agree(found: Any, expected: Any, place: str) -> None:
    """Assert that what JavaScript found is what Python expects: counts exactly, other numbers to 1e-9."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            agree(found[key], value, f"{place}.{key}")
    elif isinstance(expected, (str, bool)) or expected is None:
        assert found == expected, place
    else:
        value = int(found[:-1]) if isinstance(found, str) else found
        exact = isinstance(expected, int) and isinstance(found, str)
        assert value == expected if exact else math.isclose(value, expected, rel_tol=1e-9), (place, found, expected)


def whole(rng: random.Random, most: float) -> int:
    """A whole number with a logarithm spread evenly, small ones often."""
    return max(1, round(math.exp(rng.uniform(0, math.log(most)))))


def typed(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def sizes_of(rng: random.Random, name: str) -> dict[str, Any]:
    """Arguments of an operator of `utils.operators`, by name."""
    if name == "attention":
        groups, each = whole(rng, 64), whole(rng, 16)
        lengths = [whole(rng, 1e6) for _ in range(2)]
        flags = {flag: rng.random() < 0.5 for flag in ("causal", "materialize")}
        return {"batch": whole(rng, 1e3), "heads": groups * each, "kv_heads": groups, "head_dim": whole(rng, 512),
                "seq_len": lengths[0], "kv_len": rng.choice((lengths[0], lengths[1])), **flags}  # fmt: skip
    if name == "elementwise":
        return {
            "n": whole(rng, 1e15),
            "flops_per_element": rng.randrange(40),
            "inputs": rng.randrange(5),
            "outputs": whole(rng, 5),
        }
    return {
        size.get("argument", size["id"]): whole(rng, min(size["most"], 1e15))
        for size in tables.OPERATORS[name]["sizes"]
    }


def dragged(rng: random.Random, device: Any) -> tuple[Any, dict[str, str]]:
    """A device with other roofs, in whole FLOP/s and B/s, and the factors that a reader types for them."""
    peak, beta = (rng.choice((1, round(10 ** rng.uniform(-2, 2), 3))) for _ in range(2))
    beta = max(beta, 0.01)
    changes = {"memory_bandwidth": float(math.floor(device.memory_bandwidth * beta + 0.5))}
    if isinstance(device, CPU):
        return replace(device, **changes), {"beta": str(beta)}  # a CPU's peaks come from its cores and clock
    peaks = {name: float(math.floor(rate * peak + 0.5)) for name, rate in device.peak_flops.items()}
    return replace(device, **changes, peak_flops=peaks), {"peak": str(peak), "beta": str(beta)}


def roofline_case(rng: random.Random, op: str) -> tuple[dict[str, str], dict[str, Any]]:
    device = rng.choice(list(DEVICES.values()))
    dtype = rng.choice(list(ELEMENT_SIZE))
    own = dtype in device.peak_flops and rng.random() < 0.7
    rate = dtype if own else rng.choice(list(device.peak_flops))
    sizes = sizes_of(rng, op)
    cost = getattr(operators, op)(**sizes, dtype=dtype)
    device, roofs = dragged(rng, device)
    bounds = roofline.time_bounds(cost, device, rate)
    names = {size.get("argument", size["id"]): size["id"] for size in tables.OPERATORS[op]["sizes"]}
    asked = {"gpu": device.name, "op": op, "dtype": dtype, "rate": "same" if own else rate}
    expected = {
        "cost": {"flops": cost.flops, "bytes": cost.bytes},
        "intensity": cost.intensity,
        "ridge": roofline.ridge(device, rate),
        "attainable": roofline.attainable(cost.intensity, device, rate),
        "computeTime": roofline.compute_time(cost, device, rate),
        "memoryTime": roofline.memory_time(cost, device),
        "overlapped": bounds.overlapped,
        "serial": bounds.serial,
        "boundBy": roofline.bound_by(cost, device, rate),
    }
    if op == "matmul" and rate == dtype:
        expected["crossover"] = roofline.crossover_batch(sizes["k"], sizes["n"], device, dtype)
    return asked | roofs | {names[name]: typed(value) for name, value in sizes.items()}, expected


def link_of(rng: random.Random, device: Any) -> tuple[dict[str, str], float]:
    if device.link_bandwidth and rng.random() < 0.4:
        return {"link": "nvlink"}, device.link_bandwidth / 2
    kind = rng.choice(("pcie", "network", "own"))
    own = round(rng.uniform(0.01, 5000), 3)
    return {"link": kind, "bandwidth": str(own)}, {
        "pcie": device.pcie_bandwidth / 2,
        "network": explorers.NETWORK,
        "own": own * 1e9,
    }[kind]


def memory_case(rng: random.Random, recipe: str) -> tuple[dict[str, str], dict[str, Any]]:
    device, ranks, tokens = rng.choice(list(GPUS.values())), whole(rng, 1e6), whole(rng, 1e9)
    model = rng.choice(("own", "own", *tm.SERVED_MODELS))
    psi = whole(rng, 1e14) if model == "own" else tm.SERVED_MODELS[model].parameters
    reserve = rng.choice((0.0, round(rng.uniform(0, device.memory_bytes / 1e9 - 0.1), 2)))
    room = device.memory_bytes - reserve * 1e9
    precision = getattr(memory, tables._RECIPES[recipe][0])
    link, bandwidth = link_of(rng, device)
    sent, rate = rng.choice(list(ELEMENT_SIZE)), rng.choice(list(device.peak_flops))
    size, peak = ELEMENT_SIZE[sent], device.peak_flops[rate]
    stages = []
    for stage in tm.STAGES:
        kept = tm.memory_per_rank(psi, ranks, stage, precision)
        volume = tm.communication_volume(psi, ranks, stage)
        kinds = ["all_reduce"] if stage == 0 else ["reduce_scatter", *["all_gather"] * (2 if stage == 3 else 1)]
        stages.append({
            "kept": kept, "elements": volume, "total": sum(kept.values()), "fits": sum(kept.values()) <= room,
            "fewest": tm.fewest_ranks(psi, room, stage, precision),
            "largest": tm.largest_model(room, ranks, stage, precision),
            "sentBytes": size * sum(volume.values()),
            "sendSeconds": sum(tm.ring_seconds(kind, size * psi, ranks, bandwidth) for kind in kinds),
            "tokensToHide": tm.tokens_to_hide(peak, bandwidth, volume=sum(volume.values()) / psi, element_size=size),
        })  # fmt: skip
    asked = {"gpu": device.name, "ranks": ranks, "tokens": tokens, "model": model, "psi": psi, "reserve": reserve,
             "recipe": recipe, "stage": rng.choice(tm.STAGES), "sent": sent, "rate": rate}  # fmt: skip
    expected = {
        "stages": dict(enumerate(stages)),
        "stepSeconds": tm.training_seconds(tm.rule_of_thumb(psi, tokens), 1, peak, 1.0),
        "passByPass": tm.tokens_to_hide(peak, bandwidth, volume=3 * (ranks - 1) / ranks, element_size=size),
    }
    return {name: typed(value) for name, value in asked.items()} | link, expected


def serving_case(rng: random.Random, name: str) -> tuple[dict[str, str], dict[str, Any]]:
    device = rng.choice([*GPUS.values(), *TPUS.values()])
    formats = {"weights": rng.choice(list(ELEMENT_SIZE)), "cache": rng.choice(list(ELEMENT_SIZE))}
    rate = rng.choice(list(device.peak_flops))
    own = {"psi": whole(rng, 1e13), "layers": whole(rng, 200), "kv_heads": whole(rng, 64), "head_dim": whole(rng, 512)}
    own["heads"] = own["kv_heads"] * whole(rng, 16)
    if name == "own":
        model = tm.ServedModel(
            own["psi"], own["psi"], own["layers"], own["heads"], own["kv_heads"], own["head_dim"], 10**9
        )
    else:
        model = tm.SERVED_MODELS[name]
    prompt = whole(rng, min(model.max_seq_len - 1, 1e6))
    new = min(whole(rng, 1e5), model.max_seq_len - prompt)
    batch = whole(rng, 1e5)
    steps = {"prefill": tm.prefill_bounds(model, device, prompt, batch, weights=formats["weights"], arithmetic=rate),
             "alone": tm.prefill_bounds(model, device, prompt, weights=formats["weights"], arithmetic=rate),
             "step": tm.decode_bounds(model, device, batch, prompt + new / 2, **formats, arithmetic=rate)}  # fmt: skip
    request = tm.request_bounds(model, device, batch, prompt, new, **formats, arithmetic=rate)
    largest = tm.largest_batch(model, device.memory_bytes, prompt + new, **formats)
    per_token = model.kv_bytes_per_token(formats["cache"])
    expected = {
        "weights": model.weight_bytes(formats["weights"]),
        "perToken": per_token,
        "caches": batch * (prompt + new) * per_token,
        "largest": largest,
        "fits": batch <= largest,
        "request": request._asdict() | ({"tpot": None} if new == 1 else {}),
        **{part: {"readWeights": step.read_weights, "multiply": step.multiply, "readCaches": step.read_caches,
                  "attend": step.attend, "seconds": step.seconds, "boundBy": step.bound_by}
           for part, step in steps.items()},
    }  # fmt: skip
    asked = {
        "model": name,
        "gpu": device.name,
        "rate": rate,
        "batch": batch,
        "prompt": prompt,
        "new": new,
        **own,
        **formats,
    }
    return {key: typed(value) for key, value in asked.items()}, expected


CASE = {
    "roofline": (roofline_case, list(tables.OPERATORS)),
    "memory": (memory_case, list(tables._RECIPES)),
    "serving": (serving_case, ["own", *tm.SERVED_MODELS]),
}
