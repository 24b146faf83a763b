"""Right and wrong answers to exercise 6.4, attention over a paged cache in e4m3."""

from __future__ import annotations

import functools

from utils.checks.answers import Answers

LOOP = "6.4: one step of the loop"
ANSWERS = Answers(
    {
        LOOP: """
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = (token % BLOCK_SIZE).to(tl.int64)
        k_rows = k_head_ptr + block * stride_k[0] + offset * stride_k[1]
        v_rows = v_head_ptr + block * stride_v[0] + offset * stride_v[1]
        keys = tl.load(k_rows[:, None] + column[None, :] * stride_k[3], mask=loaded, other=0.0).to(q.dtype)
        values = tl.load(v_rows[:, None] + column[None, :] * stride_v[3], mask=loaded, other=0.0).to(q.dtype)
        ks = tl.load(k_scale_ptr + block * key_heads + key_head, mask=inside, other=0.0)
        vs = tl.load(v_scale_ptr + block * key_heads + key_head, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(keys))
        scores = scores * ks[None, :] * scale_log2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new = tl.maximum(m, tl.max(scores, axis=1))
        p = tl.exp2(scores - new[:, None])
        ratio = tl.exp2(m - new)
        d = d * ratio + tl.sum(p, axis=1)
        weights = p * vs[None, :]
        o = o * ratio[:, None] + tl.dot(weights.to(q.dtype), values)
        m = new
        """
    }
)
KEYS, VALUES = "other=0.0).to(q.dtype)\n        values", "other=0.0).to(q.dtype)\n        ks"
SCORES = "scores = scores * ks[None, :] * scale_log2"
also_right = ANSWERS.also_right
also_right("numbers before the products", {LOOP: {
    "scores = tl.dot(q, tl.trans(keys))": "keys = (keys.to(tl.float32) * ks[:, None]).to(q.dtype)\n        "
    "scores = tl.dot(q, tl.trans(keys))",
    SCORES: "scores = scores * scale_log2",
    "weights = p * vs[None, :]": "weights = p\n        values = (values.to(tl.float32) * vs[:, None]).to(q.dtype)",
}})  # fmt: skip
also_right("the mask first, and a bias of it", {LOOP: {
    'scores = tl.where(inside[None, :], scores, float("-inf"))':
        'scores += tl.where(inside, 0.0, float("-inf"))[None, :]',
    "new = tl.maximum(m, tl.max(scores, axis=1))": "new = tl.max(tl.join(m, tl.max(scores, axis=1)), axis=1)",
}})  # fmt: skip
also_right("scales of a value under the softmax's own exponent", {LOOP: {
    "weights = p * vs[None, :]": "weights = tl.where(vs[None, :] > 0, tl.exp2(scores - new[:, None] + "
    "tl.log2(tl.where(vs > 0, vs, 1.0))[None, :]), 0.0)",
}})  # fmt: skip
also_right("codes widened to float32 and then narrowed", {LOOP: {
    KEYS: "other=0.0).to(tl.float32).to(q.dtype)\n        values",
    "mask=loaded, other=0.0).to(q.dtype)\n        ks": "mask=loaded, other=0.0).to(tl.float32).to(q.dtype)\n        ks",
    "block = tl.load(table_ptr + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)":
        "block = tl.where(inside, tl.load(table_ptr + token // BLOCK_SIZE, mask=inside), 0).to(tl.int64)",
}})  # fmt: skip
also_right("a sum of weights from a product with ones", {LOOP: {
    "d = d * ratio + tl.sum(p, axis=1)": "d = tl.fma(d, ratio, tl.sum(p, 1))",
    "o = o * ratio[:, None] + tl.dot(weights.to(q.dtype), values)":
        "o = tl.dot(weights.to(q.dtype), values, acc=o * ratio[:, None])",
    "tl.dot(q, tl.trans(keys))": "tl.trans(tl.dot(keys, tl.trans(q)))",
}})  # fmt: skip

