"""What a wrong gradient, or a wrong step, is: the sum, one rank's own, a part that nobody sent.

Held against the gradients that one process computes of each rank's rows. Explains in the order in which most is said
by least: one reason for everything, then which parameters, then which elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from utils.checks.problem import Problem
from utils.checks.ranks.scenarios import RankObservation

from .tiny_models import Reference, TinyTraining

#: The parameter that two layers of the tiny model share.
SHARED = "first.weight"
Named = Mapping[str, Tensor | None]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def same(got: Tensor | None, expected: Tensor | None) -> bool:
    """Whether two gradients agree; no gradient is not the same as zeros."""
    if got is None or expected is None:
        return got is None and expected is None
    return got.shape == expected.shape and bool(torch.isclose(got.float(), expected.float(), **TOLERANCE).all())


def kind_of(got: Tensor | None, name: str, rank: int, reference: Reference) -> str:
    """What a rank's gradient of a parameter is, in a word."""
    right, ranks = reference.mean[name], len(reference.local)
    if same(got, right):
        return "right"
    if got is None:
        return "missing"
    if right is None:
        return "zeros" if not got.any() else "made up"
    own = reference.local[rank][name]
    candidates = {
        "sum": right * ranks,
        "divided twice": right / ranks,
        "own": own,
        "own divided": None if own is None else own / ranks,
        "zeros": torch.zeros_like(right),
        "mean of weights": reference.start[name],
        "doubled": right * 2,
    }
    for kind, value in candidates.items():
        if value is not None and same(got, value):
            return kind
    pieces = torch.stack([torch.zeros_like(right) if of[name] is None else of[name] for of in reference.local]).float()
    for kind, value in {"own": pieces, "own divided": pieces / ranks}.items():
        if torch.isclose(got.float(), value, **TOLERANCE).any(0).all():
            return kind  # of the rank in whose shard an element lies
    return "other"


#: kind -> (what it is, number in the lists of classic wrong answers by exercise)
SAYINGS = {
    "sum": "this is the sum over the ranks: the mean is a part in N of it",
    "divided twice": "the mean is divided by N once more",
    "own": "this is the gradient of the rank's own rows: no collective has reached it",
    "own divided": "the rank's own gradient is divided by N, and never summed",
    "zeros": "there are zeros where a gradient belongs: it was cleared, or is read from a place that was never filled",
    "mean of weights": "these are the weights: a hook is handed the parameter, its gradient is parameter.grad",
    "missing": "there is no gradient, although a rank has one: it is the mean of what all ranks have",
    "made up": "unused on all ranks: expected grad None; zeros would still trigger weight decay",
    "doubled": "it is counted twice: a parameter that two layers share is one parameter",
    "added to itself": "it is counted twice: if it was reduced into self.gradients[k], nothing is left to add to it",
}
#: What is said of zeros in place of a step: whether a gradient of zeros has led to them is not seen.
_NO_STEP = "no step is taken where one belongs: the gradient is zeros or None there, or no piece holds these elements"


