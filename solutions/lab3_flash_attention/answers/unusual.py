"""Right answers to lab 3 that few would write: other states, other masks, other products, other orders."""

from __future__ import annotations

from utils.checks.answers import Answers

from . import window

ANSWERS = Answers()
also_right = ANSWERS.also_right

# ---- 3.1: merge operator
MERGE, OUTPUTS = "3.1: merge", "3.1: merge with outputs"
also_right("stacked parts", {
    MERGE: """
        ms, ds = torch.stack([m1, m2]), torch.stack([d1, d2])
        m = ms.amax(0)
        return m, (ds * torch.exp(ms - m.clamp_min(torch.finfo(m.dtype).min))).sum(0)
    """,
    OUTPUTS: """
        ms, ds, outs = (torch.stack(pair) for pair in zip(first, second))
        m = ms.amax(0)
        weights = torch.exp(ms - m.clamp_min(torch.finfo(m.dtype).min))
        return m, (weights * ds).sum(0), (weights[..., None] * outs).sum(0)
    """,
})  # fmt: skip
also_right("only the smaller part is rescaled", {
    MERGE: """
        m, low = torch.maximum(m1, m2), torch.minimum(m1, m2)
        ratio = torch.where(low == -torch.inf, 0.0, torch.exp(low - m))
        return m, torch.where(m1 >= m2, d1 + ratio * d2, d2 + ratio * d1)
    """,
})  # fmt: skip
also_right("a helper for the factors", {
    OUTPUTS: """
        (m1, d1, o1), (m2, d2, o2) = first, second
        m, d = merge(m1, d1, m2, d2)

        def factor(part):
            return torch.where(part == -torch.inf, 0.0, torch.exp(part - m))[..., None]

        return m, d, factor(m1) * o1 + factor(m2) * o2
    """,
})  # fmt: skip
also_right("sums and outputs in one tensor", {
    OUTPUTS: """
        m = torch.maximum(first[0], second[0])
        both = 0
        for part, d, o in (first, second):
            weight = torch.exp((part - m).nan_to_num(nan=0.0, neginf=-torch.inf))
            both = both + weight[..., None] * torch.cat([d[..., None], o], dim=-1)
        return m, both[..., 0], both[..., 1:]
    """,
})  # fmt: skip

# ---- 3.2: tiled attention
STEP, END = "3.2: one step of the forward pass", "3.2: the end of a row of tiles"
BACK = "3.2: one step of the backward pass"
also_right("the last tile filled up with scores of -inf", {
    STEP: {"m_old, d, weighted = state": """m_old, d, weighted = state
        short = block_n - scores.shape[-1]
        scores = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
        v_tile = torch.nn.functional.pad(v_tile, (0, 0, 0, short))"""},
})  # fmt: skip
also_right("the output is normalised in each step", {
    STEP: """
        m_old, d_old, out = state
        m = torch.maximum(m_old, scores.max(dim=-1).values)
        safe = torch.where(torch.isinf(m), torch.zeros_like(m), m)
        p = (scores - safe.unsqueeze(-1)).exp()
        kept = d_old * (m_old - safe).exp()
        d = kept + p.sum(dim=-1)
        whole = torch.where(d == 0, torch.ones_like(d), d).unsqueeze(-1)
        state = (m, d, (out * kept.unsqueeze(-1) + torch.matmul(p, v_tile)) / whole)
    """,
    END: """
        m, d, out = state
        o[:, :, row : row + M] = out.to(o.dtype)
        lse[:, :, row : row + M] = torch.log(d) + m
    """,
})  # fmt: skip
also_right("products by einsum", {
    STEP: {"p @ v_tile": "torch.einsum('bhmn,bhnd->bhmd', p, v_tile)"},
    BACK: {
        "ds @ k_tile * scale": "torch.einsum('bhmn,bhnd->bhmd', ds, k_tile) * scale",
        "dk_tile = ds.transpose(-1, -2) @ q_tile * scale":
            "dk_tile = torch.einsum('bhmn,bhmd->bhnd', ds * scale, q_tile)",
    },
})  # fmt: skip
also_right("the heads of a group by reshape", {
    BACK: {
        "dk_tile.unflatten(1, (Hkv, group)).sum(2)":
            "dk_tile.reshape(len(dk_tile), Hkv, group, *dk_tile.shape[2:]).sum(2)",
        "dv_tile.unflatten(1, (Hkv, group)).sum(2)": "sum(dv_tile[:, part::group] for part in range(group))",
    },
})  # fmt: skip
also_right("merged with the lab's own operator", {
    STEP: """
        top = scores.amax(-1)
        p = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0)[..., None])
        state = merge_outputs(first=state, second=(top, p.sum(-1), p @ v_tile))
    """,
    END: {"torch.where(seen, d, 1.0)": "d.masked_fill(~seen, 1.0)"},
})  # fmt: skip

