"""Right and wrong answers to exercise 6.8, tokens to the ranks of their experts and back."""

from __future__ import annotations

from utils.checks.answers import Answers

THERE, BACK = "6.8: rows there", "6.8: gradients back"
DISPATCH, COMBINE = "6.8: dispatch", "6.8: combine"
ANSWERS = Answers(
    {
        THERE: """
        arrived = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        dist.all_to_all_single(
            arrived, rows.contiguous(), output_split_sizes=received, input_split_sizes=sent, group=group
        )
        return arrived
        """,
        BACK: """
        size = (sum(ctx.sent), *gradient.shape[1:])
        returned = torch.empty(size, dtype=gradient.dtype, device=gradient.device)
        dist.all_to_all_single(
            returned, gradient.contiguous(),
            output_split_sizes=ctx.sent, input_split_sizes=ctx.received, group=ctx.group,
        )
        return returned, None, None, None
        """,
        DISPATCH: """
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        tokens = order // k
        counts = torch.bincount(flat, minlength=num_experts)
        mine = shares[rank]
        arriving = torch.empty(ranks * mine, dtype=torch.int64, device=x.device)
        dist.all_to_all_single(arriving, counts, [mine] * ranks, shares, group=group)
        table = arriving.reshape(ranks, mine)
        sent = [int(part.sum()) for part in torch.split(counts, shares)]
        received = [int(line.sum()) for line in table]
        rows = exchange_rows(x[tokens], sent, received, group)
        labels = torch.cat([torch.repeat_interleave(torch.arange(mine), line) for line in table])
        arrange = torch.argsort(labels, stable=True)
        sizes = table.sum(0)
        return rows[arrange], sizes, (order, arrange, sent, received, group)
        """,
        COMBINE: """
        order, arrange, sent, received, group = kept
        undone = rows[torch.argsort(arrange)]
        home = exchange_rows(undone, received, sent, group)
        placed = home[torch.argsort(order)]
        each = placed.reshape(weights.shape[0], weights.shape[1], rows.shape[1])
        scaled = each.float() * weights[:, :, None]
        out = scaled.sum(1)
        """,
    }
)
also_right = ANSWERS.also_right
also_right("results added where they belong", {COMBINE: """
    order, arrange, sent, received, group = kept
    undone = torch.zeros_like(rows).index_copy(0, arrange, rows)
    home = exchange_rows(undone, received, sent, group).float()
    of, factor = order // weights.shape[1], weights.reshape(-1)[order].unsqueeze(1)
    out = torch.zeros(weights.shape[0], rows.shape[1], device=rows.device).index_add(0, of, home * factor)
"""})  # fmt: skip
also_right("a product of weights and results", {COMBINE: """
    order, arrange, sent, received, group = kept
    inverse = torch.empty_like(arrange)
    inverse[arrange] = torch.arange(len(arrange))
    home = exchange_rows(rows[inverse], received, sent, group)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    each = home[back].unflatten(0, weights.shape) if len(weights) else home.view(*weights.shape, rows.shape[1])
    out = torch.einsum("tkh,tk->th", each.float(), weights)
"""})  # fmt: skip
also_right("an expert's rows in another order", {DISPATCH: """
    key = experts.flatten() * (experts.numel() + 1) - torch.arange(experts.numel())
    order = key.argsort()
    counts = (experts.flatten()[:, None] == torch.arange(num_experts)).sum(0)
    arriving = counts.new_zeros((ranks, shares[rank]))
    dist.all_to_all_single(arriving.view(-1), counts, [shares[rank]] * ranks, shares, group=group)
    first = [sum(shares[:r]) for r in range(ranks + 1)]
    sent = [counts[a:b].sum().item() for a, b in zip(first, first[1:])]
    received = [line.sum().item() for line in arriving]
    rows = exchange_rows(x.index_select(0, order.div(k, rounding_mode="floor")), sent, received, group)
    starts = arriving.flatten().cumsum(0) - arriving.flatten()
    starts = starts.view(ranks, -1)
    pieces = [
        torch.arange(int(starts[r, e]), int(starts[r, e] + arriving[r, e]))
        for e in range(shares[rank]) for r in reversed(range(ranks))
    ]
    arrange = torch.cat(pieces) if pieces else torch.arange(0)
    return rows[arrange], arriving.sum(0), (order, arrange, sent, received, group)
"""})  # fmt: skip
also_right("pieces for each expert, joined", {DISPATCH: """
    chosen = [(experts == e).nonzero() for e in range(num_experts)]  # (token, choice) of each expert
    where = torch.cat(chosen)
    counts = torch.tensor([len(each) for each in chosen])
    owners = [r for r, n in enumerate(shares) for _ in range(n)]
    theirs = torch.zeros(shares[rank] * ranks, dtype=torch.int64)
    dist.all_to_all_single(theirs, counts, [shares[rank]] * ranks, shares, group=group)
    sent = [sum(int(c) for c, owner in zip(counts, owners) if owner == r) for r in range(ranks)]
    received = [int(each.sum()) for each in theirs.view(ranks, shares[rank])]
    rows = exchange_rows(x[where[:, 0]], sent, received, group)
    index = list(torch.arange(len(rows)).split(theirs.tolist())) if len(theirs) else []
    local = shares[rank]
    parts = [index[r * local + e] for e in range(local) for r in range(ranks)]
    by_expert = torch.cat(parts) if parts else torch.arange(0)
    order = where[:, 0] * k + where[:, 1]
    return rows[by_expert], theirs.view(ranks, local).sum(0), (order, by_expert, sent, received, group)
""", COMBINE: {"argsort(arrange)": "sort(arrange).indices", "argsort(order)": "sort(order).indices"}})  # fmt: skip
also_right("the exchange once more for its gradient", {BACK: """
    back = _Exchange.apply(gradient, ctx.received, ctx.sent, ctx.group)
    return (back, *[None] * 3)
""", THERE: """
    out = torch.zeros(sum(received), *rows.shape[1:]).to(rows)
    rows = rows.clone(memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, rows, received, sent, group, async_op=True).wait()
    return out
"""})  # fmt: skip

