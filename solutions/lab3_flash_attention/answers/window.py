"""A plain answer to exercise 3.10, a sliding window, and wrong answers, each an edit of it."""

from __future__ import annotations

from utils.checks.answers import Answers

KERNELS, FORWARD, BACKWARD = "3.10: your kernels", "3.10: the forward pass", "3.10: the backward pass"

_FORWARD_KERNEL = """
@triton.jit
def load(ptr, strides, hz, H, rows, N, D: tl.constexpr, BLOCK_D: tl.constexpr):
    stride_b, stride_h, stride_n, stride_d = strides
    cols = tl.arange(0, BLOCK_D)
    place = ptr + hz // H * stride_b + hz % H * stride_h + rows[:, None] * stride_n + cols[None, :] * stride_d
    return tl.load(place, mask=(rows[:, None] < N) & (cols[None, :] < D), other=0.0)


@triton.jit
def store(ptr, strides, x, hz, H, rows, N, D: tl.constexpr, BLOCK_D: tl.constexpr):
    stride_b, stride_h, stride_n, stride_d = strides
    cols = tl.arange(0, BLOCK_D)
    place = ptr + hz // H * stride_b + hz % H * stride_h + rows[:, None] * stride_n + cols[None, :] * stride_d
    tl.store(place, x.to(ptr.dtype.element_ty), mask=(rows[:, None] < N) & (cols[None, :] < D))


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o, H, Nq, Nk, window, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    hz = tl.program_id(1)
    m0 = tl.program_id(0) * BLOCK_M
    i = m0 + tl.arange(0, BLOCK_M)
    last = (i + Nk - Nq)[:, None]
    q = load(q_ptr, stride_q, hz, H, i, Nq, D, BLOCK_D)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin = tl.maximum(m0 + Nk - Nq - window + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(m0 + BLOCK_M + Nk - Nq, Nk)
    for n0 in range(begin, end, BLOCK_N):
        j = n0 + tl.arange(0, BLOCK_N)[None, :]
        k = load(k_ptr, stride_k, hz, H, n0 + tl.arange(0, BLOCK_N), Nk, D, BLOCK_D)
        v = load(v_ptr, stride_v, hz, H, n0 + tl.arange(0, BLOCK_N), Nk, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (j <= last) & (j + window > last)
        s = tl.where(seen, s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp(s - safe[:, None])
        alpha = tl.exp(m - safe)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = new
    o = acc / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, m + tl.log(total), -float("inf"))
    store(o_ptr, stride_o, o, hz, H, i, Nq, D, BLOCK_D)
    tl.store(lse_ptr + hz * Nq + i, lse, mask=i < Nq)
"""

_DQ_KERNEL = """
@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_q, stride_k, stride_v, stride_o, stride_do, stride_dq, H, Nq, Nk, window, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    hz = tl.program_id(1)
    m0 = tl.program_id(0) * BLOCK_M
    i = m0 + tl.arange(0, BLOCK_M)
    last = (i + Nk - Nq)[:, None]
    q = load(q_ptr, stride_q, hz, H, i, Nq, D, BLOCK_D)
    o = load(o_ptr, stride_o, hz, H, i, Nq, D, BLOCK_D)
    do = load(do_ptr, stride_do, hz, H, i, Nq, D, BLOCK_D)
    lse = tl.load(lse_ptr + hz * Nq + i, mask=i < Nq, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + hz * Nq + i, delta, mask=i < Nq)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    key_begin = tl.maximum(m0 + Nk - Nq - window + 1, 0) // BLOCK_N * BLOCK_N
    key_end = tl.minimum(m0 + BLOCK_M + Nk - Nq, Nk)
    for n0 in range(key_begin, key_end, BLOCK_N):
        j = n0 + tl.arange(0, BLOCK_N)
        k = load(k_ptr, stride_k, hz, H, j, Nk, D, BLOCK_D)
        v = load(v_ptr, stride_v, hz, H, j, Nk, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        p = tl.exp(s - lse[:, None])
        if n0 + BLOCK_N > m0 + Nk - Nq + 1 or n0 <= m0 + BLOCK_M - 1 + Nk - Nq - window:
            p = tl.where((j[None, :] <= last) & (j[None, :] > last - window), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    store(dq_ptr, stride_dq, dq * scale, hz, H, i, Nq, D, BLOCK_D)
"""

