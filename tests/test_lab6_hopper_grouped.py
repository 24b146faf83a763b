"""Lab 6's product of an expert layer for Hopper: right in whatever order its barriers allow; its tables; what it takes.

On a Hopper GPU the kernels themselves run; elsewhere the course's emulator of Gluon runs them.
"""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import gluon_emulator
import pytest
import torch
from parameters import thorough_but

from solutions.lab6_frontiers import expert_tables, grouped_matmul, tuning
from utils import runtime
from utils.gluon.machine import Descriptor, Fault, Pointer
from utils.runtime import DEVICE

product = pytest.importorskip("solutions.lab6_frontiers.hopper_grouped_matmul", reason="this Triton has no Gluon")
gradient = pytest.importorskip("solutions.lab6_frontiers.hopper_grouped_gradient", reason="this Triton has no Gluon")
portable = importlib.import_module("solutions.lab6_frontiers.grouped_matmul")

FOLDER = Path(product.__file__).parent
#: Programs of a grid in the emulator: each has several tiles.
PROGRAMS = 3
#: Largest error, as a share of the largest right value.
ALLOWED = {torch.bfloat16: 0.01, torch.float16: 0.002}
runs_them = pytest.mark.skipif(
    not runtime.INTERPRET and tuning.capability_of(DEVICE) != (9, 0), reason="a GPU, but none of Hopper"
)


class Emulated:
    """Stands where a kernel is launched; each program runs in the emulator."""

    def __init__(self, name: str, seed: int, folder: Path = FOLDER, first: int | None = None) -> None:
        self.name, self.seed, self.folder, self.first = name, seed, folder, first

    def __getitem__(self, grid: tuple[int]):
        return lambda *arguments, num_warps, maxnreg, **constants: self.run(grid[0], arguments, constants)

    def run(self, programs: int, arguments: tuple, constants: dict) -> None:
        given = [self.argument(each) for each in arguments]
        path, name = self.folder / f"{self.name}.py", f"{self.name}_kernel"
        gluon_emulator.run_programs(path, name, given, programs, self.seed, self.first, **constants)

    @staticmethod
    def argument(each):
        if hasattr(each, "block_shape"):
            return Descriptor(each.base.detach(), each.block_shape)
        return Pointer(each.detach()) if isinstance(each, torch.Tensor) else each


