"""The check of exercise 5.8: positions and mask of a tree, the accepted path, and decoding with them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from utils.checks.core import Exercise, classic, listed
from utils.checks.hidden import Observation, collected

from .scenarios import CheckMismatch, CheckScenario, check_scenarios
from .tree_rules import (
    MASKS,
    PATHS,
    POSITIONS,
    Mistake,
    drawn_choices,
    drawn_tree,
    forked_tree,
    right_mask,
    right_path,
    right_positions,
    same,
)  # fmt: skip
from .tree_scenario import a_single_token, observe_text, trees_are_verified

Answer = Mapping[str, Callable]


def _tree(rng: random.Random, turn: int) -> tuple[list[int], int]:
    """A tree and how many tokens stand before its root; the first one tells all mistakes apart."""
    return (forked_tree(rng), rng.randint(2, 9)) if turn == 0 else (drawn_tree(rng), rng.choice((0, 1, 3, 8)))


def _cause(mistakes: Sequence[Mistake], results: Sequence[object], cases: Sequence[tuple]) -> str:
    """What is said of the first mistake that gives all of these results."""
    for computes, text, number in mistakes:
        if all(same(computes(*case), got) for case, got in zip(cases, results, strict=True)):
            return classic(text, number)
    return ""


def _tensor(name: str, got: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What was returned, its form judged."""
    if not isinstance(got, Tensor) or tuple(got.shape) != shape or got.dtype != dtype:
        shown = f"a tensor of {tuple(got.shape)}, {got.dtype}" if isinstance(got, Tensor) else repr(got)
        raise CheckMismatch(f"{name} gives {shown}", f"expected a tensor of {shape}, {dtype}")
    return got.cpu()


def _results(name: str, function: Callable, cases: Sequence[tuple]) -> list:
    """What a function gives in each case; it must leave its arguments as they are."""
    found = []
    for case in cases:
        given = copy.deepcopy(case)
        found.append(function(*given))
        if given != case:
            raise CheckMismatch(f"{name} changes its arguments in place", "the caller still needs them")
    return found


def _first(results: Sequence, right: Sequence) -> int | None:
    """The first case whose result is wrong."""
    return next((i for i, (got, wanted) in enumerate(zip(results, right, strict=True)) if not same(got, wanted)), None)


# ---- positions and mask
def _drawn(rng: random.Random) -> list[tuple[list[int], int]]:
    """Trees, and how many tokens stand before the root; the first one tells most mistakes apart."""
    more = [(drawn_tree(rng), rng.choice((0, 1, 3, 8))) for _ in range(5)]
    return [(forked_tree(rng), rng.randint(2, 9)), *more]


def _positions(answer: Answer, rng: random.Random) -> None:
    cases = _drawn(rng)
    right = [right_positions(*case) for case in cases]
    found = [
        _tensor("tree_positions", got, (len(parents),), torch.int64)
        for got, (parents, _) in zip(_results("tree_positions", answer["tree_positions"], cases), cases, strict=True)
    ]
    if (wrong := _first(found, right)) is None:
        return
    (parents, past), got, wanted = cases[wrong], found[wrong], right[wrong]
    node = int((got != wanted).nonzero()[0])
    raise CheckMismatch(
        f"node {node} stands at position {int(got[node])}, expected {int(wanted[node])}",
        _cause(POSITIONS, found, cases),
        f"parents {parents}, past {past}: expected {listed(wanted.tolist(), 16)}",
    )


