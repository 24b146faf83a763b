"""What the benchmarks on several ranks share: where they run, how a rank is timed and its memory read, and how the
answers of all ranks become one.

A step of training ends when the last rank is through, so each round of a comparison counts as long as on the rank where
it took longest. All ranks run the same functions in the same order: whatever a rank decided by its own clock would
leave the others waiting in a collective.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import benchmark_cli
from utils import distributed, runtime, timing
from utils.distributed import CollectiveLog, calls
from utils.record_schemas import COUNT, SIZE, each

#: Numbers of GPUs, of one host, on which everything is measured.
WORLD_SIZES = (2, 4)
#: AdamW of all methods, ours and PyTorch's: its one-kernel form.
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}

#: What a model of a parallel measurement is made of.
GPT_LAYOUT = each(SIZE, "parameters", "layers", "heads", "hidden", "vocabulary", "context")
#: Kind of collective -> calls of one step on rank 0, elements of their full tensors, bytes.
COLLECTIVES_LAYOUT = {str: {"calls": SIZE, "elements": COUNT, "bytes": COUNT}}

_START = time.monotonic()

Samples = dict[str, tuple[float, ...]]


def run(
    name: str,
    measure: Callable[..., dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    schema: object,
    arguments: Sequence[str] | None = None,
) -> int:
    """As :func:`benchmarks.benchmark_cli.run`; a record needs a machine with as many GPUs as the largest world size.

    ``--quick`` measures the world sizes that the machine has room for, and records nothing.
    """
    given = sys.argv[1:] if arguments is None else arguments
    gpus = torch.cuda.device_count()
    if runtime.HAS_GPU and "--quick" not in given and "-h" not in given and gpus < max(WORLD_SIZES):
        print(f"{name}: a record needs {max(WORLD_SIZES)} GPUs in one machine and this one has {gpus} (--quick does)")
        return 1
    return benchmark_cli.run(name, measure, table, schema, arguments)


def run_on(
    world_size: int,
    name: str,
    measure: Callable[..., dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    schema: object,
    arguments: Sequence[str] | None = None,
) -> int:
    """As :func:`benchmarks.benchmark_cli.run`, for a benchmark that needs ``world_size`` GPUs, with ``--quick`` too.

    Ranks that failed are named in one message, and the exit status is 1.
    """
    given = sys.argv[1:] if arguments is None else arguments
    gpus = torch.cuda.device_count()
    if runtime.HAS_GPU and "-h" not in given and gpus < world_size:
        print(f"{name}: measuring needs {world_size} GPUs in one machine and this one has {gpus}")
        return 1
    try:
        return benchmark_cli.run(name, measure, table, schema, arguments)
    except distributed.DistributedError as error:
        print(f"{name}: nothing is recorded, because the ranks failed:\n{error}", flush=True)
        return 1


def world_sizes() -> list[int]:
    """The world sizes that this machine has GPUs for.

    Raises:
        RuntimeError: not even for the smallest.
    """
    gpus = torch.cuda.device_count() if runtime.HAS_GPU else 0
    found = [size for size in WORLD_SIZES if size <= gpus]
    if not found:
        raise RuntimeError(f"measuring needs {min(WORLD_SIZES)} GPUs at least, this machine has {gpus}")
    return found


def launch(function: Callable[..., Any], *args: Any, world_size: int, **kwargs: Any) -> list[Any]:
    """:func:`utils.distributed.launch` with patience for models that are built and kernels that are loaded."""
    return distributed.launch(function, *args, world_size=world_size, timeout=400.0, collective_timeout=90.0, **kwargs)


def launch_briefly(function: Callable[..., Any], *args: Any, world_size: int, **kwargs: Any) -> list[Any]:
    """As :func:`launch`, for a job of a minute or two: one that hangs ends sooner."""
    return distributed.launch(function, *args, world_size=world_size, timeout=240.0, collective_timeout=60.0, **kwargs)


def settle() -> None:
    """What a rank does first: what is imported is there for good, so that looking for garbage later is quick."""
    importlib.import_module("torch._dynamo")  # optimizers do at their first step
    gc.collect()
    gc.freeze()


def note(text: str) -> None:
    """Rank 0 says how far it is, with the seconds since its start."""
    if dist.is_initialized() and dist.get_rank() == 0:
        print(f"{time.monotonic() - _START:5.1f} s  {text}", flush=True)


class RankStopwatch:
    """Times calls back to back on this rank, as a training loop makes them: the host runs ahead of the GPU.

    On a GPU the time passes between two events of the current stream; on a CPU by the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, fn: Callable[[], object], flush_l2: bool) -> None:
        """Run ``fn`` once and time it; nothing is flushed."""
        start = self._now()
        fn()
        self._laps.append((start, self._now()))

    def seconds(self) -> list[float]:
        """Times of the laps so far, in seconds; the stopwatch is then empty."""
        laps, self._laps = self._laps, []
        if self._device.type != "cuda":
            return [end - start for start, end in laps]
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) * 1e-3 for start, end in laps]