wrong = ANSWERS.wrong
C = '"classic wrong answers" '
# ---- rows there, gradients back
SIZES = "output_split_sizes=received, input_split_sizes=sent"
wrong(THERE, "sizes exchanged", "sizes of the output, sizes of the input", C + "1",
      edits={SIZES: "output_split_sizes=sent, input_split_sizes=received"})  # fmt: skip
wrong(THERE, "as many come as go", "exchange_rows", edits={
    "(sum(received), *rows.shape[1:])": "rows.shape", SIZES: "output_split_sizes=sent, input_split_sizes=sent",
})  # fmt: skip
wrong(BACK, "sizes as forward", "sizes of the output, sizes of the input", C + "1",
      edits={"output_split_sizes=ctx.sent, input_split_sizes=ctx.received":
             "output_split_sizes=ctx.received, input_split_sizes=ctx.sent"})  # fmt: skip
wrong(BACK, "handed on", "the gradient of rows goes back the way that they came", C + "2",
      instead="return gradient, None, None, None")  # fmt: skip
wrong(BACK, "no gradient", "rows have no gradient", C + "2", instead="return None, None, None, None")
wrong(BACK, "zeros", "the gradient of rank 0's rows is wrong", C + "2", edits={
    "return returned": "return torch.zeros_like(returned)",
})  # fmt: skip
wrong(BACK, "a view travels", "what travels is contiguous", C + "2", edits={"gradient.contiguous()": "gradient"})
# ---- dispatch
wrong(DISPATCH, "choices for tokens", "dispatch", edits={"tokens = order // k": "tokens = order % max(len(x), 1)"})
wrong(DISPATCH, "as they came", "the rows lie as they came", C + "4",
      edits={"arrange = torch.argsort(labels, stable=True)": "arrange = torch.arange(len(labels))"})  # fmt: skip
wrong(DISPATCH, "own counts", "these are the rank's own tokens", C + "4",
      edits={"sizes = table.sum(0)": "sizes = torch.split(counts, shares)[rank]"})  # fmt: skip
wrong(
    DISPATCH, "all counts", "these are the rank's own tokens", C + "4", edits={"sizes = table.sum(0)": "sizes = counts"}
)
wrong(DISPATCH, "counts in int32", "dispatch gives counts of torch.int32, expected torch.int64",
      edits={"sizes = table.sum(0)": "sizes = table.sum(0).int()"})  # fmt: skip