def judge_gradients(
    found: Sequence[Named], reference: Reference, numbers: Mapping[str, int], last_bucket: Sequence[str] = ()
) -> Problem | None:
    """Find what is wrong in the gradients of all ranks.

    Args:
        found: of each rank, by name.
        reference: what they are held against.
        numbers: kind -> its number in the exercise's classic wrong answers.
        last_bucket: names in the order in which parameters were made: the first of them are in the last bucket.
    """
    kinds = [
        {name: kind_of(of[name], name, rank, reference) for name in reference.mean} for rank, of in enumerate(found)
    ]
    wrong = {name for of in kinds for name, kind in of.items() if kind != "right"}
    if not wrong:
        return None
    rank = next(k for k, of in enumerate(kinds) if any(kind != "right" for kind in of.values()))
    bad = [name for name in reference.mean if kinds[rank][name] != "right"]
    kind = kinds[rank][bad[0]]
    details = [_line(name, found[rank][name], reference.mean[name], kinds[rank][name], rank) for name in bad[:4]]
    if len(bad) > 4:
        details.append(f"... and {len(bad) - 4} more parameters")
    headline = f"rank {rank} has a wrong gradient for {len(bad)} of {len(reference.mean)} parameters"
    usual = [k for k in (kinds[rank][name] for name in bad) if k != "other"]
    same_kind = max(set(usual), key=usual.count) if usual else kind
    cause = SAYINGS.get(same_kind, "") if 2 * usual.count(same_kind) >= len(bad) else ""  # else it explains too little
    if same_kind == "doubled" and bad != [SHARED]:
        same_kind = "added to itself"
        cause = SAYINGS[same_kind] if same_kind in numbers and len(usual) == usual.count("doubled") else ""
    if same_kind == "own" and last_bucket and 0 < len(bad) < len(reference.mean) and set(bad) <= set(last_bucket):
        cause, same_kind = ("the last bucket is never sent: it does not get full, but the backward pass ends", "last")
    number = numbers.get(same_kind)
    pointer = f': see "classic wrong answers" {number}' if cause and number else ""
    return Problem(headline, cause + pointer, tuple(details))


def _line(name: str, got: Tensor | None, expected: Tensor | None, kind: str, rank: int) -> str:
    if got is None or expected is None:
        show = ["None" if value is None else f"a gradient of norm {value.norm():.4g}" for value in (got, expected)]
        return f"{name}: {show[0]}, expected {show[1]}"
    bad = ~torch.isclose(got.float(), expected.float(), **TOLERANCE)
    index = bad.flatten().nonzero()[0].item()
    values = got.flatten()[index].item(), expected.flatten()[index].item()
    return f"{name}: {int(bad.sum())} of {bad.numel()} elements, [{index}] is {values[0]:.5g}, expected {values[1]:.5g}"


def judge_steps(
    after: Sequence[Named], reference: Reference, numbers: Mapping[str, int], rate: float = 1.0, scale: float = 1.0
) -> Problem | None:
    """Find what is wrong in the weights of all ranks after one step of SGD: start - rate * scale * mean gradient.

    The step taken shows the gradient that was used, and which elements were stepped at all.
    """
    used: list[dict[str, Tensor | None]] = []
    for of in after:
        step = {
            name: _step(reference.start[name], of[name], reference.mean[name], rate * scale) for name in reference.mean
        }
        used.append({name: None if reference.mean[name] is None and not v.any() else v for name, v in step.items()})
    if all(same(of[name], reference.mean[name]) for of in used for name in reference.mean):
        return None
    if problem := _not_everywhere(used, reference, numbers):
        return problem
    problem = judge_gradients(used, reference, numbers)
    if problem is None:
        return None
    headline = problem.headline.replace("has a wrong gradient for", "took a wrong step for")
    cause = problem.cause.replace(SAYINGS["zeros"], _NO_STEP)
    details = tuple(line if line.startswith("...") else f"step of {line}" for line in problem.details)
    return Problem(headline, cause, details)


def _step(start: Tensor, after: Tensor, right: Tensor | None, rate: float) -> Tensor:
    """The gradient that a step used; what only the rounding of the weights hides is taken to be right."""
    step = (start.double() - after.double()) / rate
    if right is not None:
        near = (step - right.double()).abs() * rate < 4e-7 * start.double().abs().clamp_min(1)
        step = torch.where(near, right.double(), step)
    return step.float()