# ---- 3.3: forward kernel
LOOP, ROW_END = "3.3: one step of the inner loop", "3.3: the end of a row of tiles"
ADDED = 'acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")'
also_right("the product added by hand", {
    LOOP: {ADDED: 'acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")'},
    ROW_END: {"acc = acc / tl.where(seen, l_i, 1.0)[:, None]": "acc = acc * (1.0 / tl.where(seen, l_i, 1.0))[:, None]"},
})  # fmt: skip
also_right("the larger by a comparison", {
    LOOP: {"m_ij = tl.maximum(m_i, tl.max(s, 1))": "top = tl.max(s, 1)\n        m_ij = tl.where(top > m_i, top, m_i)"},
    ROW_END: {"(m_i + tl.log2(l_i)) * 0.6931471805599453": "m_i * 0.6931471805599453 + tl.log(l_i)"},
})  # fmt: skip
also_right("scores shifted first", {
    LOOP: {"p = tl.exp2(s - m_ij[:, None])": "s -= m_ij[:, None]\n        p = tl.exp2(s)",
           "l_i = l_i * alpha + tl.sum(p, 1)": "l_i *= alpha\n        l_i += tl.sum(p, 1)",
           "acc = acc * alpha[:, None]": "acc *= alpha[:, None]"},
})  # fmt: skip
also_right("permuted keys", {
    LOOP: {'s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2':
           's = scale_log2 * tl.dot(q, tl.permute(k, (1, 0)), input_precision="ieee")',
           "p = tl.exp2(s - m_ij[:, None])": "p = tl.exp2(s - tl.expand_dims(m_ij, 1))"},
    ROW_END: {"seen = l_i > 0": "seen = l_i != 0.0"},
})  # fmt: skip

# ---- 3.4: causal forward kernel
KEYS, MASK = "3.4: keys that a tile of queries sees", "3.4: the causal mask"
also_right("one bound for each query", {MASK: "return offs_n < tl.minimum(offs_m + Nk - Nq + 1, Nk)"})
also_right("differences", {
    MASK: "inside = offs_n < Nk\nreturn inside & (offs_n - offs_m <= Nk - Nq)",
    KEYS: """
        shift = Nk - Nq
        key_end = min(start_m + BLOCK_M + shift, Nk)
        return min(start_m + shift + 1, Nk), key_end
    """,
})  # fmt: skip
also_right("the mask negated", {
    MASK: "hidden = (offs_n > offs_m + (Nk - Nq)) | (offs_n >= Nk)\nreturn hidden == 0",
    KEYS: {"unmasked_end = tl.minimum(start_m + Nk - Nq + 1, Nk)":
           "first_query_sees = start_m + Nk - Nq + 1\n        unmasked_end = tl.minimum(Nk, first_query_sees)"},
})  # fmt: skip
also_right("aligned from the end", {
    MASK: "return ((Nq - offs_m) <= (Nk - offs_n)) & (Nk - offs_n > 0)",
    KEYS: {"tl.minimum(start_m + BLOCK_M + Nk - Nq, Nk)": "Nk - tl.maximum(Nq - start_m - BLOCK_M, 0)"},
})  # fmt: skip

# ---- 3.5: delta
DELTA = "3.5: delta"
SUM = "delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)"
also_right("one conversion", {DELTA: {SUM: "delta = tl.sum(do * o.to(tl.float32), axis=1)"}})
also_right("a column that is reshaped", {
    DELTA: {SUM: "both = o.to(tl.float32) * do.to(tl.float32)\n"
                 "        delta = tl.reshape(tl.sum(both, axis=1, keep_dims=True), (BLOCK_M,))"},
})  # fmt: skip
also_right("summed over the first axis", {
    DELTA: {SUM: "wide = tl.trans(do.to(tl.float32)) * tl.trans(o.to(tl.float32))\n        delta = tl.sum(wide, 0)"},
})  # fmt: skip
also_right("products by fma", {
    DELTA: {SUM: "zero = tl.zeros(o.shape, tl.float32)\n"
                 "        delta = tl.sum(tl.fma(o.to(tl.float32), do.to(tl.float32), zero), 1)"},
})  # fmt: skip

