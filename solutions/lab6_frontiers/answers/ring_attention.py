"""Right and wrong answers to exercise 6.6, attention in a ring."""

from __future__ import annotations

from utils.checks.answers import Answers

MERGE, SEES, RING = "6.6: merging two parts", "6.6: who sees whom", "6.6: the ring"
ANSWERS = Answers(
    {
        MERGE: """
        top = torch.maximum(lse, more_lse)
        a, b = torch.exp(lse - top), torch.exp(more_lse - top)
        total = a + b
        out = (a / total)[..., None] * o + (b / total)[..., None] * more
        return out, top + torch.log(total)
        """,
        SEES: """
        mine, theirs = (lengths[rank] + 1) // 2, (lengths[source] + 1) // 2
        queries, keys = slice(0, lengths[rank]), slice(0, lengths[source])
        if causal and source < rank:
            keys = slice(0, theirs)
        if causal and source > rank:
            queries = slice(mine, lengths[rank])
        return queries, keys, causal and source == rank
        """,
        RING: """
        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        held = torch.stack([k, v])
        B, G, _, D = k.shape
        source = rank
        for step in range(ranks):
            last = step == ranks - 1
            works = []
            if not last:
                coming = torch.empty((2, B, G, lengths[(source - 1) % ranks], D), dtype=k.dtype, device=k.device)
                works = dist.batch_isend_irecv([
                    dist.P2POp(dist.isend, held, group=group, group_peer=right),
                    dist.P2POp(dist.irecv, coming, group=group, group_peer=left),
                ])
            rows, columns, diagonal = seen_by(rank, source, lengths, causal)
            keys, values = held[0][:, :, columns], held[1][:, :, columns]
            part, part_lse = attention_part(q[:, :, rows], keys, values, diagonal)
            new, new_lse = merge_parts(o[:, :, rows], lse[:, :, rows], part, part_lse)
            o[:, :, rows] = new
            lse[:, :, rows] = new_lse
            for work in works:
                work.wait()
            if not last:
                held = coming
                source = (source - 1) % ranks
        """,
    }
)
also_right = ANSWERS.also_right
also_right("weights from a sigmoid", {MERGE: """
    share = torch.sigmoid(more_lse - lse).unsqueeze(-1)
    return torch.lerp(o, more, share), torch.logaddexp(more_lse, lse)
"""})  # fmt: skip
also_right("a softmax over the two parts", {MERGE: """
    both = torch.stack([lse, more_lse], -1)
    weights = both.softmax(-1)
    return (torch.stack([o, more], -1) * weights[..., None, :]).sum(-1), both.logsumexp(-1)
"""})  # fmt: skip
also_right("front and back apart", {SEES: """
    order = (rank > source) - (rank < source)
    front = lambda r: -(-lengths[r] // 2)
    if not causal or order == 0:
        return slice(None), slice(None), causal
    return [(slice(front(rank), None), ALL), (ALL, slice(front(source)))][order > 0] + (False,)
"""})  # fmt: skip
also_right("keys and values apart, and the other way round the ring", {RING: """
    k, v = k.contiguous(), v.contiguous()
    peers = [r if group is None else dist.get_global_rank(group, r) for r in ((rank - 1) % ranks, (rank + 1) % ranks)]
    for source in [*range(rank, ranks), *range(rank)]:
        coming, works = None, []
        if source != (rank - 1) % ranks:
            n = lengths[(source + 1) % ranks]
            coming = [x.new_empty((*x.shape[:2], n, x.shape[3])) for x in (k, v)]
            for old, new in zip((k, v), coming):
                works += [dist.isend(old, peers[0], group=group), dist.irecv(new, peers[1], group=group)]
        rows, columns, diagonal = seen_by(rank, source, lengths, causal)
        part = attention_part(q[:, :, rows], k[:, :, columns], v[:, :, columns], diagonal)
        o[:, :, rows], lse[:, :, rows] = merge_parts(o[:, :, rows], lse[:, :, rows], *part)
        [work.wait() for work in works]
        k, v = coming or (k, v)
"""})  # fmt: skip
also_right("parts of queries kept until the end, and a longest part", {RING: """
    longest, n = max(lengths), q.shape[2]
    sent = k.new_zeros((2, *k.shape[:2], n, k.shape[3]))
    sent[0], sent[1] = k, v
    outs, sums = [], []
    for step in range(ranks):
        source = rank - step if step <= rank else rank - step + ranks
        works = []
        if step < ranks - 1:
            got = sent.new_empty((*sent.shape[:3], lengths[source - 1], sent.shape[4]))
            receive = dist.P2POp(dist.irecv, got, group=group, group_peer=(rank + ranks - 1) % ranks)
            send = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks)
            works = dist.batch_isend_irecv([receive, send])
        rows, columns, diagonal = seen_by(rank, source, lengths, causal)
        out, total = torch.zeros_like(o), torch.full_like(lse, -torch.inf)
        some = q[:, :, rows], *sent[:, :, :, columns]
        out[:, :, rows], total[:, :, rows] = attention_part(*some, diagonal)
        outs.append(out)
        sums.append(total)
        for work in works:
            work.wait()
        sent = got if works else sent
    o = (torch.stack(sums).softmax(0)[..., None] * torch.stack(outs)).sum(0)
"""})  # fmt: skip
also_right("no mask left out of the diagonal's halves", {SEES: """
    if not causal:
        return slice(0, lengths[rank]), slice(0, lengths[source]), False
    later = source > rank
    own = source == rank
    first_query = (lengths[rank] + 1) // 2 * later
    last_key = lengths[source] if own or later else lengths[source] - lengths[source] // 2
    return slice(first_query, None), slice(last_key), own
"""})  # fmt: skip

