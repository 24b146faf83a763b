"""Tokens per pass of the target: trees of the draft head against chains of the draft model, on the course's own models.

Nothing is timed: the figures are counts, from texts that the engines write behind beginnings of chapters. Which trees
are best is decided on beginnings from the training text, what they yield is counted on text that was held out.

- ``acceptance``: how often the head's candidates are accepted behind an accepted parent, by depth and rank.
- ``trees``: for the tree of each size that :func:`grow` makes of that, the tokens per pass that are expected and those
  that were counted, with their standard error. ``chains``: the same of k tokens drafted by the draft model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli
from solutions.lab5_serving.engine import Engine
from solutions.lab5_serving.speculative_engine import SpeculativeEngine
from solutions.lab6_frontiers.draft_tree import expected_tokens, grow
from solutions.lab6_frontiers.tree_engine import TreeEngine
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, each
from utils.serving import MODELS, Decoder, SamplingParams, load_model, load_tokenizer
from utils.serving.heads import DraftHead, load_head
from utils.serving.training.excerpts import excerpt

PROMPTS, PROMPT, NEW = 20, 25, 40  # texts, and tokens of each: given, generated
NODES = (4, 8, 16, 32, 64)
CHAINS = (1, 2, 4, 6)
DEPTH = 6
#: Acceptances by rank that the tree is grown of on which they are measured: it has many ranks and many depths.
GUESS = [[0.45, 0.12, 0.08, 0.05, 0.04, 0.03, 0.03, 0.02]] * DEPTH
WAYS: Mapping[str, SamplingParams] = {
    "temperature 1": SamplingParams(NEW, temperature=1.0, ignore_eos=True),
    "greedy": SamplingParams(NEW, ignore_eos=True),
}


def prompts_of(name: str, count: int) -> list[list[int]]:
    """The first tokens of so many texts of an excerpt, spread over it."""
    tokenizer, texts = load_tokenizer(MODELS / "target"), excerpt(name)
    chosen = torch.linspace(0, len(texts) - 1, count).long().tolist()
    return [tokenizer.encode(texts[index])[:PROMPT] for index in chosen]


def count(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, nodes: int) -> dict[str, float]:
    """Tokens per pass of requests that had a whole draft, ``nodes`` tokens in the pass, and the standard error."""
    for seed, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(**vars(params) | {"seed": seed}))
    found: list[int] = []
    while engine.has_work:
        outputs = engine.step()
        sizes = {id: size for id, first, size in engine.history[-1].chunks if first > 0}
        found += [len(output.new_tokens) for output in outputs if sizes.get(output.id) == nodes]
    passes = torch.tensor(found, dtype=torch.float64)
    return {
        "passes": len(found),
        "tokens_per_pass": float(passes.mean()),
        "error": float(passes.std() / len(found) ** 0.5),
    }


def blocks(prompts: Sequence[Sequence[int]], nodes: int) -> int:
    """Blocks of 16 for all requests and their drafts at once."""
    return len(prompts) * -(-(PROMPT + NEW + nodes) // 16)


def acceptances(
    target: Decoder, head: DraftHead, prompts: Sequence[Sequence[int]], params: SamplingParams, nodes: int
) -> list[list[float]]:
    """By depth and rank, how often a candidate is accepted behind an accepted parent; rows that never increase."""
    tree = grow(GUESS, nodes)
    engine = TreeEngine(target, head, tree, num_blocks=blocks(prompts, nodes), token_budget=1 << 14)
    count(engine, prompts, params, nodes)
    rows = []
    for depth in range(1, tree.depth + 1):
        widest = max(rank for rank, at in zip(tree.ranks, tree.depths, strict=True) if at == depth)
        row: list[float] = []
        for rank in range(widest + 1):
            alike = [n for n in range(1, len(tree)) if (tree.depths[n], tree.ranks[n]) == (depth, rank)]
            share = sum(engine.accepted[n] for n in alike) / max(1, sum(engine.tried[n] for n in alike))
            row.append(min([share, *row[-1:]]))  # the scatter of rare ranks
        rows.append(row)
    return rows


SCHEMA = {
    **each(SIZE, "prompts", "prompt_tokens", "new_tokens", "head_parameters", "draft_parameters"),
    "acceptance": {str: [[NOT_NEGATIVE]]},
    "trees": {
        str: [{**each(SIZE, "nodes", "depth", "passes"), **each(POSITIVE, "expected", "tokens_per_pass"),
               "error": NOT_NEGATIVE}]
    },
    "chains": {str: [{"draft_tokens": COUNT, "passes": SIZE, "tokens_per_pass": POSITIVE, "error": NOT_NEGATIVE}]},
}  # fmt: skip


@torch.no_grad()
def measure(
    quick: bool = False,
    nodes: Sequence[int] = NODES,
    chains: Sequence[int] = CHAINS,
    prompts: int = PROMPTS,
    ways: Mapping[str, SamplingParams] = WAYS,
) -> dict[str, Any]:
    """Everything in the record's schema; ``quick`` takes few texts and one size."""
    if quick:
        nodes, chains, prompts = nodes[:2], chains[1:2], 4
    target, draft = (load_model(MODELS / name, dtype="float32") for name in ("target", "draft"))
    head = load_head(MODELS / "heads", target)
    training, held_out = (prompts_of(name, prompts) for name in ("training", "held_out"))
    shares = {way: acceptances(target, head, training, params, max(nodes)) for way, params in ways.items()}
    trees: dict[str, list[dict[str, Any]]] = {}
    for way, params in ways.items():
        trees[way] = []
        for size in nodes:
            tree = grow(shares[way], size)
            pool = {"num_blocks": blocks(held_out, size), "token_budget": 1 << 14}
            found = count(TreeEngine(target, head, tree, **pool), held_out, params, len(tree))
            expected = expected_tokens(tree, shares[way])
            trees[way].append({"nodes": len(tree), "depth": tree.depth, "expected": expected, **found})
    drafted = {
        way: [
            {"draft_tokens": k}
            | count(
                SpeculativeEngine(target, draft, draft_tokens=k, num_blocks=blocks(held_out, k)),
                held_out,
                params,
                k + 1,
            )
            for k in chains
        ]
        for way, params in ways.items()
    }
    return {
        "prompts": prompts,
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "head_parameters": sum(weight.numel() for weight in head.parameters()),
        "draft_parameters": draft.config.parameters,
        "acceptance": shares,
        "trees": trees,
        "chains": drafted,
    }


def table(results: dict[str, Any]) -> str:
    """Acceptances by rank; tokens per pass of trees and of chains."""
    parts = []
    for way, rows in results["acceptance"].items():
        shown = [[depth, *(f"{share:.3f}" for share in row)] for depth, row in enumerate(rows, 1)]
        width = max(map(len, shown))
        headings = [f"{way}: depth", *(f"rank {rank}" for rank in range(width - 1))]
        parts.append(benchmark_cli.text_table(headings, [[*row, *[""] * (width - len(row))] for row in shown]))
        trees = [
            [f"tree of {each['nodes']}", each["depth"], f"{each['expected']:.2f}", f"{each['tokens_per_pass']:.2f}",
             f"{each['error']:.2f}"]
            for each in results["trees"][way]
        ]  # fmt: skip
        chains = [
            [f"draft model, k = {each['draft_tokens']}", each["draft_tokens"], "", f"{each['tokens_per_pass']:.2f}",
             f"{each['error']:.2f}"]
            for each in results["chains"][way]
        ]  # fmt: skip
        parts.append(benchmark_cli.text_table([way, "depth", "expected", "tokens per pass", "+-"], trees + chains))
    return "\n\n".join(parts)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("draft_trees", measure, table, SCHEMA, needs_gpu=False))