class AlignedStopwatch(RankStopwatch):
    """A :class:`RankStopwatch` whose laps begin on all ranks at once.

    Steps of one GPU alone take a little longer on one rank than on another. What comes next would begin as much
    earlier on the others, and they would wait within the lap.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._flag = torch.zeros(1, device=device)

    def lap(self, fn: Callable[[], object], flush_l2: bool) -> None:
        """Wait on the GPU for all other ranks, then run ``fn`` once and time it."""
        dist.all_reduce(self._flag)
        super().lap(fn, flush_l2)


def compare_aligned(steps: Mapping[str, Callable[[], object]], *, warmup: int, rounds: int) -> Samples:
    """As :func:`compare`, but each lap begins on all ranks at once (:class:`AlignedStopwatch`)."""
    with calls.unobserved():
        timed = timing.compare(
            steps, warmup=warmup, rounds=rounds, flush_l2=False, stopwatch=AlignedStopwatch(distributed.device())
        )
    note(", ".join(f"{name} {t.median * 1e3:.3g} ms" for name, t in timed.items()))
    return {name: t.samples for name, t in timed.items()}


def compare(steps: Mapping[str, Callable[[], object]], *, warmup: int, rounds: int) -> Samples:
    """Seconds of each step by interleaved rounds on this rank; the watch over the job's collectives rests meanwhile."""
    with calls.unobserved():
        timed = timing.compare(
            steps, warmup=warmup, rounds=rounds, flush_l2=False, stopwatch=RankStopwatch(distributed.device())
        )
    note(", ".join(f"{name} {t.median * 1e3:.3g} ms" for name, t in timed.items()))
    return {name: t.samples for name, t in timed.items()}


def slowest(of_ranks: Sequence[Samples]) -> dict[str, timing.Timing]:
    """One timing a step: each round as long as on the rank where it took longest."""
    return {
        name: timing.summarize([max(times) for times in zip(*(samples[name] for samples in of_ranks), strict=True)])
        for name in of_ranks[0]
    }


def allocated() -> int:
    """Bytes of tensors on this rank's GPU now; on a CPU those of the tensors that Python holds."""
    gc.collect()
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    storages = [t.untyped_storage() for t in tensors if t.device.type == "cpu" and t.layout == torch.strided]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def peak(step: Callable[[], object], base: int = 0, repeats: int = 2) -> int:
    """Most bytes allocated at one time during ``step``, less ``base``; on a CPU what is there after it.

    Args:
        base: bytes that were there before what is measured was built.
    """
    if distributed.device().type != "cuda":
        step()
        return max(1, allocated() - base)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


def release() -> None:
    """Give what is not used any more back to the GPU."""
    gc.collect()
    if distributed.device().type == "cuda":
        torch.cuda.empty_cache()


def counted(log: CollectiveLog) -> dict[str, dict[str, int]]:
    """What a log holds: calls, elements of the full tensors and bytes of each kind of collective."""
    kinds = list(dict.fromkeys(entry.kind for entry in log.entries))
    return {
        kind: {"calls": log.count(kind), "elements": log.elements(kind), "bytes": log.bytes(kind)} for kind in kinds
    }
