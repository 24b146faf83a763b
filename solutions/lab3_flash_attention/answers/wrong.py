"""Wrong answers to lab 3, each with one mistake, and what the check must say of it: edits of the plain answers."""

from __future__ import annotations

from utils.checks.answers import Edits

from .right import ANSWERS, K_TILE, LAST_V_ROWS, SCORES, V_ROWS

wrong = ANSWERS.wrong


def not_rescaled(place: str, total: Edits, weighted: Edits, own: Edits, *says: str) -> None:
    """What may be left out when the maximum changes; with ``own`` it is the maximum of the tile alone."""
    when = "is rescaled after the maximum changes"
    wrong(place, "no rescale", "neither the running sum nor the accumulator is rescaled", *says, edits=total | weighted)
    wrong(place, "sum only", f"the running sum {when}, the accumulator is not", edits=weighted)
    wrong(place, "accumulator only", f"the accumulator {when}, the running sum is not", edits=total)
    wrong(place, "maximum of the tile", "each tile has a maximum of its own", edits=own | total | weighted)


def wrong_end(place: str, divided: Edits, lse: str, maximum: str, log: str) -> None:
    """What may be left out at the end of a row of tiles."""
    wrong(place, "not divided", "the accumulator is not divided by the running sum", edits=divided)
    wrong(place, "lse without maximum", "the logsumexp lacks the maximum", edits={lse: log})
    wrong(place, "lse maximum only", "the logsumexp is the maximum alone", edits={lse: maximum})


def wrong_ds(step: str, end: str, gradient: str, across: str, seen: str, rows: str) -> None:
    """Wrong dS: ``across`` lays the numbers of queries along its axis, ``seen`` is true where P is not 0."""
    ds, lse = f"ds = p * (dp - delta{across})", f"lse{across}"
    wrong(step, "no delta", "delta is missing", '"classic wrong answers" 1', rows, edits={ds: "ds = p * dp"})
    wrong(step, "delta added", "delta is added", edits={"dp - delta": "dp + delta"})
    wrong(step, "no p", "the factor P is missing", edits={ds: f"ds = tl.where({seen}, dp - delta{across}, 0.0)"})
    wrong(end, "dS not scaled", "dS is not multiplied by the scale", edits={f"{gradient} * scale": gradient})
    wrong(step, "scaled twice", "the scale is multiplied twice", edits={ds: ds + " * scale"})
    wrong(step, "no lse", "P is exp(S) without the logsumexp", edits={f"s * scale - {lse}": "s * scale"})
    powers = {f"(s * scale - {lse}) * 1.4426950408889634": f"s * scale - {lse}"}
    wrong(step, "exp2 without log2 e", "exp2 needs both S and L multiplied by log2 e", edits=powers)


# ---- 3.1 merge
MERGE, OUTPUTS = "3.1: merge", "3.1: merge with outputs"
wrong(
    MERGE, "no rescale", "neither sum is rescaled", '"classic wrong answers" 1', edits={"d1 * r1 + d2 * r2": "d1 + d2"}
)
wrong(MERGE, "one rescale", "only one of the two sums is rescaled", edits={"d2 * r2": "d2"})
wrong(
    MERGE,
    "upside down",
    "the ratio is upside down",
    edits={"exp(m1 - safe)": "exp(safe - m1)", "exp(m2 - safe)": "exp(safe - m2)"},
)
wrong(MERGE, "crossed", "the other part's maximum", edits={"d1 * r1 + d2 * r2": "d1 * r2 + d2 * r1"})
wrong(MERGE, "powers of two", "powers of 2", edits={"torch.exp(": "torch.exp2("})
wrong(MERGE, "smaller maximum", "the smaller of the two maxima", edits={"torch.maximum": "torch.minimum"})
wrong(
    MERGE,
    "empty parts",
    "a part without elements, (-inf, 0), gives NaN",
    edits={"torch.where(m == -torch.inf, 0.0, m)": "m"},
)
wrong(
    MERGE,
    "overflow",
    "only large values fail",
    edits={"d1 * r1 + d2 * r2": "(d1 * torch.exp(m1) + d2 * torch.exp(m2)) * torch.exp(-safe)"},
)
wrong(
    OUTPUTS,
    "outputs added",
    "the outputs are added as they are",
    edits={"o1 * r1[..., None] + o2 * r2[..., None]": "o1 + o2"},
)
wrong(OUTPUTS, "one output rescaled", "only one of the two outputs is rescaled", edits={"o2 * r2[..., None]": "o2"})
wrong(
    OUTPUTS,
    "outputs divided",
    "the output is divided by d",
    edits={"return m, d, o": "return m, d, o / torch.where(d == 0, 1.0, d)[..., None]"},
)
wrong(
    OUTPUTS,
    "outputs times sums",
    "o is a sum already",
    edits={"o1 * r1[..., None] + o2 * r2[..., None]": "o1 * (d1 * r1)[..., None] + o2 * (d2 * r2)[..., None]"},
)
wrong(
    OUTPUTS,
    "outputs by sums",
    "what rescales them is e^(m1 - m)",
    edits={"o1 * r1[..., None] + o2 * r2[..., None]": "o1 * d1[..., None] + o2 * d2[..., None]"},
)

