"""Serve a model over HTTP: ``python -m solutions.lab5_serving``, then point any OpenAI client at it.

In the folder ``labs``, ``python -m lab5_serving`` serves it by what you have written. ::

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"model": "target", "prompt": "It was the best of times", "max_tokens": 40}'
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from utils import runtime
from utils.serving import MODELS, load_model, load_tokenizer
from utils.serving.server import create_app

from .engine import Engine
from .memory import default_num_blocks
from .runner import ATTENTIONS, ModelRunner
from .speculative_engine import SpeculativeEngine


def create_server(
    folder: Path,
    *,
    name: str | None = None,
    draft: Path | None = None,
    draft_tokens: int = 4,
    attention: str = "triton",
    dtype: torch.dtype | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    max_batch: int = 32,
    **settings: Any,
) -> FastAPI:
    """The server of a model, with the engine of this package behind it.

    Args:
        folder: a Hugging Face folder.
        name: what clients call the model; None: the folder's name.
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
    if drafts:
        settings |= {"draft_tokens": draft_tokens, "draft_runner": runner(drafts[0], 2)}
        engine = SpeculativeEngine(model, drafts[0], runner=runner(model, draft_tokens + 1), **settings)
    else:
        engine = Engine(model, runner=runner(model), **settings)
    return create_app(engine, load_tokenizer(folder), name=name or folder.resolve().name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Load a model and serve it until interrupted."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description="Serve a model over HTTP.")
    parser.add_argument("--model", type=Path, default=MODELS / "target", help="a Hugging Face folder (%(default)s)")
    parser.add_argument("--name", help="what clients call the model (the folder's name)")
    parser.add_argument("--draft", type=Path, help="the folder of a model that drafts (none)")
    parser.add_argument(
        "--attention", choices=ATTENTIONS, default="triton", help="triton: the kernels of this package (%(default)s)"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=32, help="requests in a step (%(default)s)")
    parser.add_argument("--token-budget", type=int, default=512, help="tokens in a step (%(default)s)")
    parser.add_argument("--max-waiting", type=int, default=128, help="requests that may wait (%(default)s)")
    parser.add_argument("--num-blocks", type=int, help="KV blocks (as many as fit)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a KV block (%(default)s)")
    options = vars(parser.parse_args(arguments))
    folder, host, port = options.pop("model"), options.pop("host"), options.pop("port")
    name = options.pop("name") or folder.resolve().name
    app = create_server(folder, name=name, **options)
    print(f"serving {name!r} on http://{host}:{port}/v1/completions", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main()