wrong = ANSWERS.wrong
C = '"classic wrong answers" '
# ---- who sees whom
NOTHING = {"if causal and source < rank:": "if False:", "if causal and source > rank:": "if False:"}
wrong(SEES, "no mask", "the causal mask is left out", C + "1",
      edits={**NOTHING, "causal and source == rank": "False"})  # fmt: skip
wrong(SEES, "contiguous parts", "this is the rule for contiguous parts", C + "1", edits={
    "keys = slice(0, theirs)": "pass", "queries = slice(mine, lengths[rank])": "queries = slice(0, 0)",
})  # fmt: skip
wrong(SEES, "own part whole", "a rank's own part is not masked", C + "1", edits={"causal and source == rank": "False"})
wrong(SEES, "every part on the diagonal", "every part is masked as if it were the rank's own", C + "1",
      edits={**NOTHING, "causal and source == rank": "causal"})  # fmt: skip
wrong(SEES, "earlier parts whole", "an earlier rank's back counts too", C + "1",
      edits={"if causal and source < rank:": "if False:"})  # fmt: skip
wrong(SEES, "later parts skipped", "the keys of later ranks do not count", C + "2",
      edits={"slice(mine, lengths[rank])": "slice(0, 0)"})  # fmt: skip
wrong(SEES, "later parts for all queries", "count for the front too", C + "2",
      edits={"if causal and source > rank:": "if False:"})  # fmt: skip
wrong(SEES, "front for back", "of a later rank's keys the front sees all and the back none", C + "2",
      edits={"slice(mine, lengths[rank])": "slice(0, mine)"})  # fmt: skip
wrong(SEES, "back for front", "of an earlier rank the back counts instead of the front", C + "2",
      edits={"slice(0, theirs)": "slice(theirs, lengths[source])"})  # fmt: skip
wrong(SEES, "earlier for later", "earlier and later ranks are exchanged", C + "2",
      edits={"source < rank": "source > rank ", "source > rank:": "source < rank:"})  # fmt: skip
wrong(SEES, "halves rounded down", "fronts are taken for shorter than they are", C + "6", edits={
    "(lengths[rank] + 1) // 2, (lengths[source] + 1) // 2": "lengths[rank] // 2, lengths[source] // 2",
})  # fmt: skip
wrong(SEES, "keys measured by the queries", "is measured by this rank's length", C + "6",
      edits={"slice(0, theirs)": "slice(0, mine)"})  # fmt: skip
wrong(SEES, "queries measured by the keys", "is measured by another rank's length", C + "6",
      edits={"slice(mine, lengths[rank])": "slice(theirs, lengths[rank])"})  # fmt: skip
wrong(SEES, "diagonal of an earlier rank", "the front of an earlier rank is masked", C + "1",
      edits={"causal and source == rank": "causal and source <= rank"})  # fmt: skip
wrong(SEES, "diagonal of a later rank", "the keys of a later rank are masked", C + "1",
      edits={"causal and source == rank": "causal and source >= rank"})  # fmt: skip
wrong(SEES, "later keys for queries", "of a later rank the back's keys count, for all queries", C + "2",
      edits={"queries = slice(mine, lengths[rank])": "keys = slice(mine, lengths[source])"})  # fmt: skip
# ---- merging two parts
OUT = "(a / total)[..., None] * o + (b / total)[..., None] * more"
wrong(MERGE, "sum", "the parts are added", C + "3", edits={OUT: "o + more"})
wrong(MERGE, "second part missing", "the second part is left out", C + "3",
      edits={OUT: "(a / total)[..., None] * o"})  # fmt: skip
