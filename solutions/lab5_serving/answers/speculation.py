"""Wrong answers to exercise 5.6, each with one mistake, and what the check must say of it: edits of plain answers."""

from __future__ import annotations

import functools

from .right import ANSWERS

RESIDUAL, SAMPLE, DROP = (
    "5.6: the residual distribution",
    "5.6: accept, replace or add",
    "5.6: drop what was rejected",
)

wrong = functools.partial(ANSWERS.wrong, RESIDUAL)
wrong("in float32", "expected torch.float64", edits={".double()": ".float()"})
wrong(
    "difference in float32",
    "before the difference, not its result",
    edits={
        "target_probs.double() - draft_probs.double()": "target_probs.float() - draft_probs.float()",
        "return torch.where(total == 0, target_probs.double(), rest)": (
            "return torch.where(total == 0, target_probs.float(), rest).double()"
        ),
    },
)
wrong(
    "not renormalised",
    "is not divided by its sum",
    '"classic wrong answers" 3',
    edits={"rest = left / total": "rest = left"},
)
wrong(
    "not clipped",
    "p - q is not clipped",
    edits={"rest = left / total": "rest = (target_probs.double() - draft_probs.double()) / total"},
)
wrong("absolute", "this is |p - q|", edits={"torch.clamp(": "torch.abs(", ", min=0)": ")"})
wrong(
    "upside down",
    "p and q stand in each other's place",
    edits={
        "target_probs.double() - draft_probs.double()": "draft_probs.double() - target_probs.double()",
        "total == 0, target_probs": "total == 0, draft_probs",
    },
)
wrong(
    "nothing left",
    "0 / 0 is no number",
    edits={"return torch.where(total == 0, target_probs.double(), rest)": "return rest"},
)
wrong("sum of all", "each row is divided by its own sum", edits={"left.sum(dim=-1, keepdim=True)": "left.sum()"})
wrong("the target", "the target's distribution itself", edits={"rest = left / total": "rest = target_probs.double()"})
wrong("in place", "changes its arguments in place", edits={"left = ": "target_probs -= draft_probs\n        left = "})

wrong = functools.partial(ANSWERS.wrong, SAMPLE)
KEEP = "result.append(int(draw(rest, uniforms[-1])))"
wrong(
    "ratio upside down",
    "the acceptance ratio is upside down",
    '"classic wrong answers" 1',
    edits={
        "float(target_probs[i, token]) / float(draft_probs[i, token])": (
            "float(draft_probs[i, token]) / max(1e-9, float(target_probs[i, token]))"
        )
    },
)
wrong(
    "from the target",
    "replaced from the target's distribution",
    edits={"residual(target_probs[i], draft_probs[i])": "target_probs[i]"},
)
wrong("from the draft", "replaced from", edits={"residual(target_probs[i], draft_probs[i])": "draft_probs[i]"})
wrong(
    "no bonus",
    "it is free",
    '"classic wrong answers" 4',
    edits={"        result.append(int(draw(target_probs[-1], uniforms[-1])))": ""},
)
wrong(
    "bonus of the row before", "row k", edits={"draw(target_probs[-1]": "draw(target_probs[max(0, len(drafted) - 1)]"}
)
wrong("goes on", "behind", '"classic wrong answers" 5', edits={"            return result\n": ""})
wrong(
    "rejected kept",
    '"classic wrong answers" 5',
    edits={"rest = residual": "result.append(token)\n            rest = residual"},
)
wrong("not replaced", '"classic wrong answers"', edits={KEEP: "pass"})
wrong("only likelier", "a token is accepted if p >= q", edits={"float(uniforms[i]) < min(1.0, ratio)": "ratio >= 1"})
wrong(
    "probability of the target",
    "with probability p: min(1, p/q)",
    edits={"min(1.0, ratio)": "float(target_probs[i, token])"},
)
wrong("one number", "one number decides on all", edits={"float(uniforms[i])": "float(uniforms[0])"})
wrong("number used again", "also draws its replacement", edits={KEEP: "result.append(int(draw(rest, uniforms[i])))"})
wrong(
    "row ahead",
    "row i of the target judges drafted token i",
    edits={
        "target_probs[i, token]": "target_probs[i + 1, token]",
        "residual(target_probs[i],": "residual(target_probs[i + 1],",
    },
)
wrong(
    "another generator",
    "global random numbers",
    '"classic wrong answers" 7',
    edits={"float(uniforms[i])": "float(torch.rand(()))"},
)
wrong("likeliest", "the likeliest token of the residual", edits={KEEP: "result.append(int(rest.argmax()))"})
wrong("tensors", "expected a list of ints", edits={KEEP: "result.append(draw(rest, uniforms[-1]))"})

wrong = functools.partial(ANSWERS.wrong, DROP)
wrong(
    "nothing dropped",
    "a rejected token stays in the cache",
    '"classic wrong answers" 8',
    edits={"model.keep(len(tokens) - 1)": "pass"},
)
wrong("one too many kept", "a rejected token stays in the cache", edits={"len(tokens) - 1": "len(tokens)"})
wrong("target alone", "a rejected token stays in the cache", edits={"(checker, drafter)": "(checker,)"})
wrong("draft alone", "a rejected token stays in the cache", edits={"(checker, drafter)": "(drafter,)"})
wrong(
    "too much dropped",
    "again, with the token that it has read there",
    "more is dropped than was rejected",
    edits={"len(tokens) - 1": "max(0, len(tokens) - 2)"},
)
wrong("all dropped", "more is dropped than was rejected", edits={"len(tokens) - 1": "0"})
