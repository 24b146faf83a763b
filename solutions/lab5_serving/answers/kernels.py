"""Wrong answers to exercises 5.4 and 5.5, each with one mistake, and what the check must say of it."""

from __future__ import annotations

import functools

from .right import ANSWERS

PART, LOOP, END, MERGE = (
    "5.4: the tokens of a part",
    "5.4: one step of the loop",
    "5.4: the end of a part",
    "5.5: merging parts",
)

wrong = functools.partial(ANSWERS.wrong, LOOP)
wrong(
    "no table",
    "the block table is ignored",
    '"classic wrong answers" 1',
    edits={"tl.load(table_ptr + (token // BLOCK_SIZE) * stride_bb, mask=inside, other=0)": "token // BLOCK_SIZE"},
)
wrong("first block alone", "from the sequence's first block", edits={"(token // BLOCK_SIZE) * stride_bb": "0 * token"})
wrong(
    "before the table",
    "its offset is negative",
    edits={"(token // BLOCK_SIZE) * stride_bb": "-(token // BLOCK_SIZE) * stride_bb"},
)
wrong(
    "one block a tile",
    "a tile spans several blocks",
    edits={"(token // BLOCK_SIZE) * stride_bb": "(start // BLOCK_SIZE + 0 * token) * stride_bb"},
)
wrong(
    "newest token",
    "the newest token is left out",
    '"classic wrong answers" 2',
    edits={"inside = token < end": "inside = token < end - 1"},
)
wrong("one token more", "a token beyond the context counts", edits={"inside = token < end": "inside = token <= end"})
wrong(
    "no mask",
    "the mask is missing",
    '"classic wrong answers" 3',
    edits={
        "inside = token < end": "inside = token < (end + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE",
    },
)
wrong(
    "scores not masked",
    "of the free slots are not masked before the maximum",
    edits={'s = tl.where(inside[None, :], s, float("-inf"))': "pass"},
)
wrong("a low number for minus infinity", "of the free slots", edits={'s, float("-inf"))': "s, -1e4)"})
wrong("table without strides", "the block table too, has its own", edits={" * stride_bb": ""})
wrong(
    "first key head",
    "every query head reads the first key head",
    edits={"k_head_ptr": "k_cache_ptr", "v_head_ptr": "v_cache_ptr"},
)
wrong(
    "no rescale", "neither the sum nor the output is rescaled", edits={"ratio = tl.exp2(m - new)": "ratio = m * 0 + 1"}
)
wrong("output not rescaled", "the output is not", '"classic wrong answers" 5', edits={"o * ratio[:, None]": "o"})
wrong("sum not rescaled", "the sum is not", edits={"d * ratio": "d"})
wrong(
    "own maximum",
    "each tile has a maximum of its own",
    edits={"tl.maximum(m, tl.max(s, axis=1))": "tl.max(s, axis=1)", "ratio = tl.exp2(m - new)": "ratio = m * 0 + 1"},
)
wrong("powers of e", "one too many", '"classic wrong answers" 6', edits={"exp2": "exp"})
wrong("not scaled", '"classic wrong answers" 6', edits={" * scale_log2": " * 1.4426950408889634"})
wrong("scaled by e", "powers of 2 of the scores", edits={"* scale_log2": "* (scale_log2 * 0.6931471805599453)"})
wrong(
    "values for keys",
    "keys and values stand in each other's place",
    edits={"k = load": "w = load", "v = load": "k = load", "        s = tl.dot": "        v = w\n        s = tl.dot"},
)

wrong = functools.partial(ANSWERS.wrong, END)
wrong("not divided", "the output is not divided by the sum", edits={"o = o / tl.where(seen, d, 1.0)[:, None]": "pass"})
wrong("nothing gives NaN", "a context without tokens gives NaN", edits={"tl.where(seen, d, 1.0)": "d"})
wrong(
    "lse in powers of 2",
    "the logsumexp is in powers of 2",
    '"classic wrong answers" 9',
    edits={"0.6931471805599453 * ": ""},
)
wrong("lse mixes bases", "the logsumexp mixes bases", edits={"tl.log2(d)": "tl.log(d)"})
wrong("lse without maximum", "the logsumexp lacks the maximum", edits={"(m + tl.log2(d))": "tl.log2(d)"})
wrong("lse without sum", "the logsumexp lacks the sum", edits={"(m + tl.log2(d))": "m"})

wrong(
    "a global",
    "compiles on no GPU",
    "LOG2_E",
    edits={"0.6931471805599453 * (m + tl.log2(d))": "(m + tl.log2(d)) / LOG2_E"},
)

