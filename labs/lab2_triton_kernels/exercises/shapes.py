"""The tensors that lab 2's kernels are tried on: any leading shape, any strides, offsets beyond 2^31."""

from __future__ import annotations

from collections.abc import Callable

import torch

from utils import runtime
from utils.checks.cases import Case, Cases, far_fits
from utils.checks.core import classic, generator
from utils.checks.diagnoses import Diagnosis, Evidence
from utils.checks.symptoms import inaccurate
from utils.kernel_profile.findings import OutOfBounds

#: Kind of the cases whose leading axes no single stride describes.
PERMUTED = "leading axes swapped"
#: Kind of the cases whose vector, and the gradient that arrives, repeat one number.
ZERO_STRIDE = "a vector of stride 0"
#: Kinds of the cases whose columns, or whose vector's elements, lie 2^30 elements apart.
FAR_COLUMNS, FAR_VECTOR = "columns far apart", "a vector's elements far apart"
#: Kind of the cases that hold NaN and infinities.
SPECIAL = "NaN and infinities"


def too_inaccurate(advice: str, number: int) -> Diagnosis:
    """A rule for answers that only shorter types show to be wrong."""
    return Diagnosis(
        lambda e: e.only(lambda case: case.dtype.itemsize < 4) and inaccurate(e),
        lambda e: classic(
            f"right in float32, but too inaccurate in {str(e.case.dtype).removeprefix('torch.')}: {advice}", number
        ),
    )


def tensor(case: Case, name: str) -> torch.Tensor:
    """The input of a case; one with a ``batch`` axis is cut out of a larger tensor, with its leading axes swapped.

    No single stride then leads from row to row, in whatever order the axes are taken.
    """
    if "batch" in case.sizes:
        larger = case.tensor(name, "row", case.sizes["batch"] + 1, "col", layout="padded")
        return larger[:, 1:].transpose(0, 1)
    if case.kind == FAR_COLUMNS:
        return case.tensor(name, "col", "row").transpose(0, 1)
    if case.kind == FAR_VECTOR:
        return case.tensor(name, *case.sizes, layout="contiguous")
    return case.tensor(name, *case.sizes)


def permuted(seed: int, col: int, dtype: torch.dtype = torch.float32) -> Case:
    """A case of shape (batch, row, col) whose rows do not lie evenly in memory."""
    draw = generator(seed)
    batch, row = draw.sample(range(2, 6), 2)
    return Case(PERMUTED, {"batch": batch, "row": row, "col": col}, dtype, seed=seed)


def views(seed: int, block: int) -> list[Case]:
    """Matrices of every layout, and a permuted one, of one drawn ragged size."""
    draw = generator(seed)
    ragged = {"row": draw.randint(3, 5), "col": block + draw.randint(1, block - 1)}
    fp16, bf16 = torch.float16, torch.bfloat16
    plans = [("contiguous", torch.float32), ("padded", fp16), ("transposed", torch.float32), ("strided", bf16)]
    cases = [Case("ragged", ragged, dtype, layout, seed=seed) for layout, dtype in plans]
    return [*cases, permuted(seed, draw.randint(5, block))]


def far(seed: int, col: int) -> list[Case]:
    """Three rows 2^30 elements apart, where such a tensor can be had."""
    if not far_fits(torch.float16):
        return []
    return [Case("ragged", {"row": 3, "col": col + 5}, torch.float16, "far", seed=seed)]


def far_columns(seed: int) -> list[Case]:
    """Three columns 2^30 elements apart, where such a tensor can be had."""
    sizes = {"row": generator(seed).randint(4, 9), "col": 3}
    return [Case(FAR_COLUMNS, sizes, torch.float16, "far", seed=seed)] if far_fits(torch.float16) else []


def far_vector(seed: int) -> list[Case]:
    """A small matrix and a vector of three elements that lie 2^30 elements apart, where such a one can be had."""
    sizes = {"row": generator(seed).randint(4, 9), "col": 3}
    return [Case(FAR_VECTOR, sizes, torch.float16, "far", seed=seed)] if far_fits(torch.float16) else []


def boundaries(seed: int, rows: int, columns: int) -> list[Case]:
    """Matrices that tiles of so many rows and columns cover exactly, among memory of others, and one element more."""
    whole, beyond = {"row": 2 * rows, "col": 2 * columns}, {"row": rows + 1, "col": columns + 1}
    return [
        Case("whole tiles", whole, layout="padded", seed=seed),
        Case("one past whole tiles", beyond, seed=seed),
    ]


