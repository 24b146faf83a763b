"""What the ranks do for test_lab6_tensor_parallel.py, and what they bring back. All of it in one launch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from serving_runs import BLOCK_SIZE, held, request, right_logits
from serving_runs import tiny_model as model_of_family
from token_identity import WatchedRunner, draw_workload, play, tiny_model

from solutions.lab5_serving import BlockManager, Chunk, Step
from solutions.lab6_frontiers import tensor_parallel_engine
from solutions.lab6_frontiers.rank_channel import RankChannel
from solutions.lab6_frontiers.tensor_parallel_decoder import TensorParallelDecoder, TensorParallelRunner, shard
from solutions.lab6_frontiers.tensor_parallel_engine import TensorParallelEngine
from utils.distributed import CollectiveLog, record_collectives
from utils.distributed.calls import unheard
from utils.serving import MODELS, Decoder, SamplingParams, load_model

#: Cut over 2 ranks: tied head and norms of heads; every bias that there is.
CUT_FAMILIES = ("qwen3", "llama")
RUNNERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"attention": "triton", "fused": True},
    "in buckets": {"cuda_graphs": True},
}
PROMPT = list(range(2, 40))
SMALL_POOL = {"num_blocks": 10, "block_size": 4, "max_batch": 3, "token_budget": 6}
PARAMS = SamplingParams(max_new_tokens=20)
LONG_PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)
#: How long a rank that does not answer is waited for.
SHORT_TIMEOUT = timedelta(seconds=2)


def many_heads() -> Decoder:
    """:func:`token_identity.tiny_model` with heads for 4 ranks."""
    model = tiny_model()
    wide = Decoder(replace(model.config, num_heads=8, num_kv_heads=4)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            if weight.dim() == 2:
                scale = 1 if "embed" in name else (4 if "lm_head" in name else 1) / weight.shape[1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return wide


# ---- the decoder -----------------------------------------------------------------------------------------------------


@dataclass
class Steps:
    """Two steps of a runner: a prompt beside a shorter one, then a token of each."""

    differences: list[float]  # largest, of the logits from those of the whole model, relative to the largest logit
    logs: list[CollectiveLog]


def two_steps(model: Decoder, options: dict[str, Any]) -> Steps:
    runner = TensorParallelRunner(shard(model), 24, BLOCK_SIZE, **options)
    manager, asks = BlockManager(24, BLOCK_SIZE), [request("a", 11), request("b", 3)]
    held(manager, *asks)
    found = Steps([], [])
    for _ in range(2):
        chunks = [Chunk(ask, ask.computed, ask.pending) for ask in asks]
        with record_collectives() as log:
            logits = runner.run(Step(chunks), manager)
        right = torch.stack([right_logits(model, ask.tokens)[-1] for ask in asks])
        found.differences.append(float((logits - right).abs().max() / right.abs().max()))
        found.logs.append(log)
        for ask in asks:
            ask.computed = len(ask.tokens)
            ask.append(5, 0.0)
            manager.append(ask.id, [5])
    return found


@dataclass
class Memory:
    """Bytes of the layers' matrices, and of one token's keys and values in the cache, of a rank and of the whole."""

    matrices: tuple[int, int]
    cache: tuple[int, int]
    parameters: tuple[int, int]  # counted by the configuration, and really there


def memory(model: Decoder) -> Memory:
    part = shard(model)
    runner = TensorParallelRunner(part, 7, BLOCK_SIZE)
    caches = runner.key_cache.nbytes + runner.value_cache.nbytes
    whole = 7 * BLOCK_SIZE * model.config.kv_bytes_per_token(model.dtype.itemsize)
    return Memory(
        tuple(sum(w.nbytes for w in each.layers.parameters() if w.dim() == 2) for each in (part, model)),
        (caches, whole),
        (part.config.parameters, sum(weight.numel() for weight in part.parameters())),
    )


# ---- the engine ------------------------------------------------------------------------------------------------------


class WatchedTensorRunner(WatchedRunner, TensorParallelRunner):
    """A rank's runner that looks at what it is asked to write."""


@dataclass
class Played:
    """A random workload: what happened (on rank 0), and every step as a rank saw it."""

    counts: Counter[str] | None
    steps: list[tuple]


def engine_steps(engine: TensorParallelEngine) -> list[tuple]:
    return [(step.chunks, step.waiting, step.used, step.preempted, step.finished) for step in engine.history]