class _FilledMemory(TorchFunctionMode):
    """Memory that nobody has written holds True, not by chance what is right."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> object:
        """Do what PyTorch does, and fill what it leaves unwritten."""
        found = func(*args, **(kwargs or {}))
        return found.fill_(True) if func.__name__ in ("empty", "empty_like", "new_empty") else found


def _masks(answer: Answer, rng: random.Random) -> None:
    cases = _drawn(rng)
    right = [right_mask(*case) for case in cases]
    with _FilledMemory():
        results = _results("tree_mask", answer["tree_mask"], cases)
    found = [
        _tensor("tree_mask", got, (len(parents), past + len(parents)), torch.bool)
        for got, (parents, past) in zip(results, cases, strict=True)
    ]
    if (wrong := _first(found, right)) is None:
        return
    (parents, past), got, wanted = cases[wrong], found[wrong], right[wrong]
    bad = (got != wanted).any(1)
    node = int(bad.nonzero()[0])
    raise CheckMismatch(
        f"node {node} sees {_seen(got[node], past)}, expected {_seen(wanted[node], past)}",
        _cause(MASKS, found, cases),
        f"parents {parents}, past {past}",
        f"rows of the mask: {''.join('X' if each else '.' for each in bad)}   ('.' right, 'X' wrong)",
    )


def _seen(row: Tensor, past: int) -> str:
    """What a row of a mask shows: ``the text and nodes 0 2``."""
    text, nodes = row[:past], row[past:].nonzero().flatten().tolist()
    share = "the text" if text.all() else "no text" if not text.any() else f"{int(text.sum())} of {past} tokens"
    return f"{f'{share} and ' if past else ''}{_nodes(nodes)}"


def _nodes(nodes: list[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {listed(nodes, 16)}" if nodes else "no node"


# ---- the accepted path
def _paths(answer: Answer, rng: random.Random) -> None:
    trees = [forked_tree(rng) for _ in range(12)] + [drawn_tree(rng) for _ in range(8)]
    cases = [(parents, *drawn_choices(rng, parents)) for parents in trees]
    right = [right_path(*case) for case in cases]
    found = _results("accepted_path", answer["accepted_path"], cases)
    for got in found:
        if not isinstance(got, list) or not all(isinstance(node, int) for node in got):
            raise CheckMismatch(f"accepted_path returns {got!r}", "expected a list of ints: the numbers of nodes")
    if (wrong := _first(found, right)) is None:
        return
    parents, tokens, choices = cases[wrong]
    raise CheckMismatch(
        f"the accepted path is {found[wrong]}, expected {right[wrong]}",
        _cause(PATHS, found, cases),
        f"parents {parents}",
        f"tokens  {tokens}",
        f"choices {choices}",
    )


_SCENARIOS = (
    CheckScenario("positions of the nodes", _positions),
    CheckScenario("who sees whom", _masks, times=2),
    CheckScenario("the accepted path", _paths, times=2),
    CheckScenario("greedy text by trees", trees_are_verified, times=3),
    CheckScenario("greedy text from one token on", a_single_token),
)


# ---- hidden cases
@collected
def observe(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Hidden cases: larger trees, other pasts, and texts."""
    rng, answer = random.Random(f"{seed}/5.8"), vars(package)
    trees = [(drawn_tree(rng, rng.randint(1, 24)), rng.randint(0, 20)) for _ in range(6)] + [([-1], 0)]
    yield "tree_positions", [answer["tree_positions"](parents, past) for parents, past in trees]
    yield "tree_mask", [answer["tree_mask"](parents, past) for parents, past in trees]
    given = [(tree, *drawn_choices(rng, tree)) for tree in [drawn_tree(rng, rng.randint(4, 24)) for _ in range(20)]]
    yield "accepted_path", [answer["accepted_path"](*each) for each in given]
    for number in range(2):
        yield from observe_text(answer, rng, f"tree_decode, text {number + 1}")


TREES = Exercise("5.8", "the tree mask", observe=observe, module="tree_mask")


@TREES.checked_by
def check_tree_mask(
    tree_positions: Callable,
    tree_mask: Callable,
    accepted_path: Callable,
    tree_decode: Callable,
    seed: int | None = None,
) -> None:
    """Exercise 5.8: who sees whom in a tree of drafts, which path is accepted, and text by trees.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    check_scenarios(
        TREES,
        {
            "tree_positions": tree_positions,
            "tree_mask": tree_mask,
            "accepted_path": accepted_path,
            "tree_decode": tree_decode,
        },
        _SCENARIOS,
        seed,
        "one pass verifies every path of a tree; the greedy text is the target's own",
    )