# ---- 3.2 tiled attention
STEP, END, BACK = (
    "3.2: one step of the forward pass",
    "3.2: the end of a row of tiles",
    "3.2: one step of the backward pass",
)
not_rescaled(
    STEP,
    {"d = d * rescale": "d = d"},
    {"weighted * rescale[..., None]": "weighted"},
    {"torch.maximum(m_old, scores.amax(-1))": "scores.amax(-1)"},
    "query tile rows",
)
wrong_end(END, {"weighted / torch.where(seen, d, 1.0)[..., None]": "weighted"}, "m + torch.log(d)", "m", "torch.log(d)")
wrong(
    STEP,
    "ratio upside down",
    "the ratio of the rescaling is upside down",
    edits={"torch.exp(m_old - safe)": "torch.where(m_old == -torch.inf, 0.0, torch.exp(safe - m_old))"},
)
wrong(
    STEP,
    "last tile only",
    "only the last tile of keys counts",
    edits={"d = d * rescale + p": "d = p", "weighted * rescale[..., None] + p": "p"},
)
wrong(
    STEP,
    "a softmax each",
    "each tile of keys is a softmax of its own",
    edits={"weighted * rescale[..., None] + p @": "weighted + (p / p.sum(-1, keepdim=True)) @"},
    also={END: {"weighted / torch.where(seen, d, 1.0)[..., None]": "weighted"}},
)
FILLED = """m_old, d, weighted = state
        short = block_n - scores.shape[-1]
        scores = torch.nn.functional.pad(scores, (0, short))
        v_tile = torch.nn.functional.pad(v_tile, (0, 0, 0, short))"""
wrong(
    STEP,
    "last tile filled up",
    "keys past the end count, with score 0",
    '"classic wrong answers" 4',
    edits={"m_old, d, weighted = state": FILLED},
)
wrong(
    STEP,
    "last tile left out",
    "the last, ragged tile of keys is left out",
    '"classic wrong answers" 4',
    edits={
        "m_old, d, weighted = state": """m_old, d, weighted = state
        if column + block_n > Nk:
            continue"""
    },
)
wrong(
    STEP,
    "a mask of whole tiles",
    "only a last tile of fewer keys goes wrong",
    '"classic wrong answers" 4',
    edits={
        "m_old, d, weighted = state": """m_old, d, weighted = state
        scores = torch.where(column + torch.arange(block_n, device=q.device) < Nk, scores, -torch.inf)"""
    },
)
wrong(
    BACK,
    "a mask of whole tiles in the backward pass",
    "only a last tile of fewer keys goes wrong",
    '"classic wrong answers" 4',
    edits={
        "dp = do_tile": """p = torch.where(column + torch.arange(block_n, device=q.device) < Nk, p, 0.0)
        dp = do_tile"""
    },
)
wrong(STEP, "empty rows", "a query that sees no key gives NaN", edits={"torch.where(m == -torch.inf, 0.0, m)": "m"})
wrong(
    STEP,
    "powers of two",
    "these are powers of 2 where powers of e belong",
    edits={"torch.exp(": "torch.exp2("},
    also={END: {"m + torch.log(d)": "(m + torch.log2(d)) * 0.6931471805599453"}},
)
wrong(
    STEP,
    "ready made",
    "torch.softmax",
    "built-in softmax operator",
    edits={"p = torch.exp(": "torch.softmax(scores, -1)\n        p = torch.exp("},
)
wrong(END, "divided by zero", "a query that sees no key gives NaN", edits={"torch.where(seen, d, 1.0)": "d"})
wrong(END, "lse base 2", "the logsumexp mixes bases", edits={"torch.log(d)": "torch.log2(d)"})
wrong(
    STEP,
    "all scores at once",
    "largest allocation: expected at most",
    edits={
        "m_old, d, weighted = state": """m_old, d, weighted = state
        whole = tile_scores(_wide(q), _wide(k).repeat_interleave(group, 1), 0, 0, Nq, Nk, causal, scale)
        scores = whole[:, :, row : row + M, column : column + block_n]"""
    },
)
wrong(
    BACK,
    "all of dP at once",
    "largest allocation: expected at most",
    edits={
        "dp = do_tile @ v_tile.transpose(-1, -2)": """whole = _wide(do) @ _wide(v).repeat_interleave(group, 1).mT
        dp = whole[:, :, queries, keys]"""
    },
)
wrong(BACK, "no delta", "delta is missing", edits={"dp - delta[:, :, queries, None]": "dp"})
wrong(
    BACK,
    "delta of a tile",
    "delta is that of a tile of keys",
    '"classic wrong answers" 9',
    edits={"delta[:, :, queries, None]": "(p * dp).sum(-1, keepdim=True)"},
)
wrong(BACK, "dq not scaled", "dS is not multiplied by the scale", edits={"ds @ k_tile * scale": "ds @ k_tile"})
wrong(
    BACK,
    "dk last head",
    "only one query head counts",
    edits={"dk_tile.unflatten(1, (Hkv, group)).sum(2)": "dk_tile.unflatten(1, (Hkv, group))[:, :, -1]"},
)
wrong(BACK, "dq not added", "only the last tile is left", edits={"dq[:, :, queries] +=": "dq[:, :, queries] ="})
wrong(BACK, "dv from ds", "dV comes from dS", edits={"p.transpose(-1, -2) @ do_tile": "ds.transpose(-1, -2) @ do_tile"})

