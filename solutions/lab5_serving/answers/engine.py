"""Wrong answers to exercise 5.7, each with one mistake, and what the check must say of it: edits of plain answers."""

from __future__ import annotations

import functools

from .right import ANSWERS

RUN, COUNT, SAMPLING, TOKENS = (
    "5.7: schedule and run",
    "5.7: count and commit",
    "5.7: who gets a token",
    "5.7: tokens and errors",
)

wrong = functools.partial(ANSWERS.wrong, COUNT)
wrong(
    "nothing counted",
    "what was run is computed now",
    '"classic wrong answers" 1',
    edits={"chunk.request.computed = end": "pass"},
)
wrong("one too many", "what was run is computed now", edits={"+ chunk.count": "+ chunk.count + 1"})
wrong(
    "only the last chunk's tokens", "what was run is computed now", edits={"chunk.start + chunk.count": "chunk.count"}
)
wrong(
    "not committed",
    "so that others find their blocks",
    '"classic wrong answers" 2',
    edits={"self.manager.commit(chunk.request.id, end)": "pass"},
)
wrong(
    "committed but for the last token",
    "so that others find",
    edits={"commit(chunk.request.id, end)": "commit(chunk.request.id, end - 1)"},
)

wrong = functools.partial(ANSWERS.wrong, RUN)
wrong(
    "runner called without _run",
    "the others go on",
    '"classic wrong answers" 4',
    edits={"self._run(step)": "self.runner.run(step, self.manager), {}"},
)
wrong(
    "run twice",
    "a chunk is run twice",
    edits={"logits, failed = self._run(step)": "self._run(step)\n        logits, failed = self._run(step)"},
)

wrong = functools.partial(ANSWERS.wrong, SAMPLING)
wrong(
    "all of the step",
    "a request in the middle of its prompt gets no token",
    '"classic wrong answers" 3',
    edits={"chunk.samples and ": ""},
)
wrong(
    "failed ones too",
    "it is not in sampling",
    '"classic wrong answers" 4',
    edits={" and chunk.request.id not in failed": ""},
)
wrong("newest first", "expected token", edits={"in step.chunks": "in reversed(step.chunks)"})

wrong = functools.partial(ANSWERS.wrong, TOKENS)
wrong(
    "appended by hand",
    "_accept appends a token",
    '"classic wrong answers" 5',
    edits={"outputs.append(self._accept(chunk.request, token, now))": "chunk.request.append(token, now)"},
)
wrong(
    "outputs dropped",
    "_accept appends a token",
    edits={"outputs.append(self._accept(chunk.request, token, now))": "self._accept(chunk.request, token, now)"},
)
wrong(
    "failed ones stay",
    "ends with the reason 'error'",
    edits={'outputs.append(self._end(self.requests[id], "error", error))': "pass"},
)
wrong("another error of failed ones", "its output's error is this text", edits={'"error", error': '"error", now'})
wrong("failed ones by length", "ends with the reason 'error'", edits={'"error", error': '"length"'})
wrong(
    "failed ones get a token",
    "ends with the reason 'error'",
    edits={"if chunk.request.id in failed:\n                continue": "pass"},
)