def _not_everywhere(used: Sequence[Named], reference: Reference, numbers: Mapping[str, int]) -> Problem | None:
    """Elements that some ranks, or all, have not stepped while the others are right."""
    names = [name for name in reference.mean if reference.mean[name] is not None]
    right = torch.cat([reference.mean[name].flatten().float() for name in names])
    takes = [
        torch.cat([(torch.zeros_like(reference.mean[n]) if of[n] is None else of[n]).flatten().float() for n in names])
        for of in used
    ]
    fine = torch.stack([torch.isclose(take, right, **TOLERANCE) for take in takes])
    still = torch.stack([take.abs() < 1e-7 for take in takes]) & (right.abs() > 1e-5)
    if not (fine | still).all():
        return None
    if fine.any(0).all() and still.any():
        lines = [f"rank {k}: {int(row.sum())} of {row.numel()} elements have moved" for k, row in enumerate(~still)]
        return Problem(
            "the ranks have different weights after a step",
            _numbered("each rank has stepped its shard, and the new weights were never gathered", numbers, "gather"),
            tuple(lines),
        )
    never = still.all(0)
    if never.any():
        index = int(never.nonzero()[0])
        if never.all():
            cause = _numbered(
                "the gradients that reach the optimizer are zeros, or it has no gradient, or no element, to step with; "
                "or it takes no step",
                numbers,
                "zeros",
            )
            return Problem("the step moves no element, on no rank", cause)
        return Problem(
            f"{int(never.sum())} of {never.numel()} elements are never stepped, on no rank",
            _numbered(
                "the shards do not cover every element, or a piece gets no gradient: where does each begin and end?",
                numbers,
                "cover",
            ),
            (_place(index, names, reference),),
        )
    return None


def _place(index: int, names: Sequence[str], reference: Reference) -> str:
    for name in names:
        size = reference.mean[name].numel()
        if index < size:
            return f"the first is element {index} of {size} of {name}"
        index -= size
    return ""


def _numbered(text: str, numbers: Mapping[str, int], key: str) -> str:
    return f'{text}: see "classic wrong answers" {numbers[key]}' if key in numbers else text


def judge_training(
    observations: Sequence[RankObservation], training: TinyTraining, stale: str = "", *, steps: int,
    users: tuple[int, ...], accumulation: int = 1, numbers: Mapping[str, int] = MappingProxyType({}),
) -> Problem | None:  # fmt: skip
    """Hold "losses" (means over the ranks) and the final "weights" of all ranks against one process.

    ``stale`` is what to say when the losses are right until what an earlier backward pass left behind can count;
    ``numbers`` as in :func:`judge_gradients`.
    """
    expected, weights = training.trained(len(observations), steps, users, accumulation)
    for rank, observed in enumerate(observations):
        for name in ("unused", "frozen"):
            if not torch.allclose(observed.value["weights"][name].float(), weights[name].float(), rtol=1e-6):
                cause = (
                    "a parameter without gradient on any rank must stay as it is: no weight decay, and no other "
                    "parameter's step reaches into it"
                )
                cause = _numbered(cause, numbers, "made up") if name == "unused" else cause
                shrunk = _shrunk(observed.value["weights"][name], weights[name])
                return Problem(f"after training, {name} on rank {rank} is not as it was", cause if shrunk else "")
    losses = [sum(step) / len(step) for step in zip(*(seen.value["losses"] for seen in observations), strict=True)]
    for step, (mine, one) in enumerate(zip(losses, expected, strict=True)):
        if abs(mine - one) > 1e-4 * abs(one) + 1e-7:
            updates = step // accumulation
            cause = stale if updates > (accumulation == 1) else ""
            return Problem(f"the loss of step {step} is {mine:.6g}, one process has {one:.6g}", cause)
    after = [seen.value["weights"] for seen in observations]
    for rank, of in enumerate(after):
        for name, one in weights.items():
            if not torch.allclose(of[name].float(), one.float(), rtol=2e-4, atol=2e-5):
                worst = (of[name].float() - one.float()).abs().max().item()
                moved = "" if any(not torch.equal(of[name], other[name]) for other in after) else " (all ranks agree)"
                return Problem(
                    f"after training, {name} on rank {rank} differs from one process by {worst:.2g}{moved}",
                )
    return None


def _shrunk(after: Tensor, before: Tensor) -> bool:
    """Whether a weight is what it was times a factor below 1, as weight decay alone leaves it."""
    after, before = after.double(), before.double()
    factor = float((after * before).sum() / before.square().sum())
    return 0 < factor < 1 and torch.allclose(after, factor * before, rtol=1e-4, atol=1e-7)