wrong(
    BACK,
    "dv not transposed",
    "which operand is transposed?",
    '"classic wrong answers" 12',
    "RuntimeError",
    edits={"p.transpose(-1, -2) @ do_tile": "p @ do_tile"},
)

# ---- 3.3 the forward kernel
LOOP, LAST = "3.3: one step of the inner loop", "3.3: the end of a row of tiles"
MASK = 's = tl.where(attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL), s, -float("inf"))'
not_rescaled(
    LOOP,
    {"l_i * alpha": "l_i"},
    {"acc * alpha[:, None]": "acc"},
    {"tl.maximum(m_i, tl.max(s, 1))": "tl.max(s, 1)"},
    '"classic wrong answers" 1',
    "computed by program",
)
wrong_end(LAST, {"acc / tl.where(seen, l_i, 1.0)[:, None]": "acc"}, "(m_i + tl.log2(l_i))", "m_i", "tl.log2(l_i)")
wrong(
    LOOP,
    "ratio upside down",
    "the ratio of the rescaling is upside down",
    edits={"alpha = tl.exp2(m_i - m_ij)": "alpha = tl.where(m_i < -1e29, 0.0, tl.exp2(m_ij - tl.maximum(m_i, -1e9)))"},
)
wrong(LOOP, "maximum not kept", "the running maximum stays where it started", edits={"        m_i = m_ij\n": ""})
wrong(
    LOOP,
    "divided in every step",
    "the accumulator is divided in every step",
    '"classic wrong answers" 1',
    edits={"        m_i = m_ij\n": "        acc = acc / l_i[:, None]\n        m_i = m_ij\n"},
    also={LAST: {"acc = acc / tl.where(seen, l_i, 1.0)[:, None]": "pass"}},
)
wrong(LOOP, "no scale", "the scale 1/sqrt(D) of the scores is missing", edits={"* scale_log2": "* 1.4426950408889634"})
wrong(
    LOOP,
    "scale twice",
    "the scale 1/sqrt(D) is applied twice",
    edits={"* scale_log2": "* scale_log2 * scale_log2 / 1.4426950408889634"},
)
wrong(
    LOOP,
    "scale by D",
    "or the scores are divided by D",
    edits={"* scale_log2": "* (1.4426950408889634 / HEAD_DIM)"},
)
wrong(
    LOOP,
    "exp2 without log2 e",
    "exp2 needs scores that are multiplied by log2 e",
    edits={"* scale_log2": "* (scale_log2 * 0.6931471805599453)"},
)
wrong(
    LOOP,
    "exp with log2 e",
    "log2 e multiplies the scores, but their exponential is e^x",
    edits={"tl.exp2(": "tl.exp("},
    also={LAST: {"tl.log2(l_i)) * 0.6931471805599453": "tl.log(l_i))"}},
)
wrong(LOOP, "padded keys", "keys past the end count", edits={MASK: ""})
wrong(LOOP, "padded keys masked with zero", "keys past the end count", edits={'s, -float("inf")': "s, 0.0"})
wrong(
    LOOP,
    "accumulator in float16",
    "too inaccurate in float16",
    "accumulator are float32",
    edits={"        m_i = m_ij": "        acc = acc.to(q.dtype).to(tl.float32)\n        m_i = m_ij"},
)
wrong(
    LOOP,
    "heads mixed",
    "query head h reads key head h % Hkv",
    edits={
        "stride_k, batch, key_head": "stride_k, batch, head % (num_heads // GQA_GROUP_SIZE)",
        "stride_v, batch, key_head": "stride_v, batch, head % (num_heads // GQA_GROUP_SIZE)",
    },
)
wrong(
    LOOP,
    "values of another head",
    "values from another one",
    edits={"stride_v, batch, key_head": "stride_v, batch, head % (num_heads // GQA_GROUP_SIZE)"},
)
wrong(
    LOOP,
    "strides of k for v",
    "only non-contiguous inputs fail",
    edits={"v_ptr, stride_v": "v_ptr, (stride_v[0], stride_v[1], HEAD_DIM, 1)"},
)
wrong(
    LOOP,
    "k loaded twice",
    "k_ptr",
    "loaded more than once",
    '"classic wrong answers" 9',
    edits={"        s = tl.dot(q": "        k = " + f"{K_TILE}\n        s = tl.dot(q"},
)
wrong(
    LOOP,
    "no mask on the load",
    "out-of-bounds access",
    "no mask stops it",
    edits={"mask_kv": "mask_d[None, :]"},
)
wrong(LAST, "L in base 2", "the logsumexp is in powers of 2", edits={" * 0.6931471805599453": ""})
wrong(
    LAST,
    "L with a natural logarithm",
    "the logsumexp mixes bases",
    edits={"(m_i + tl.log2(l_i)) * 0.6931471805599453": "m_i + tl.log(l_i)"},
)

