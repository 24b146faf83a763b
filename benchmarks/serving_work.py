"""What serving benchmarks share: engines over one runner, timed runs, the least bytes of their steps, agreement.

Bytes: a step reads every weight once, the keys and values of each sequence's past once, and writes those of its new
tokens. Over a memory's bandwidth that is the least time that the step can take, however good its kernels.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from solutions.lab5_serving import BlockManager, Chunk, Engine, ModelRunner, Request, Step, StepRecord
from utils import runtime
from utils.serving import Decoder, ModelConfig, SamplingParams, attend_causally


@dataclass(frozen=True)
class Run:
    """One run of an engine: its output by request, its seconds, and what its steps were."""

    outputs: list[list[int]]
    seconds: float
    steps: list[StepRecord]

    @property
    def tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.outputs))


def blocks_for(requests: Sequence[tuple[int, int]], block_size: int) -> int:
    """Blocks that hold all requests (prompt tokens, new tokens) at once, and a hundredth more."""
    needed = sum(-(-(prompt + new) // block_size) for prompt, new in requests)
    return needed + needed // 50 + 2


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if runtime.HAS_GPU:
        torch.cuda.synchronize(runtime.DEVICE)


def engine_over(runner: ModelRunner, **settings: Any) -> Engine:
    """A new engine, with an empty cache, over a runner that others have used. Prefixes are not reused: the same
    prompts are served again and again, and each run should do all its work."""
    settings = {"prefix_caching": False, "history": None, **settings}
    return Engine(runner.model, num_blocks=runner.num_blocks, block_size=runner.block_size, runner=runner, **settings)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No pause of Python's garbage collector: searching the objects of PyTorch and Triton takes 0.1 to 0.2 s, which
    every running request would wait. What exists now is searched once, here, and then left alone."""
    gc.collect()
    gc.freeze()
    try:
        synchronize()
        yield
    finally:
        gc.unfreeze()


def serve(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> Run:
    """Serve prompts that all come at once, from the first request's arrival to the last token."""
    with undisturbed():
        start = time.perf_counter()
        outputs = engine.generate(prompts, params)
        seconds = time.perf_counter() - start
    return Run([output.tokens for output in outputs], seconds, list(engine.history))


def step_bytes(step: StepRecord, config: ModelConfig, element_size: int) -> int:
    """The least bytes that a step moves. A tied embedding is read whole, as the head; other rows are not counted."""
    tokens = sum(start + count for _, start, count in step.chunks)
    return config.parameters * element_size + tokens * config.kv_bytes_per_token(element_size)


def copy_bandwidth(nbytes: int = 2**32, rounds: int = 10) -> float:
    """Bytes a second that a copy on the GPU reads and writes."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device=runtime.DEVICE).random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return nbytes / sorted(times[2:])[rounds // 2]


def widened(model: Decoder) -> Decoder:
    """The same model in float32: what a bf16 run is compared with."""
    with torch.device("meta"):
        wide = Decoder(model.config)
    weights = {name: weight.float() for name, weight in model.state_dict().items()}
    if model.config.tied_head:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    wide.load_state_dict(weights, assign=True)
    if model.config.tied_head:
        wide.lm_head.weight = wide.embed_tokens.weight
    wide.frequencies = model.frequencies
    return wide.eval().requires_grad_(False)


@torch.no_grad()
def logits_after(model: Decoder, tokens: Sequence[int], last: int = 1) -> torch.Tensor:
    """Logits (last, V) float32 of the next token after each of the ``last`` newest tokens, nothing cached."""
    ids = torch.tensor(tokens, device=model.device)
    hidden = model.hidden(ids, torch.arange(len(tokens), device=model.device), attend_causally)
    return model.logits(hidden[-last:]).float()


def logits_errors(runner: ModelRunner, wide: Decoder, prompts: Sequence[list[int]]) -> dict[str, float]:
    """How far logits are from float32's, ``|x - x32| / |x32|``: the runner's after a prefill and after a decode step,
    and those of the plain decoder in the runner's dtype; the runner is allowed twice the plain decoder's."""
    manager = BlockManager(runner.num_blocks, runner.block_size, prefix_caching=False)
    requests = [Request(f"check-{i}", list(prompt)) for i, prompt in enumerate(prompts)]
    for request in requests:
        manager.allocate(request.id, request.tokens)
    found: list[list[torch.Tensor]] = [[], []]
    # All but the last token, then the last one alone: a ragged prefill without logits, then a decode step.
    runner.run(Step([Chunk(r, 0, len(r.tokens) - 1) for r in requests]), manager)
    found[1] += runner.run(Step([Chunk(r, len(r.tokens) - 1, 1) for r in requests]), manager).float().unbind()
    found[0] += runner.run(Step([Chunk(r, 0, len(r.tokens)) for r in requests]), manager).float().unbind()
    right = [logits_after(wide, r.tokens)[0] for r in requests]
    plain = [logits_after(runner.model, r.tokens)[0] for r in requests]

    def error(rows: Sequence[torch.Tensor]) -> float:
        return max(float((row - true).norm() / true.norm()) for row, true in zip(rows, right, strict=True))

    torch_error = error(plain)
    return {
        "prefill_error": error(found[0]),
        "decode_error": error(found[1]),
        "torch_error": torch_error,
        "allowed": 2 * torch_error + 1e-6,
    }


def token_agreement(wide: Decoder, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> dict[str, float]:
    """What float32 says of tokens that were chosen greedily in less: how many it would have chosen too, and by how much
    at most its own choice has a higher logit than the one taken (where two are nearly equal, rounding decides)."""
    equal, checked, gap = 0, 0, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = logits_after(wide, [*prompt, *output[:-1]], last=len(output))
        taken = torch.tensor(output, device=logits.device)
        best, choice = logits.max(-1)
        equal += int((choice == taken).sum())
        checked += len(output)
        gap = max(gap, float((best - logits.gather(1, taken[:, None])[:, 0]).max()))
    return {"checked": checked, "equal": equal, "largest_gap": gap}


def assert_right(errors: dict[str, float], agreement: dict[str, float], largest_gap: float = 0.25) -> None:
    """Nothing is timed that computes something else.

    Raises:
        AssertionError: logits further from float32's than allowed, or a token chosen that was not nearly the best.
    """
    for kind in ("prefill_error", "decode_error"):
        if not errors[kind] <= errors["allowed"]:
            raise AssertionError(f"{kind} of the logits is {errors[kind]:.2e}, allowed {errors['allowed']:.2e}")
    if not agreement["largest_gap"] <= largest_gap:
        raise AssertionError(
            f"a token was chosen whose float32 logit is {agreement['largest_gap']:.3f} below the best, "
            f"allowed {largest_gap}"
        )