def emulate(monkeypatch, seed: int, folder: Path = FOLDER, first: int | None = None, programs: int = PROGRAMS) -> None:
    """Kernels are emulated where others are interpreted, and new tensors are full of what is wrong."""
    if not runtime.INTERPRET:
        return
    empty = torch.empty

    def unwritten(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", unwritten)
    for kernels in (product, gradient):
        name = kernels.__name__.split(".")[-1]
        monkeypatch.setattr(kernels, "programs", lambda device: programs)
        monkeypatch.setattr(kernels, f"{name}_kernel", Emulated(name, seed, folder, first))


def operands(counts, K: int, N: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.Tensor]:
    """x, weights and a gradient of the output."""
    source = torch.Generator().manual_seed(seed)
    shapes = ((sum(counts), K), (len(counts), K, N), (sum(counts), N))
    return [torch.randn(shape, generator=source).to(DEVICE, dtype) for shape in shapes]


def multiplied(counts, x, weights, dout) -> list[torch.Tensor]:
    """The output and the gradients of x and weights."""
    assert not (product.why_portable(x, weights) or product.why_portable(dout, weights.mT))
    assert not gradient.why_portable(x, dout)
    given = torch.tensor(counts, device=DEVICE)
    made = [torch.empty(shape, dtype=x.dtype, device=DEVICE) for shape in (dout.shape, x.shape, weights.shape)]
    product.hopper_grouped_matmul(x, weights, given, made[0])
    product.hopper_grouped_matmul(dout, weights.mT, given, made[1])
    gradient.hopper_grouped_gradient(x, dout, given, made[2])
    return made


def by_loop(counts, x, weights, dout) -> list[torch.Tensor]:
    """The same by three products of each expert."""
    groups = list(zip(x.split(counts), weights, dout.split(counts)))
    return [
        torch.cat([rows @ each for rows, each, _ in groups]),
        torch.cat([drows @ each.mT for _, each, drows in groups]),
        torch.stack([rows.mT @ drows for rows, _, drows in groups]),
    ]


def errors(counts, x, weights, dout) -> list[float]:
    """Largest error of the output and of the gradients of x and weights, each as a share of the largest right value.

    It is NaN where there is a NaN in one of both only.
    """
    got = [each.double() for each in multiplied(counts, x, weights, dout)]
    right = by_loop(counts, x.double(), weights.double(), dout.double())
    off = [torch.where(a.isnan() & b.isnan(), 0.0, a - b).abs().max() for a, b in zip(got, right)]
    return [(error / want.nan_to_num().abs().max()).item() for error, want in zip(off, right)]


@runs_them
def test_ragged_groups_are_right(monkeypatch):
    emulate(monkeypatch, 1)
    counts = (70, 0, 131)
    found = errors(counts, *operands(counts, 256, 256))
    assert all(error < ALLOWED[torch.bfloat16] for error in found), found


#: Rows of each expert, K and N: all rows with one expert, the first or the last; whole tiles; single rows.
CASES = [((130, 0, 64, 200, 1), 256, 512), ((0, 0, 300), 256, 256), ((300, 0), 512, 256), ((128, 64, 256), 256, 256),
         ((1, 1, 1, 1), 256, 256), ((63, 65, 129, 127), 256, 256)]  # fmt: skip


@runs_them
@pytest.mark.slow
@pytest.mark.parametrize("case", thorough_but(CASES, CASES[0], CASES[5]))
def test_groups_are_right_in_whatever_order_things_happen(monkeypatch, case):
    counts, K, N = case
    for seed, dtype in enumerate((torch.bfloat16, torch.float16)):
        with monkeypatch.context() as patched:
            emulate(patched, seed)
            found = errors(counts, *operands(counts, K, N, dtype, seed))
        assert all(error < ALLOWED[dtype] for error in found), found


@runs_them
@pytest.mark.slow
def test_matrices_may_be_transposed_and_rows_apart(monkeypatch):
    emulate(monkeypatch, 2)
    counts = (40, 90)
    x, weights, dout = operands(counts, 256, 256)
    wide = torch.full((130, 512), float("nan"), dtype=x.dtype, device=DEVICE)
    wide[:, 256:] = x
    taken = wide[:, 256:], weights.mT.contiguous().mT, dout
    found = errors(counts, *taken)
    assert all(error < ALLOWED[torch.bfloat16] for error in found), found


@runs_them
@pytest.mark.slow
def test_no_nan_of_an_expert_reaches_another(monkeypatch):
    emulate(monkeypatch, 3)
    counts = (70, 30, 41)
    for number in range(3):
        given = operands(counts, 256, 256)
        given[number][1 if number == 1 else slice(70, 100)] = float("nan")
        found = errors(counts, *given)
        assert all(error < ALLOWED[torch.bfloat16] for error in found), found


@runs_them
def test_counts_without_a_row_leave_the_output_alone(monkeypatch):
    emulate(monkeypatch, 4)
    x, weights, dout = operands((5, 0), 256, 256)
    none = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    out, dweights = torch.full_like(dout, 7), torch.full_like(weights, 7)
    product.hopper_grouped_matmul(x, weights, none, out)
    gradient.hopper_grouped_gradient(x, dout, none, dweights)
    assert (out == 7).all() and not dweights.any()


#: What is changed in which file, and what the emulator then finds.
MISTAKES = {
    "a stage that is free while it is read": (
        "hopper_grouped_matmul", "empty.index((step + S - 1) % S), pred=k > 0)", "empty.index(step % S))",
        {"overwritten", "arrivals"},
    ),
    "a stage that is read before it is full": (
        "hopper_grouped_matmul", "        mbarrier.wait(full.index(s), (step // S) & 1)\n        weights =",
        "        weights =", {"early"},
    ),
    "stages that nobody sets free": (
        "hopper_grouped_matmul", "        mbarrier.arrive(empty.index(step % S))\n", "", {"deadlock"},
    ),
    "no wait for the store before": ("hopper_grouped_matmul", "    tma.store_wait(0)\n    wait", "    wait", {"wrong"}),
    "no fence before a store": (
        "hopper_grouped_matmul", "    fence_async_shared()\n    wait_for_all()\n    tma", "    tma", {"unfenced"},
    ),
    "rows of the next expert are stored": (
        "hopper_grouped_matmul", "    if rows >= 64:", "    if rows > 0:", {"wrong"},
    ),
    "x is not zeroed": (
        "hopper_grouped_gradient", "            zero_rows(x_tiles.index(s * 2 + GROUP), rows - row)\n", "", {"wrong"},
    ),
    "dout is not zeroed": (
        "hopper_grouped_gradient",
        "            zero_rows(dout_tiles.index(s).slice(GROUP * 128, 128, 1), rows - row)\n", "", {"wrong"},
    ),
    "no wait for the other half to be zeroed": (
        "hopper_grouped_gradient", "            mbarrier.wait(zeroed.index(0), zeroings & 1)\n", "", {"wrong"},
    ),
    "no fence after zeroing": (
        "hopper_grouped_gradient", "            fence_async_shared()\n", "", {"unfenced"},
    ),
    "zeroings are not counted": (
        "hopper_grouped_gradient", "        zeroings += (rows % 64 + 63) // 64", "        zeroings += 0",
        {"wrong", "deadlock", "unfenced"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not runtime.INTERPRET, reason="mistakes are for the emulator")
@pytest.mark.slow
@pytest.mark.parametrize("mistake", thorough_but(MISTAKES, *list(MISTAKES)[::4]))
def test_what_is_removed_shows(monkeypatch, tmp_path, mistake):
    changed, old, new, kinds = MISTAKES[mistake]
    for file in ("hopper_grouped_matmul", "hopper_grouped_gradient"):
        text = (FOLDER / f"{file}.py").read_text()
        assert file != changed or text.count(old) == 1
        (tmp_path / f"{file}.py").write_text(text.replace(old, new) if file == changed else text)
    counts = (70, 5, 200)
    x, weights, dout = operands(counts, 512, 256)
    x[70:75] = dout[70:75] = float("nan")
    seen = set()
    for seed, first in enumerate((0, -1, 1, 2, *[None] * 12)):  # one partition always goes on if it can; whichever
        emulate(monkeypatch, seed, tmp_path, first, programs=2)
        try:
            found = errors(counts, x, weights, dout)
        except Fault as fault:
            seen.add(fault.kind)
        else:
            seen |= {"wrong"} if any(not error < ALLOWED[torch.bfloat16] for error in found) else set()
        if seen:
            break
    assert seen and seen <= kinds, seen


# ---- tables


def drawn_counts(draw: random.Random) -> list[int]:
    return [draw.choice((0, 1, 127, 128, 129, draw.randint(0, 700))) for _ in range(draw.choice((1, 2, 7, 64)))]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables_say_whose_rows_are_whose(dtype):
    draw = random.Random(5)
    for counts in [[0, 0], [20_000, 3], *(drawn_counts(draw) for _ in range(6))]:
        given = torch.tensor(counts, dtype=dtype, device=DEVICE)
        begins = [sum(counts[:e]) for e in range(len(counts))]
        tiles = [(e, begins[e] + i, min(128, n - i)) for e, n in enumerate(counts) for i in range(0, n, 128)]
        table, count = expert_tables.tile_table(given, sum(counts), 128)
        assert count.item() == len(tiles) <= table.shape[1]
        assert table[:, : len(tiles)].T.tolist() == list(map(list, tiles))
        order = sorted(range(len(counts)), key=lambda e: (-counts[e], e))
        assert expert_tables.largest_first(given).T.tolist() == [[e, begins[e], counts[e]] for e in order]


def test_a_table_ends_where_the_rows_do_though_counts_say_more():
    counts = torch.tensor([300, 500], device=DEVICE)
    table, count = expert_tables.tile_table(counts, 256, 128)
    assert count.item() == table.shape[1] == 4
    assert table.T.tolist() == [[0, 0, 128], [0, 128, 128], [0, 256, 44], [1, 300, 128]]


def test_counts_may_have_any_stride():
    counts = torch.tensor([[3, 1], [0, 1], [200, 1]], device=DEVICE)[:, 0]
    assert expert_tables.largest_first(counts).tolist() == [[2, 0, 1], [3, 0, 3], [200, 3, 0]]


# ---- what the kernels take


@pytest.mark.parametrize(
    ("K", "N", "change", "wanted"),
    [
        (256, 256, lambda *given: given, "all"),
        (64, 256, lambda *given: given, "out"),  # dx has K columns
        (128, 256, lambda *given: given, "out dweights"),
        (256, 64, lambda *given: given, "dx"),
        (256, 128, lambda *given: given, "dx"),
        (32, 256, lambda *given: given, ""),
        (256, 256, lambda x, w, d: (x.float(), w.float(), d.float()), ""),
        (256, 256, lambda x, w, d: (x[:0], w, d[:0]), "out dx"),  # of no rows, they are not asked
        (256, 256, lambda x, w, d: (x, w.mT.contiguous().mT, d), "all"),
        (256, 256, lambda x, w, d: (x, w.repeat(1, 2, 1)[:, :256], d), "dweights"),
        (256, 256, lambda x, w, d: (x, w.repeat(1, 1, 2)[:, :, :256], d), "all"),
        (256, 256, lambda x, w, d: (x, w[:1].expand(2, -1, -1), d), "dweights"),
        (256, 256, lambda x, w, d: (x, w.repeat(1, 1, 2)[:, :, ::2], d), "dweights"),
        (256, 256, lambda x, w, d: (x.repeat(1, 2)[:, 1:257], w, d), "dx"),  # rows begin 2 bytes off
        (256, 256, lambda x, w, d: (x[:1].expand(9, -1), w, d), "dx"),
    ],
)  # fmt: skip
def test_the_kernels_take_what_tma_can_describe(monkeypatch, K, N, change, wanted):
    monkeypatch.setattr(runtime, "INTERPRET", True)
    given = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((9, K), (2, K, N), (9, N)))
    x, weights, dout = change(*given)
    whys = {
        "out": product.why_portable(x, weights),
        "dx": product.why_portable(dout, weights.mT),
        "dweights": gradient.why_portable(x, dout),
    }
    assert [name for name, why in whys.items() if not why] == (list(whys) if wanted == "all" else wanted.split())


def test_the_reason_is_said():
    x = torch.zeros(8, 256, dtype=torch.bfloat16)
    assert "neither bfloat16 nor float16" in product.why_portable(x.float(), x.float()[None])
    assert "K is no multiple of 64" in product.why_portable(x[:, :32], x.mT[None, :32])
    assert "no rows" in gradient.why_portable(x[:0], x[:0])


# ---- who takes them


@runs_them
@pytest.mark.parametrize("needed", ["x weights", "x", "weights"])
def test_on_hopper_the_product_and_its_gradients_take_them(monkeypatch, needed):
    emulate(monkeypatch, 5)
    monkeypatch.setattr(tuning, "capability_of", lambda device: (9, 0))
    for name in ("grouped_matmul_kernel", "grouped_weight_gradient_kernel"):
        monkeypatch.setattr(portable, name, None)
    counts = (70, 0, 5)
    x, weights, dout = operands(counts, 256, 256)
    leaves = {"x": x.requires_grad_("x" in needed.split()), "weights": weights.requires_grad_("weights" in needed)}
    out = grouped_matmul(x, weights, torch.tensor(counts, device=DEVICE))
    got = torch.autograd.grad(out, [leaves[name] for name in needed.split()], dout)
    right = dict(
        zip(("out", "x", "weights"), by_loop(counts, x.detach().double(), weights.detach().double(), dout.double()))
    )
    for name, mine in zip(("out", *needed.split()), (out, *got)):
        error = (mine.double() - right[name]).abs().max() / right[name].abs().max()
        assert error < ALLOWED[torch.bfloat16], name


@pytest.mark.parametrize("capability", [None, (8, 0), (10, 0), (12, 0)])
def test_no_other_gpu_takes_them(monkeypatch, capability):
    monkeypatch.setattr(tuning, "capability_of", lambda device: capability)
    x = torch.zeros(256, 256, dtype=torch.bfloat16)
    assert portable.hopper_product(x, x[None]) is None and portable.hopper_gradient(x, x) is None


@pytest.mark.parametrize(("K", "N"), [(64, 256), (128, 256), (256, 64), (256, 250)])
def test_each_product_asks_for_itself(monkeypatch, K, N):
    monkeypatch.setattr(runtime, "INTERPRET", True)
    monkeypatch.setattr(tuning, "capability_of", lambda device: (9, 0))
    x, weights, dout = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((9, K), (2, K, N), (9, N)))
    taken = [portable.hopper_product(x, weights), portable.hopper_product(dout, weights.mT)]
    taken.append(portable.hopper_gradient(x, dout))
    fits = [N % 256 == 0, K % 256 == 0 and N % 64 == 0, K % 128 == 0 and N % 256 == 0]
    assert taken == [module if fit else None for module, fit in zip((product, product, gradient), fits)]