# ---- 3.4 causal
SEEN, VISIBLE = "3.4: keys that a tile of queries sees", "3.4: the causal mask"
wrong(
    VISIBLE,
    "off by one",
    "a query does not see its own key",
    '"classic wrong answers" 1',
    "computed by program",
    edits={"offs_n <= offs_m": "offs_n < offs_m"},
)
wrong(VISIBLE, "one too many", "a query sees the key after its own", edits={"offs_n <= offs_m": "offs_n <= 1 + offs_m"})
wrong(VISIBLE, "top left", "aligned at the top left", '"classic wrong answers" 2', edits={"offs_m + Nk - Nq": "offs_m"})
wrong(
    VISIBLE,
    "no mask",
    "the causal mask is missing",
    edits={"& (offs_n <= offs_m + Nk - Nq)": ""},
    also={SEEN: {"tl.minimum(start_m + BLOCK_M + Nk - Nq, Nk)": "Nk"}},
)
wrong(
    VISIBLE,
    "other way",
    "the other way round",
    '"classic wrong answers" 1',
    edits={"offs_n <= offs_m": "offs_n >= offs_m"},
)
wrong(
    SEEN,
    "diagonal skipped",
    "causal_key_range: key_end is wrong",
    "tiles are left out in which a query sees a key",
    '"classic wrong answers" 4',
    edits={"tl.minimum(start_m + BLOCK_M + Nk - Nq, Nk)": "tl.minimum((start_m + Nk - Nq + 1) // 16 * 16, Nk)"},
)
wrong(
    SEEN,
    "top left loop",
    "with Nq != Nk",
    '"classic wrong answers" 2',
    edits={"start_m + BLOCK_M + Nk - Nq": "start_m + BLOCK_M"},
)
wrong(
    SEEN,
    "nothing skipped",
    "here no block is skipped",
    '"classic wrong answers" 3',
    edits={"tl.minimum(start_m + BLOCK_M + Nk - Nq, Nk)": "Nk"},
)
wrong(
    SEEN,
    "a tile of queries too many",
    "here no block is skipped",
    '"classic wrong answers" 3',
    edits={"start_m + BLOCK_M + Nk - Nq": "start_m + 2 * BLOCK_M + Nk - Nq"},
)
wrong(
    SEEN,
    "one step too many",
    "the loop ends a step too late",
    edits={"tl.minimum(start_m + BLOCK_M + Nk - Nq, Nk)": "tl.minimum(start_m + BLOCK_M + Nk - Nq + 16, Nk)"},
)
wrong(
    SEEN,
    "mask only past the end",
    "unmasked_end is wrong",
    "tiles go without the mask that need it",
    '"classic wrong answers" 4',
    edits={"unmasked_end = tl.minimum(start_m + Nk - Nq + 1, Nk)": "unmasked_end = Nk"},
)
wrong(
    LAST,
    "empty rows",
    "a query that sees no key gives NaN",
    edits={"tl.where(seen, l_i, 1.0)": "l_i"},
    exercise="3.4",
)
wrong(
    VISIBLE,
    "infinite maximum",
    "a query that sees no key gives NaN",
    edits={"offs_n": "offs_n"},
    also={LOOP: {"m_ij = tl.max": 'm_i = tl.where(m_i < -1e29, -float("inf"), m_i)\n        m_ij = tl.max'}},
)

# ---- 3.5 delta
DELTA = "3.5: delta"
PRODUCT = "tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)"
wrong(
    DELTA,
    "no conversion",
    "too inaccurate in float16",
    "convert both to float32",
    '"classic wrong answers" 1',
    edits={PRODUCT: "tl.sum((o * do).to(tl.float32), 1)"},
)
wrong(
    DELTA,
    "dO twice",
    "dO is multiplied by itself",
    "computed by program",
    edits={"o.to(tl.float32) * do": "do.to(tl.float32) * do"},
)
wrong(DELTA, "O twice", "O is multiplied by itself", edits={"* do.to": "* o.to"})
wrong(DELTA, "no O", "the factor O is missing", edits={"o.to(tl.float32) * do": "do"})
wrong(DELTA, "no dO", "the factor dO is missing", edits={" * do.to(tl.float32)": ""})
wrong(DELTA, "mean", "this is the mean of the products", edits={PRODUCT: PRODUCT + " / ACCESS.head_dim"})
wrong(DELTA, "sign", "the sign is wrong", edits={PRODUCT: "-" + PRODUCT})
wrong(
    DELTA,
    "product of sums",
    "a product of two sums",
    edits={PRODUCT: "tl.sum(o.to(tl.float32), 1) * tl.sum(do.to(tl.float32), 1)"},
)
wrong(DELTA, "largest", "this is the largest product", edits={"tl.sum(": "tl.max("})
wrong(
    DELTA,
    "strides of o for dO",
    "only non-contiguous inputs fail",
    edits={"do_ptr, stride_do": "do_ptr, stride_o"},
)

OWN_LOADS = """
        offs_m = start_m + tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_D)
        rows_seen, columns_seen = (offs_m < Nq)[:, None], (columns < ACCESS.head_dim)[None, :]
        o_ptrs = o_ptr + batch.to(tl.int64) * stride_o[0] + head * stride_o[1]
        o_ptrs += offs_m[:, None] * stride_o[2] + columns[None, :] * stride_o[3]
        do_ptrs = do_ptr + batch.to(tl.int64) * stride_do[0] + head * stride_do[1]
        do_ptrs += offs_m[:, None] * stride_do[2] + columns[None, :] * stride_do[3]
        o = tl.load(o_ptrs, mask=rows_seen & columns_seen, other=0.0)
        do = tl.load(do_ptrs, mask=rows_seen & columns_seen, other=0.0)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        """
