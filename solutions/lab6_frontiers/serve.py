"""Lab 5's server with what lecture 18 adds to its engine: a host that works ahead, shared beginnings, a draft head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from solutions.lab5_serving.engine import Engine
from solutions.lab5_serving.memory import default_num_blocks
from solutions.lab5_serving.runner import ModelRunner
from utils import records, runtime
from utils.serving import MODELS, Decoder, load_model
from utils.serving.heads import load_head

from .draft_tree import MOST_NODES, grow
from .overlapped_engine import OverlappedEngine
from .overlapped_runner import OverlappedRunner
from .shared_prefix_runner import SharedPrefixRunner
from .tree_engine import TreeEngine
from .tree_runner import TreeRunner

#: The name by which ``draft`` asks for the head that comes with the course's target.
HEADS = "heads"


class OverlappedSharedPrefixRunner(OverlappedRunner, SharedPrefixRunner):
    """Both: the newest tokens come from the device, and what requests have in common is read once."""


def create_engine(
    folder: Path,
    *,
    overlap: bool = False,
    shared_prefix: bool = False,
    draft: str | Path | None = None,
    tree_nodes: int = 16,
    attention: str = "triton",
    dtype: torch.dtype | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    max_batch: int = 32,
    **settings: Any,
) -> Engine:
    """The engine of a model with some of these extensions; it reports no log probabilities.

    Args:
        folder: a Hugging Face folder.
        overlap: the host prepares a step while the device computes the one before.
        shared_prefix: a decode step reads the blocks that requests have in common once.
        draft: the folder of a draft head made for the model, or "heads": that of the course's target.
        tree_nodes: of the tree that the head fills for each request, the root included; grown for the acceptances that
            were recorded for the course's head.
        attention, dtype, num_blocks, block_size, max_batch, settings: as for
            :func:`solutions.lab5_serving.serve.create_engine`.

    Raises:
        ValueError: drafts together with one of the others, or a tree that is too large.
    """
    if draft and (overlap or shared_prefix):
        raise ValueError("a draft head goes with neither overlap nor shared_prefix: it decides how long each step is")
    if not 1 <= tree_nodes <= MOST_NODES:
        raise ValueError(f"tree_nodes must be between 1 and {MOST_NODES}, got {tree_nodes}")
    model = load_model(folder, dtype=dtype or runtime.pick(cpu=torch.float32, gpu=None)).to(runtime.DEVICE)
    num_blocks = num_blocks or default_num_blocks(model, block_size, max_batch)
    settings |= {"max_batch": max_batch, "history": 1000}
    if draft:
        head = MODELS / HEADS if str(draft) == HEADS else Path(draft)
        return _with_head(model, head, tree_nodes, num_blocks, block_size, attention, settings)
    runners: dict[tuple[bool, bool], type[ModelRunner]] = {
        (False, False): ModelRunner,
        (False, True): SharedPrefixRunner,
        (True, False): OverlappedRunner,
        (True, True): OverlappedSharedPrefixRunner,
    }
    runner = runners[overlap, shared_prefix](model, num_blocks, block_size, attention=attention)
    return (OverlappedEngine if overlap else Engine)(model, runner=runner, **settings)


def _with_head(
    model: Decoder, folder: Path, nodes: int, num_blocks: int, block_size: int, attention: str, settings: dict[str, Any]
) -> TreeEngine:
    tree = grow(records.load("draft_trees").results["acceptance"]["temperature 1"], nodes)
    runner = TreeRunner(model, num_blocks, block_size, attention=attention, graph_chunks=[len(tree)])
    return TreeEngine(model, load_head(folder, model), tree, runner=runner, **settings)
