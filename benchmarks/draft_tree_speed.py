"""Tokens per second of trees of the draft head, of chains of the draft model, and of plain decoding: the shipped pair.

Texts are written behind beginnings that were held out of training, in bf16, by lab 5's fused layers and CUDA graphs.
The trees are those that the record ``draft_trees`` says yield most; ``tokens_per_pass`` counts the tokens of a request
in a pass of the target that verified its whole draft. All engines run in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli, draft_trees, serving_work
from solutions.lab5_serving import Engine, ModelRunner
from solutions.lab5_serving.speculative_engine import SpeculativeEngine
from solutions.lab6_frontiers.draft_tree import grow
from solutions.lab6_frontiers.tree_engine import TreeEngine
from solutions.lab6_frontiers.tree_runner import TreeRunner
from utils import records, runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING, each
from utils.serving import MODELS, SamplingParams, load_model
from utils.serving.heads import load_head

NEW, BLOCK_SIZE = 160, 16
BATCHES = (1, 16)
NODES = (8, 16, 32)
CHAINS = (2, 4)
RUNS, QUICK_RUNS = 2, 1

SCHEMA = {
    "dtype": TEXT,
    **each(SIZE, "prompt_tokens", "new_tokens"),
    "speeds": [
        {
            "way": TEXT,
            "batch": SIZE,
            "engine": TEXT,
            "drafted": {"kind": TEXT, "tokens": SIZE},
            **TIMING,
            **each(POSITIVE, "tokens_per_second", "tokens_per_pass"),
            **RATIO,
        }
    ],
}  # fmt: skip
MakeEngine = Callable[[], Engine]


def makers(
    batch: int,
    acceptance: Sequence[Sequence[float]],
    dtype: torch.dtype | None,
    settings: Mapping[str, Any],
    nodes: Sequence[int] = NODES,
    chains: Sequence[int] = CHAINS,
) -> dict[str, tuple[str, int, MakeEngine]]:
    """By name: what is drafted, how many tokens go through a pass per request, and what makes an engine."""
    target, draft = (load_model(MODELS / name, dtype=dtype).to(runtime.DEVICE) for name in ("target", "draft"))
    head = load_head(MODELS / "heads", target)
    longest = draft_trees.PROMPT + NEW + max((*nodes, *chains)) + 1
    blocks = batch * -(-longest // BLOCK_SIZE)
    shared = {"max_batch": batch, "token_budget": 1 << 13, "prefix_caching": False}

    def runner(kind: type[ModelRunner], model: Any, *chunks: int) -> ModelRunner:
        return kind(model, blocks, BLOCK_SIZE, graph_chunks=chunks, **settings)

    plain = runner(ModelRunner, target)
    found: dict[str, tuple[str, int, MakeEngine]] = {
        "plain": ("nothing", 1, lambda: Engine(target, runner=plain, **shared))
    }
    for k in chains:
        pair = runner(ModelRunner, target, k + 1), runner(ModelRunner, draft, 2)
        found[f"draft model, k = {k}"] = ("model", k + 1, lambda k=k, pair=pair: SpeculativeEngine(
            target, draft, draft_tokens=k, runner=pair[0], draft_runner=pair[1], **shared))  # fmt: skip
    for size in nodes:
        tree = grow(acceptance, size)
        own = runner(TreeRunner, target, len(tree))
        found[f"tree of {size}"] = ("head", len(tree), lambda tree=tree, own=own: TreeEngine(
            target, head, tree, runner=own, **shared))  # fmt: skip
    return found


def serve(make: MakeEngine, prompts: Sequence[list[int]], params: SamplingParams, nodes: int) -> tuple[float, float]:
    """Seconds of some requests from their arrival to the last token, and tokens per pass with a whole draft."""
    engine = make()
    each_params = [SamplingParams(**vars(params) | {"seed": seed}) for seed in range(len(prompts))]
    run = serving_work.serve(engine, prompts, each_params)
    gained, passes = 0, 0
    known: dict[str, int] = {}
    for step in run.steps:
        for id, first, size in step.chunks:
            if id in known and known[id][1] == nodes:
                gained, passes = gained + first - known[id][0], passes + 1
            known[id] = first, size if first else 0
    return run.seconds, gained / max(1, passes)


@torch.no_grad()
def measure(
    quick: bool = False,
    batches: Sequence[int] = BATCHES,
    nodes: Sequence[int] = NODES,
    chains: Sequence[int] = CHAINS,
    new_tokens: int = NEW,
    runs: int | None = None,
    ways: Mapping[str, SamplingParams] = draft_trees.WAYS,
    dtype: torch.dtype | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything in the record's schema; ``quick`` runs each engine once.

    Args:
        dtype: of both models; None: as they are stored.
        settings: of the runners.
    """
    runs = runs or (QUICK_RUNS if quick else RUNS)
    table = records.load("draft_trees").results["acceptance"]
    speeds = []
    for batch in batches:
        prompts = draft_trees.prompts_of("held_out", batch)
        for way, params in ways.items():
            params = SamplingParams(**vars(params) | {"max_new_tokens": new_tokens})
            engines = makers(batch, table[way], dtype, settings or {}, nodes, chains)
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            per_pass: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(runs + 1):
                for name, (_, size, make) in engines.items():
                    took, gained = serve(make, prompts, params, size)
                    if number:
                        seconds[name].append(took)
                        per_pass[name].append(gained)
            timed = {name: timing.summarize(own) for name, own in seconds.items()}
            speeds += [
                {"way": way, "batch": batch, "engine": name, "drafted": {"kind": kind, "tokens": size},
                 **timed[name].as_dict(), "tokens_per_second": batch * new_tokens / timed[name].median,
                 "tokens_per_pass": sum(per_pass[name]) / runs, **timing.ratio(timed["plain"], timed[name]).as_dict()}
                for name, (kind, size, _) in engines.items()
            ]  # fmt: skip
    return {
        "dtype": str(dtype or load_model(MODELS / "target").dtype).removeprefix("torch."),
        "prompt_tokens": draft_trees.PROMPT,
        "new_tokens": new_tokens,
        "speeds": speeds,
    }


def table(results: Mapping[str, Any]) -> str:
    """A line per engine, batch and way of sampling."""
    rows = [
        [f"{row['way']}, {row['batch']} requests", row["engine"], f"{row['tokens_per_pass']:.2f}",
         f"{row['tokens_per_second']:,.0f}", f"{row['ratio']:.2f}"]
        for row in results["speeds"]
    ]  # fmt: skip
    return benchmark_cli.text_table(["requests", "drafts", "tokens per pass", "tokens/s", "x plain"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("draft_tree_speed", measure, table, SCHEMA))