wrong = functools.partial(ANSWERS.wrong, LOOP)
C = '"classic wrong answers" '
K_SCALE = "ks = tl.load(k_scale_ptr + block * key_heads + key_head, mask=inside, other=0.0)"
V_SCALE = K_SCALE.replace("k_scale", "v_scale").replace("ks", "vs", 1)
wrong("no scales", "both scales are left out", C + "1", edits={" * ks[None, :]": "", " * vs[None, :]": ""})
wrong("no scales of keys", "the scales of the keys are left out", C + "1", edits={" * ks[None, :]": ""})
wrong("no scales of values", "the scales of the values are left out", C + "1", edits={" * vs[None, :]": ""})
wrong("scales exchanged", "keys have the scales of values, and values", C + "1", edits={
    "ks = tl.load(k_scale": "vs = tl.load(k_scale", "vs = tl.load(v_scale": "ks = tl.load(v_scale",
})  # fmt: skip
wrong(
    "keys' scales for values", "values have the scales of keys", C + "1", edits={"tl.load(v_scale": "tl.load(k_scale"}
)
wrong("block of the sequence", "a scale is looked up by the block's number in the sequence", C + "2", edits={
    K_SCALE: "logical = token // BLOCK_SIZE\n        " + K_SCALE.replace("block *", "logical *"),
    V_SCALE: V_SCALE.replace("block *", "logical *"),
})  # fmt: skip
wrong("the first head's scales", "every head has the scales of the first one", C + "2", edits={
    "k_scale_ptr + block * key_heads + key_head": "k_scale_ptr + block * key_heads",
    "v_scale_ptr + block * key_heads + key_head": "v_scale_ptr + block * key_heads",
})  # fmt: skip
FIRST = "first = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)"
wrong("a tile's scale", "a whole tile has the scales of its first token", C + "3", edits={
    K_SCALE: f"{FIRST}\n        " + K_SCALE.replace("block *", "0 * block + first *"),
    V_SCALE: V_SCALE.replace("block *", "0 * block + first *"),
})  # fmt: skip
wrong("sum of scaled weights", "d adds up weights that are multiplied by the values' scales", C + "4", edits={
    "p = tl.exp2(scores - new[:, None])": "p = tl.exp2(scores - new[:, None]) * vs[None, :]",
    "weights = p * vs[None, :]": "weights = p",
})  # fmt: skip
wrong("no table", "the block table is ignored", C + "5", edits={
    "block = tl.load(table_ptr + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)":
        "block = (token // BLOCK_SIZE).to(tl.int64)",
})  # fmt: skip
wrong(
    "no mask on the scores",
    "a score of 0 is no weight of 0",
    C + "5",
    edits={'scores = tl.where(inside[None, :], scores, float("-inf"))': "pass"},
)
wrong("hidden by -1e4", "only scores far below zero go wrong", C + "5", edits={
    'scores = tl.where(inside[None, :], scores, float("-inf"))': "scores = tl.where(inside[None, :], scores, -1e4)",
})  # fmt: skip
wrong("no strides", "other strides", C + "5", edits={
    "block * stride_k[0] + offset * stride_k[1]": "(block * BLOCK_SIZE + offset) * key_heads * HEAD_DIM",
})  # fmt: skip
wrong("not rescaled", "neither the sum nor the output is rescaled", C + "6", edits={
    "ratio = tl.exp2(m - new)": "ratio = m * 0 + 1",
})  # fmt: skip
wrong("keys loaded twice", "k_cache_ptr: expected", C + "7", edits={
    "scores = tl.dot(q, tl.trans(keys))":
        "keys = tl.load(k_rows[:, None] + column[None, :] * stride_k[3], mask=loaded, other=0.0).to(q.dtype)\n        "
        "scores = tl.dot(q, tl.trans(keys))",
})  # fmt: skip
wrong("products of float32", "got a product of float32", C + "8", edits={
    "tl.dot(q, tl.trans(keys))": 'tl.dot(q.to(tl.float32), tl.trans(keys).to(tl.float32), input_precision="ieee")',
})  # fmt: skip
wrong("offsets of 32 bits", "overflows", edits={"other=0).to(tl.int64)": "other=0)"})
wrong(
    "slots of 32 bits", "overflows", edits={"offset = (token % BLOCK_SIZE).to(tl.int64)": "offset = token % BLOCK_SIZE"}
)
