"""Ten times more requests than the server can take, a third of them from bad clients: ``python -m tests.overload``.

First as many requests as the server can answer are measured; then ten times that rate comes for five minutes, and with
it clients that hang up amid a stream or while they wait, prompts longer than the pool, invalid parameters, and requests
that fail inside the model. Every answer must be the text of plain generation or a clear error, and afterwards memory is
what it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from solutions.lab5_serving import Engine, ModelRunner
from utils.notebooks import ROOT
from utils.serving import MODELS, SamplingParams, generate, load_model, load_tokenizer
from utils.serving.metrics import percentile
from utils.serving.server import create_app, serving

BLOCKS, BLOCK_SIZE, BATCH, WAITING = 32, 16, 8, 16
#: A prompt that holds these tokens one after another breaks the model.
POISON = [91, 92, 93]
BEGINNINGS = (
    "It was", "In the beginning", "My dear", "She looked at him and said", "The old man", "At last the ship", "When I",
    "There is nothing so",
)  # fmt: skip


class Fragile(ModelRunner):
    """Breaks on poison, as a model breaks on what nobody thought of."""

    def run(self, step: Any, *arguments: Any, **options: Any) -> Any:
        for chunk in step.chunks:
            if chunk.request.prompt[:3] == POISON:
                raise ArithmeticError("poison")
        return super().run(step, *arguments, **options)


@dataclass(frozen=True)
class Outcome:
    """What came of it. Rates in requests a second, memory in bytes."""

    sustainable: float
    offered: float
    seconds: float
    sent: int
    answered: int
    met: dict[str, dict[str, int]]
    wrong: list[str]
    first_token: dict[str, float]
    latency: dict[str, float]
    tokens_per_second: float
    stats: dict[str, Any]
    memory_before: int
    memory_after: int
    leaks: list[str]

    def __str__(self) -> str:
        lines = [
            f"sustainable {self.sustainable:.1f} requests/s; offered {self.offered:.1f} requests/s for "
            f"{self.seconds:.0f} s: {self.sent} requests ({self.offered / self.sustainable:.1f}x)",
            *(
                f"  {kind:26}" + ", ".join(f"{n} {what}" for what, n in sorted(m.items()))
                for kind, m in self.met.items()
            ),
            f"answered {self.answered}, each with its own text ({self.answered / self.seconds:.1f} requests/s, a "
            f"{self.sent / max(self.answered, 1):.1f}th of what was asked, "
            f"{self.tokens_per_second:.0f} tokens/s); first token p50 {self.first_token['p50']:.2f} s, "
            f"p99 {self.first_token['p99']:.2f} s; whole answer p50 {self.latency['p50']:.2f} s, "
            f"p99 {self.latency['p99']:.2f} s",
            f"engine: {self.stats}",
            f"memory of the process {self.memory_before / 2**20:.0f} MiB before, {self.memory_after / 2**20:.0f} after",
            *(f"LEAK {leak}" for leak in self.leaks),
            *(f"WRONG {wrong}" for wrong in self.wrong),
        ]
        return "\n".join(lines)


def templates(model: Any, tokenizer: Any, count: int, tokens: int) -> list[dict[str, Any]]:
    """What is asked, and the text that plain generation gives."""
    asked = []
    for i in range(count):
        text, params = BEGINNINGS[i % len(BEGINNINGS)], {"temperature": 0.8 * (i % 2), "seed": i}
        length = tokens // 2 + tokens * i // count
        right = generate(model, tokenizer.encode(text), SamplingParams(max_new_tokens=length, **params)).tokens
        body = {"prompt": text, "max_tokens": length, **params}
        asked.append({"body": body, "text": tokenizer.decode(right), "tokens": len(right)})
    return asked


def ask(plan: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Let the clients loose, in a process of their own, and read their books."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(plan | changes), encoding="utf-8")
        command = [sys.executable, "-m", "tests.overload_clients", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the clients broke:\n{done.stderr}")
    return json.loads(done.stdout)


def run(
    seconds: float = 300.0, *, factor: float = 10.0, warm_up: float = 15.0, tokens: int = 64, seed: int = 0
) -> Outcome:
    """Overload a server; see the module's text. ``warm_up`` seconds measure the sustainable rate."""
    # In float32: bfloat16 has many ties for the likeliest token, and another batch may break them in another way.
    model, tokenizer = load_model(MODELS / "target", dtype=torch.float32), load_tokenizer(MODELS / "target")
    runner = Fragile(model, BLOCKS, BLOCK_SIZE)
    engine = Engine(model, runner=runner, max_batch=BATCH, token_budget=128, max_waiting=WAITING, history=1000)
    app = create_app(engine, tokenizer, name="target")
    process = psutil.Process()
    with serving(app) as url:
        plan = {
            "url": url, "model": "target", "seed": seed, "templates": templates(model, tokenizer, 8, tokens),
            "too_long": [7] * (BLOCKS * BLOCK_SIZE + 50), "poison": POISON, "workers": BATCH + WAITING // 2,
        }  # fmt: skip
        calm = ask(plan, rate=0, seconds=warm_up)
        sustainable = sum(m.get("answered", 0) for m in calm["met"].values()) / calm["seconds"]
        before, threads = process.memory_info().rss, len(_threads())
        storm = ask(plan, rate=factor * sustainable, seconds=seconds)
        leaks = _left(url, engine, app.state.worker, threads)
        after, stats = process.memory_info().rss, engine.stats()
        first = plan["templates"][0]
        again = httpx.post(f"{url}/v1/completions", json={"model": "target", **first["body"]}, timeout=60)
        if again.status_code != 200 or again.json()["choices"][0]["text"] != first["text"]:
            leaks.append(f"afterwards the server answers {again.status_code}: {again.text[:200]}")
    shown = {p: {f"p{q}": percentile(storm[p], q) for q in (50, 99)} for p in ("first_token", "latency")}
    return Outcome(
        sustainable, storm["sent"] / storm["seconds"], storm["seconds"], storm["sent"],
        sum(m.get("answered", 0) for m in storm["met"].values()), storm["met"], calm["wrong"] + storm["wrong"],
        shown["first_token"], shown["latency"], storm["tokens"] / storm["seconds"], stats, before, after, leaks,
    )  # fmt: skip