wrong(MERGE, "first part missing", "the first part is left out", C + "3",
      edits={OUT: "(b / total)[..., None] * more"})  # fmt: skip
wrong(MERGE, "mean", "this is the mean of the parts", C + "3", edits={OUT: "(o + more) / 2"})
wrong(MERGE, "exchanged weights", "the weights are exchanged", C + "3",
      edits={OUT: "(b / total)[..., None] * o + (a / total)[..., None] * more"})  # fmt: skip
wrong(MERGE, "not divided", "the weights are relative to the larger one", C + "3",
      edits={OUT: "a[..., None] * o + b[..., None] * more"})  # fmt: skip
wrong(
    MERGE,
    "first part not rescaled",
    "the first part is not rescaled",
    C + "3",
    edits={"(a / total)[..., None] * o": "o"},
)
wrong(
    MERGE, "logsumexps added", "the logsumexps are added", C + "3", edits={"top + torch.log(total)": "lse + more_lse"}
)
wrong(MERGE, "the larger logsumexp", "this is the larger logsumexp", C + "3", edits={"top + torch.log(total)": "top"})
wrong(MERGE, "no maximum", "overflows", C + "4",
      edits={"top = torch.maximum(lse, more_lse)": "top = torch.zeros_like(lse)"})  # fmt: skip
wrong(MERGE, "minus infinity minus itself", "-inf minus -inf is NaN", C + "4",
      edits={"top = torch.maximum(lse, more_lse)": "top = lse"})  # fmt: skip
# ---- the ring
STORED = """lse[:, :, rows] = new_lse"""
PASSED_ON = "held = coming\n"
wrong(RING, "logsumexp forgotten", "only the last part counts", C + "5", edits={STORED: "pass"})
wrong(RING, "own keys only", "every step computes with the rank's own keys", C + "5",
      edits={"held[0][:, :, columns], held[1]": "k[:, :, columns], v"})  # fmt: skip
wrong(RING, "nothing passed on in the last step", "computes with the keys of rank r - 1", C + "5",
      edits={"last = step == ranks - 1": "last = step >= ranks - 2",
             "source = (source - 1) % ranks": "pass\n            source = (source - 1) % ranks"})  # fmt: skip
wrong(RING, "keys and values exchanged", "keys and values are exchanged", C + "5",
      edits={"torch.stack([k, v])": "torch.stack([v, k])"})  # fmt: skip
wrong(RING, "received from the right", "every rank waits for a message that no rank sends it", C + "9",
      edits={"group_peer=left": "group_peer=right"})  # fmt: skip
wrong(RING, "received from the right, listed first", "every rank waits for a message that no rank sends it", C + "9",
      edits={"dist.P2POp(dist.isend, held, group=group, group_peer=right),\n": "",
             "dist.P2POp(dist.irecv, coming, group=group, group_peer=left),":
                 "dist.P2POp(dist.irecv, coming, group=group, group_peer=right),\n"
                 "                    dist.P2POp(dist.isend, held, group=group, group_peer=right),"})  # fmt: skip
wrong(RING, "own keys sent again", "computes with the keys of rank r - 1", C + "5",
      edits={"dist.P2POp(dist.isend, held,": "dist.P2POp(dist.isend, torch.stack([k, v]),"})  # fmt: skip
wrong(RING, "a step too few", "a step too few", C + "5", edits={
    "for step in range(ranks):": "for step in range(max(1, ranks - 1)):", "step == ranks - 1": "step >= ranks - 2",
})  # fmt: skip
wrong(RING, "counted the other way", "the parts are taken for those of other ranks", C + "5",
      edits={"source = (source - 1) % ranks": "source = (source + 1) % ranks"})  # fmt: skip
wrong(RING, "own length for what comes", "only parts of different lengths go wrong", C + "6",
      edits={"lengths[(source - 1) % ranks]": "k.shape[2]"})  # fmt: skip
