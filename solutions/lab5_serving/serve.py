"""From a folder to a server: the engine of this package, and what HTTP needs around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI

from utils import runtime
from utils.serving import load_model, load_tokenizer
from utils.serving.chat_template import load_chat_template
from utils.serving.engine_process import EngineProcess
from utils.serving.server import create_app

from .engine import Engine
from .logprobs import scored
from .memory import default_num_blocks
from .runner import ModelRunner
from .speculative_engine import SpeculativeEngine


def create_engine(
    folder: Path,
    *,
    draft: Path | None = None,
    draft_tokens: int = 4,
    attention: str = "triton",
    dtype: torch.dtype | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    max_batch: int = 32,
    **settings: Any,
) -> Engine:
    """The engine of a model, which also reports log probabilities.

    Args:
        folder: a Hugging Face folder.
        draft: the folder of a model with the same vocabulary, which drafts ``draft_tokens`` at a time; None: no drafts.
        attention: ``"triton"`` (the kernels of this package) or ``"torch"`` (on a CPU several times as fast).
        dtype: of the models; None: float32 on a CPU, on a GPU what the folder holds.
        num_blocks, block_size: of the cache; None: as many blocks as fit.
        max_batch: requests in a step.
        settings: of the :class:`Engine`.
    """
    dtype = dtype or runtime.pick(cpu=torch.float32, gpu=None)
    model, *drafts = (load_model(path, dtype=dtype).to(runtime.DEVICE) for path in (folder, draft) if path)
    num_blocks = num_blocks or default_num_blocks(model, block_size, max_batch)

    def runner(of: torch.nn.Module, *chunks: int) -> ModelRunner:
        return ModelRunner(of, num_blocks, block_size, attention=attention, graph_chunks=chunks)

    settings |= {"max_batch": max_batch, "history": 1000}
    if not drafts:
        return scored(Engine)(model, runner=runner(model), **settings)
    settings |= {"draft_tokens": draft_tokens, "draft_runner": runner(drafts[0], 2)}
    return scored(SpeculativeEngine)(model, drafts[0], runner=runner(model, draft_tokens + 1), **settings)


def create_server(
    folder: Path,
    *,
    name: str | None = None,
    engine_process: bool = False,
    create: Callable[..., Engine] = create_engine,
    **options: Any,
) -> FastAPI:
    """The server of a model, with the engine of this package behind it.

    Args:
        folder: a Hugging Face folder.
        name: what clients call the model; None: the folder's name.
        engine_process: the engine runs in a process of its own instead of a thread.
        create: makes the engine; one with the arguments of :func:`create_engine`, perhaps more.
        options: of ``create``.
    """
    make = partial(create, folder, **options)
    return create_app(
        EngineProcess(make) if engine_process else make(),
        load_tokenizer(folder),
        name=name or folder.resolve().name,
        chat_template=load_chat_template(folder),
    )
