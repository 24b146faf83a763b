"""An attention of somebody's own: found by its module or file, and tried against lab 3's rule before it is timed.

What is asked of it is lab 3's interface: ``flash_attention(q, k, v, causal=False, scale=None)``, and if it is there
also ``flash_attention_with_lse``, with all that lab 3 promises: any lengths, heads that share keys, a causal mask that
is aligned at its end, queries that see no key, strides, and gradients.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import attention_errors
from utils import runtime
from utils.checks import cases, tensors

#: (batch, query heads, key heads, queries, keys, causal, scale, layout)
CASES = (
    (1, 1, 1, 1, 1, False, None, "contiguous"),
    (1, 2, 2, 256, 256, False, None, "contiguous"),
    (2, 4, 2, 113, 203, True, None, "contiguous"),
    (1, 3, 1, 203, 113, True, None, "padded"),
    (2, 2, 2, 129, 257, False, 0.3, "by token"),
    (1, 2, 1, 1023, 1024, True, None, "contiguous"),
)
AXES = ("b", "h", "row", "column")


class EntryError(ValueError):
    """What is wrong with an entry; the message names it and says what would be right."""


@dataclass(frozen=True)
class Entry:
    """An attention to try and to time.

    Attributes:
        target: The module or file, as it was given.
        attention: ``flash_attention`` of it.
        with_lse: ``flash_attention_with_lse`` of it, or None.
        sha256: Of its source: the file, or all Python files of a package's folder.
    """

    target: str
    attention: Callable[..., Any]
    with_lse: Callable[..., Any] | None
    sha256: str


def load(target: str) -> Entry:
    """Import a module (``solutions.lab3_flash_attention``) or a file (``mine.py``) and find its functions.

    Raises:
        EntryError: there is no such module or file, it cannot be imported, or it has not lab 3's interface.
    """
    module = imported(target)
    attention = getattr(module, "flash_attention", None)
    if not callable(attention):
        raise EntryError(
            f"{target} must have a function flash_attention(q, k, v, causal=False, scale=None), and has "
            f"{'none' if attention is None else f'{attention!r:.60} of that name'}"
        )
    with_lse = getattr(module, "flash_attention_with_lse", None)
    for function in filter(None, (attention, with_lse)):
        if not callable(function):
            raise EntryError(f"flash_attention_with_lse of {target} must be a function, got {function!r:.60}")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # built in, or C++: it is seen when it is called
            continue
        try:
            signature.bind("q", "k", "v", causal=True, scale=None)
        except TypeError:
            raise EntryError(
                f"{function.__name__} of {target} must take (q, k, v, causal=False, scale=None), it takes {signature}"
            ) from None
    return Entry(target, attention, with_lse, digest(module))


def imported(target: str) -> ModuleType:
    """The module of a name or a file; a file's folder is searched for what it imports, after everything else."""
    path = Path(target)
    if path.suffix == ".py":
        if not path.is_file():
            raise EntryError(f"there is no file {target}")
        name = f"entry_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path.resolve())
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if str(path.resolve().parent) not in sys.path:
            sys.path.append(str(path.resolve().parent))
        run = lambda: spec.loader.exec_module(module) or module  # noqa: E731
    elif all(part.isidentifier() for part in target.split(".")):
        run = lambda: importlib.import_module(target)  # noqa: E731
    else:
        raise EntryError(f"{target!r} is neither a module's name (package.module) nor a file that ends in .py")
    try:
        return run()
    except ModuleNotFoundError as error:
        if error.name and f"{target}.".startswith(f"{error.name}."):
            raise EntryError(f"there is no module {target} (a file is given with its .py)") from error
        raise EntryError(f"{target} cannot be imported: {error}") from error
    except ImportError as error:
        hint = f" (give it as a module: {target[:-3].replace('/', '.')})" if "relative import" in str(error) else ""
        raise EntryError(f"{target} cannot be imported: {error}{hint}") from error
    except (Exception, SystemExit) as error:
        raise EntryError(f"{target} cannot be imported: {said(error)}") from error


