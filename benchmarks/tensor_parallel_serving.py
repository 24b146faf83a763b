"""A model of the shape of Llama 3 8B served by one GPU, and by two that share every layer.

Random weights in bf16; 256 requests come at once, prompts of 100 to 1024 random tokens, 64 new tokens each, greedy. Two
GPUs run lab 6's tensor-parallel engine. ``engines``:

- ``one GPU`` is lab 5's engine, ``one GPU, overlapped`` lab 6's, whose host works a step ahead; both run on each GPU at
  once, so that there is nothing that one of them would do meanwhile;
- ``two GPUs, launched`` launches every kernel and all-reduce from Python, ``two GPUs`` replays decode steps as CUDA
  graphs, and ``two GPUs, overlapped`` also works a step ahead.

All engines run in turns, and each time is that of the slowest rank. ``decode`` is a step of all 256 requests, the
host's time included; ``replayed`` is such a step as its CUDA graph alone, and ``all_reduces`` the sums of a step alone,
launched and as a graph. Before anything is timed, a small model in float32 must give the tokens of one GPU on two. If
graphs cannot be recorded with all-reduces in them, ``graphs`` says why, and what needs them is left out.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import benchmark_cli, ranks, serving_work
from benchmarks.context_parallel import LLAMA_3_8B
from benchmarks.serving_throughput import BLOCK_SIZE, PROMPTS, REQUESTS, TOKEN_BUDGET, draw_prompts
from solutions.lab5_serving import Engine
from solutions.lab5_serving.cuda_graphs import bucket
from solutions.lab6_frontiers import OverlappedEngine, OverlappedRunner
from solutions.lab6_frontiers.tensor_parallel_decoder import RankRecorder, TensorParallelRunner, shard
from solutions.lab6_frontiers.tensor_parallel_engine import TensorParallelEngine
from solutions.lab6_frontiers.tensor_parallel_overlapped import OverlappedTensorEngine, OverlappedTensorRunner
from utils import distributed, timing
from utils.distributed import calls
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each
from utils.serving import Decoder, ModelConfig, SamplingParams
from utils.serving.model import rotary_frequencies
from utils.transformer_math import tensor_parallel_step_bytes

WORLD_SIZE = 2
#: A small model of the same kind, whose tokens are compared in float32.
SMALL = replace(
    LLAMA_3_8B, vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=8, num_kv_heads=4,
    head_dim=32,
)  # fmt: skip
CHECKED_REQUESTS, CHECKED_PROMPTS, CHECKED_TOKENS = 12, (5, 60), 24
#: A token of two GPUs may differ from one GPU's where the two logits are as close as that.
LARGEST_GAP = 1e-3
NEW_TOKENS, QUICK_NEW_TOKENS = 64, 16
RUNS, QUICK_RUNS = 2, 1
REPLAYS, QUICK_REPLAYS = 20, 5

ONE, ONE_OVERLAPPED = "one GPU", "one GPU, overlapped"
LAUNCHED, TWO, TWO_OVERLAPPED = "two GPUs, launched", "two GPUs", "two GPUs, overlapped"
#: What is compared: on two GPUs, on one.
PAIRS = {LAUNCHED: ONE, TWO: ONE, TWO_OVERLAPPED: ONE_OVERLAPPED}
GRAPHS = "recorded"

Results = dict[str, Any]
MakeEngine = Callable[[], Engine]


def random_model(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """A model with random weights on this rank's GPU, the same on all ranks, made there and in ``dtype``.

    Raises:
        AssertionError: ranks have drawn different weights.
    """
    device, before = distributed.device(), torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = Decoder(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.normal_(std=0.02)
    model.frequencies = rotary_frequencies(config).to(device)  # float32 whatever the weights are
    sums = torch.stack([weight.sum(dtype=torch.float64) for weight in model.parameters()])
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if not torch.equal(low, high):
        raise AssertionError("the ranks have drawn different weights")
    return model


def graphs_trial(model: Decoder, control: dist.ProcessGroup) -> str:
    """Whether decode steps can be recorded with their all-reduces: ``GRAPHS``, or what a rank says against it.

    Args:
        control: a group over gloo, for ranks whose GPUs may not be able to talk any more.
    """
    said = GRAPHS
    try:
        runner = TensorParallelRunner(shard(model), 8, BLOCK_SIZE, cuda_graphs=True)
        replay = runner.graphs.prepare(2, 1, 16).replay
        for _ in range(2):
            replay()
        if distributed.device().type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:500]
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, said, group=control)
    return next((each_ for each_ in everyone if each_ != GRAPHS), GRAPHS)


class Engines:
    """What makes the engines over one model.

    The two engines on one GPU share a runner and its cache, and so do the two on two GPUs with graphs.

    Args:
        model: the whole, the same on all ranks.
        blocks: of each runner's cache.
        graphs: whether two GPUs replay decode steps as graphs.
        one_graphs: as for :class:`solutions.lab5_serving.ModelRunner`, on one GPU.
        settings: of all engines.
    """

    def __init__(self, model: Decoder, blocks: int, graphs: bool, one_graphs: bool | None, **settings: Any) -> None:
        settings = {"prefix_caching": False, "history": None, **settings}
        part = shard(model)
        self.one = OverlappedRunner(model, blocks, BLOCK_SIZE, cuda_graphs=one_graphs)
        self.two = OverlappedTensorRunner(part, blocks, BLOCK_SIZE, cuda_graphs=graphs)
        launched = TensorParallelRunner(part, blocks, BLOCK_SIZE)
        self.make: dict[str, MakeEngine] = {
            ONE: functools.partial(Engine, model, runner=self.one, **settings),
            ONE_OVERLAPPED: functools.partial(OverlappedEngine, model, runner=self.one, **settings),
            LAUNCHED: functools.partial(TensorParallelEngine, part, runner=launched, **settings),
            TWO: functools.partial(TensorParallelEngine, part, runner=self.two, **settings),
            TWO_OVERLAPPED: functools.partial(OverlappedTensorEngine, part, runner=self.two, **settings),
        }
        if not graphs:
            del self.make[TWO]


def synchronize() -> None:
    """Wait for this rank's GPU, and for all other ranks."""
    dist.all_reduce(torch.zeros(1, device=distributed.device()))
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()