COLUMNS = "columns from D on must add nothing", '"classic wrong answers" 5'
wrong(DELTA, "columns not masked", *COLUMNS, instead=OWN_LOADS.replace(" & columns_seen", ""))
wrong(DELTA, "columns of ones", *COLUMNS, instead=OWN_LOADS.replace("other=0.0", "other=1.0"))
wrong(DELTA, "a mean over the block", *COLUMNS, edits={PRODUCT: PRODUCT + " * (BLOCK_D / ACCESS.head_dim)"})

# ---- 3.6 dK and dV
FIRST, DKDV, STORE = "3.6: queries that see a tile of keys", "3.6: one step of dK and dV", "3.6: the end of dK and dV"
DS = "ds = p * (dp - delta[None, :])"
wrong_ds(DKDV, STORE, "dk", "[None, :]", "seen", "key tile rows")
wrong(
    DKDV,
    "delta after",
    "delta is taken off after the product",
    edits={DS: "ds = p * dp - tl.where(seen, delta[None, :], 0.0)"},
)
wrong(STORE, "dV scaled", "dV carries the scale", edits={"stride_dv, dv,": "stride_dv, dv * scale,"})
wrong(DKDV, "no scale in P", "recomputed from scores without the scale", edits={"(s * scale - lse": "(s - lse"})
wrong(
    DKDV,
    "lse in powers of e",
    "the scores are multiplied by log2 e and the logsumexp is not",
    edits={"(s * scale - lse[None, :]) * 1.4426950408889634": "s * scale_log2 - lse[None, :]"},
)
wrong(
    DKDV,
    "dV from dS",
    "dV comes from dS",
    edits={
        '        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")\n': "",
        DS: DS + '\n        dv = tl.dot(ds.to(do.dtype), do, dv, input_precision="ieee")',
    },
)
wrong(DKDV, "dK from P", "dK comes from P", edits={"tl.dot(ds.to(q.dtype), q": "tl.dot(p.to(q.dtype), q"})
wrong(DKDV, "dK times dO", "dK multiplies dO", edits={"tl.dot(ds.to(q.dtype), q": "tl.dot(ds.to(q.dtype), do"})
wrong(
    DKDV,
    "no mask",
    "the causal mask is missing",
    edits={"offs_n[:, None] <= offs_m[None, :] + Nk - Nq": "offs_n[:, None] >= 0"},
    also={FIRST: {"tl.maximum(0, start_n - (Nk - Nq)) // BLOCK_M * BLOCK_M": "0 * start_n"}},
)
wrong(
    DKDV,
    "top left",
    "aligned at the top left",
    edits={"offs_m[None, :] + Nk - Nq": "offs_m[None, :]"},
    also={FIRST: {"tl.maximum(0, start_n - (Nk - Nq)) // BLOCK_M * BLOCK_M": "0 * start_n"}},
)
wrong(
    DKDV,
    "off by one",
    "off by one: a query does not see its own key",
    edits={"offs_n[:, None] <= offs_m": "offs_n[:, None] < offs_m"},
)
wrong(
    FIRST,
    "a tile too late",
    "only causal attention goes wrong",
    edits={" // BLOCK_M * BLOCK_M": " // BLOCK_M * BLOCK_M + BLOCK_M"},
)
wrong(
    FIRST,
    "nothing skipped",
    "q_ptr is loaded",
    "times, expected",
    '"classic wrong answers" 10',
    edits={"tl.maximum(0, start_n - (Nk - Nq)) // BLOCK_M * BLOCK_M": "0 * start_n"},
)
wrong(
    DKDV,
    "heads averaged",
    "averaged: they are summed",
    edits={"dp = tl.dot": "dp = tl.dot"},
    also={STORE: {"dk * scale": "dk * scale / GQA_GROUP_SIZE", "stride_dv, dv,": "stride_dv, dv / GQA_GROUP_SIZE,"}},
)
wrong(
    DKDV,
    "one head counts",
    "only one query head counts",
    edits={
        "batch, head, start_m": "batch, key_head * GQA_GROUP_SIZE, start_m",
        "rows_before + offs_m": "rows_before - member * Nq + offs_m",
        "p = tl.where(seen, p, 0.0)": "p = tl.where(seen & (member == 0), p, 0.0)",
    },
)
wrong(
    DKDV,
    "one for each pair that is seen",
    "only causal attention goes wrong",
    "and leave as they are",
    edits={"p = tl.where(seen, p, 0.0)": "p = tl.where(seen, 1.0 if CAUSAL else p, 0.0)"},
)
wrong(
    DKDV,
    "last step only",
    "only the last tile is left",
    '"classic wrong answers" 7',
    edits={"do, dv, input": "do, tl.zeros_like(dv), input", "q, dk, input": "q, tl.zeros_like(dk), input"},
)
wrong(
    DKDV,
    "strides",
    "only non-contiguous inputs fail",
    edits={"do_ptr, stride_do": "do_ptr, (stride_q[0], stride_q[1], ACCESS.head_dim, 1)"},
)
wrong(
    STORE,
    "raced",
    "race",
    edits={"dk * scale, batch, key_head, start_n": "dk * scale, batch, key_head, 0"},
)

