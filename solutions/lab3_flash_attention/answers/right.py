"""Plain answers to lab 3, as a student might write them: right, and without the solution's tuning.

A test fills the lab's places with them, so that the checks are held to an answer that is not the solution, and wrong
answers are edits of these.
"""

from __future__ import annotations

from utils.checks.answers import Answers


def _rows(tensor: str, head: str, start: str, count: str, block: str) -> str:
    """A call that loads rows of q, k, v or dO, as the stub's neighbours show it."""
    return f"load_rows({tensor}_ptr, stride_{tensor}, batch, {head}, {start}, {count}, {block}, BLOCK_D, False, ACCESS)"


def _tile(tensor: str) -> str:
    """A call that loads a tile of k or v in the simple kernel, as its load of q shows it."""
    return (
        f"tl.load(tile_ptrs({tensor}_ptr, stride_{tensor}, batch, key_head, offs_n, offs_d), mask=mask_kv, other=0.0)"
    )


K_TILE, V_TILE = _tile("k"), _tile("v")
K_ROWS = _rows("k", "key_head", "start_n", "Nk", "BLOCK_N")
V_ROWS = _rows("v", "key_head", "start_n", "Nk", "BLOCK_N")
LAST_V_ROWS = _rows("v", "key_head", "last", "Nk", "BLOCK_N")
#: A call of the lab's own function, for the tile from ``{start_n}`` on.
SCORES = (
    "masked_scores(q, k_ptr, stride_k, batch, key_head, {start_n}, offs_m, unmasked_end, Nq, Nk, scale_log2, BLOCK_D, "
    "BLOCK_N, CAUSAL, EVEN_N, PRESCALE, ACCESS)"
)
Q_ROWS = _rows("q", "head", "start_m", "Nq", "BLOCK_M")
DO_ROWS = _rows("do", "head", "start_m", "Nq", "BLOCK_M")
O_ROWS = _rows("o", "head", "start_m", "Nq", "BLOCK_M")


def _store(name: str, value: str, head: str, start: str, count: str, block: str) -> str:
    return f"store_rows({name}_ptr, stride_{name}, {value}, batch, {head}, {start}, {count}, {block}, BLOCK_D, ACCESS)"


