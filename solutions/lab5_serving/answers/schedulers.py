"""Wrong answers to exercise 5.3, each with one mistake, and what the check must say of it: edits of plain answers."""

from __future__ import annotations

import functools

from .right import ANSWERS

CONTINUOUS, STATIC = "5.3: a step of continuous batching", "5.3: a step of static batching"

wrong = functools.partial(ANSWERS.wrong, CONTINUOUS)
wrong(
    "waits for the batch",
    "is a static one",
    '"classic wrong answers" 6',
    edits={"while self.waiting and": "while self.waiting and (prompts or not self.running) and"},
)
wrong(
    "a place stays empty",
    "although there is room for it",
    edits={"self.running) < self.max_batch": "self.running) < self.max_batch - 1"},
)
wrong("one newcomer a step", "although there is room for it", edits={"prompts += 1": "break"})
wrong(
    "newcomers first",
    "running requests come first",
    '"classic wrong answers" 1',
    instead="""
        while self.waiting and budget > 0 and len(self.running) < self.max_batch:
            if not self._admit(step):
                break
            request = self.running[-1]
            count = min(request.pending, budget)
            step.chunks.append(Chunk(request, request.computed, count))
            budget -= count
        newcomers = [chunk.request for chunk in step.chunks]
        for request in list(self.running):
            if request in newcomers or request not in self.running or budget == 0:
                continue
            count = self._make_room(request, min(request.pending, budget), step)
            if count > 0:
                step.chunks.append(Chunk(request, request.computed, count))
                budget -= count
        """,
)
wrong(
    "newest first",
    "oldest first",
    edits={"in list(self.running)": "in list(reversed(self.running))"},
)
wrong(
    "passes over the long one",
    "starves",
    '"classic wrong answers" 5',
    edits={
        "while self.waiting": "turns = 0\n        while turns <= len(self.waiting) and self.waiting",
        "if not self._admit(step):\n                break": "if not self._admit(step):\n                "
        "self.waiting.rotate(-1)\n                turns += 1\n                continue",
    },
)
wrong(
    "shortest first",
    "which came earlier",
    "starves",
    edits={"prompts = 0": "prompts = 0\n        self.waiting = deque(sorted(self.waiting, key=lambda r: r.pending))"},
)
wrong(
    "one token each",
    "a chunk takes all pending tokens that the budget allows",
    edits={"min(request.pending, budget), step": "1, step"},
)
wrong("budget not shared", "all chunks share one budget", edits={"budget -= count": "pass"})
wrong(
    "prompts not counted",
    "all chunks share one budget",
    edits={"budget = max(0, budget - count)": "pass"},
)
wrong(
    "prompts not split",
    "all chunks share one budget",
    edits={"if self.chunked_prefill:": "if False:"},
)
wrong(
    "prompts beside each other beyond the budget",
    "joins another one only if the budget has room for all of it",
    '"classic wrong answers" 2',
    edits={"if not self.chunked_prefill and prompts and self.waiting[0].pending > budget:": "if False:"},
)
wrong(
    "positions restart",
    "positions restart at 0",
    '"classic wrong answers" 3',
    edits={"Chunk(request, request.computed, count)": "Chunk(request, 0, count)"},
)
wrong(
    "from the end",
    "a chunk starts at request.computed",
    edits={"Chunk(request, request.computed, count)": "Chunk(request, len(request.tokens) - count, count)"},
)
wrong(
    "positions of before",
    "after a preemption nothing of a request is in the cache",
    edits={
        "for request in list(self.running)": "seen = self.__dict__.setdefault('seen', {})\n"
        "        for request in list(self.running)",
        "request.computed, count))": "max(seen.get(request.id, 0), request.computed), count))",
        "budget -= count": "budget -= count\n                seen[request.id] = request.computed",
    },
)
wrong(
    "no slots",
    "has no slot",
    '"classic wrong answers" 4',
    edits={"self._make_room(request, min(request.pending, budget), step)": "min(request.pending, budget)"},
)
wrong("preempted and scheduled", "is scheduled and does not run", edits={"if count > 0:": "if True:"})
wrong("preempted and asked", "look at its status", edits={"request not in self.running or ": ""})
wrong(
    "more than max_batch", "max_batch is the most that may run", edits={" and len(self.running) < self.max_batch": ""}
)
wrong(
    "one admission per step",
    "who waits joins as soon as there is room, in the very step",
    edits={"            budget = max(0, budget - count)": "            break"},
)
wrong(
    "a prompt that just fits waits",
    "although there is room for it",
    edits={"pending > budget": "pending >= budget"},
)
wrong("nobody waits", "look at self.waiting before _admit", edits={"while self.waiting and": "while"})

wrong = functools.partial(ANSWERS.wrong, STATIC)
wrong(
    "refilled",
    "a static batch is not refilled",
    '"classic wrong answers" 6',
    edits={"if not self.running:": "if True:"},
)
wrong(
    "prompts alone promised",
    "if all grow to their limit",
    edits={"self.waiting[0].limit - 1": "len(self.waiting[0].prompt)"},
)
wrong("nothing promised", "if all grow to their limit", edits={"promised > self.manager.num_blocks or ": ""})
wrong("no limit of the batch", "max_batch", edits={" and len(self.running) < self.max_batch": ""})
wrong(
    "waits for a full batch",
    "got none",
    edits={"if not self.running:": "if not self.running and len(self.waiting) >= self.max_batch:"},
)
wrong(
    "one request",
    "as many as max_batch allows",
    edits={"self.waiting and len(": "self.waiting and not self.running and len("},
)
wrong("budget ignored", "all chunks share one budget", edits={"budget = max(0, budget - count)": "pass"})
wrong(
    "one token each", "a chunk takes all pending tokens", edits={"= min(request.pending, budget)": "= min(1, budget)"}
)
