"""Several engines that serve the same requests in turn: what the benchmarks of lecture 18's extensions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import gpu_idle, serving_work
from solutions.lab5_serving import Engine, ModelRunner
from solutions.lab6_frontiers import OverlappedEngine, OverlappedRunner
from utils import hardware, runtime, timing
from utils.record_schemas import COUNT, POSITIVE, RATIO, SIZE, TIMING
from utils.serving import ModelConfig, SamplingParams

#: Decode steps under the profiler.
TRACED = 20
#: What :func:`result` returns, for a benchmark's schema.
RESULT = {
    **TIMING,
    "tokens_per_second": POSITIVE,
    "steps": SIZE,
    "decode": {"steps": SIZE, "seconds": POSITIVE},
    "mixed": {"steps": COUNT},
    "idle": gpu_idle.IDLE,
}
#: What :func:`ratio` returns.
TIMES = RATIO

MakeEngine = Callable[[], Engine]


def engine_over(runner: ModelRunner, **settings: Any) -> Engine:
    """A new engine over a runner, with overlap if the runner is made for it; prefixes are not reused by default."""
    if not isinstance(runner, OverlappedRunner):
        return serving_work.engine_over(runner, **settings)
    return OverlappedEngine(runner.model, runner=runner, **{"prefix_caching": False, "history": None, **settings})


def served(
    engines: Mapping[str, MakeEngine],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    runs: int,
    prepare: Callable[[Engine], None] = lambda engine: None,
) -> dict[str, list[serving_work.Run]]:
    """Each engine's runs, in turns after one of each that does not count; ``prepare`` is not timed."""
    found: dict[str, list[serving_work.Run]] = {name: [] for name in engines}
    for number in range(runs + 1):
        for name, make in engines.items():
            engine = make()
            prepare(engine)
            before = len(engine.history)
            run = serving_work.serve(engine, prompts, params)
            if number:
                found[name].append(serving_work.Run(run.outputs, run.seconds, run.steps[before:]))
    return found


def decoding(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> Engine:
    """The engine amid its decode steps: every prompt is computed."""
    for prompt in prompts:
        engine.add(prompt, params)
    while any(not request.output for request in engine.requests.values()):
        engine.step()
    for _ in range(3):
        engine.step()
    return engine


def idle(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> dict[str, Any] | None:
    """How long the GPU idles in decode steps of all requests (:mod:`.gpu_idle`); None without a GPU."""
    if not runtime.HAS_GPU:
        return None
    decoding(engine, prompts, params)
    found = gpu_idle.measure(engine.step, min(TRACED, params.max_new_tokens // 2))
    for id in list(engine.requests):
        engine.abort(id)
    while engine.has_work:
        engine.step()
    return found


def result(runs: Sequence[serving_work.Run], idle: Mapping[str, Any] | None) -> dict[str, Any]:
    """Seconds of an engine's runs, the median's tokens per second, and the steps of the last one."""
    timed = timing.summarize([run.seconds for run in runs])
    steps = runs[-1].steps
    decode = [step for step in steps if sum(count for _, _, count in step.chunks) == len(step.chunks)]
    # Steps overlap, so a step's time is that between its end and the end of the one before.
    ends = [step.end for step in decode]
    return {
        **timed.as_dict(),
        "tokens_per_second": runs[-1].tokens / timed.median,
        "steps": len(steps),
        "decode": {"steps": len(decode), "seconds": ends[-1] - ends[0]},
        "mixed": {"steps": len(steps) - len(decode)},
        "idle": idle,
    }


def ratio(slow: Sequence[serving_work.Run], fast: Sequence[serving_work.Run]) -> dict[str, float]:
    """How many times as fast the second one is."""
    return timing.ratio(*(timing.summarize([run.seconds for run in runs]) for runs in (slow, fast))).as_dict()


def moved(steps: Sequence[Any], config: ModelConfig, element_size: int) -> int:
    """The least bytes of some steps (:func:`.serving_work.step_bytes`)."""
    return sum(serving_work.step_bytes(step, config, element_size) for step in steps)


def bandwidths() -> dict[str, float]:
    """Bytes per second of this GPU's memory: by its data sheet (``peak``), and of a copy (``copy``)."""
    gpu = hardware.this_gpu() or hardware.gpu("H200")
    return {
        "peak": gpu.memory_bandwidth,
        "copy": serving_work.copy_bandwidth() if runtime.HAS_GPU else gpu.memory_bandwidth,
    }


def idle_shares(idle: Mapping[str, Any]) -> str:
    """The GPU's idle time as a short text."""
    between, within = (idle[where] / idle["seconds"] for where in ("between", "within"))
    return (
        f"a decode step {idle['seconds'] / idle['steps'] * 1e3:.2f} ms, the GPU idle between steps {between:.1%}, "
        f"within them {within:.1%}"
    )