wrong(DISPATCH, "counts gathered", "calls all_gather", C + "8", edits={
    "dist.all_to_all_single(arriving, counts, [mine] * ranks, shares, group=group)": """
        every = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(every, counts, group=group)
        arriving = torch.cat([torch.split(each, shares)[rank] for each in every])"""
})  # fmt: skip
wrong(DISPATCH, "experts sent along", "exchanges integers 2 times", C + "8", edits={
    "labels = torch.cat([torch.repeat_interleave(torch.arange(mine), line) for line in table])":
        "labels = exchange_rows(flat[order], sent, received, group) - sum(shares[:rank])",
})  # fmt: skip
wrong(DISPATCH, "equal shares", "only experts that ranks cannot share evenly go wrong", C + "5", edits={
    "mine = shares[rank]": "mine = -(-num_experts // ranks)\n        pad = mine * ranks - num_experts\n"
    "        counts = torch.cat([counts, counts.new_zeros(pad)])\n        shares = [mine] * ranks",
})  # fmt: skip
wrong(DISPATCH, "dealt out in turn", "experts are dealt out in turn", C + "5", edits={
    "flat = experts.reshape(-1)": "turn = torch.cat([torch.arange(r, num_experts, ranks) for r in range(ranks)])\n"
    "        flat = turn.argsort()[experts.reshape(-1)]",
})  # fmt: skip
wrong(DISPATCH, "nobody at home", "takes part", C + "9", edits={
    "flat = experts.reshape(-1)":
        "if not len(x):\n            return x, torch.zeros(shares[rank], dtype=torch.int64), None\n"
        "        flat = experts.reshape(-1)",
}, also={COMBINE: {
    "order, arrange, sent, received, group = kept": "if kept is None:\n            return rows\n"
    "        order, arrange, sent, received, group = kept",
}})  # fmt: skip
wrong(DISPATCH, "padded", "elements of rows, expected", C + "8", edits={
    "rows = exchange_rows(x[tokens], sent, received, group)": """
        room = 40
        padded = x.new_zeros((ranks * room, x.shape[1]))
        place = torch.cat([torch.arange(n) + r * room for r, n in enumerate(sent)])
        padded = padded.index_copy(0, place, x[tokens])
        rows = exchange_rows(padded, [room] * ranks, [room] * ranks, group)
        rows = torch.cat([part[:n] for part, n in zip(rows.split(room), received)])"""
})  # fmt: skip
wrong(DISPATCH, "ranks of the whole job", "only a group of some ranks goes wrong", C + "11", edits={
    "(arriving, counts, [mine] * ranks, shares, group=group)": "(arriving, counts, [mine] * ranks, shares)",
})  # fmt: skip
wrong(DISPATCH, "picked by a product", "one infinite token spoils others", C + "12", edits={
    "x[tokens]": "(tokens[:, None] == torch.arange(len(x))).to(x.dtype) @ x",
})  # fmt: skip
# ---- combine
wrong(
    COMBINE,
    "back by expert",
    "results are sent back by expert",
    C + "6",
    edits={"rows[torch.argsort(arrange)]": "rows"},
)
wrong(COMBINE, "sorted once more", "sorted by expert once more on their way back", C + "6",
      edits={"rows[torch.argsort(arrange)]": "rows[arrange]"})  # fmt: skip
wrong(COMBINE, "not put back", "results that are home are not put back", C + "6",
      edits={"home[torch.argsort(order)]": "home"})  # fmt: skip
wrong(COMBINE, "put back by the order itself", "results that are home are sorted once more", C + "6",
      edits={"home[torch.argsort(order)]": "home[order]"})  # fmt: skip
wrong(COMBINE, "no weights", "the weights are left out", C + "7", edits={" * weights[:, :, None]": ""})
wrong(COMBINE, "mean", "the weighted results are averaged", C + "7", edits={"scaled.sum(1)": "scaled.mean(1)"})
wrong(COMBINE, "weights of other choices", "each result has the weight of another one", C + "7", edits={
    "placed = home[torch.argsort(order)]": "placed = (home * weights.reshape(-1, 1))[torch.argsort(order)]",
    " * weights[:, :, None]": "",
})  # fmt: skip
wrong(COMBINE, "the last choice only", "of each token one result is left", C + "7", edits={
    "out = scaled.sum(1)": "out = torch.zeros(len(weights), rows.shape[1])\n"
    "        out[order // weights.shape[1]] = scaled.flatten(0, 1)[order]",
})  # fmt: skip
wrong(COMBINE, "sums of 16 bits", "only bfloat16 goes wrong", C + "10",
      edits={"each.float() * weights[:, :, None]": "each * weights[:, :, None].to(each.dtype)"})  # fmt: skip
wrong(COMBINE, "cut off", "have no gradient", C + "2", edits={"undone = rows": "undone = rows.detach()"})
wrong(COMBINE, "orders exchanged", "the sizes of the pieces must add up to the rows of their tensor", edits={
    "order, arrange, sent, received, group = kept": "arrange, order, sent, received, group = kept",
})  # fmt: skip