@calls.unobserved()
def serve(make: MakeEngine, prompts: Sequence[list[int]], params: SamplingParams) -> serving_work.Run:
    """One run of an engine, as this rank sees it: another rank than 0 of a tensor-parallel one brings no tokens."""
    gc.collect()
    gc.disable()  # a pause of the collector would let every request, and the other ranks, wait
    try:
        engine = make()
        synchronize()
        start = time.perf_counter()
        if isinstance(engine, TensorParallelEngine):
            with engine:
                outputs = engine.generate(prompts, params) if engine.leads else engine.follow()
        else:
            outputs = engine.generate(prompts, params)
        seconds = time.perf_counter() - start
    finally:
        gc.enable()
    return serving_work.Run([output.tokens for output in outputs or ()], seconds, list(engine.history))


def decode_seconds(run: serving_work.Run, requests: int) -> float:
    """Mean seconds of a step that gives each of all requests one token.

    Raises:
        AssertionError: there are not two of them, one after the other.
    """
    ends = [step.end for step in run.steps if len(step.chunks) == requests == sum(count for _, _, count in step.chunks)]
    if len(ends) < 2:
        raise AssertionError(f"only {len(ends)} decode steps have all {requests} requests: take more new tokens")
    return (ends[-1] - ends[0]) / (len(ends) - 1)


# ---- what a rank does ------------------------------------------------------------------------------------------------


def checked(config: ModelConfig, graphs: bool, one_graphs: bool | None) -> Results:
    """Tokens of a small model in float32, of two GPUs beside one's.

    Raises:
        AssertionError: on rank 0, if a token differs that rounding does not explain.
    """
    model = random_model(config, torch.float32)
    prompts = draw_prompts(CHECKED_REQUESTS, CHECKED_PROMPTS, config.vocab_size)
    params = SamplingParams(max_new_tokens=CHECKED_TOKENS, ignore_eos=True)
    blocks = serving_work.blocks_for([(len(prompt), CHECKED_TOKENS) for prompt in prompts], BLOCK_SIZE)
    engines = Engines(model, blocks, graphs, one_graphs, max_batch=CHECKED_REQUESTS, token_budget=256)
    outputs = {name: serve(make, prompts, params).outputs for name, make in engines.make.items()}
    found: Results = {"requests": len(prompts), "new_tokens": CHECKED_TOKENS, "same": {}, "largest_gap": 0.0}
    for name in PAIRS:
        if dist.get_rank() == 0 and name in outputs:
            found["same"][name] = sum(mine == one for mine, one in zip(outputs[name], outputs[ONE], strict=True))
            gap = serving_work.token_agreement(model, prompts, outputs[name])["largest_gap"]
            found["largest_gap"] = max(found["largest_gap"], gap)
            ranks.note(f"{name}: float32, {found['same'][name]} of {len(prompts)} requests get one GPU's tokens")
            if gap > LARGEST_GAP:
                raise AssertionError(f"{name}: a token's logit is {gap:.1e} below the best, allowed {LARGEST_GAP:.0e}")
    return found


