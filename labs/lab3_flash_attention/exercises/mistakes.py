"""Classic wrong answers to the forward pass, each recognised by what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from utils.checks.core import classic
from utils.checks.diagnoses import Diagnosis, Evidence

from .walk import walk

#: ``block_m`` and ``block_n`` of the answer that a rule looks at.
BlocksOf = Callable[[Evidence], Mapping[str, int]]


def scaled(e: Evidence) -> float:
    """The scale of a case, to the power of -1: what turns scaled scores into scores."""
    given = e.case.options.get("scale")
    return e.case.sizes["D"] ** 0.5 if given is None else 1 / given


def _answers(e: Evidence, blocks: Mapping[str, int], flags: Mapping[str, Any]) -> bool:
    options = {name: value for name, value in e.case.options.items() if name in ("causal", "scale")}
    flags = {name: value(e) if callable(value) else value for name, value in flags.items()}
    return e.close(walk(*e.args64[:3], **options, **blocks, **flags)[e.position])


def forward(
    blocks: BlocksOf, *, sums: int, scale: int, mask: int, last: int, heads: int, lse: int, empty: int
) -> tuple[Diagnosis, ...]:
    """Rules for the output and the logsumexp, each with its place in the exercise's list.

    Args:
        blocks: The answer's tile sizes.
        sums: Where the list tells of what is carried from tile to tile.
        scale: Of the scale, and of powers of 2.
        mask: Of the causal mask.
        last: Of the last tile of keys, and of what lies past the end.
        heads: Of shared heads.
        lse: Of the logsumexp.
        empty: Of queries that see no key.
    """

    def rule(cause: str, place: int, *alternatives: Mapping[str, Any], where: Callable[[Evidence], bool] | None = None):
        def applies(e: Evidence) -> bool:
            if where is not None and not where(e):
                return False
            return any(_answers(e, blocks(e), flags) for flags in alternatives)

        return Diagnosis(applies, classic(cause, place))

    def is_lse(e: Evidence) -> bool:
        return e.difference.name == "lse"

    def causal(e: Evidence) -> bool:
        return bool(e.case.options.get("causal"))

    def only_blind(e: Evidence) -> bool:
        blind = max(0, e.case.sizes["Nq"] - e.case.sizes["Nk"])
        rows = e.bad.any(-1) if e.difference.name == "o" else e.bad
        return blind > 0 and not bool(rows[..., blind:].any())

    neither = {"rescale_sum": False, "rescale_output": False}
    return (
        Diagnosis(
            lambda e: is_lse(e) and bool((e.got[e.bad].isfinite() & (e.got[e.bad] < -1e20)).any()),
            classic("the running maximum stays where it started: the next step needs the new one, m = m_new", sums),
        ),
        rule("the logsumexp lacks the maximum: it is m + log d", lse, {"lse": "sum"}, where=is_lse),
        rule(
            "the logsumexp is the maximum alone: add the logarithm of the sum, m + log d",
            lse,
            {"lse": "max"},
            where=is_lse,
        ),
        rule(
            "the logsumexp is in powers of 2: multiply it by ln 2, or divide by log2 e",
            lse,
            {"lse": "base 2"},
            where=is_lse,
        ),
        rule(
            "the logsumexp mixes bases: a sum of powers of e goes with log, and a maximum in units of log2 e with ln 2",
            lse,
            {"lse": "log2 sum"},
            {"lse": "plain max"},
            {"lse": "2 sums"},
            where=is_lse,
        ),
        rule("the logsumexp adds the sum itself: it is m + log d", lse, {"lse": "raw sum"}, where=is_lse),
        rule(
            "the logarithm of the sum has the wrong sign or is multiplied: it is m + log d",
            lse,
            {"lse": "difference"},
            {"lse": "product"},
            where=is_lse,
        ),
        rule("neither the running sum nor the accumulator is rescaled after the maximum changes", sums, neither),
        rule(
            "the running sum is rescaled after the maximum changes, the accumulator is not",
            sums,
            {"rescale_output": False},
        ),
        rule(
            "the accumulator is rescaled after the maximum changes, the running sum is not",
            sums,
            {"rescale_sum": False},
        ),
        rule("the ratio of the rescaling is upside down: it is e^(old maximum - new maximum)", sums, {"inverse": True}),
        rule(
            "each tile has a maximum of its own: the new maximum is the larger of the tile's and the one so far",
            sums,
            {"carry": False},
            {"carry": False, **neither},
        ),
        rule(
            "each tile of keys is a softmax of its own: maximum and sum belong to the whole row",
            sums,
            {"each_tile": True},
        ),
        rule("only the last tile of keys counts: add to sum and accumulator", sums, {"last_tile": True}),
        rule("the accumulator is not divided by the running sum at the end", sums, {"divide": False}),
        rule("the scale 1/sqrt(D) of the scores is missing", scale, {"factor": scaled}),
        rule(
            "the scale 1/sqrt(D) is applied twice, or the scores are divided by D",
            scale,
            {"factor": lambda e: 1 / scaled(e)},
        ),
        rule(
            "these are powers of 2 where powers of e belong: exp2 needs scores that are multiplied by log2 e",
            scale,
            {"factor": math.log(2)},
        ),
        rule(
            "log2 e multiplies the scores, but their exponential is e^x: use exp2", scale, {"factor": 1 / math.log(2)}
        ),
        rule("log2 e is multiplied twice", scale, {"factor": 1 / math.log(2)}),
        rule(
            "the causal mask is missing: query i sees key j only if j <= i + Nk - Nq",
            mask,
            {"shift": "none"},
            {"shift": "none", "leave_out": "unseen"},
            where=causal,
        ),
        rule(
            "the causal mask is aligned at the top left: with Nq != Nk the last query sees the last key, "
            "j <= i + Nk - Nq",
            mask,
            {"shift": "top left"},
            {"shift": "top left", "leave_out": "top left"},
            {"shift": "top left", "leave_out": "square"},
            {"shift": "top left", "leave_out": "unseen"},
            where=causal,
        ),
        rule(
            "the blocks that are skipped are those of a square mask: with Nq != Nk the last block that a query tile "
            "sees lies Nk - Nq keys further",
            mask,
            {"leave_out": "top left"},
            {"leave_out": "square"},
            where=causal,
        ),
        rule(
            "the causal mask is off by one: a query does not see its own key; j <= i + Nk - Nq includes equality",
            mask,
            {"shift": -1},
            where=causal,
        ),
        rule(
            "the causal mask is off by one: a query sees the key after its own",
            mask,
            {"shift": 1},
            {"shift": 1, "leave_out": "unseen"},
            where=causal,
        ),
        Diagnosis(
            lambda e: causal(e) and only_blind(e) and not bool(e.got.isnan().any()),
            classic(
                "queries that see no key get something: their output is 0 and their logsumexp -inf; hide scores with "
                "-inf, since what a large negative number leaves of them counts once nothing larger comes",
                empty,
            ),
        ),
        rule(
            "the last query of a tile lacks its last key: seen_by_one counts first + BLOCK_M + Nk - Nq keys",
            last,
            {"leave_out": "short"},
            where=causal,
        ),
        rule(
            "tiles that need the mask go without: seen_by_all is what query `first` sees, first + 1 + Nk - Nq keys; a "
            "tile needs a mask if it ends after them, start + BLOCK_N > seen_by_all",
            last,
            {"unmasked": 1},
            {"unmasked": lambda e: blocks(e)["block_m"] - 1},
            {"unmasked": lambda e: blocks(e)["block_m"]},
            {"unmasked": lambda e: blocks(e)["block_n"] - 1},
            where=causal,
        ),
        rule(
            "the block on the diagonal is skipped: its lower half is visible",
            mask,
            {"leave_out": "diagonal"},
            where=causal,
        ),
        rule(
            "keys past the end count, with score 0: give them -inf before the maximum is taken", last, {"padded": True}
        ),
        rule(
            "the last, ragged tile of keys is left out: tl.cdiv(Nk, BLOCK_N) tiles cover the keys",
            last,
            {"leave_out": "ragged"},
            where=lambda e: e.case.sizes["Nk"] % blocks(e)["block_n"] != 0,
        ),
        rule("the last tile of keys is left out: the loop ends a step too early", last, {"leave_out": "last"}),
        rule(
            "query head h reads key head h % Hkv: heads that share keys are neighbours, h // (Hq // Hkv)",
            heads,
            {"heads": "modulo"},
        ),
        rule("every query head reads the first key head", heads, {"heads": "first"}),
        rule("query head h reads key head h: with shared heads it reads h // (Hq // Hkv)", heads, {"heads": "same"}),
        rule(
            "keys are read from the right head, values from another one",
            heads,
            {"value_heads": "modulo"},
            {"value_heads": "first"},
            {"value_heads": "same"},
        ),
    )