# ---- 3.6: dK and dV
QUERIES, DKDV = "3.6: queries that see a tile of keys", "3.6: one step of dK and dV"
P = "p = tl.exp2((s * scale - lse[None, :]) * 1.4426950408889634)"
S = 's = tl.dot(k, tl.trans(q), input_precision="ieee")'
DV = 'dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")'
DK = 'dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")'
also_right("natural exponentials and sums by hand", {
    DKDV: {P: "p = tl.exp(s * scale - lse[None, :])", DV: DV.replace("dv, ", "").replace("dv =", "dv +="),
           DK: DK.replace("dk, ", "").replace("dk =", "dk +=")},
})  # fmt: skip
also_right("a transposed product for dP", {
    DKDV: {'dp = tl.dot(v, tl.trans(do), input_precision="ieee")':
           'dp = tl.trans(tl.dot(do, tl.trans(v), input_precision="ieee"))',
           "p = tl.where(seen, p, 0.0)": "p = tl.where(~seen, 0.0, p)"},
})  # fmt: skip
also_right("scores as the forward pass has them", {
    DKDV: {S: 's = tl.trans(tl.dot(q, tl.trans(k), input_precision="ieee"))',
           "ds = p * (dp - delta[None, :])": "ds = p * dp - p * delta[None, :]"},
    QUERIES: {"begin = tl.maximum(0, start_n - (Nk - Nq)) // BLOCK_M * BLOCK_M":
              "first = tl.maximum(start_n - Nk + Nq, 0)\n        begin = first - first % BLOCK_M"},
})  # fmt: skip
also_right("the scores are masked", {
    DKDV: {P: "", "        p = tl.where(seen, p, 0.0)":
           "        s = tl.where(seen, s * scale - lse[None, :], -float('inf'))\n"
           "        p = tl.exp2(s * 1.4426950408889634)"},
})  # fmt: skip

# ---- 3.7: dQ
DQ, DQ_END = "3.7: one step of dQ", "3.7: the end of dQ"
also_right("natural exponentials", {
    DQ: {"p = tl.exp2((s * scale - lse[:, None]) * 1.4426950408889634)": "p = tl.exp(scale * s - lse[:, None])"},
})  # fmt: skip
also_right("a transposed product", {
    DQ: {'dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")':
         'dq += tl.trans(tl.dot(tl.trans(k), tl.trans(ds.to(k.dtype)), input_precision="ieee"))'},
})  # fmt: skip
also_right("the sum by hand, scaled in the loop", {
    DQ: {'dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")':
         'dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee") * scale'},
    DQ_END: {"dq * scale": "dq"},
})  # fmt: skip
also_right("a mask with a name, keys loaded as columns", {
    DQ: {"p = tl.where(attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL), p, 0.0)":
         "seen = attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL)\n        p = tl.where(seen, p, 0.0)",
         "ds = p * (dp - delta[:, None])": "dp -= delta[:, None]\n        ds = p * dp",
         's = tl.dot(q, tl.trans(k), input_precision="ieee")': 's = tl.dot(q, k.T, input_precision="ieee")'},
})  # fmt: skip