def played(seed: int, model: Decoder) -> Played:
    """Rank 0 plays a workload as it would with any engine; the others follow."""
    workload, engines = draw_workload(seed, model), []
    for ask in workload.asks:
        ask.fails_at = None  # a failure inside the model ends this engine
    settings = dict(workload.settings)
    sizes = settings.pop("num_blocks"), settings.pop("block_size")

    def make(model: Decoder, runner: WatchedRunner | None = None, **settings: Any) -> TensorParallelEngine:
        own = WatchedTensorRunner(shard(model), *sizes, {})
        engines.append(TensorParallelEngine(model, runner=own, **settings))
        return engines[0]

    counts = None
    if dist.get_rank() == 0:
        counts = play(workload, model, make)
        engines[0].close()
    else:
        make(model, **settings).follow()
        assert engines[0].manager.num_used == 0 and not engines[0].requests, "a rank has kept something"
        engines[0].manager.check()
    return Played(counts, engine_steps(engines[0]))


def served(make: Callable[[], TensorParallelEngine], prompts: list[list[int]], params: SamplingParams) -> Any:
    """What rank 0's engine generates."""
    with make() as engine:
        return engine.generate(prompts, params) if engine.leads else engine.follow()


def counted_step() -> tuple[list[int], CollectiveLog]:
    """The tokens of each step of a small engine, and all collectives of these steps."""
    model = tiny_model()
    with TensorParallelEngine(model, num_blocks=30, block_size=4, token_budget=64) as engine:
        if engine.leads:
            engine.add(PROMPT[:5], SamplingParams(max_new_tokens=4, ignore_eos=True))
            engine.add(PROMPT[:9], SamplingParams(max_new_tokens=2, ignore_eos=True))
        with record_collectives() as log:
            if not engine.leads:
                engine.follow()
            while engine.leads and engine.has_work:
                engine.step()
            engine.close()
        return [sum(step.tokens.values()) for step in engine.history], log


class Disturbed(TensorParallelRunner):
    """Computes other logits than it should."""

    def __init__(self, disturb: Callable[[torch.Tensor, list[Chunk]], None], model: TensorParallelDecoder) -> None:
        super().__init__(model, 40, 4)
        self.disturb = disturb

    def run(self, step: Step, manager: BlockManager, rows: str = "last") -> torch.Tensor:
        logits = super().run(step, manager, rows)
        self.disturb(logits, step.chunks)
        return logits


def negated_on_other_ranks(logits: torch.Tensor, chunks: list[Chunk]) -> None:
    if dist.get_rank() > 0:
        logits.neg_()


def nan_for_token_60(logits: torch.Tensor, chunks: list[Chunk]) -> None:
    logits[[60 in chunk.request.prompt for chunk in chunks if chunk.samples]] = torch.nan


def disturbed(disturb: Callable, prompts: list[list[int]]) -> tuple[list[tuple], list[tuple]]:
    """How each request of rank 0's engine ended, and the steps of a rank."""
    model = tiny_model()
    ends = []
    with TensorParallelEngine(model, runner=Disturbed(disturb, shard(model))) as engine:
        if engine.leads:
            for prompt in prompts:
                engine.add(prompt, PARAMS)
            outputs = [output for _ in range(40) for output in engine.step()]
            ends = [(o.id, o.finish_reason, o.error, o.request.output) for o in outputs if o.finished]
        else:
            engine.follow()
        return sorted(ends), engine_steps(engine)


def agreed_blocks() -> int:
    """Blocks of an engine on ranks with room for 40, 39, ... blocks."""
    original = tensor_parallel_engine.default_num_blocks
    tensor_parallel_engine.default_num_blocks = lambda *sizes: 40 - dist.get_rank()
    try:
        with TensorParallelEngine(tiny_model()) as engine:
            if not engine.leads:
                engine.follow()
            return engine.runner.num_blocks
    finally:
        tensor_parallel_engine.default_num_blocks = original


def messages(sizes: list[int]) -> list[Any]:
    """What is heard of messages of these sizes in bytes and more."""
    channel = RankChannel()
    if dist.get_rank() == 0:
        for size in sizes:
            channel.say((size, b"x" * size))
        return []
    return [channel.hear() for _ in sizes]