def matrices(seed: int, rows: int, columns: int) -> list[Case]:
    """What a kernel of a matrix and a vector is tried on, whose tiles have so many rows and columns."""
    cases = Cases({"row": rows, "col": columns}, layouts=("transposed", "padded"), count=2, max_tiles=2, zero=True)
    return [*cases.draw(seed), permuted(seed, 21), *far(seed, 40)]


def further(seed: int) -> list[Case]:
    """Tensors that no check draws: of one axis and of four, one column, tall, every second column, stride 0."""
    draw = generator(seed)
    n = draw.randint(30, 300)
    four = {"first": 2, "second": 3, "row": draw.randint(2, 5), "col": draw.randint(5, 30)}
    return [
        Case("one axis", {"col": 3 * n}, seed=seed),
        Case("four axes", four, torch.float16, "transposed", seed=seed),
        Case("one column", {"row": n, "col": 1}, seed=seed),
        Case("tall", {"row": 5 * n, "col": draw.randint(3, 9)}, seed=seed),
        Case("every second column", {"row": draw.randint(5, 30), "col": n}, torch.bfloat16, "strided", seed=seed),
        Case(ZERO_STRIDE, {"row": draw.randint(5, 20), "col": n}, seed=seed),
    ]


FAR = Diagnosis(
    lambda e: e.only(lambda case: case.layout == "far"),
    "only offsets beyond 2^31 are wrong: a 32-bit integer overflows where an index is multiplied by a stride; "
    "convert the index to 64 bits first: row.to(tl.int64)",
)

FAR_ALONG_A_ROW = Diagnosis(
    lambda e: e.only(lambda case: case.kind in (FAR_COLUMNS, FAR_VECTOR)),
    "only columns 2^30 elements apart are wrong: col_offset counts in 32 bits unless INT64 is true; the launch passes "
    "INT64=rows.needs_int64, and with a vector `or vector.stride(0) > 1`",
)

ONE_STRIDE = Diagnosis(
    lambda e: e.only(lambda case: "batch" in case.sizes),
    "only tensors without one stride from row to row fail, such as x.transpose(0, 1): one stride does not lead to "
    "every row; where row r starts is row_offset(r, size_1, size_2, stride_0, stride_1, stride_2)",
)


def _without_its_stride(e: Evidence) -> OutOfBounds | None:
    """What the profiler says of the first vector with gaps of which an element between two of its own is touched."""
    given = {
        (launch.kernel, name): value for launch in e.trial.profile.launches for name, value in launch.given.items()
    }
    for found in e.findings("out_of_bounds"):
        value = given.get((found.kernel, found.argument))
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.stride(0) > 1:
            return found
    return None


VECTOR_STRIDE = Diagnosis(
    _without_its_stride,
    lambda e: (
        f"{_without_its_stride(e).argument} has a stride of its own: element i lies at i * stride, not at i "
        f"({_without_its_stride(e)})"
    ),
)

#: Rules that hold for every kernel of this lab that finds its rows by ``row_offset``.
MISTAKES = (
    FAR_ALONG_A_ROW,
    FAR,
    ONE_STRIDE,
    VECTOR_STRIDE,
    Diagnosis(
        lambda e: (
            e.only(lambda case: case.layout != "contiguous" or "batch" in case.sizes)
            and not e.findings("races")
            and all(found.access != "write" for found in e.findings("out_of_bounds"))
        ),
        "only non-contiguous inputs fail: in the input row r starts at row_offset(r, ...) and its elements are "
        "`stride_col` apart; in the output it starts at r * columns",
    ),
)


def vector(case: Case, name: str) -> torch.Tensor:
    """One number for each column: a slice with a step where the matrix is a slice, too."""
    if case.kind == ZERO_STRIDE:
        return case.tensor(name, 1).expand(case.sizes["col"])
    if case.kind == FAR_VECTOR:
        return case.tensor(name, "col")
    return case.tensor(name, "col", layout="strided" if case.layout == "padded" else "contiguous")


def with_gradient(function: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function of (x, vector) and its backward pass as one: (x, vector, dout) to the output and both gradients."""

    def run(x: torch.Tensor, vector: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, vector = x.detach().requires_grad_(), vector.detach().requires_grad_()
        out = function(x, vector)
        dx, dvector = torch.autograd.grad(out, (x, vector), dout)
        return out.detach(), dx, dvector

    run.__name__ = getattr(function, "__name__", "run")
    return run


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A normal tensor for a timing, on the device where kernels run."""
    return torch.randn(shape, device=runtime.DEVICE).to(dtype)