def digest(module: ModuleType) -> str:
    """SHA-256 of a module's file, or of a package's Python files with their names; of its name if it has no file."""
    path = Path(getattr(module, "__file__", None) or module.__name__)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    if not path.is_file():
        return hashlib.sha256(str(path).encode()).hexdigest()
    if len(files) == 1:
        return hashlib.sha256(files[0].read_bytes()).hexdigest()
    total = hashlib.sha256()
    for file in files:
        total.update(str(file.relative_to(path.parent)).encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def said(error: BaseException) -> str:
    """An error's type and its last line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


# ---- correctness -----------------------------------------------------------------------------------------------------


def check(entry: Entry, dtypes: Sequence[torch.dtype], head_dims: Sequence[int], backward: bool = True) -> int:
    """Try an entry on ragged cases; return how many.

    The error allowed is lab 3's: twice what plain PyTorch errs in the same dtype, both against float64, and the
    rounding of the output.

    Args:
        backward: Whether gradients are tried too.

    Raises:
        EntryError: a call fails, or a result is wrong: the message says in which case, by how much, and where.
    """
    count = 0
    for dtype in dtypes:
        for head_dim in head_dims:
            for number, sizes in enumerate(CASES):
                for function in filter(None, (entry.attention, entry.with_lse)):
                    try_case(function, function is entry.with_lse, sizes, head_dim, dtype, backward, number)
                    count += 1
    return count


def try_case(
    function: Callable[..., Any], gives_lse: bool, sizes: tuple, head_dim: int, dtype: torch.dtype, backward: bool,
    seed: int,
) -> None:  # fmt: skip
    """One case of :func:`check`."""
    B, Hq, Hkv, Nq, Nk, causal, scale, layout = sizes
    words = f"B={B} Hq={Hq} Hkv={Hkv} Nq={Nq} Nk={Nk} D={head_dim} {str(dtype).removeprefix('torch.')} causal={causal}"
    words += ("" if scale is None else f" scale={scale}") + ("" if layout == "contiguous" else f", {layout} in memory")
    source = torch.Generator().manual_seed(seed)
    shapes = ((B, Hq, Nq, head_dim), (B, Hkv, Nk, head_dim), (B, Hkv, Nk, head_dim), (B, Hq, Nq, head_dim))
    q, k, v, do = (laid_out(torch.randn(shape, generator=source), dtype, layout) for shape in shapes)
    dlse = torch.randn((B, Hq, Nq), generator=source).to(runtime.DEVICE) * gives_lse
    options = {"causal": causal, "scale": scale}
    targets = tensors.targets(
        attention_errors.plain_attention, (q, k, v, do, dlse), options, factor=attention_errors.FACTOR
    )
    floors = attention_errors.cancelled(q, k, v, do, dlse, **options)
    before = [x.clone() for x in (q, k, v)]
    found = outputs(function, gives_lse, (q, k, v), (do, dlse), options, backward, words)
    for name, x, old in zip("qkv", (q, k, v), before, strict=True):
        if tensors.changed(old, x):
            raise EntryError(f"{words}: {function.__name__} changes its input {name}")
    for name, target in zip(attention_errors.OUTPUTS, targets, strict=True):
        if name in found:
            problem = wrong(name, found[name], target, floors.get(name, 0.0), {"q": q, "k": k, "v": v})
            if problem:
                raise EntryError(f"{words}: {problem}")


def laid_out(values: torch.Tensor, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """``values`` (B, H, N, D) on the device in a dtype and a layout of lab 3's suite."""
    values = values.to(dtype).to(runtime.DEVICE)
    if layout == "by token":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    return cases.with_layout(values, layout)


def outputs(
    function: Callable[..., Any], gives_lse: bool, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor],
    options: Mapping[str, Any], backward: bool, words: str,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Results by name: o, lse where it is given, and gradients where they are asked for."""
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    name = function.__name__
    try:
        with torch.set_grad_enabled(backward):
            result = function(*leaves, **options)
        wait()
    except Exception as error:
        raise EntryError(f"{words}: {name} raises {said(error)}") from error
    results = result if gives_lse else (result,)
    good = isinstance(results, tuple | list) and len(results) == 1 + gives_lse
    if not good or not all(isinstance(x, torch.Tensor) for x in results):
        asked = "two tensors, o and the logsumexp" if gives_lse else "one tensor, o"
        raise EntryError(f"{words}: {name} must return {asked}, got {described(result)}")
    found = dict(zip(("o", "lse"), results))
    if found["o"].shape != inputs[0].shape:
        raise EntryError(f"{words}: expected o.shape {tuple(inputs[0].shape)}, got {tuple(found['o'].shape)}")
    if not backward:
        return found
    for label, x in found.items():
        if not x.requires_grad:
            raise EntryError(f"{words}: {label} of {name} has no gradient (--forward-only times it without)")
    try:
        made = torch.autograd.grad(list(results), leaves, list(gradients[: len(results)]), allow_unused=True)
        wait()
    except Exception as error:
        raise EntryError(f"{words}: the backward pass of {name} raises {said(error)}") from error
    for label, x in zip(("dq", "dk", "dv"), made, strict=True):
        if x is None:
            raise EntryError(f"{words}: the backward pass of {name} gives no {label}")
    return {**found, **dict(zip(("dq", "dk", "dv"), made, strict=True))}


def wait() -> None:
    """Wait for the GPU, so that an error of a kernel is raised where the kernel was called."""
    if runtime.HAS_GPU:
        torch.cuda.synchronize(runtime.DEVICE)


def described(result: Any) -> str:
    """A result in a few words."""
    if isinstance(result, tuple | list):
        return f"{type(result).__name__} of {len(result)}: {', '.join(type(x).__name__ for x in result)}"
    return "None (is there a return?)" if result is None else f"a {type(result).__name__}"


def wrong(
    name: str, got: torch.Tensor, target: tensors.Target, floor: float, inputs: Mapping[str, torch.Tensor]
) -> str | None:
    """What is wrong with an output, or None: how many elements, the largest error, and where it is."""
    form = tensors.wrong_form(name, got, target, inputs)
    if form is not None:
        return form.headline
    values, allowed = got.detach().double().cpu(), target.allowed + floor
    bad = ~tensors.agrees(values, target.right, allowed, target.dtype)
    if not bad.any():
        return None
    error = (values - target.right).abs().nan_to_num(math.inf, math.inf).where(bad, torch.zeros_like(values))
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    place = ", ".join(f"{axis}={i}" for axis, i in zip(AXES, at))
    return (
        f"{name}: {int(bad.sum()):,} of {bad.numel():,} elements differ; max abs error "
        f"{tensors.number(error[at].item())} (tolerance {tensors.number(allowed)}) at {name}[{place}]: "
        f"expected {tensors.number(target.right[at].item())}, got {tensors.number(values[at].item())}"
    )
