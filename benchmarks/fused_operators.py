"""The fused operators of lab 2 at the speed of memory, beside a device copy, PyTorch and torch.compile.

Every operator is timed in the same rounds as a copy of a tensor of the size of its input and as its peers, so that a
ratio compares what ran under the same conditions. Bytes are the least an operator can move: each input read once, each
output written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import benchmark_cli, blocked_stream
from solutions import lab2_triton_kernels as lab
from utils import runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING

#: Elements of every large input: 1 GiB in bf16, far more than any cache holds.
ELEMENTS = 1 << 29
COLUMNS = 8192
SOFTMAX_COLUMNS = (1024, 8192, 65536, 262144)

Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    """One operator: its inputs by shape, what is timed, and its least traffic in elements."""

    name: str
    direction: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor]
    moved: int


def cases(
    elements: int = ELEMENTS, columns: int = COLUMNS, softmax_columns: Sequence[int] = SOFTMAX_COLUMNS
) -> list[Case]:
    """All operators for inputs of ``elements`` elements."""
    n, rows = elements, elements // columns
    matrix = ((rows, columns), (columns,))
    found = [
        Case("gelu", "forward", ((rows, columns),), lab.gelu, lambda x: F.gelu(x, approximate="tanh"), 2 * n),
        Case("bias_relu", "forward", matrix, lab.bias_relu, lambda x, bias: F.relu(x + bias), 2 * n + columns),
        Case("weighted_sum", "forward", matrix, lab.weighted_sum, lambda x, w: (w * x).sum(-1), n + columns + rows),
        Case("weighted_sum", "backward", matrix, lab.weighted_sum, lambda x, w: (w * x).sum(-1),
             2 * n + 2 * columns + rows),
        Case("bias_relu", "backward", matrix, lab.bias_relu, lambda x, bias: F.relu(x + bias), 3 * n + columns),
    ]  # fmt: skip
    for width in softmax_columns:
        name = f"softmax, rows of {width}"
        found.append(Case(name, "forward", ((n // width, width),), lab.softmax, lambda x: torch.softmax(x, -1), 2 * n))
    for width in (width for width in softmax_columns if width > COLUMNS):
        name = f"online softmax, rows of {width}"
        found.append(
            Case(name, "forward", ((n // width, width),), lab.online_softmax, lambda x: torch.softmax(x, -1), 2 * n)
        )
    return found


def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.compile`` for these shapes alone, knowing nothing of earlier ones."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def _call(function: Callable[..., torch.Tensor], inputs: Tensors, direction: str) -> Callable[[], object]:
    """A function that runs one direction once."""
    if direction == "forward":
        return lambda: function(*inputs)
    leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    with torch.enable_grad():
        out = function(*leaves)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def point(
    case: Case, copy: Callable[[], object], copy_bytes: int, rounds: int, compile_peer: bool = True
) -> dict[str, Any]:
    """Measure one operator beside the copy and its peers."""
    inputs = tuple(torch.randn(shape, device=runtime.DEVICE).to(torch.bfloat16) for shape in case.shapes)
    peers = {"lab 2": case.ours, "torch": case.plain}
    if compile_peer:
        peers["torch.compile"] = _compiled(case.plain)
    with torch.set_grad_enabled(False):
        calls = {name: _call(function, inputs, case.direction) for name, function in peers.items()}
        timed = timing.compare({"copy": copy, **calls}, warmup=5, rounds=rounds, stopwatch=blocked_stream.stopwatch())
    moved = 2 * case.moved
    speed = {
        name: {
            **timed[name].as_dict(),
            "bytes_per_second": (copy_bytes if name == "copy" else moved) / timed[name].median,
        }
        for name in timed
    }
    # rates, not times: a ratio above 1 says that lab 2 is faster
    per_byte = timing.ratio(timed["copy"], timed["lab 2"])
    scale = moved / copy_bytes
    return {
        "name": case.name,
        "direction": case.direction,
        "shape": list(case.shapes[0]),
        "bytes": moved,
        "timed": speed,
        "of_copy": {
            "ratio": per_byte.median * scale, "ratio_low": per_byte.low * scale, "ratio_high": per_byte.high * scale
        },
        "of_peer": {
            name: timing.ratio(timed[name], timed["lab 2"]).as_dict() for name in peers if name != "lab 2"
        },
    }  # fmt: skip


SCHEMA = {
    "dtype": TEXT,
    "elements": SIZE,
    "points": [
        {
            "name": TEXT,
            "direction": TEXT,
            "shape": [SIZE],
            "bytes": SIZE,
            "timed": {str: {**TIMING, "bytes_per_second": POSITIVE}},
            "of_copy": RATIO,
            "of_peer": {str: RATIO},
        }
    ],
}


def measure(
    quick: bool = False,
    elements: int | None = None,
    columns: int = COLUMNS,
    softmax_columns: Sequence[int] | None = None,
) -> dict[str, Any]:
    """All operators, bf16; ``quick`` takes inputs of an eighth of the size, few rounds, and no ``torch.compile``.

    Raises:
        RuntimeError: there is no GPU here.
    """
    elements = elements or (ELEMENTS // 8 if quick else ELEMENTS)
    source = torch.randn(elements, device=runtime.DEVICE).to(torch.bfloat16)
    target = torch.empty_like(source)
    points = [
        point(case, lambda: target.copy_(source), 4 * elements, 10 if quick else 50, compile_peer=not quick)
        for case in cases(elements, columns, softmax_columns or SOFTMAX_COLUMNS)
    ]
    return {"dtype": "bf16", "elements": elements, "points": points}


def table(results: Mapping[str, Any]) -> str:
    """One line an operator: rates in TB/s, and lab 2's ratio to each."""
    rows = []
    for item in results["points"]:
        rates = {name: f"{timed['bytes_per_second'] / 1e12:.3f}" for name, timed in item["timed"].items()}
        compiled = item["of_peer"].get("torch.compile")
        rows.append([
            f"{item['name']} {item['direction']}", rates["lab 2"], rates["copy"], rates.get("torch.compile", "-"),
            rates["torch"], f"{item['of_copy']['ratio']:.3f}", f"{compiled['ratio']:.3f}" if compiled else "-",
            f"{item['of_peer']['torch']['ratio']:.2f}",
        ])  # fmt: skip
    return benchmark_cli.text_table(
        ["operator", "TB/s", "copy", "compile", "torch", "x copy", "x compile", "x torch"], rows
    )


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("fused_operators", measure, table, SCHEMA))