def sums_of_a_step(config: ModelConfig, rows: int, graphs: bool) -> dict[str, Callable[[], object]]:
    """The all-reduces of a decode step alone, launched from Python and as a CUDA graph."""
    added = torch.zeros((rows, config.hidden_size), dtype=torch.bfloat16, device=distributed.device())

    def launched() -> torch.Tensor:
        for _ in range(2 * config.num_layers):
            dist.all_reduce(added)
        return added

    found: dict[str, Callable[[], object]] = {"launched": launched}
    if graphs:
        found["graph"] = RankRecorder()(launched) if added.is_cuda else launched
    return found


def replays(engines: Engines, requests: int) -> dict[str, Callable[[], object]]:
    """The graphs of a decode step of all requests, with the inputs of the last one that ran in them."""
    found = {}
    for name, runner in ((ONE, engines.one), (TWO, engines.two)):
        keys = [key for key in runner.graphs.recorded if key[:2] == (bucket(requests), 1)]
        found[name] = runner.graphs.prepare(*keys[-1]).replay
    return found


def on_rank(
    config: ModelConfig,
    small: ModelConfig,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    budget: int,
    runs: int,
    replay_rounds: int,
    one_graphs: bool | None,
) -> Results:
    """Everything that one rank measures."""
    ranks.settle()
    with torch.no_grad():
        control = dist.new_group(backend="gloo")
        said = graphs_trial(random_model(small, torch.float32), control)
        ranks.note(f"graphs with all-reduces: {said}")
        graphs = said == GRAPHS
        found: Results = {"graphs": said, "tokens": checked(small, graphs, one_graphs)}
        ranks.release()
        requests = len(prompts)
        blocks = serving_work.blocks_for([(len(prompt), params.max_new_tokens) for prompt in prompts], BLOCK_SIZE)
        model = random_model(config, torch.bfloat16)
        engines = Engines(model, blocks, graphs, one_graphs, max_batch=requests, token_budget=budget)
        ranks.note(f"{config.parameters / 1e9:.2f} billion parameters, {blocks} blocks")
        found |= {"samples": {}, "decode": {}, "outputs": {}, "blocks": blocks}
        for number in range(runs + 1):
            for name, make in engines.make.items():
                run = serve(make, prompts, params)
                step = decode_seconds(run, requests)
                ranks.note(f"{name}: {run.seconds:.3f} s, a decode step {step * 1e3:.2f} ms")
                if number:
                    found["samples"].setdefault(name, []).append(run.seconds)
                    found["decode"].setdefault(name, []).append(step)
                    found["outputs"][name] = run.outputs
        sums = sums_of_a_step(config, requests, graphs)
        found["all_reduces"] = ranks.compare_aligned(sums, warmup=3, rounds=replay_rounds)
        whole_steps = replays(engines, requests) if graphs and engines.one.graphs is not None else {}
        found["replayed"] = whole_steps and ranks.compare_aligned(whole_steps, warmup=2, rounds=replay_rounds)
        del engines, model, make, sums, whole_steps  # graphs end before the process group that they use
        ranks.release()
    return found


# ---- the record ------------------------------------------------------------------------------------------------------

SCHEMA = {
    "dtype": TEXT,
    "world_size": SIZE,
    "model": {"name": TEXT, **each(SIZE, "parameters", "layers", "hidden", "vocabulary")},
    **each(SIZE, "requests", "prompt_tokens", "new_tokens", "token_budget", "blocks", "block_size"),
    "graphs": TEXT,
    "tokens": {**each(SIZE, "requests", "new_tokens"), "same": {str: COUNT}, "largest_gap": NOT_NEGATIVE},
    "engines": {str: {**TIMING, "tokens_per_second": POSITIVE, "decode": TIMING, "decode_tokens_per_second": POSITIVE}},
    "gain": {str: {"over": TEXT, "same": COUNT, "whole": RATIO, "decode": RATIO}},
    "all_reduces": {str: TIMING},
    "step_sent_bytes": SIZE,
    "replayed": {str: TIMING},
}


