"""Serve a model over HTTP: ``python -m solutions.lab5_serving``, then point any OpenAI client at it.

In the folder ``labs``, ``python -m lab5_serving`` serves it by what you have written. ::

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"model": "target", "prompt": "It was the best of times", "max_tokens": 40}'
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
         -d '{"model": "target", "messages": [{"role": "user", "content": "Where is the whale?"}], "stream": true}'
    curl http://127.0.0.1:8000/metrics

A model without a chat template, as the two that come with the course, gets the course's plain one
(:mod:`utils.serving.chat_template`). Ctrl-C or SIGTERM stops the server: requests under way may finish within
``--drain-seconds``, new ones are refused with 503.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from fastapi import FastAPI

from utils.serving import MODELS
from utils.serving.shutdown import run

from .runner import ATTENTIONS
from .serve import create_server


def command_line() -> argparse.ArgumentParser:
    """What may be said on the command line; a package that serves another engine adds to it."""
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
    parser.add_argument("--engine-process", action="store_true", help="run the engine in a process of its own")
    parser.add_argument(
        "--drain-seconds", type=float, default=20.0, help="for requests under way when it stops (%(default)s)"
    )
    return parser


def main(
    arguments: Sequence[str] | None = None,
    parser: argparse.ArgumentParser | None = None,
    create: Callable[..., FastAPI] = create_server,
) -> None:
    """Load a model and serve it until interrupted."""
    options = vars((parser or command_line()).parse_args(arguments))
    folder, host, port = options.pop("model"), options.pop("host"), options.pop("port")
    drain_seconds = options.pop("drain_seconds")
    name = options.pop("name") or folder.resolve().name
    app = create(folder, name=name, **options)
    print(f"serving {name!r} on http://{host}:{port}/v1/completions and /v1/chat/completions", flush=True)
    run(app, host=host, port=port, drain_seconds=drain_seconds)


if __name__ == "__main__":
    main()