# ---- 3.7 dQ
DQ, DQ_STORE = "3.7: one step of dQ", "3.7: the end of dQ"
wrong_ds(DQ, DQ_STORE, "dq", "[:, None]", "p > 0", "query tile rows")
wrong(DQ, "times V", "dQ multiplies V", edits={"tl.dot(ds.to(k.dtype), k": "tl.dot(ds.to(k.dtype), v"})
wrong(DQ, "from P", "dQ comes from P", edits={"tl.dot(ds.to(k.dtype)": "tl.dot(p.to(k.dtype)"})
wrong(
    DQ,
    "no mask",
    "the causal mask is missing",
    edits={
        "attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL)": (
            "(offs_n[None, :] < Nk) & (offs_m[:, None] >= 0)"
        )
    },
    also={SEEN: {"tl.minimum(start_m + BLOCK_M + Nk - Nq, Nk)": "Nk"}},
)
wrong(
    DQ,
    "heads mixed",
    "query head h reads key head h % Hkv",
    edits={"batch, key_head": "batch, head % (heads // GQA_GROUP_SIZE)"},
)
wrong(DQ, "last step only", "only the last tile is left", edits={"k, dq, input": "k, tl.zeros_like(dq), input"})
wrong(
    DQ,
    "strides",
    "only non-contiguous inputs fail",
    edits={"v_ptr, stride_v": "v_ptr, (stride_v[0], stride_v[1], ACCESS.head_dim, 1)"},
)
wrong(DQ_STORE, "raced", "race", edits={"batch, head, start_m": "batch, head, 0"})
wrong(
    DQ_STORE,
    "added by atomics",
    "programs race for the same rows",
    edits={"store_rows(": "tl.atomic_add(dq_ptr, tl.sum(dq).to(dq_ptr.dtype.element_ty))\n        store_rows("},
)

# ---- 3.8 the autograd function
KEEP, BACKWARD = "3.8: what the forward pass keeps", "3.8: the backward pass"
wrong(
    BACKWARD,
    "swapped",
    "dk and dv stand in each other's place",
    '"classic wrong answers" 1',
    edits={"return dq, dk, dv": "return dq, dv, dk"},
)
DQ_CALL = "dq = flash_dq(q, k, v, do, lse, delta, ctx.causal, ctx.scale)"
wrong(
    BACKWARD,
    "asks whether k needs the gradient of q",
    "wrong only where one input asks for its gradient",
    edits={DQ_CALL: f"{DQ_CALL} if ctx.needs_input_grad[1] else None"},
)
wrong(
    BACKWARD,
    "too few gradients",
    "None for causal and scale",
    "incorrect number of gradients",
    edits={"dv, None, None": "dv"},
)
wrong(
    KEEP,
    "not causal in the backward pass",
    "forgets that attention was causal",
    edits={"ctx.causal = causal": "ctx.causal = False"},
)
wrong(
    KEEP,
    "default scale in the backward pass",
    "forgets the scale that was given",
    edits={"ctx.scale = scale": "ctx.scale = q.shape[3] ** -0.5"},
)
wrong(
    KEEP,
    "not causal in the forward pass",
    "causal does not reach the forward kernel",
    edits={"flash_forward(q, k, v, causal, scale)": "flash_forward(q, k, v, False, scale)"},
)
wrong(
    KEEP,
    "default scale in the forward pass",
    "does not reach the forward kernel",
    edits={"flash_forward(q, k, v, causal, scale)": "flash_forward(q, k, v, causal)"},
)
wrong(
    BACKWARD,
    "no gradient of the logsumexp",
    "the gradient that arrives for the logsumexp is ignored",
    edits={"o, do, dlse, num_fully_masked": "o, do, None, num_fully_masked"},
)
wrong(
    BACKWARD,
    "fully masked queries",
    "pass on a NaN that arrives for their logsumexp",
    edits={"dlse, num_fully_masked": "dlse"},
)
wrong(
    KEEP,
    "keeps the scores",
    "largest allocation: expected at most",
    '"classic wrong answers" 7',
    edits={"ctx.causal = causal": "ctx.scores = q.new_empty(*q.shape[:3], k.shape[2]); ctx.causal = causal"},
)
wrong(
    KEEP,
    "keeps too much",
    "are kept for the backward pass",
    edits={"save_for_backward(q, k, v, o, lse)": "save_for_backward(q, k, v, o, lse, q.clone())"},
    also={BACKWARD: {"q, k, v, o, lse = ctx": "q, k, v, o, lse, _ = ctx"}},
)
wrong(BACKWARD, "no dv", "this gradient is zero", edits={"return dq, dk, dv": "dv.zero_(); return dq, dk, dv"})

