"""Classic wrong answers to the forward pass, each recognised by what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from utils.checks.core import classic
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.tensors import agrees

from . import shapes
from .walk import walk

#: ``block_m`` and ``block_n`` of the answer that a rule looks at.
BlocksOf = Callable[[Evidence], Mapping[str, int]]


@dataclass(frozen=True)
class Mistake:
    """A classic wrong answer.

    Args:
        place: What part of the algorithm it is about; each exercise gives that part a place in its list.
        cause: What the student reads.
        ways: Keywords of :func:`walk` or :func:`gradients` that compute it, one mapping for each way to make it; a
            value may be a function of the evidence. Without any, ``where`` alone recognises the mistake.
        where: What must hold of the evidence besides.
    """

    place: str
    cause: str
    ways: Sequence[Mapping[str, Any]] = ()
    where: Callable[[Evidence], bool] = lambda e: True


def rules(
    mistakes: Sequence[Mistake], compute: Callable[..., torch.Tensor], places: Mapping[str, int]
) -> tuple[Diagnosis, ...]:
    """A rule for each mistake.

    Args:
        mistakes: In the order in which they are looked for.
        compute: ``compute(evidence, causal=..., scale=..., **way)`` gives the output of the evidence as the mistake
            computes it.
        places: The place in the exercise's list of each part that a mistake is about.
    """

    def rule(mistake: Mistake) -> Diagnosis:
        def applies(e: Evidence) -> bool:
            if not mistake.where(e):
                return False
            return not mistake.ways or any(explains(e, lambda e, way=way: computed(e, way)) for way in mistake.ways)

        return Diagnosis(applies, classic(mistake.cause, places[mistake.place]))

    def computed(e: Evidence, way: Mapping[str, Any]) -> torch.Tensor:
        options = {name: value for name, value in e.case.options.items() if name in ("causal", "scale")}
        return compute(e, **options, **{name: value(e) if callable(value) else value for name, value in way.items()})

    return tuple(map(rule, mistakes))


def explains(e: Evidence, computed: Callable[[Evidence], torch.Tensor]) -> bool:
    """Whether a wrong formula gives the answer in the first failed case, and in others that fail or pass besides it.

    Those have its mask, or none as it has: what becomes of hidden pairs depends on how the mistake is made.
    """
    passed = _others(e, False) if e.case.kind in (shapes.LOW, shapes.VERY_LOW) else []  # there several mistakes give 0
    return e.close(computed(e)) and all(_fits(other, computed(other)) for other in (*_others(e), *passed))


def _others(e: Evidence, failed: bool = True, most: int = 3) -> list[Evidence]:
    """The same output in further cases of float32 that fail (or pass), of other kinds; none with NaN."""
    found: dict[str, Evidence] = {}
    for trial in e.trials[::-1]:
        if trial is e.trial or not trial.differences or trial.case.dtype != torch.float32 or trial.case.magnitude != 1:
            continue
        if causal(trial) != causal(e) or trial.case.kind in (*found, e.case.kind, shapes.LOW, shapes.VERY_LOW):
            continue
        difference = trial.differences[e.position]
        ragged = trial.case.kind == "ragged" or trial.args[1].shape[-2] % 16 > 0
        tells = failed or (ragged and difference.got.numel() > 0)
        if bool(difference.count) == failed and tells and not bool(difference.got.isnan().any()):
            found[trial.case.kind] = Evidence(trial, difference, e.position, e.trials, e.reference, None, e.names)
    return list(found.values())[:most]


def _fits(e: Evidence, candidate: torch.Tensor) -> bool:
    """Whether the answer is about another tensor, be that right or wrong."""
    size = candidate[candidate.isfinite()].abs().max() / e.right[e.right.isfinite()].abs().max().clamp(min=1e-9)
    allowed = 4 * e.difference.allowed * max(1.0, size.item())
    return bool(agrees(e.got, candidate.double(), allowed, e.difference.dtype).all())


def forward(blocks: BlocksOf, **places: int) -> tuple[Diagnosis, ...]:
    """Rules for the output and the logsumexp.

    Args:
        blocks: The answer's tile sizes.
        places: Where the exercise's list tells of ``sums`` (what is carried from tile to tile), ``scale`` (and powers
            of 2), ``mask`` (the causal one), ``corner`` (one that is aligned at the top left), ``last`` (the last tile
            of keys, and what lies past the end), ``range`` (causal tiles that are read, or masked), ``heads`` (shared
            ones), ``lse`` and ``empty`` (queries that see no key).
    """

    def compute(e: Evidence, **way: Any) -> torch.Tensor:
        return walk(*e.args64[:3], **way, **blocks(e))[e.position]

    return rules(_FORWARD, compute, places)


def scaled(e: Evidence) -> float:
    """The scale of a case, to the power of -1: what turns scaled scores into scores."""
    given = e.case.options.get("scale")
    return e.case.sizes["D"] ** 0.5 if given is None else 1 / given


def causal(e: Evidence | CaseResult) -> bool:
    """Whether the case has a causal mask."""
    return bool(e.case.options.get("causal"))


def _is_lse(e: Evidence) -> bool:
    return e.difference.name == "lse"


def _no_sum(e: Evidence) -> bool:
    """Whether the logsumexp is -inf in each row, beside an output that is right or wrong."""
    found = next((d for d in e.trial.differences if d.name == "lse"), None)
    return found is not None and bool(found.count) and bool((found.got == -math.inf).all())


def _stuck_maximum(e: Evidence) -> bool:
    return _is_lse(e) and bool((e.got[e.bad].isfinite() & (e.got[e.bad] < -1e20)).any())


def _only_blind(e: Evidence) -> bool:
    """Whether nothing but queries that see no key goes wrong, and that without NaN."""
    blind = max(0, e.case.sizes["Nq"] - e.case.sizes["Nk"])
    rows = e.bad.any(-1) if e.difference.name == "o" else e.bad
    only = blind > 0 and not bool(rows[..., blind:].any())
    return causal(e) and only and not bool(e.got.isnan().any())


_NEITHER = {"rescale_sum": False, "rescale_output": False}
_LSE = (
    Mistake(
        "sums",
        "the running maximum stays where it started: the next step needs the new one",
        where=_stuck_maximum,
    ),
    Mistake("lse", "the logsumexp lacks the maximum: it is m + log d", [{"lse": "sum"}], _is_lse),
    Mistake(
        "lse",
        "the logsumexp is the maximum alone: add the logarithm of the sum, m + log d",
        [{"lse": "max"}],
        _is_lse,
    ),
    Mistake(
        "lse",
        "the logsumexp is in powers of 2: multiply it by ln 2, or divide by log2 e",
        [{"lse": "base 2"}],
        _is_lse,
    ),
    Mistake(
        "lse",
        "the logsumexp mixes bases: a sum of powers of e goes with log, and a maximum in units of log2 e with ln 2",
        [{"lse": "log2 sum"}, {"lse": "plain max"}, {"lse": "2 sums"}],
        _is_lse,
    ),
    Mistake("lse", "the logsumexp adds the sum itself: it is m + log d", [{"lse": "raw sum"}], _is_lse),
    Mistake(
        "lse",
        "the logarithm of the sum has the wrong sign or is multiplied: it is m + log d",
        [{"lse": "difference"}, {"lse": "product"}],
        _is_lse,
    ),
)
_SUMS = (
    Mistake("sums", "neither the running sum nor the accumulator is rescaled after the maximum changes", [_NEITHER]),
    Mistake(
        "sums",
        "the running sum is rescaled after the maximum changes, the accumulator is not",
        [{"rescale_output": False}],
    ),
    Mistake(
        "sums",
        "the accumulator is rescaled after the maximum changes, the running sum is not",
        [{"rescale_sum": False}],
    ),
    Mistake(
        "sums",
        "the ratio of the rescaling is upside down: it is e^(old maximum - new maximum)",
        [{"inverse": True}],
    ),
    Mistake(
        "sums",
        "each tile has a maximum of its own: the new maximum is the larger of the tile's and the one so far",
        [{"carry": False}, {"carry": False, **_NEITHER}],
    ),
    Mistake(
        "sums",
        "each tile of keys is a softmax of its own: maximum and sum belong to the whole row",
        [{"each_tile": True}],
    ),
    Mistake(
        "sums",
        "the accumulator is divided in every step: what is carried is a plain sum, and the division comes once, at the "
        "end",
        [{"divide": "each"}],
    ),
    Mistake("sums", "only the last tile of keys counts: add to sum and accumulator", [{"last_tile": True}]),
    Mistake(
        "sums",
        "the running sum stays 0, and nothing is divided by it: each step adds the sum of its tile",
        [{"divide": False}],
        _no_sum,
    ),
    Mistake("sums", "the accumulator is not divided by the running sum at the end", [{"divide": False}]),
)
_SCALE = (
    Mistake("scale", "the scale 1/sqrt(D) of the scores is missing", [{"factor": scaled}]),
    Mistake(
        "scale",
        "the scale 1/sqrt(D) is applied twice, or the scores are divided by D",
        [{"factor": lambda e: 1 / scaled(e)}, {"factor": lambda e: scaled(e) / e.case.sizes["D"]}],
    ),
    Mistake(
        "scale",
        "these are powers of 2 where powers of e belong: exp2 needs scores that are multiplied by log2 e",
        [{"factor": math.log(2)}],
    ),
    Mistake(
        "scale",
        "log2 e multiplies the scores, but their exponential is e^x: use exp2",
        [{"factor": 1 / math.log(2)}],
    ),
)
_MASK = (
    Mistake(
        "mask",
        "the causal mask is missing, or hides nothing: query i sees key j only if j <= i + Nk - Nq",
        [{"shift": "none"}, {"shift": "none", "leave_out": "unseen"}],
        causal,
    ),
    Mistake(
        "mask",
        "the causal mask is the other way round: query i sees key j if j <= i + Nk - Nq",
        [{"shift": "reversed"}],
        causal,
    ),
    Mistake(
        "corner",
        "the causal mask is aligned at the top left: with Nq != Nk the last query sees the last key, j <= i + Nk - Nq",
        [{"shift": "top left", "leave_out": tiles} for tiles in ("", "top left", "square", "unseen")],
        causal,
    ),
    Mistake(
        "corner",
        "the blocks that are skipped are those of a square mask: with Nq != Nk the last block that a query tile "
        "sees lies Nk - Nq keys further",
        [{"leave_out": "top left"}, {"leave_out": "square"}],
        causal,
    ),
    Mistake(
        "mask",
        "the causal mask is off by one: a query does not see its own key; j <= i + Nk - Nq includes equality",
        [{"shift": -1}],
        causal,
    ),
    Mistake(
        "mask",
        "the causal mask is off by one: a query sees the key after its own",
        [{"shift": 1}, {"shift": 1, "leave_out": "unseen"}],
        causal,
    ),
    Mistake(
        "empty",
        "queries that see no key get something: their output is 0 and their logsumexp -inf; mask scores with "
        "-inf, since what a large negative number leaves of them counts once nothing larger comes",
        where=_only_blind,
    ),
    Mistake(
        "range",
        "the last query of a tile lacks its last key: key_end is start_m + BLOCK_M + Nk - Nq",
        [{"leave_out": "short"}],
        causal,
    ),
    Mistake(
        "range",
        "tiles that need the mask go without: query `start_m` sees the keys before unmasked_end, start_m + 1 + Nk - Nq;"
        " a tile needs a mask if it ends after that, start_n + BLOCK_N > unmasked_end",
        [{"unmasked": to} for to in ("key", "last query", "next query tile", "key tile")],
        causal,
    ),
    Mistake(
        "range",
        "the block on the diagonal is skipped: its lower half is visible",
        [{"leave_out": "diagonal"}],
        causal,
    ),
)
_LAST = (
    Mistake(
        "last",
        "keys past the end count, with score 0: give them -inf before the maximum is taken",
        [{"padded": True}],
    ),
    Mistake(
        "last",
        "the last, ragged tile of keys is left out: its keys count, though there are fewer of them",
        [{"leave_out": "ragged"}],
    ),
    Mistake("last", "the last tile of keys is left out: the loop ends a step too early", [{"leave_out": "last"}]),
)
_HEADS = (
    Mistake(
        "heads",
        "query head h reads key head h % Hkv: heads that share keys are neighbours, h // (Hq // Hkv)",
        [{"heads": "modulo"}],
    ),
    Mistake("heads", "every query head reads the first key head", [{"heads": "first"}]),
    Mistake(
        "heads",
        "query head h reads key head h: with shared heads it reads h // (Hq // Hkv)",
        [{"heads": "same"}],
    ),
    Mistake(
        "heads",
        "keys are read from the right head, values from another one",
        [{"value_heads": "modulo"}, {"value_heads": "first"}, {"value_heads": "same"}],
    ),
)
_FORWARD = (*_LSE, *_SUMS, *_SCALE, *_MASK, *_LAST, *_HEADS)