#: What stands in each place, by the label that the place has in the solution.
ANSWERS = Answers(
    {
        "3.1: merge": """
        m = torch.maximum(m1, m2)
        safe = torch.where(m == -torch.inf, 0.0, m)
        r1 = torch.exp(m1 - safe)
        r2 = torch.exp(m2 - safe)
        d = d1 * r1 + d2 * r2
        return m, d
        """,
        "3.1: merge with outputs": """
        m1, d1, o1 = first
        m2, d2, o2 = second
        m = torch.maximum(m1, m2)
        safe = torch.where(m == -torch.inf, 0.0, m)
        r1 = torch.exp(m1 - safe)
        r2 = torch.exp(m2 - safe)
        d = d1 * r1 + d2 * r2
        o = o1 * r1[..., None] + o2 * r2[..., None]
        return m, d, o
        """,
        "3.2: one step of the forward pass": """
        m_old, d, weighted = state
        m = torch.maximum(m_old, scores.amax(-1))
        safe = torch.where(m == -torch.inf, 0.0, m)
        p = torch.exp(scores - safe[..., None])
        rescale = torch.exp(m_old - safe)
        d = d * rescale + p.sum(-1)
        weighted = weighted * rescale[..., None] + p @ v_tile
        state = (m, d, weighted)
        """,
        "3.2: the end of a row of tiles": """
        m, d, weighted = state
        seen = d > 0
        o[:, :, row : row + M] = (weighted / torch.where(seen, d, 1.0)[..., None]).to(q.dtype)
        lse[:, :, row : row + M] = m + torch.log(d)
        """,
        "3.2: one step of the backward pass": """
        dp = do_tile @ v_tile.transpose(-1, -2)
        ds = p * (dp - delta[:, :, queries, None])
        dq[:, :, queries] += ds @ k_tile * scale
        dk_tile = ds.transpose(-1, -2) @ q_tile * scale
        dv_tile = p.transpose(-1, -2) @ do_tile
        dk[:, :, keys] += dk_tile.unflatten(1, (Hkv, group)).sum(2)
        dv[:, :, keys] += dv_tile.unflatten(1, (Hkv, group)).sum(2)
        """,
        "3.3: one step of the inner loop": f"""
        k = {K_TILE}
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        s = tl.where(attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL), s, -float("inf"))
        m_ij = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_ij[:, None])
        alpha = tl.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = {V_TILE}
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_ij
        """,
        "3.3: the end of a row of tiles": """
        seen = l_i > 0
        acc = acc / tl.where(seen, l_i, 1.0)[:, None]
        lse = tl.where(seen, (m_i + tl.log2(l_i)) * 0.6931471805599453, -float("inf"))
        """,
        "3.4: keys that a tile of queries sees": """
        unmasked_end = tl.minimum(start_m + Nk - Nq + 1, Nk)
        key_end = tl.minimum(start_m + BLOCK_M + Nk - Nq, Nk)
        return unmasked_end, key_end
        """,
        "3.4: the causal mask": """
        return (offs_n < Nk) & (offs_n <= offs_m + Nk - Nq)
        """,
        "3.9: scores of one tile": f"""
        k = {K_ROWS}
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale_log2 if PRESCALE else 1.0)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        return tl.where(attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL), s, -float("inf"))
        """,
        "3.9: a row of tiles with an anchor": f"""
        factor = 1.0 if PRESCALE else scale_log2
        m_i = tl.zeros((BLOCK_M,), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        last = (key_end - 1) // BLOCK_N * BLOCK_N
        if key_end > 0:
            s = {SCORES.format(start_n="0")}
            m_i = tl.maximum(tl.max(s, 1), -1e30)
            for start_n in range(0, last, BLOCK_N):
                p = tl.exp2((s - m_i[:, None]) * factor)
                v = {V_ROWS}
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
                l_i = l_i + tl.sum(p, 1)
                s = {SCORES.format(start_n="start_n + BLOCK_N")}
            p = tl.exp2((s - m_i[:, None]) * factor)
            v = {LAST_V_ROWS}
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
            l_i = l_i + tl.sum(p, 1)
        limit = 30000.0 if q.dtype == tl.float16 else 1e19
        bad = tl.where(l_i < limit, 0.0, 1.0) + tl.where(tl.sum(acc * 0.0, 1) == 0.0, 0.0, 1.0)
        return acc, m_i, l_i, tl.max(bad, 0) == 0.0
        """,
        "3.5: delta": f"""
        o = {O_ROWS}
        do = {DO_ROWS}
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        """,
        "3.6: queries that see a tile of keys": """
        begin = tl.maximum(0, start_n - (Nk - Nq)) // BLOCK_M * BLOCK_M
        seen_from = start_n + BLOCK_N - 1 - (Nk - Nq)
        """,
        "3.6: one step of dK and dV": f"""
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = {Q_ROWS}
        do = {DO_ROWS}
        lse = tl.load(lse_ptr + rows_before + offs_m, mask=offs_m < Nq, other=0.0)
        delta = tl.load(delta_ptr + rows_before + offs_m, mask=offs_m < Nq, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        p = tl.exp2((s * scale - lse[None, :]) * 1.4426950408889634)
        seen = (offs_n[:, None] < Nk) & (offs_m[None, :] < Nq)
        if CAUSAL:
            seen = seen & (offs_n[:, None] <= offs_m[None, :] + Nk - Nq)
        p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
        """,
        "3.6: the end of dK and dV": f"""
        {_store("dk", "dk * scale", "key_head", "start_n", "Nk", "BLOCK_N")}
        {_store("dv", "dv", "key_head", "start_n", "Nk", "BLOCK_N")}
        """,
        "3.7: one step of dQ": f"""
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = {K_ROWS}
        v = {V_ROWS}
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        p = tl.exp2((s * scale - lse[:, None]) * 1.4426950408889634)
        p = tl.where(attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        """,
        "3.7: the end of dQ": f"""
        {_store("dq", "dq * scale", "head", "start_m", "Nq", "BLOCK_M")}
        """,
        "3.8: what the forward pass keeps": """
        o, lse = flash_forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        ctx.scale = scale
        return o, lse
        """,
        "3.8: the backward pass": """
        q, k, v, o, lse = ctx.saved_tensors
        num_fully_masked = max(0, q.shape[2] - k.shape[2]) if ctx.causal else 0
        delta = attention_delta(o, do, dlse, num_fully_masked)
        dq = flash_dq(q, k, v, do, lse, delta, ctx.causal, ctx.scale)
        dk, dv = flash_dkdv(q, k, v, do, lse, delta, ctx.causal, ctx.scale)
        return dq, dk, dv, None, None
        """,
    }
)