_DKDV_KERNEL = """
@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv, H, Nq, Nk, window, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    hz = tl.program_id(1)
    n0 = tl.program_id(0) * BLOCK_N
    j = n0 + tl.arange(0, BLOCK_N)
    k = load(k_ptr, stride_k, hz, H, j, Nk, D, BLOCK_D)
    v = load(v_ptr, stride_v, hz, H, j, Nk, D, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    query_begin = tl.maximum(n0 - (Nk - Nq), 0) // BLOCK_M * BLOCK_M
    query_end = tl.minimum(n0 + BLOCK_N - 1 - (Nk - Nq) + window, Nq)
    for m0 in range(query_begin, query_end, BLOCK_M):
        i = m0 + tl.arange(0, BLOCK_M)
        q = load(q_ptr, stride_q, hz, H, i, Nq, D, BLOCK_D)
        do = load(do_ptr, stride_do, hz, H, i, Nq, D, BLOCK_D)
        lse = tl.load(lse_ptr + hz * Nq + i, mask=i < Nq, other=0.0)
        delta = tl.load(delta_ptr + hz * Nq + i, mask=i < Nq, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        age = i[:, None] + Nk - Nq - j[None, :]
        p = tl.where((age >= 0) & (age < window), tl.exp(s - lse[:, None]), 0.0)
        dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
    store(dk_ptr, stride_dk, dk * scale, hz, H, j, Nk, D, BLOCK_D)
    store(dv_ptr, stride_dv, dv, hz, H, j, Nk, D, BLOCK_D)
"""

ANSWERS = Answers(
    {
        KERNELS: "\n\n".join(text.strip("\n") for text in (_FORWARD_KERNEL, _DQ_KERNEL, _DKDV_KERNEL)),
        FORWARD: """
        B, H, Nq, D = q.shape
        Nk = k.shape[2]
        o = torch.empty_like(q)
        lse = torch.empty(B, H, Nq, device=q.device)
        forward_kernel[triton.cdiv(Nq, 16), B * H](
            q, k, v, o, lse, q.stride(), k.stride(), v.stride(), o.stride(), H, Nq, Nk, window, scale,
            D=D, BLOCK_D=tuning.block_d(D), BLOCK_M=16, BLOCK_N=16,
        )
        return o, lse
        """,
        BACKWARD: """
        B, H, Nq, D = q.shape
        Nk = k.shape[2]
        dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
        sizes = {"D": D, "BLOCK_D": tuning.block_d(D), "BLOCK_M": 16, "BLOCK_N": 32}
        dq_kernel[triton.cdiv(Nq, 16), B * H](
            q, k, v, o, do, lse, delta, dq, q.stride(), k.stride(), v.stride(), o.stride(), do.stride(), dq.stride(),
            H, Nq, Nk, window, scale, **sizes,
        )
        dkdv_kernel[triton.cdiv(Nk, 32), B * H](
            q, k, v, do, lse, delta, dk, dv, q.stride(), k.stride(), v.stride(), do.stride(), dk.stride(), dv.stride(),
            H, Nq, Nk, window, scale, **sizes,
        )
        return dq, dk, dv
        """,
    }
)


def wrong(name: str, number: int, says: str, edits: dict[str, str]) -> None:
    """A wrong answer whose kernels have these edits: the check says those words and that place of the list."""
    ANSWERS.wrong(KERNELS, name, says, f'"classic wrong answers" {number}', edits=edits)


SEEN, P_SEEN = "(j <= last) & (j + window > last)", "(j[None, :] <= last) & (j[None, :] > last - window)"
MASK, P = 's = tl.where(seen, s, -float("inf"))', "p = tl.exp(s - lse[:, None])\n"
BEGIN, KEY_BEGIN = (
    f"{name} = tl.maximum(m0 + Nk - Nq - window + 1, 0) // BLOCK_N * BLOCK_N" for name in ("    begin", "key_begin")
)
END = "    end = tl.minimum(m0 + BLOCK_M + Nk - Nq, Nk)"
QUERY_BEGIN = "tl.maximum(n0 - (Nk - Nq), 0) // BLOCK_M * BLOCK_M"
QUERY_END = "tl.minimum(n0 + BLOCK_N - 1 - (Nk - Nq) + window, Nq)"
PARTLY = " or n0 <= m0 + BLOCK_M - 1 + Nk - Nq - window"

OFF = "a bound of the window is off by one"
wrong("window and one more key", 1, OFF, {"j + window > last": "j + window >= last"})
wrong("window less one key", 1, OFF, {"j + window > last": "j + window > last + 1"})
wrong("not its own key", 1, OFF, {"(j <= last)": "(j < last)"})
wrong("window and one more query", 1, OFF, {"age < window": "age <= window"})
wrong("dq less one key", 1, OFF, {"> last - window)": "> last - window + 1)"})

NO_OTHER = "a tile is loaded once where an element of it is in the window"
wrong("begins at key 0", 2, "the keys before the window are read", {BEGIN: "    begin = 0"})
wrong("dq begins at key 0", 2, "the keys before the window are read", {KEY_BEGIN: "key_begin = 0"})
wrong("ends at the last query", 2, "queries past the window are read", {QUERY_END: "Nq"})
wrong("begins a tile early", 2, NO_OTHER, {BEGIN: BEGIN.replace("+ 1, 0)", "+ 1 - BLOCK_N, 0)")})
wrong("ends a tile late", 2, NO_OTHER, {QUERY_END: QUERY_END.replace("BLOCK_N - 1", "BLOCK_N + BLOCK_M")})

