"""Right and wrong answers to exercise 5.9, the overlapped step."""

from __future__ import annotations

import functools

from utils.checks.answers import Answers

LOOK, WHO, STEP = "5.9: look the placeholders up", "5.9: who takes part", "5.9: launch, then read"
ANSWERS = Answers(
    {
        LOOK: """
        is_placeholder = tokens < 0
        row = torch.where(is_placeholder, -1 - tokens, 0)
        return torch.where(is_placeholder, newest.gather(0, row), tokens)
        """,
        WHO: """
        last_row = {}
        if flight is not None:
            for row, request in enumerate(flight.requests):
                last_row[request.id] = row
        stay = []
        for request in running:
            known = len(request.tokens)
            if request.id in last_row:
                known += 1
            if known < request.limit:
                stay.append(request)
        running = stay
        admit(waiting, running, max_batch)
        chunks = []
        for request in running:
            if request.id in last_row:
                chunks.append((request.id, [placeholder(last_row[request.id])]))
            else:
                chunks.append((request.id, request.tokens))
        """,
        STEP: """
        following = None
        if chunks:
            number = device.launch(chunks)
            following = Flight(tuple(running), number)
        if flight is not None:
            tokens = device.read(flight.step)
            for row, request in enumerate(flight.requests):
                if request.status is Status.FINISHED:
                    continue
                accept(request, tokens[row], ends, device.now)
        running = [request for request in running if request.status is not Status.FINISHED]
        flight = following
        """,
    }
)

# ---- right answers that few would write
also_right = ANSWERS.also_right
also_right("one table", {
    LOOK: """
        table = torch.cat((newest, tokens))
        own = len(newest) + torch.arange(len(tokens), device=tokens.device)
        return table[torch.where(tokens < 0, -1 - tokens, own)]
    """,
    STEP: """
        landing, flight = flight, None
        if chunks:
            flight = Flight(tuple(running), device.launch(chunks))
        for request, token in zip(landing.requests, device.read(landing.step)) if landing else ():
            if request in running or request.status is Status.RUNNING:
                accept(request, token, ends, device.now)
        running = [request for request in running if request.status is Status.RUNNING]
    """,
})  # fmt: skip
also_right("arithmetic", {
    LOOK: """
        stands = (tokens < 0).to(tokens.dtype)
        return stands * newest.index_select(0, tokens.bitwise_not() * stands) + (1 - stands) * tokens
    """,
    WHO: """
        ids = [request.id for request in flight.requests] if flight else []
        running = [r for r in running if len(r.tokens) + ids.count(r.id) < r.limit]
        admit(waiting, running, max_batch)
        chunks = []
        for r in running:
            chunks.append((r.id, [placeholder(ids.index(r.id))] if r.id in ids else list(r.prompt)))
    """,
})  # fmt: skip
also_right("rows in another order", {
    WHO: """
        rows = {r: row for row, r in enumerate(flight.requests)} if flight else {}
        running = [r for r in running if not (r in rows and len(r.tokens) == r.limit - 1)]
        admit(waiting, running, max_batch)
        running = sorted(running, key=lambda r: r.id, reverse=True)
        chunks = [(r.id, (placeholder(rows[r]),) if r in rows else tuple(r.tokens)) for r in running]
    """,
})  # fmt: skip
also_right("masked", {
    LOOK: """
        rows = tokens.clamp(max=-1).neg().sub(1)
        found = torch.take(newest, rows)
        return found.masked_fill(tokens >= 0, 0) + tokens.clamp(min=0)
    """,
    STEP: """
        launched = device.launch(chunks) if chunks else None
        if flight is not None:
            pairs = dict(zip((r.id for r in flight.requests), device.read(flight.step)))
            for r in flight.requests:
                if r.status is not Status.FINISHED:
                    accept(r, pairs[r.id], ends, device.now)
        flight = None if launched is None else Flight(tuple(running), launched)
        running = list(filter(lambda r: r.status is not Status.FINISHED, running))
    """,
})  # fmt: skip
also_right("the ended ones leave when a step is made", {
    WHO: """
        last = flight.requests if flight else ()
        going = []
        for r in running:
            if r.status is not Status.FINISHED and len(r.tokens) + (r in last) < r.limit:
                going.append(r)
        running = going
        admit(waiting, running, max_batch)
        chunks = [(r.id, [placeholder(last.index(r))]) if r in last else (r.id, r.tokens[:]) for r in running]
    """,
    STEP: """
        launched = Flight(tuple(running), device.launch(chunks)) if running else None
        if flight:
            found = device.read(flight.step)
            for r in flight.requests:
                token = found.pop(0)
                if r.status != Status.FINISHED:
                    accept(r, token, ends, device.now)
        flight = launched
    """,
})  # fmt: skip