def _threads() -> list[str]:
    """Names of the threads that run, but for the pools that the event loop keeps for the next request."""
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if not name.startswith(("asyncio_", "uvloop_", "AnyIO worker")))


def _left(url: str, engine: Engine, worker: Any, threads: int, patience: float = 30.0) -> list[str]:
    """What is still there when all clients are gone; what they left is given a moment to end."""
    limit = time.monotonic() + patience
    while time.monotonic() < limit and (engine.has_work or engine.manager.num_used):
        httpx.get(f"{url}/health")
    engine.manager.check()
    now = _threads()
    found = {
        "requests": len(engine.requests),
        "waiting": len(engine.scheduler.waiting),
        "running": len(engine.scheduler.running),
        "blocks": engine.manager.num_used,
        "listeners": len(worker._listeners),
        "commands": len(worker._commands),
        "pending": worker._pending,
        "threads (" + ", ".join(now) + ")": max(0, len(now) - threads),
    }
    lost = {"free blocks": BLOCKS - engine.manager.num_free}
    return [f"{count} {what}" for what, count in (found | lost).items() if count]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it, print what came of it; 0 if nothing leaked and every answer was right or a clear error."""
    parser = argparse.ArgumentParser(prog="python -m tests.overload", description="Overload the server.")
    parser.add_argument("--seconds", type=float, default=300.0, help="of overload (%(default)s)")
    parser.add_argument("--factor", type=float, default=10.0, help="times the sustainable load (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    outcome = run(options.seconds, factor=options.factor, seed=options.seed)
    print(outcome)
    return int(bool(outcome.wrong or outcome.leaks))


if __name__ == "__main__":
    sys.exit(main())