# ---- found by trying: what an earlier form of the checks let pass, or told something misleading about
LOG_SUM = "(m1 + torch.log(d1)).logaddexp(m2 + torch.log(d2))"
wrong(MERGE, "logaddexp", "by rounding: m + log d", edits={"d = d1 * r1 + d2 * r2": f"d = torch.exp({LOG_SUM} - safe)"})
wrong(MERGE, "replaced maximum", "the maximum of two empty parts is -inf", edits={"return m, d": "return safe, d"})
wrong(MERGE, "in another order", "maximum and sum stand in each other's place", edits={"return m, d": "return d, m"})
wrong(MERGE, "in place", "input d1 was modified in place", edits={"d = d1 * r1": "d1 *= r1; d = d1"})
wrong(
    LOOP,
    "values with the keys' strides",
    "only non-contiguous inputs fail",
    edits={"v_ptr, stride_v": "v_ptr, stride_k"},
)
RAW = {
    'input_precision="ieee") * scale_log2': 'input_precision="ieee")',
    "s - m_ij[:, None]": "(s - m_ij[:, None]) * scale_log2",
    "tl.exp2(m_i - m_ij)": "tl.exp2((m_i - m_ij) * scale_log2)",
}
wrong(
    LOOP,
    "scale after the maximum",
    "only a negative scale goes wrong",
    edits=RAW,
    also={LAST: {"(m_i + tl": "(m_i * scale_log2 + tl"}},
)
Q_BACK = "tl.store(tile_ptrs(q_ptr, stride_q, batch, head, offs_m, offs_d), q, mask=mask_q)"
wrong(
    LAST,
    "more than the output leaves the kernel",
    "flash_forward_simple_kernel also writes to q_ptr",
    edits={"seen = l_i > 0": "seen = l_i > 0\n        " + Q_BACK},
)
wrong(
    VISIBLE,
    "hidden by a large number",
    "queries that see no key get something",
    edits={"offs_n <= offs_m": "offs_n <= 0 + offs_m"},
    also={LOOP: {'-float("inf")': "-1e30"}},
)
wrong(
    SEEN,
    "one key too many is seen by all",
    "unmasked_end is wrong",
    "tiles go without the mask that need it",
    edits={"start_m + Nk - Nq + 1": "start_m + Nk - Nq + 2"},
)
wrong(
    SEEN,
    "one key too few is seen by one",
    "causal_key_range: key_end is wrong",
    '"classic wrong answers" 4',
    edits={"start_m + BLOCK_M + Nk": "start_m + BLOCK_M - 1 + Nk"},
)
wrong(DELTA, "one number a tile", "all rows of a tile get the same number", edits={"tl.float32), 1)": "tl.float32))"})
wrong(
    FIRST,
    "not rounded",
    "`begin` is no multiple of BLOCK_M",
    edits={" // BLOCK_M * BLOCK_M": ""},
    also={DKDV: {"BLOCK_D, False": "BLOCK_D, EVEN_M"}},
)
wrong(FIRST, "negative", "out-of-bounds access", edits={"tl.maximum(0, start_n - (Nk - Nq))": "(start_n - (Nk - Nq))"})
wrong(
    DKDV, "L for delta", "the logsumexp is taken off where delta belongs", edits={"delta_ptr + rows": "lse_ptr + rows"}
)
wrong(
    DKDV,
    "scores scaled twice",
    "the scale multiplies the scores twice",
    edits={"s * scale - lse": "s * scale * scale - lse"},
)
wrong(
    DKDV,
    "dO with q's strides",
    "each tensor has strides of its own, dO too",
    edits={"do_ptr, stride_do": "do_ptr, stride_q"},
)
wrong(
    STORE,
    "dV with dK's strides",
    "each tensor has strides of its own",
    edits={"dv_ptr, stride_dv": "dv_ptr, stride_dk"},
)
wrong(
    DQ,
    "last tile not masked",
    "only scores far below 0 go wrong",
    edits={
        "attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL)": (
            "(offs_n[None, :] <= offs_m[:, None] + Nk - Nq) | (not CAUSAL)"
        )
    },
)
wrong(
    BACKWARD,
    "fully masked without a mask",
    "too many queries are taken to see no key",
    edits={" if ctx.causal else 0": ""},
)
wrong(
    BACKWARD,
    "all queries fully masked",
    "delta is 0 in causal attention alone",
    '"classic wrong answers" 5',
    edits={"q.shape[2] - k.shape[2]": "q.shape[2]"},
)
wrong(LOOP, "no running sum", "the running sum stays 0", edits={"l_i * alpha + tl.sum(p, 1)": "l_i * alpha"})
wrong(
    BACKWARD,
    "fully masked the other way",
    "too many queries are taken to see no key",
    edits={"q.shape[2] - k.shape[2]": "k.shape[2] - q.shape[2]"},
)
wrong(
    KEEP,
    "keeps a copy on ctx",
    "are kept for the backward pass",
    edits={"ctx.causal = causal": "ctx.copy = [o.clone()]; ctx.causal = causal"},
)
wrong(
    BACKWARD,
    "another order than saved",
    "the tensors in the order in which they were saved",
    edits={"q, k, v, o, lse = ctx": "q, v, k, o, lse = ctx"},
)
wrong(
    LOOP,
    "sum in float16",
    "too inaccurate in float16",
    "accumulator are float32",
    edits={"        m_i = m_ij": "        l_i = l_i.to(q.dtype).to(tl.float32)\n        m_i = m_ij"},
)
wrong(
    FIRST,
    "one query too late",
    "only causal attention goes wrong",
    edits={"start_n - (Nk - Nq)) //": "start_n - (Nk - Nq) + 1) //"},
)

