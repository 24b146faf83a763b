"""Who takes part in a comparison with the capstone's attention: calls to time, and their kernels compiled ahead.

A kernel in Gluon takes some 20 s to compile, and there are dozens: :func:`compile_first` has a pool of processes
compile them into Triton's cache on disk, where the process that measures finds them.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from benchmarks import attention_speed
from benchmarks.attention_speed import DIRECTIONS, Attention, Shape
from solutions import capstone_hopper
from utils import runtime

OURS, FAST, LAB = "ours", "ours, fast", "lab 3"
BASELINES = ("flash", "cudnn")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Processes that compile.
WORKERS = 14


def functions() -> dict[str, Attention]:
    """What is compared, by name; ours first."""
    return {
        OURS: lambda q, k, v, causal: capstone_hopper.flash_attention(q, k, v, causal),
        FAST: lambda q, k, v, causal: capstone_hopper.flash_attention(q, k, v, causal, deterministic=False),
        LAB: attention_speed.ours,
        **{name: attention_speed.baseline(attention_speed.BASELINES[name]) for name in BASELINES},
    }


def need_hopper() -> None:
    """Refuse a GPU on which the capstone would run lab 3's kernels.

    Raises:
        RuntimeError: the GPU in use is not one that the kernels are written for.
    """
    if runtime.HAS_GPU:
        q = torch.empty((1, 1, 1, 64), dtype=torch.bfloat16, device=runtime.DEVICE)
        reason = capstone_hopper.why_portable(q, q, q)
        if reason is not None:
            raise RuntimeError(f"the capstone's kernels do not run here: {reason}")


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Random q, k, v that ask for gradients, and a gradient of the output: (batch, heads, seq_len, head_dim)."""
    batch, heads, seq_len, head_dim, _ = shape
    size = (batch, heads, seq_len, head_dim)
    q, k, v, do = (torch.randn(size, device=runtime.DEVICE).to(dtype) for _ in range(4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def calls(
    shape: Shape, dtype: torch.dtype, attentions: Mapping[str, Attention], directions: Sequence[str] = DIRECTIONS
) -> tuple[dict[tuple[str, str], Callable[[], object]], dict[str, str]]:
    """(direction, name) -> what to time; and "name, D 256, direction" -> why a peer cannot.

    Forward, ``ours, fast`` is ``ours`` and not timed again. Without ``backward`` in ``directions`` only forward passes
    are called.
    """
    q, k, v, do = inputs(shape, dtype)
    found: dict[tuple[str, str], Callable[[], object]] = {}
    unavailable = {}

    def backward(o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    for name, attention in attentions.items():
        direction = "forward"
        try:
            o = attention(q, k, v, shape[4])
            if name != FAST:
                found["forward", name] = lambda attention=attention: attention(q, k, v, shape[4])
            if "backward" not in directions:
                continue
            direction = "backward"
            backward(o)
        except RuntimeError as error:
            if name not in BASELINES:
                raise
            unavailable[f"{name}, D {shape[3]}, {direction}"] = str(error).strip().splitlines()[0]
            continue
        found["backward", name] = lambda o=o: backward(o)
        found["both", name] = lambda attention=attention: backward(attention(q, k, v, shape[4]))
    return found, unavailable


# ---- compiling -------------------------------------------------------------------------------------------------------

#: dtype, function, whether backward too, and shapes of one head_dim and mask, for which the same kernels run.
Job = tuple[str, str, bool, tuple[Shape, ...]]


def jobs(shapes: Iterable[Shape], dtypes: Sequence[str], directions: Sequence[str] = DIRECTIONS) -> list[Job]:
    """What to compile, each kernel once if it can be: forward passes first, since backward passes need them."""
    by_kernel: dict[tuple[int, bool], list[Shape]] = {}
    for shape in shapes:
        by_kernel.setdefault((shape[3], shape[4]), []).append(shape)
    groups = [tuple(group) for _, group in sorted(by_kernel.items(), reverse=True)]
    order = ((OURS, False), (OURS, True), (FAST, True), (LAB, True))
    if "backward" not in directions:
        order = ((OURS, False), (LAB, False))
    return [(dtype, name, back, group) for name, back in order for dtype in dtypes for group in groups]


def compile_job(job: Job) -> str | None:
    """Run one function on its shapes, so that its kernels are in Triton's cache on disk; the error if there is one."""
    dtype, name, back, shapes = job
    try:
        for shape in shapes:
            q, k, v, do = inputs(shape, DTYPES[dtype])
            o = functions()[name](q, k, v, shape[4])
            if back:
                torch.autograd.grad(o, (q, k, v), do)
    except Exception as error:  # an error of Triton's compiler does not survive the way between processes
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return f"{name}, {dtype}, D {shapes[0][3]}, {'causal' if shapes[0][4] else 'full'}: {last}"
    return None


def compile_first(
    shapes: Iterable[Shape], dtypes: Sequence[str], workers: int = WORKERS, directions: Sequence[str] = DIRECTIONS
) -> None:
    """Compile everything that will be timed, in ``workers`` processes.

    Raises:
        RuntimeError: something does not compile or run; the message names all that failed.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        failed = [error for error in pool.map(compile_job, jobs(shapes, dtypes, directions)) if error]
    if failed:
        raise RuntimeError("\n".join(["not everything compiles:", *failed]))