def compared(of_ranks: Sequence[Results], requests: int, new_tokens: int) -> Results:
    """What each engine reached, and what two GPUs gain over one."""
    whole, decode = (ranks.slowest([found[kind] for found in of_ranks]) for kind in ("samples", "decode"))
    outputs = of_ranks[0]["outputs"]
    engines = {
        name: {
            **whole[name].as_dict(),
            "tokens_per_second": requests * new_tokens / whole[name].median,
            "decode": decode[name].as_dict(),
            "decode_tokens_per_second": requests / decode[name].median,
        }
        for name in whole
    }
    gain = {
        two: {
            "over": one,
            "same": sum(mine == other for mine, other in zip(outputs[two], outputs[one], strict=True)),
            "whole": timing.ratio(whole[one], whole[two]).as_dict(),
            "decode": timing.ratio(decode[one], decode[two]).as_dict(),
        }
        for two, one in PAIRS.items()
        if two in whole
    }
    return {"engines": engines, "gain": gain}


def measure(
    quick: bool = False,
    config: ModelConfig = LLAMA_3_8B,
    small: ModelConfig = SMALL,
    requests: int = REQUESTS,
    lengths: tuple[int, int] = PROMPTS,
    new_tokens: int | None = None,
    token_budget: int = TOKEN_BUDGET,
    one_graphs: bool | None = None,
) -> Results:
    """Everything in the record's schema; ``quick`` takes fewer new tokens and one run of each engine.

    Args:
        small: the model whose tokens are compared in float32.
        lengths: of the prompts, at least and at most.
        one_graphs: whether one GPU replays decode steps as graphs; None: on a GPU.
    """
    new_tokens = new_tokens or (QUICK_NEW_TOKENS if quick else NEW_TOKENS)
    prompts = draw_prompts(requests, lengths, config.vocab_size)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    runs, replay_rounds = (QUICK_RUNS, QUICK_REPLAYS) if quick else (RUNS, REPLAYS)
    found = ranks.launch_briefly(
        on_rank, config, small, prompts, params, token_budget, runs, replay_rounds, one_graphs, world_size=WORLD_SIZE
    )
    return {
        "dtype": "bf16",
        "world_size": WORLD_SIZE,
        "model": {
            "name": "Llama 3 8B shape",
            "parameters": config.parameters,
            "layers": config.num_layers,
            "hidden": config.hidden_size,
            "vocabulary": config.vocab_size,
        },
        "requests": requests,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": new_tokens,
        "token_budget": token_budget,
        "blocks": found[0]["blocks"],
        "block_size": BLOCK_SIZE,
        "graphs": found[0]["graphs"],
        "tokens": found[0]["tokens"],
        **compared(found, requests, new_tokens),
        **{
            kind: {name: t.as_dict() for name, t in ranks.slowest([each_[kind] for each_ in found]).items()}
            for kind in ("all_reduces", "replayed")
        },
        "step_sent_bytes": round(
            tensor_parallel_step_bytes(requests, WORLD_SIZE, config.hidden_size, config.num_layers)
        ),
    }


def table(results: Mapping[str, Any]) -> str:
    """One line an engine, then what two GPUs gain."""
    rows = [
        [
            name,
            f"{found['seconds']:.3f}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['decode']['seconds'] * 1e3:.2f}",
            f"{found['decode_tokens_per_second']:,.0f}",
        ]
        for name, found in results["engines"].items()
    ]
    lines = []
    for two, gain in results["gain"].items():
        times = f"decoding {gain['decode']['ratio']:.3f} times as fast, all {gain['whole']['ratio']:.3f}"
        same = f"{gain['same']} of {results['requests']} requests get the same tokens"
        lines.append(f"{two} over {gain['over']}: {times}; {same}")
    for kind in ("all_reduces", "replayed"):
        times = ", ".join(f"{name} {t['seconds'] * 1e3:.2f} ms" for name, t in results[kind].items())
        lines.append(f"{kind.replace('_', '-')} of a decode step: {times or 'not measured'}")
    same = ", ".join(f"{name} {count}" for name, count in results["tokens"]["same"].items())
    lines.append(f"graphs: {results['graphs']}; float32, same of {results['tokens']['requests']} requests: {same}")
    headings = ["engine", "s", "tokens/s", "decode step ms", "tokens/s"]
    return "\n".join([benchmark_cli.text_table(headings, rows), *lines])


if __name__ == "__main__":
    from benchmarks.tensor_parallel_serving import measure  # a rank imports it by this name

    raise SystemExit(ranks.run_on(WORLD_SIZE, "tensor_parallel_serving", measure, table, SCHEMA))