# ---- 3.9 the anchored loop
SCORES_OF_A_TILE, ANCHOR = "3.9: scores of one tile", "3.9: a row of tiles with an anchor"
FIRST_SCORES, LOOK = SCORES.format(start_n="0"), "return acc, m_i, l_i, tl.max(bad, 0) == 0.0"
wrong(
    ANCHOR,
    "values of the next tile",
    "p belongs to the tile before",
    '"classic wrong answers" 1',
    edits={V_ROWS: V_ROWS.replace("start_n", "start_n + BLOCK_N")},
)
wrong(
    ANCHOR,
    "last tile too early",
    "it begins at a multiple of BLOCK_N",
    '"classic wrong answers" 2',
    edits={"(key_end - 1) // BLOCK_N * BLOCK_N": "tl.maximum(key_end - BLOCK_N, 0)"},
)
wrong(
    ANCHOR,
    "last tile before the last key",
    "no case of one tile or of whole tiles fails without a causal mask",
    "each line for the last tile",
    edits={"(key_end - 1) // BLOCK_N * BLOCK_N": "(key_end - 2) // BLOCK_N * BLOCK_N"},
)
wrong(
    ANCHOR,
    "scores of the tile before",
    "only rows of more than one tile go wrong",
    "at each line of the loop and its range",
    edits={SCORES.format(start_n="start_n + BLOCK_N"): SCORES.format(start_n="start_n")},
)
wrong(
    ANCHOR,
    "last values past the end",
    "out-of-bounds access",
    "its offset is wrong",
    edits={LAST_V_ROWS: LAST_V_ROWS.replace("last, Nk", "Nk, last").replace("False", "EVEN_N")},
)
wrong(
    ANCHOR,
    "sizes exchanged in the first tile",
    "no case of one tile or of whole tiles fails without a causal mask",
    "look at whatever depends on key_end or on Nk",
    edits={FIRST_SCORES: FIRST_SCORES.replace("Nq, Nk", "Nk, Nq")},
)
wrong(
    ANCHOR,
    "last tile left",
    "the last tile is missing",
    '"classic wrong answers" 2',
    edits={f"v = {LAST_V_ROWS}": f"p = p * 0.0\n            v = {LAST_V_ROWS}"},
)
FINITE, SMALL_SUM, ALL_ROWS = "tl.sum(acc * 0.0, 1) == 0.0", "tl.where(l_i < limit, 0.0, 1.0)", "tl.max(bad, 0) == 0.0"
FIRST_COLUMN = "tl.sum(tl.where(tl.arange(0, BLOCK_D)[None, :] == 0, acc * 0.0, 0.0), 1) == 0.0"
FIRST_ROW = "tl.sum(tl.where(tl.arange(0, BLOCK_M) == 0, bad, 0.0), 0) == 0.0"
NO_LIMIT = {"limit = 30000.0 if q.dtype == tl.float16 else 1e19": "limit = float('inf')"}
for name, edits in {
    "never looked at": {LOOK: LOOK.replace("==", ">=")},
    "sum alone looked at, and for infinity": {**NO_LIMIT, FINITE: "l_i >= 0.0"},
    "sum alone looked at": {FINITE: "l_i >= 0.0"},
    "output alone looked at": {SMALL_SUM: "tl.where(l_i < limit, 0.0, 0.0)"},
    "first column alone looked at": {FINITE: FIRST_COLUMN},
    "output compared with plus infinity": {FINITE: "tl.max(acc, 1) < float('inf')"},
    "first row alone looked at": {ALL_ROWS: FIRST_ROW},
}.items():
    wrong(ANCHOR, name, '"classic wrong answers" 3', edits=edits)
wrong(
    ANCHOR,
    "anchored at zero",
    "only low scores go wrong",
    '"classic wrong answers" 3',
    edits={"m_i = tl.maximum(tl.max(s, 1), -1e30)": "m_i = tl.zeros((BLOCK_M,), tl.float32)"},
)
wrong(
    ANCHOR,
    "always again",
    "each row is computed again although nothing overflowed",
    '"classic wrong answers" 4',
    edits={LOOK: "return acc, m_i, l_i, tl.max(bad, 0) == 7.0"},
)
wrong(
    ANCHOR,
    "one limit",
    "each row is computed again although nothing overflowed",
    '"classic wrong answers" 4',
    edits={"30000.0 if q.dtype == tl.float16 else 1e19": "30000.0"},
)
wrong(
    ANCHOR,
    "never tried",
    "only one of the two loops has run",
    '"classic wrong answers" 4',
    edits={"if key_end > 0:": "if key_end > 1000000:", LOOK: "return acc, m_i, l_i, tl.max(bad, 0) == 7.0"},
)
wrong(
    ANCHOR,
    "maximum in another unit",
    "only the logsumexp goes wrong",
    '"classic wrong answers" 7',
    edits={LOOK: "return acc, m_i * 2.0, l_i, tl.max(bad, 0) == 0.0"},
)
wrong(
    ANCHOR,
    "first tile not masked",
    "the first tile of scores goes without",
    '"classic wrong answers" 5',
    edits={FIRST_SCORES: FIRST_SCORES.replace("CAUSAL, EVEN_N", "False, EVEN_N")},
)
wrong(
    SCORES_OF_A_TILE,
    "no mask",
    "keys past the last one count with score 0",
    '"classic wrong answers" 5',
    edits={MASK.replace("s = ", "return "): "return s"},
)
wrong(
    SCORES_OF_A_TILE,
    "scaled in the exponent alone",
    "a negative scale",
    '"classic wrong answers" 6',
    edits={" * (scale_log2 if PRESCALE else 1.0)": ""},
    also={
        ANCHOR: {
            "1.0 if PRESCALE else scale_log2": "scale_log2",
            "return acc, m_i,": "return acc, m_i * (scale_log2 if PRESCALE else 1.0),",
        }
    },
)