# ---- 3.8: autograd function
KEPT, BACKWARD = "3.8: what the forward pass keeps", "3.8: the backward pass"
also_right("one tuple of options", {
    KEPT: """
        o, lse = flash_forward(q, k, v, causal, scale)
        ctx.options = (causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse
    """,
    BACKWARD: """
        q, k, v, o, lse = ctx.saved_tensors
        causal, scale = ctx.options
        empty_rows = max(0, q.shape[2] - k.shape[2]) if causal else 0
        delta = attention_delta(o, do, dlse, empty_rows)
        common = (q, k, v, do, lse, delta, causal, scale)
        return flash_dq(*common), *flash_dkdv(*common), None, None
    """,
})  # fmt: skip
also_right("saved in another order", {
    KEPT: {"ctx.save_for_backward(q, k, v, o, lse)": "ctx.save_for_backward(lse, o, q, k, v)"},
    BACKWARD: {"q, k, v, o, lse = ctx.saved_tensors": "lse, o, *inputs = ctx.saved_tensors\n        q, k, v = inputs"},
})  # fmt: skip
also_right("dK and dV first", {
    BACKWARD: """
        saved = dict(zip(("q", "k", "v", "o", "lse"), ctx.saved_tensors, strict=True))
        o = saved.pop("o")
        hidden = 0
        if ctx.causal:
            hidden = max(0, saved["q"].size(2) - saved["k"].size(2))
        delta = attention_delta(o, do, dlse, hidden)
        q, k, v, lse = (saved[name] for name in ("q", "k", "v", "lse"))
        dk, dv = flash_dkdv(q, k, v, do, lse, delta, ctx.causal, ctx.scale)
        return flash_dq(q, k, v, do, lse, delta, ctx.causal, ctx.scale), dk, dv, None, None
    """,
})  # fmt: skip
also_right("a list of gradients", {
    KEPT: """
        outputs = flash_forward(q, k, v, causal, scale)
        for name, value in (("causal", causal), ("scale", scale)):
            if name == "causal":
                ctx.causal = value
            else:
                ctx.scale = value
        ctx.save_for_backward(q, k, v, *outputs)
        return outputs
    """,
    BACKWARD: {"return dq, dk, dv, None, None": "gradients = [dq, dk, dv]\n        return (*gradients, *[None] * 2)"},
})  # fmt: skip

# ---- 3.9: speed challenge
SCORES, ROW = "3.9: scores of one tile", "3.9: a row of tiles with an anchor"
also_right("conditions as whole numbers", {
    ROW: {"bad = tl.where(l_i < limit, 0.0, 1.0) + tl.where(tl.sum(acc * 0.0, 1) == 0.0, 0.0, 1.0)":
          "good = (l_i < limit) & (tl.sum(acc * 0.0, 1) == 0.0)",
          "tl.max(bad, 0) == 0.0": "tl.min(good.to(tl.int32), 0) == 1"},
})  # fmt: skip
also_right("sums in place", {
    ROW: {"l_i = l_i + tl.sum(p, 1)": "l_i += tl.sum(p, 1)",
          'acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")':
          'acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")'},
})  # fmt: skip
also_right("an anchor of zero for rows that see nothing", {
    ROW: {"m_i = tl.maximum(tl.max(s, 1), -1e30)":
          "top = tl.max(s, 1)\n            m_i = tl.where(top == -float('inf'), 0.0, top)"},
})  # fmt: skip
also_right("a product before the difference", {
    SCORES: {"return tl.where(attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL), s, -float(\"inf\"))":
             "seen = attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL)\n"
             "        return tl.where(seen, s, float('-inf'))"},
    ROW: {"p = tl.exp2((s - m_i[:, None]) * factor)": "p = tl.exp2(s * factor - (m_i * factor)[:, None])"},
})  # fmt: skip

# ---- 3.10: sliding window
KERNELS = window.KERNELS
SEEN = "seen = (j <= last) & (j + window > last)"
also_right("the age of a key", {
    KERNELS: {SEEN: "age = last - j\n        seen = (age >= 0) & (age < window)",
              "age = i[:, None] + Nk - Nq - j[None, :]": "age = (i + (Nk - Nq))[:, None] - j[None, :]"},
})  # fmt: skip
also_right("powers of two", {
    KERNELS: {"p = tl.exp(s - safe[:, None])": "p = tl.exp2((s - safe[:, None]) * 1.4426950408889634)",
              "p = tl.exp(s - lse[:, None])": "p = tl.exp2((s - lse[:, None]) * 1.4426950408889634)"},
})  # fmt: skip
also_right("every tile is masked", {
    KERNELS: {
        "        if n0 + BLOCK_N > m0 + Nk - Nq + 1 or n0 <= m0 + BLOCK_M - 1 + Nk - Nq - window:\n            p =":
            "        p =",
    },
})  # fmt: skip
also_right("sums in the product", {
    KERNELS: {
        'dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")':
            'dv = tl.dot(p.to(do.dtype).T, do, dv, input_precision="ieee")',
        'dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")':
            'dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision="ieee")',
        'dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")':
            'dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")',
        "acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision":
            "acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision",
    },
})  # fmt: skip
