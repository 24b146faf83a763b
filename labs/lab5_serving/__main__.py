"""Serve a model over HTTP: ``python -m solutions.lab5_serving``, then point any OpenAI client at it.

::

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"model": "target", "prompt": "It was the best of times", "max_tokens": 40}'
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import uvicorn

from utils import runtime
from utils.serving import MODELS, load_model, load_tokenizer
from utils.serving.server import create_app

from .engine import Engine


def main(arguments: Sequence[str] | None = None) -> None:
    """Load a model and serve it until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m solutions.lab5_serving", description="Serve a model over HTTP.")
    parser.add_argument("--model", type=Path, default=MODELS / "target", help="a Hugging Face folder (%(default)s)")
    parser.add_argument("--name", help="what clients call the model (the folder's name)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=32, help="requests in a step (%(default)s)")
    parser.add_argument("--token-budget", type=int, default=512, help="tokens in a step (%(default)s)")
    parser.add_argument("--max-waiting", type=int, default=128, help="requests that may wait (%(default)s)")
    parser.add_argument("--num-blocks", type=int, help="KV blocks (as many as fit)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a KV block (%(default)s)")
    options = parser.parse_args(arguments)
    dtype = runtime.pick(cpu=torch.float32, gpu=None)  # a GPU serves what the checkpoint holds
    model = load_model(options.model, dtype=dtype).to(runtime.DEVICE)
    engine = Engine(
        model,
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        max_batch=options.max_batch,
        token_budget=options.token_budget,
        max_waiting=options.max_waiting,
        history=1000,
    )
    name = options.name or options.model.resolve().name
    app = create_app(engine, load_tokenizer(options.model), name=name)
    print(f"serving {name!r} on http://{options.host}:{options.port}/v1/completions", flush=True)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main()
