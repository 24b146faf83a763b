"""Wrong answers to exercise 5.1, each with one mistake, and what the check must say of it: edits of plain answers."""

from __future__ import annotations

import functools

from .right import ANSWERS

POSITIONS, KEEP, SEE, STEP = (
    "5.1: position ids",
    "5.1: keep keys and values",
    "5.1: what each query sees",
    "5.1: one step",
)

wrong = functools.partial(ANSWERS.wrong, POSITIONS)
wrong("restart", "positions restart at 0", '"classic wrong answers" 1', edits={"arange(n, n + count)": "arange(count)"})
wrong("from one", "positions count from 0", edits={"arange(n, n + count)": "arange(n + 1, n + count + 1)"})
wrong("one early", "positions start one too early", edits={"arange(n, n + count)": "arange(n - 1, n + count - 1)"})
wrong(
    "longest past",
    "every sequence has a past of its own",
    edits={"arange(n, n + count)": "arange(count) + int(self.lengths.max())"},
)
wrong(
    "same place",
    "all new tokens of a sequence stand at the same place",
    edits={"arange(n, n + count)": "full((count,), n)"},
)

wrong = functools.partial(ANSWERS.wrong, KEEP)
wrong("from the start", "the past is overwritten", edits={"n : n + count": ":count"})
wrong("one too far", "slot lengths[b] = ", edits={"n : n + count": "n + 1 : n + 1 + count"})
wrong("one layer", "each layer keeps its own", edits={"[layer, b": "[0, b"})
wrong("keys twice", "the values' place holds the keys", edits={"= v[b]": "= k[b]"})
wrong(
    "one length",
    "every sequence has a past of its own",
    edits={"n : n + count": "end - count : end"},
)
wrong(
    "sequences in a row",
    "sequences (B, 1) and slots (B, T)",
    instead="""
        self.keys[layer, torch.arange(batch), self.positions(count)] = k
        self.values[layer, torch.arange(batch), self.positions(count)] = v
    """,
)
wrong("first token alone", "nothing is kept there", edits={"n : n + count] = k[b]": "n] = k[b, 0]"})
wrong(
    "advances",
    "every layer of a step has the same past",
    edits={
        "self.lengths.tolist()": "(self.lengths - count).tolist()",
        "for b, n": "self.lengths = self.lengths + count\n        for b, n",
    },
    also={SEE: {"self.lengths.tolist()": "(self.lengths - count).tolist()"}},
)

wrong = functools.partial(ANSWERS.wrong, SEE)
wrong("no mask", "no slot is hidden", edits={": n + t + 1": ":"})
wrong("future", "a query sees the tokens after it", edits={": n + t + 1": ": n + count"})
wrong("not itself", "a query does not see its own token", edits={": n + t + 1": ": n + t"})
wrong("one too many", "one slot too many is visible", edits={": n + t + 1": ": n + t + 2"})
wrong("past alone", "only the past is visible", edits={": n + t + 1": ": n"})
wrong("no past", "the past is invisible", edits={": n + t + 1": "n : n + t + 1"})
wrong("longest", "the longest one's is visible in all", edits={": n + t + 1": ": end - count + t + 1"})
wrong("from slot 0", "the mask starts at slot 0", edits={": n + t + 1": ": t + 1"})
wrong("upside down", "the mask is upside down", edits={"zeros": "ones", "True": "False", "bool)": "bool)"})

wrong = functools.partial(ANSWERS.wrong, STEP)
wrong("padded row", "the last *real* row", '"classic wrong answers" 6', edits={"int(n) - 1": "-1"})
wrong(
    "padding counts",
    "padding counts as tokens",
    edits={"advance(counts)": "advance(torch.full_like(counts, step.shape[1]))"},
)
wrong("never advances", "the cache does not move on", edits={"cache.advance(counts)": "pass"})
wrong(
    "advances before",
    "after the model has read",
    edits={"        cache.advance(counts)\n": "", "scores =": "cache.advance(counts)\n        scores ="},
)
wrong("advances twice", "the cache moves on too far", edits={"cache.advance(counts)": "cache.advance(2 * counts)"})
wrong(
    "no cache",
    "text that is in the cache goes through the model again",
    instead="""
        def whole(layer, q, k, v):
            n = q.shape[1]
            visible = torch.ones(n, n, dtype=torch.bool).tril().expand(len(prompts), n, n)
            return masked_attention(q, k, v, visible)

        texts_now = [[*prompt, *text] for prompt, text in zip(prompts, texts)]
        step, counts = padded(texts_now)
        scores = model(step, torch.arange(step.shape[1]).expand(len(prompts), -1), whole)
        tokens = torch.stack([scores[b, int(n) - 1].argmax() for b, n in enumerate(counts)])
        """,
)
wrong("least likely", "brings token", edits={"argmax": "argmin"})