# ---- wrong answers
wrong = functools.partial(ANSWERS.wrong, STEP)
wrong(
    "read at once",
    "is read before step",
    '"classic wrong answers" 1',
    edits={"        if flight is not None:\n": "        flight = following\n        if flight is not None:\n"},
)
wrong(
    "read before the launch",
    "while the host reads, the device waits",
    edits={"following = None\n        if chunks:\n            number = device.launch(chunks)\n"
           "            following = Flight(tuple(running), number)\n": "pass\n",
           "flight = following": "flight = Flight(tuple(running), device.launch(chunks)) if chunks else None"},
)  # fmt: skip
wrong(
    "the last step read again",
    "each step is read once",
    edits={"flight = following": "flight = following or flight"},
)
wrong(
    "read for each row",
    "each step is read once",
    edits={"tokens = device.read(flight.step)\n": "tokens = []\n", "tokens[row]": "device.read(flight.step)[row]"},
)
wrong(
    "surplus kept",
    "a text that has ended gets no more tokens",
    '"classic wrong answers" 4',
    edits={"if request.status is Status.FINISHED:\n                    continue": "pass"},
)
wrong(
    "rows of the next step", "row r of a step is the token", edits={"enumerate(flight.requests)": "enumerate(running)"}
)
wrong("nothing accepted", "accept appends it", edits={"accept(request, tokens[row], ends, device.now)": "pass"})
wrong(
    "ended ones go on",
    "it takes part no more",
    '"classic wrong answers" 3',
    edits={"running = [request for request in running if request.status is not Status.FINISHED]": "pass"},
)

wrong = functools.partial(ANSWERS.wrong, WHO)
wrong(
    "the newest known token",
    "this token has been run",
    '"classic wrong answers" 2',
    edits={"[placeholder(last_row[request.id])]": "request.tokens[-1:]"},
)
wrong(
    "rows of this step",
    "rows move up when a request leaves",
    edits={"placeholder(last_row[request.id])": "placeholder(running.index(request))"},
)
wrong(
    "the whole text again",
    "only its newest token is new",
    edits={"[placeholder(last_row[request.id])]": "[*request.tokens, placeholder(last_row[request.id])]"},
)
wrong("a step too many", "needs no further step", edits={"known += 1": "pass"})
wrong("a step too few", "takes part in every step", edits={"known += 1": "known += 2"})
wrong(
    "admitted before the others leave",
    "admit fills it in this very step",
    edits={"        admit(waiting, running, max_batch)\n": "",
           "        stay = []\n": "        admit(waiting, running, max_batch)\n        stay = []\n"},
)  # fmt: skip
wrong("too many at a time", "no more requests run at a time", edits={"running, max_batch)": "running, max_batch + 1)"})

wrong = functools.partial(ANSWERS.wrong, LOOK)
wrong(
    "from the end",
    "counts from the end of newest",
    '"classic wrong answers" 5',
    edits={"-1 - tokens": "len(newest) + tokens"},
)
wrong("a row late", "-1 stands for row 0", edits={"-1 - tokens": "-tokens"})
wrong("zero too", "0 is a token", edits={"tokens < 0": "tokens <= 0", "-1 - tokens": "(-1 - tokens).clamp(min=0)"})
wrong("without a clamp", "clamp before you index", edits={"torch.where(is_placeholder, -1 - tokens, 0)": "-1 - tokens"})
wrong(
    "all looked up", "stay as they are", edits={"newest.gather(0, row), tokens)": "newest.gather(0, row), newest[0])"}
)
wrong("the row itself", "this is the row", edits={"newest.gather(0, row)": "row"})
wrong(
    "read by the host",
    "look_up asks for values: tolist",
    instead="return torch.tensor([int(newest[-1 - t]) if t < 0 else t for t in tokens.tolist()])",
)
wrong(
    "an index of truth values",
    "an index of truth values",
    edits={"return torch.where(is_placeholder, newest.gather(0, row), tokens)": (
        "found = tokens.clone()\n        found[is_placeholder] = newest[row[is_placeholder]]\n        return found"
    )},
)  # fmt: skip
wrong(
    "in place",
    "changes its arguments in place",
    edits={"return torch.where(is_placeholder, newest.gather(0, row), tokens)": (
        "return tokens.copy_(torch.where(is_placeholder, newest.gather(0, row), tokens))"
    )},
)  # fmt: skip