wrong = functools.partial(ANSWERS.wrong, LOOP)
wrong(
    "products as they come",
    "a GPU rounds a float32 product to TF32",
    '"classic wrong answers" 8',
    edits={", input_precision=PRECISION": ""},
)
wrong(
    "values in float32",
    "got a product of float32",
    edits={"p.to(v.dtype), v,": "p, v.to(tl.float32),"},
)
wrong(
    "sum of rounded weights",
    "d adds up p after it was rounded",
    '"classic wrong answers" 8',
    edits={"tl.sum(p, axis=1)": "tl.sum(p.to(q.dtype).to(tl.float32), axis=1)"},
)

wrong = functools.partial(ANSWERS.wrong, PART)
wrong(
    "cut by tokens",
    "a part ends where a tile ends",
    '"classic wrong answers" 10',
    edits={
        "(tiles * part // parts) * BLOCK_N": "length * part // parts",
        "(tiles * (part + 1) // parts) * BLOCK_N": "length * (part + 1) // parts",
    },
)
wrong(
    "every part has all",
    "tokens are in several parts",
    '"classic wrong answers" 10',
    edits={"return first, end": "return 0 * first, length + 0 * end"},
)
wrong(
    "rest left out",
    "tokens are left out",
    edits={
        "(tiles * part // parts)": "(tiles // parts * part)",
        "(tiles * (part + 1) // parts)": "(tiles // parts * (part + 1))",
    },
)
wrong(
    "a last tile left out",
    "that is not full is left out",
    edits={"(length + BLOCK_N - 1) // BLOCK_N": "length // BLOCK_N"},
)
wrong(
    "uneven",
    "deal the tiles out evenly",
    edits={
        "(tiles * part // parts) * BLOCK_N": "tl.where(part == 0, 0, tiles * BLOCK_N)",
        "(tiles * (part + 1) // parts) * BLOCK_N": "tiles * BLOCK_N",
    },
)
wrong("beyond the end", "the mask is missing", edits={"end = tl.minimum(end, length)": "pass"})

wrong = functools.partial(ANSWERS.wrong, MERGE)
wrong(
    "no rescale",
    "neither sum nor output is rescaled",
    '"classic wrong answers" 1',
    edits={"ratio = tl.exp(m - new)": "ratio = 1.0"},
)
wrong("output not rescaled", "the output is not", edits={"o * ratio": "o"})
wrong("sum not rescaled", "the sum is not", edits={"d * ratio": "d"})
wrong(
    "own maximum",
    "each step has a maximum of its own",
    edits={"tl.maximum(m, tl.max(lse, axis=0))": "tl.max(lse, axis=0)", "ratio = tl.exp(m - new)": "ratio = 1.0"},
)
wrong(
    "averaged",
    "the parts are averaged",
    '"classic wrong answers" 2',
    edits={"weight = tl.exp(lse - new)": 'weight = tl.where(lse > float("-inf"), 1.0, 0.0)'},
)
wrong(
    "averaged with empty ones",
    "the parts are averaged",
    edits={
        "tl.sum(weight, axis=0)": "tl.sum(tl.where(inside, 1.0, 0.0), axis=0)",
        "weight = tl.exp(lse - new)": 'weight = tl.where(lse > float("-inf"), 1.0, 0.0)',
    },
)
wrong(
    "logarithms as weights",
    "the logsumexps themselves are the weights",
    edits={
        "weight[:, None] > 0": "weight[:, None] != 0",
        "weight = tl.exp(lse - new)": 'weight = tl.where(lse > float("-inf"), lse, 0.0)',
        "ratio = tl.exp(m - new)": "ratio = 1.0",
    },
)
wrong(
    "rescaled by powers of two",
    "earlier steps are rescaled by a power of 2",
    '"classic wrong answers" 4',
    edits={"ratio = tl.exp(m - new)": "ratio = tl.exp2(m - new)"},
)
wrong("powers of two", "these are powers of 2", '"classic wrong answers" 4', edits={"tl.exp(": "tl.exp2("})
wrong(
    "upside down",
    "the sign is wrong",
    edits={"weight = tl.exp(lse - new)": 'weight = tl.where(lse > float("-inf"), tl.exp(new - lse), 0.0)'},
)
wrong(
    "empty parts",
    "an empty part gives NaN",
    '"classic wrong answers" 3',
    edits={"x = tl.where(weight[:, None] > 0, x, 0.0)": "pass"},
)
wrong(
    "overflow",
    "only large logsumexps go wrong",
    '"classic wrong answers" 5',
    edits={
        "new = tl.maximum(m, tl.max(lse, axis=0))": "new = 0.0",
        "m = new": "m = 0.0",
        "ratio = tl.exp(m - new)": "ratio = 1.0",
    },
)
wrong(
    "sum of weights missing", '"classic wrong answers" 2', edits={"d = d * ratio + tl.sum(weight, axis=0)": "d = 1.0"}
)
wrong("not masked", "outside", edits={"mask=inside, other": "mask=part < parts + 1, other"})
wrong("strides", "other strides", '"classic wrong answers" 6', edits={"part * stride_lp": "part"})
wrong("maximum forgotten", '"classic wrong answers" 1', edits={"        m = new": ""})