# ---- errors ----------------------------------------------------------------------------------------------------------


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def misused() -> dict[str, str]:
    """What a rank is told that calls what is not for it."""
    model, rank = tiny_model(), dist.get_rank()
    said = {
        "settings": error_of(lambda: TensorParallelEngine(model, num_blocks=30, token_budget=64 + rank)),
        "other settings": error_of(lambda: TensorParallelEngine(model, **({"prefix_caching": False} if rank else {}))),
        "whole": error_of(lambda: TensorParallelRunner(model, 30)),
    }
    with TensorParallelEngine(model, num_blocks=30, clock=lambda: rank, history=rank + 1) as engine:
        if engine.leads:
            said["follow"] = error_of(engine.follow)
            said["prompt"] = error_of(lambda: engine.add([99]))
        else:
            said["add"], said["abort"] = error_of(lambda: engine.add([1])), error_of(lambda: engine.abort("a"))
            said["step"] = error_of(engine.step)
            engine.follow()
    if rank == 0:
        said["closed"] = error_of(lambda: engine.add([1]))
        said["aborted"] = str(engine.abort("a"))
    return said


def failing(rank: int, make: type[TensorParallelEngine] = TensorParallelEngine) -> str:
    """What a rank is told when the model fails on one rank alone in the third step, and the process lives on."""
    group = dist.new_group()
    engine = make(tiny_model(), group=group, num_blocks=30, timeout=10)
    original, steps = engine.runner.run, []

    def run(*arguments: Any) -> torch.Tensor:
        steps.append(arguments)
        if len(steps) == 3:  # before, a timeout is only for a machine that is loaded
            if dist.get_rank() == rank:
                raise ArithmeticError("injected")
            dist.distributed_c10d._set_pg_timeout(SHORT_TIMEOUT, group)
        return original(*arguments)

    engine.runner.run = run
    with unheard():  # who waits in vain is what this is about
        if engine.leads:
            said = error_of(lambda: engine.generate([PROMPT], LONG_PARAMS))
            assert error_of(engine.step) == said and error_of(lambda: engine.add([1])) == said
        else:
            said = error_of(engine.follow)
    return said


def deaf() -> str:
    """What rank 0 is told when the others do not listen, and live on."""
    engine = TensorParallelEngine(tiny_model(), num_blocks=30, timeout=5)
    with unheard():
        return error_of(lambda: engine.generate([PROMPT], PARAMS)) if engine.leads else ""


# ---- all of it -------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What a rank brings back."""

    steps: dict[tuple[str, str], Steps]
    memory: dict[str, Memory]
    unchanged: bool  # the whole model, by being cut
    played: dict[int, Played]
    shipped: Any
    shipped_model: Memory
    counted: tuple[list[int], CollectiveLog]
    negated: Any
    nan: tuple[list[tuple], list[tuple]]
    blocks: int
    heard: list[Any]
    misused: dict[str, str]
    failing: list[str]
    deaf: str


MESSAGE_SIZES = [0, *range(960, 1030), 5000]


def everything(seeds: list[int], prompts: list[list[int]]) -> Found:
    torch.set_grad_enabled(False)
    model, before = tiny_model(), copy.deepcopy(tiny_model().state_dict())
    families = {family: model_of_family(family) for family in CUT_FAMILIES}
    shipped = load_model(MODELS / "target", dtype="float32")
    return Found(
        steps={
            (family, name): two_steps(whole, options)
            for family, whole in families.items()
            for name, options in RUNNERS.items()
        },
        memory={family: memory(whole) for family, whole in families.items()},
        played={seed: played(seed, model) for seed in seeds},
        unchanged=all(torch.equal(before[name], weight) for name, weight in model.state_dict().items()),
        shipped=served(lambda: TensorParallelEngine(shipped, **SMALL_POOL), prompts, PARAMS),
        shipped_model=memory(shipped),
        counted=counted_step(),
        negated=disturbed(negated_on_other_ranks, [[3, 4], [5]])[0],
        nan=disturbed(nan_for_token_60, [[3, 4], [5, 60], [6]]),
        blocks=agreed_blocks(),
        heard=messages(MESSAGE_SIZES),
        misused=misused(),
        failing=[failing(rank) for rank in range(2)],
        deaf=deaf(),
    )


def workloads(seeds: list[int]) -> dict[int, Played]:
    """Random workloads, on 2 ranks or on 4."""
    torch.set_grad_enabled(False)
    model = tiny_model() if dist.get_world_size() == 2 else many_heads()
    return {seed: played(seed, model) for seed in seeds}