wrong(RING, "all pairs and a mask", "FLOPs on products", "pairs that are masked are computed first", C + "7", edits={
    "part, part_lse = attention_part(q[:, :, rows], keys, values, diagonal)": """
            keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in held.float())
            scores = q.float() @ keys.mT / q.shape[3] ** 0.5
            if causal:
                at = [torch.arange(n) for n in lengths]
                total, ends = sum(lengths), [sum((n + 1) // 2 for n in lengths[:r]) for r in range(ranks)]
                backs = [total - sum(n // 2 for n in lengths[: r + 1]) for r in range(ranks)]
                at = [torch.cat((torch.arange((n + 1) // 2) + ends[r], torch.arange(n // 2) + backs[r]))
                      for r, n in enumerate(lengths)]
                scores = scores.masked_fill(at[rank][:, None] < at[source], -torch.inf)
            rows, part_lse = ALL, scores.logsumexp(-1)
            part = torch.exp(scores - part_lse[..., None]).nan_to_num() @ values"""
})  # fmt: skip
wrong(RING, "heads repeated before they travel", "keys and values travel once for each query head", C + "8", edits={
    "held = torch.stack([k, v])":
        "held = torch.stack([x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)])",
    "B, G, _, D = k.shape": "B, G, _, D = q.shape",
})  # fmt: skip
wrong(RING, "views sent", "must be contiguous", C + "8", edits={
    "held = torch.stack([k, v])": "held = [k, v]",
    "coming = torch.empty((2, B, G, lengths[(source - 1) % ranks], D), dtype=k.dtype, device=k.device)":
        "coming = [k.new_empty((B, G, lengths[(source - 1) % ranks], D)) for _ in range(2)]",
    "dist.P2POp(dist.isend, held, group=group, group_peer=right),":
        "*(dist.P2POp(dist.isend, x, group=group, group_peer=right) for x in held),",
    "dist.P2POp(dist.irecv, coming, group=group, group_peer=left),":
        "*(dist.P2POp(dist.irecv, x, group=group, group_peer=left) for x in coming),",
})  # fmt: skip
wrong(RING, "gathered", "calls all_gather", C + "8", instead="""
    longest = max(lengths)
    mine = torch.zeros((2, *k.shape[:2], longest, k.shape[3]), dtype=k.dtype)
    mine[:, :, :, : k.shape[2]] = torch.stack([k, v])
    every = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(every, mine, group=group)
    for source in range(ranks):
        rows, columns, diagonal = seen_by(rank, source, lengths, causal)
        keys, values = every[source][:, :, :, : lengths[source]]
        part = attention_part(q[:, :, rows], keys[:, :, columns], values[:, :, columns], diagonal)
        o[:, :, rows], lse[:, :, rows] = merge_parts(o[:, :, rows], lse[:, :, rows], *part)
""")  # fmt: skip
wrong(RING, "sent to every rank", "in a ring a rank sends to one neighbour", C + "8", instead="""
    own = torch.stack([k, v])
    parts, works = {rank: own}, []
    for other in range(ranks):
        if other != rank:
            parts[other] = own.new_empty((*own.shape[:3], lengths[other], own.shape[4]))
            works += dist.batch_isend_irecv([
                dist.P2POp(dist.isend, own, group=group, group_peer=other),
                dist.P2POp(dist.irecv, parts[other], group=group, group_peer=other),
            ])
    for source in [rank, *(r for r in range(ranks) if r != rank)]:
        rows, columns, diagonal = seen_by(rank, source, lengths, causal)
        keys, values = parts[source][:, :, :, columns]
        part = attention_part(q[:, :, rows], keys, values, diagonal)
        o[:, :, rows], lse[:, :, rows] = merge_parts(o[:, :, rows], lse[:, :, rows], *part)
        while works:
            works.pop().wait()
""")  # fmt: skip
wrong(RING, "send, then receive", "deadlock", "every rank sends first", C + "9", edits={
    "works = dist.batch_isend_irecv([": "dist.send(held, group=group, group_dst=right)\n"
    "                dist.recv(coming, group=group, group_src=left)\n                works = ([",
    "for work in works:\n                work.wait()": "pass",
})  # fmt: skip
wrong(RING, "waits first", "waits for keys and values before it computes", C + "9", edits={
    "rows, columns, diagonal =":
        "for work in works:\n                work.wait()\n            works = []\n"
        "            rows, columns, diagonal =",
})  # fmt: skip
wrong(RING, "never waits", "does not wait for 4 of its messages", C + "9", edits={"work.wait()": "pass"})
wrong(RING, "sums of 16 bits", "only bfloat16 goes wrong", C + "10",
      edits={"source = rank\n": "source = rank\n        o, lse = o.to(q.dtype), lse.to(q.dtype)\n"})  # fmt: skip
wrong(RING, "ranks of the whole job", "only a group of some ranks goes wrong", C + "11", edits={
    "right, left = (rank + 1) % ranks, (rank - 1) % ranks": "right, left = (rank + 1) % ranks, (rank - 1) % ranks\n"
    "        group = None",
})  # fmt: skip
wrong(RING, "into the inputs", "changes its inputs", C + "8", edits={
    PASSED_ON: "held = coming\n                if k.shape[2] == coming.shape[3]:\n"
    "                    k.copy_(coming[0]), v.copy_(coming[1])\n",
})  # fmt: skip
