"""Right and wrong answers to exercise 6.5, attention of packed documents."""

from __future__ import annotations

import functools

from utils.checks.answers import Answers

KERNEL, LAUNCH = "6.5: your kernel", "6.5: the launch"
ANSWERS = Answers(
    {
        KERNEL: """
@triton.jit
def my_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, cu_ptr, T, H, S, q_t, q_h, k_t, k_h, v_t, v_h, scale,
    D: tl.constexpr, COLUMNS: tl.constexpr, STARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):
    h = (tl.program_id(0) % H).to(tl.int64)
    i0 = tl.program_id(0) // H * M
    i = i0 + tl.arange(0, M)
    row = i.to(tl.int64)
    d = tl.arange(0, COLUMNS)
    inside = (i < T)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + row[:, None] * q_t + h * q_h + d[None, :], mask=inside, other=0.0)
    s = tl.arange(0, STARTS)
    starts = tl.load(cu_ptr + s, mask=s <= S, other=2147483647)
    begin = tl.max(tl.where(starts[None, :] <= i[:, None], starts[None, :], 0), axis=1)
    m = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, COLUMNS), tl.float32)
    lowest = tl.min(begin, axis=0)
    highest = tl.minimum(i0 + M, T)
    for j0 in range(lowest, highest, N):
        j = j0 + tl.arange(0, N)
        key = j.to(tl.int64)
        there = (j < T)[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + key[:, None] * k_t + h * k_h + d[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_t + h * v_h + d[None, :], mask=there, other=0.0)
        x = tl.dot(q, tl.trans(k))
        x = x * scale
        seen = (j[None, :] >= begin[:, None]) & (j[None, :] <= i[:, None])
        x = tl.where(seen, x, -float("inf"))
        new = tl.maximum(m, tl.max(x, axis=1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp(x - safe[:, None])
        alpha = tl.exp(m - safe)
        total = total * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = new
    out = acc / total[:, None]
    tl.store(o_ptr + (row[:, None] * H + h) * D + d[None, :], out.to(o_ptr.dtype.element_ty), mask=inside)
""",
        LAUNCH: """
        grid = (triton.cdiv(T, 32) * H,)
        my_kernel[grid](
            q, k, v, o, cu_seqlens, T, H, documents,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), scale,
            D=D, COLUMNS=triton.next_power_of_2(D), STARTS=triton.next_power_of_2(documents + 1), M=32, N=32,
        )
        return o
        """,
    }
)
SEEN = "seen = (j[None, :] >= begin[:, None]) & (j[None, :] <= i[:, None])"
MASK = 'x = tl.where(seen, x, -float("inf"))'
BEGIN = "begin = tl.max(tl.where(starts[None, :] <= i[:, None], starts[None, :], 0), axis=1)"
LOWEST, HIGHEST = "lowest = tl.min(begin, axis=0)", "highest = tl.minimum(i0 + M, T)"
LOOP = "for j0 in range(lowest, highest, N):"
SEARCH = "s = tl.arange(0, STARTS)\n    starts = tl.load(cu_ptr + s, mask=s <= S, other=2147483647)\n    " + BEGIN
also_right = ANSWERS.also_right
also_right("tiles that begin anew in each document", {
    KERNEL: {
        "i0 = tl.program_id(0) // H * M\n    i = i0 + tl.arange(0, M)": """tile = tl.program_id(0) // H
    document = 0
    before = 0
    tiles = tl.cdiv(tl.load(cu_ptr + 1) - tl.load(cu_ptr), M)
    while (before + tiles <= tile) & (document < S - 1):
        before += tiles
        document += 1
        tiles = tl.cdiv(tl.load(cu_ptr + document + 1) - tl.load(cu_ptr + document), M)
    if before + tiles <= tile:
        return
    lowest = tl.load(cu_ptr + document)
    end = tl.load(cu_ptr + document + 1)
    i0 = lowest + (tile - before) * M
    i = i0 + tl.arange(0, M)""",
        SEARCH: "begin = tl.full((M,), 0, tl.int32) + lowest",
        LOWEST: "",
        HIGHEST: "highest = tl.minimum(i0 + M, end)",
        "(i < T)[:, None]": "(i < end)[:, None]",
        "(j < T)[:, None]": "(j < end)[:, None]",
    },
    LAUNCH: {"triton.cdiv(T, 32) * H": "(T // 32 + documents) * H"},
})  # fmt: skip
also_right("a table by PyTorch", {
    KERNEL: {SEARCH: "begin = tl.load(cu_ptr + i, mask=i < T, other=T)"},
    LAUNCH: {
        "grid =": "token = torch.arange(T, device=q.device, dtype=torch.int32)\n        "
        "begins = cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1]\n        grid =",
        "q, k, v, o, cu_seqlens, T": "q, k, v, o, begins, T",
    },
})  # fmt: skip
also_right("a table by PyTorch, each beginning as often as its document is long", {
    KERNEL: {SEARCH: "begin = tl.load(cu_ptr + i, mask=i < T, other=T)"},
    LAUNCH: {
        "grid =": "begins = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())\n        grid =",
        "q, k, v, o, cu_seqlens, T": "q, k, v, o, begins, T",
    },
})  # fmt: skip
also_right("a table by a kernel of its own", {
    KERNEL: {
        "@triton.jit\ndef my_kernel": """@triton.jit
def table_kernel(cu_ptr, begins_ptr, SIZE: tl.constexpr):
    begin, end = tl.load(cu_ptr + tl.program_id(0)), tl.load(cu_ptr + tl.program_id(0) + 1)
    for first in range(begin, end, SIZE):
        token = first + tl.arange(0, SIZE)
        tl.store(begins_ptr + token, begin + 0 * token, mask=token < end)


@triton.jit
def my_kernel""",
        SEARCH: "begin = tl.load(cu_ptr + i, mask=i < T, other=T)",
    },
    LAUNCH: {
        "grid =": "begins = torch.empty(T, dtype=torch.int32, device=q.device)\n        "
        "table_kernel[(documents,)](cu_seqlens, begins, SIZE=256)\n        grid =",
        "q, k, v, o, cu_seqlens, T": "q, k, v, o, begins, T",
    },
})  # fmt: skip
also_right("a binary search for each query", {KERNEL: {SEARCH: """low = i * 0
    high = i * 0 + S
    while tl.max(high - low, axis=0) > 1:
        middle = (low + high) // 2
        left = tl.load(cu_ptr + middle) <= i
        low = tl.where(left, middle, low)
        high = tl.where(left, high, middle)
    begin = tl.load(cu_ptr + low)"""}})  # fmt: skip
