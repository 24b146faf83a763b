"""Hidden scenarios of exercise 5.6: residuals, what is accepted and added, and text by drafts.

The exercise says which random number decides on what, so that the same numbers give the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from utils.checks.hidden import Draw, Observation, collected
from utils.serving import SamplingParams

from .sampling_rules import drawn_rows
from .speculative_scenario import almost
from .spied_model import tiny_model

#: Calls of ``speculative_sample`` with the same distributions.
CALLS = 60


@collected
def speculative_sampling(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Rows that are near and far from one another, rows that are equal, and text of two models that agree at times."""
    draw = Draw(seed, "5.6")
    yield from _residuals(package, draw).items()
    for what, k in (("of several drafted tokens", draw.between(3, 5)), ("of one drafted token", 1)):
        for number in range(3):
            yield f"speculative_sample {what}, distributions {number + 1}", _samples(package, draw, k)
    yield "speculative_sample without a drafted token", _samples(package, draw, 0)
    for number in range(3):
        yield from _text(package, draw, f"speculative_generate, greedy, text {number + 1}", temperature=0.0).items()
    yield from _text(package, draw, "speculative_generate with a temperature", temperature=0.9).items()


def _residuals(package: ModuleType, draw: Draw) -> dict[str, Observation]:
    rows, size = draw.between(3, 5), draw.between(4, 9)
    p, q = drawn_rows(draw.random, rows, size), drawn_rows(draw.random, rows, size)
    q[1] = p[1]
    given = p.clone(), q.clone()
    seen: dict[str, Observation] = {
        "residual of several rows": package.residual(*given),
        "residual of one row": package.residual(p[0], q[0]),
        "residual of equal rows": package.residual(p[2], p[2].clone()),
        "residual of float32 rows": package.residual(p.float(), q.float()),
        "residual of rows in rows": package.residual(p[None].clone(), q[None].clone()),
    }
    seen["residual: its arguments stay as they are"] = torch.equal(given[0], p) and torch.equal(given[1], q)
    return seen


def _samples(package: ModuleType, draw: Draw, k: int) -> Observation:
    """Many results of one set of distributions; each call continues the generator of the one before."""
    size = draw.between(4, 8)
    p, q = drawn_rows(draw.random, k + 1, size), drawn_rows(draw.random, k, size)
    generator = torch.Generator().manual_seed(draw.random.getrandbits(60))
    found = []
    for _ in range(CALLS):
        drafted = [int(torch.multinomial(row, 1, generator=draw.generator)) for row in q]
        found.append(package.speculative_sample(p, q, torch.tensor(drafted, dtype=torch.int64), generator))
    return found


def _text(package: ModuleType, draw: Draw, name: str, temperature: float) -> dict[str, Observation]:
    """A text, and how much the two models read for it."""
    target = tiny_model(draw.random)
    draft = almost(target, draw.random)
    prompt = [draw.random.randrange(23) for _ in range(draw.between(1, 6))]
    params = SamplingParams(
        max_new_tokens=draw.between(14, 20), temperature=temperature, seed=draw.between(0, 10**6), ignore_eos=True
    )
    found = package.speculative_generate(target, draft, list(prompt), params, draw.between(2, 4))
    return {
        f"{name}: tokens": list(found.tokens),
        f"{name}: rounds": [[list(each.drafted), each.accepted, each.added] for each in found.rounds],
        f"{name}: passes of the target": len(target.notes.passes),
        f"{name}: tokens that the models read": [target.notes.tokens, draft.notes.tokens],
    }