SHORT, LATE = "the loop over queries ends too early", "the loop over queries begins too late"
wrong("ends with the window of its first key", 3, SHORT, {QUERY_END: QUERY_END.replace("BLOCK_N - 1 ", "0 ")})
wrong("ends with its own tile", 3, SHORT, {QUERY_END: "tl.minimum(n0 + BLOCK_N - (Nk - Nq), Nq)"})
wrong("begins with the last key", 3, LATE, {QUERY_BEGIN: QUERY_BEGIN.replace("n0 -", "n0 + BLOCK_N - 1 -")})
wrong(
    "begins with the last query", 3, "the loop over keys begins too late",
    {BEGIN: BEGIN.replace("m0 +", "m0 + BLOCK_M - 1 +")},
)  # fmt: skip
wrong("ends with its first query", 3, "the loop over keys ends too early", {END: END.replace("BLOCK_M", "1")})

LEFT = "the mask of tiles at its left edge is left out, or hides none of them"
DIAGONAL = "the mask of tiles on the diagonal is left out, or hides none of them"
wrong("left edge not masked", 4, LEFT, {SEEN: "j <= last"})
wrong("dq masked on the diagonal alone", 4, LEFT, {PARTLY: ""})
wrong("oldest queries not masked", 4, LEFT, {" & (age < window)": ""})
wrong("diagonal not masked", 4, DIAGONAL, {SEEN: "j + window > last"})
wrong("a diagonal that hides no key", 4, DIAGONAL, {"j <= last": "j <= last + Nq"})
wrong("nothing masked", 4, "nothing is masked inside of the tiles", {MASK: "s = s"})

TOP_LEFT = "aligned at the top left"
wrong("top left", 5, TOP_LEFT, {"last = (i + Nk - Nq)[:, None]": "last = i[:, None]"})
wrong(
    "loop at the top left", 5, TOP_LEFT,
    {BEGIN: BEGIN.replace("Nk - Nq - ", "0 - "), END: END.replace("Nk - Nq, ", "0, ")},
)  # fmt: skip
wrong("gradients at the top left", 5, TOP_LEFT, {"age = i[:, None] + Nk - Nq": "age = i[:, None]"})

NO_KEY = "a query that sees no key gives NaN"
wrong("divided by an empty sum", 6, NO_KEY, {"acc / tl.where(total > 0, total, 1.0)": "acc / total"})
wrong(
    "minus infinity from itself", 6, "no key of the first tile",
    {'safe = tl.where(new == -float("inf"), 0.0, new)': "safe = new"},
)  # fmt: skip
wrong("hidden by a large number", 6, "queries that see no key get something", {MASK: "s = tl.where(seen, s, -1e30)"})
wrong(
    "scores masked instead of p", 6, NO_KEY,
    {P: f"s = tl.where({P_SEEN}, s, -float('inf'))\n        {P}", f"p = tl.where({P_SEEN}, p, 0.0)": "p = p"},
)  # fmt: skip

wrong(
    "counted in tiles", 7, "the window is counted in tiles",
    {
        SEEN: "(j <= last) & (j // BLOCK_N > last // BLOCK_N - tl.cdiv(window, BLOCK_N))",
        BEGIN: BEGIN.replace("window + 1, 0)", "window + 1 - BLOCK_N, 0)"),
    },
)  # fmt: skip
wrong("no delta", 8, "delta is missing", {"ds = p * (dp - delta[:, None])": "ds = p * dp"})
wrong("not scaled", 8, "dS is not multiplied by the scale", {"dq * scale": "dq"})
wrong("values with the keys' strides", 8, "only non-contiguous inputs fail", {"v_ptr, stride_v": "v_ptr, stride_k"})
ANSWERS.wrong(  # right where more queries than keys are, as no window at the top left is
    KERNELS, "ends further back than its window", "the result is zero everywhere",
    edits={QUERY_END: QUERY_END.replace("(Nk - Nq)", "2 * (Nk - Nq)")},
)  # fmt: skip
ANSWERS.wrong(
    KERNELS, "rows not masked", "out-of-bounds access",
    edits={"(rows[:, None] < N) & (cols[None, :] < D), other": "cols[None, :] < D, other"},
)  # fmt: skip
ANSWERS.wrong(
    KERNELS,
    "every head takes the first head's logsumexp",
    "the first tile along h is right and each later one is wrong",
    edits={"lse = tl.load(lse_ptr + hz * Nq": "lse = tl.load(lse_ptr + hz // H * H * Nq"},
)
ANSWERS.wrong(
    KERNELS,
    "delta of the first batch entry",
    "only batch entries after the first go wrong",
    edits={"delta = tl.load(delta_ptr + hz * Nq": "delta = tl.load(delta_ptr + hz % H * Nq"},
)
wrong(
    "the maximum begins at 1", 8, "only scores far from 0 go wrong",
    {"new = tl.maximum(m, tl.max(s, 1))": "new = tl.maximum(m, 1)"},
)  # fmt: skip