also_right("from the last key back to the first, in powers of two", {KERNEL: {
    LOOP: "for step in range(tl.cdiv(highest - lowest, N)):\n        j0 = highest - (step + 1) * N",
    "there = (j < T)[:, None]": "there = (j >= lowest)[:, None]",
    "x = x * scale": "x = x * (scale * 1.4426950408889634)",
    "tl.exp(": "tl.exp2(",
}})  # fmt: skip
also_right("keys on the left, larger tiles that begin at multiples of their size", {
    KERNEL: {
        LOWEST: "lowest = tl.min(begin, axis=0) // N * N",
        "x = tl.dot(q, tl.trans(k))": "x = tl.trans(tl.dot(k, tl.trans(q)))",
        MASK: 'x += tl.where(seen, 0.0, -float("inf"))',
        "m = tl.full((M,), -float(\"inf\"), tl.float32)": "m = tl.full((M,), -1e20, tl.float32)",
    },
    LAUNCH: {"M=32, N=32": "M=64, N=16", "cdiv(T, 32)": "cdiv(T, 64)"},
})  # fmt: skip

wrong = functools.partial(ANSWERS.wrong, KERNEL)
C = '"classic wrong answers" '
wrong("no document mask", "keys of the documents before count", C + "1", edits={
    LOWEST: "lowest = 0", SEEN: "seen = j[None, :] <= i[:, None]",
})  # fmt: skip
wrong("not causal", "keys after a query count", C + "1", edits={
    HIGHEST: "highest = T",
    SEARCH: f"{SEARCH}\n    end = tl.min(tl.where(starts[None, :] > i[:, None], starts[None, :], T), axis=1)",
    "(j[None, :] <= i[:, None])": "(j[None, :] < end[:, None])",
})  # fmt: skip
wrong("nothing masked", "nothing is masked", C + "1", edits={
    LOWEST: "lowest = 0", HIGHEST: "highest = T", SEEN: "seen = (j[None, :] < T) & (i[:, None] >= 0)",
})  # fmt: skip
wrong("the first token in the document before", "a document's first token counts as one of the", C + "2", edits={
    "starts[None, :] <= i[:, None]": "starts[None, :] < i[:, None]",
})  # fmt: skip
wrong("one key of the document before", "the last key of the document before counts", C + "2", edits={
    SEEN: f"{SEEN.replace('begin[:, None]', 'begin[:, None] - 1')} & (j >= 0)[None, :]",
    LOWEST: f"{LOWEST} - 1",
    "there = (j < T)[:, None]": "there = ((j < T) & (j >= 0))[:, None]",
})  # fmt: skip
wrong("not its own key", "a query does not see its own key", C + "2", edits={
    "j[None, :] <= i[:, None]": "j[None, :] < i[:, None]",
})  # fmt: skip
wrong("not the first key", "a document's first key is not seen", C + "2", edits={
    "j[None, :] >= begin[:, None]": "j[None, :] > begin[:, None]",
})  # fmt: skip
wrong("no mask in the tiles", "the keys of the first query's document count for the whole tile", C + "3", edits={
    SEEN: "seen = j[None, :] <= i[:, None]",
})  # fmt: skip
wrong("the first query's document", "the keys of the first query's document count for the whole tile", C + "3", edits={
    "j[None, :] >= begin[:, None]": "j[None, :] >= lowest",
})  # fmt: skip
wrong("the last query's document", "the loop begins with the document of a tile's last query", C + "3", edits={
    LOWEST: "lowest = tl.max(tl.where(i < T, begin, 0), axis=0)",
})  # fmt: skip
wrong("minus infinity from itself", "NaN where a query sees no key of the first tile", C + "4", edits={
    'safe = tl.where(new == -float("inf"), 0.0, new)': "safe = new",
})  # fmt: skip
wrong("begins at key 0", "the keys of the documents before are read", C + "5", edits={LOWEST: "lowest = 0"})
wrong("the whole row", "every tile of queries reads the keys of the whole row", C + "5", edits={
    LOWEST: "lowest = 0", HIGHEST: "highest = T",
})  # fmt: skip
wrong("a tile too early", "tiles are read that hold no key", C + "5", edits={
    LOWEST: "lowest = tl.maximum(tl.min(begin, axis=0) - N, 0)",
})  # fmt: skip
wrong("a tile too many", "tl.dot: expected", "end the loop there", C + "5", edits={
    HIGHEST: f"{HIGHEST}\n    own = highest", LOOP: "for j0 in range(lowest, highest + N, N):",
    "there = (j < T)[:, None]": "there = (j < own)[:, None]",
})  # fmt: skip
wrong("begins at the next multiple", "the loop begins too late", C + "6", edits={
    LOWEST: "lowest = tl.cdiv(tl.min(begin, axis=0), N) * N",
})  # fmt: skip
wrong("ends with the first query", "the loop ends too early", C + "6", edits={HIGHEST: "highest = i0 + 1"})
wrong("not rescaled", "sum and output are not rescaled", C + "7", edits={
    "alpha = tl.exp(m - safe)": "alpha = m * 0 + 1", 'm = tl.full((M,), -float("inf"), tl.float32)': "m = total - 1e30",
    "total = tl.zeros((M,), tl.float32)": "pass", "    s = tl.arange(0, STARTS)":
    "    total = tl.zeros((M,), tl.float32)\n    s = tl.arange(0, STARTS)",
})  # fmt: skip
wrong("the output not rescaled", "the output is not rescaled", C + "7", edits={"acc * alpha[:, None]": "acc"})
wrong("hidden by a zero", "hidden keys count with a score of 0", C + "7", edits={MASK: "x = tl.where(seen, x, 0.0)"})
wrong("hidden by -1e4", "only scores far below zero go wrong", C + "7", edits={
    MASK: "x = tl.where(seen, x, -1e4)",
})  # fmt: skip
wrong("no scale", "the scores are not multiplied by 1 / sqrt(D)", C + "7", edits={"x = x * scale": "x = x * 1.0"})
wrong("powers of two", "exp2 of scores without the factor log2(e)", C + "7", edits={"tl.exp(": "tl.exp2("})
wrong("sixteen documents", "only rows of more than 16 documents go wrong", C + "8", edits={
    "mask=s <= S": "mask=(s <= S) & (s < 16)",
})  # fmt: skip
wrong("the first of equal beginnings", "only rows with empty documents go wrong", C + "8", edits={
    BEGIN: """own = tl.argmax(tl.where(starts[None, :] <= i[:, None], starts[None, :], -1), axis=1)
    begin = tl.load(cu_ptr + own)
    end = tl.load(cu_ptr + own + 1, mask=own < S, other=T)""",
    SEEN: f"{SEEN} & (j[None, :] < end[:, None])",
})  # fmt: skip
wrong("q's strides for all", "q, k and v have each their own", C + "9", edits={
    "key[:, None] * k_t + h * k_h": "key[:, None] * q_t + h * q_h",
    "key[:, None] * v_t + h * v_h": "key[:, None] * q_t + h * q_h",
})  # fmt: skip
wrong("q loaded at each step", "q: expected", "loaded once, and stays on chip", C + "9", edits={
    "x = tl.dot(q,": "q = tl.load(q_ptr + row[:, None] * q_t + h * q_h + d[None, :], mask=inside, other=0.0)\n        "
    "x = tl.dot(q,",
})  # fmt: skip
wrong("products of float32", "got a product of float32", C + "10", edits={
    "tl.dot(q, tl.trans(k))": 'tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32), input_precision="ieee")',
})  # fmt: skip
wrong("no mask on the keys", "out-of-bounds", edits={"there = (j < T)[:, None] & ": "there = (j < j + 1)[:, None] & "})
wrong(
    "offsets of 32 bits", "beyond 2^31", edits={"row = i.to(tl.int64)": "row = i", ".to(tl.int64)\n    i0": "\n    i0"}
)
wrong("heads of 32 bits", "overflows", edits={
    "h = (tl.program_id(0) % H).to(tl.int64)": "h = tl.program_id(0) % H",
})  # fmt: skip
wrong("keys of 32 bits", "only offsets beyond 2^31", C + "9", edits={"key = j.to(tl.int64)": "key = j"})
wrong = functools.partial(ANSWERS.wrong, LAUNCH)
wrong("searched from the left", "token 0 of none", "right=True", C + "2", edits={
    "grid =": "token = torch.arange(T, device=q.device, dtype=torch.int32)\n        "
    "begins = cu_seqlens[torch.searchsorted(cu_seqlens, token) - 1]\n        grid =",
    "q, k, v, o, cu_seqlens, T": "q, k, v, o, begins, T",
}, also={KERNEL: {SEARCH: "begin = tl.load(cu_ptr + i, mask=i < T, other=T)"}})  # fmt: skip
wrong("too few programs", "elements of o are never written", C + "9", edits={
    "triton.cdiv(T, 32) * H": "max(1, T // 32) * H",
})  # fmt: skip
wrong("a program too few where one query is left", "elements of o are never written", C + "9", edits={
    "triton.cdiv(T, 32) * H": "triton.cdiv(T, 33) * H",
})  # fmt: skip
wrong("tiles of 16", "a tile has at least 32 queries", C + "9", edits={"M=32": "M=16", "cdiv(T, 32)": "cdiv(T, 16)"})
wrong(
    "a launch for each document",
    "the host waits",
    edits={"grid =": "cu = cu_seqlens.tolist()\n        grid ="},
)
wrong(
    "PyTorch's attention",
    "is a built-in attention operator",
    instead="""
        whole = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)[0].transpose(0, 1).contiguous()
""",
)
