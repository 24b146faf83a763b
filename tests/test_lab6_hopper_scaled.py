"""Lab 6's products of e4m3 matrices for Hopper: right in whatever order their barriers allow, and taken where they fit.

On a Hopper GPU the kernels themselves run; elsewhere the course's emulator of Gluon runs them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import gluon_emulator
import pytest
import torch
from parameters import thorough_but

from solutions.lab6_frontiers import Quantized, quantize, quantize_blocks, scaled_matmul, tiles, tuning
from utils import runtime
from utils.gluon.machine import Descriptor, Fault, Integer, Pointer
from utils.runtime import DEVICE

from triton.runtime import driver  # isort: skip

by_row = pytest.importorskip("solutions.lab6_frontiers.hopper_row_scaled", reason="this Triton has no Gluon")
by_block = pytest.importorskip("solutions.lab6_frontiers.hopper_block_scaled", reason="this Triton has no Gluon")
products = importlib.import_module("solutions.lab6_frontiers.hopper_products")
portable = importlib.import_module("solutions.lab6_frontiers.scaled_matmul")

FOLDER = Path(by_row.__file__).parent
#: Programs of a grid in the emulator: each has several tiles.
PROGRAMS = 2
#: Largest error, as a share of the largest right value.
ALLOWED = {torch.bfloat16: 0.005, torch.float16: 0.001}
runs_them = pytest.mark.skipif(
    not runtime.INTERPRET and tuning.capability_of(DEVICE) != (9, 0), reason="a GPU, but none of Hopper"
)


class Emulated:
    """Stands where kernels are launched; each program runs in the emulator."""

    def __init__(self, seed: int, folder: Path = FOLDER, first: int | None = None) -> None:
        self.seed, self.folder, self.first = seed, folder, first

    def __call__(self, kernel, programs: int, *arguments) -> None:
        name = kernel.__name__
        path = self.folder / f"{name.removesuffix('_kernel')}.py"
        given = [self.argument(each) for each in arguments]
        gluon_emulator.run_programs(path, name, given, programs, self.seed, self.first)

    @staticmethod
    def argument(each):
        if hasattr(each, "block_shape"):
            return Descriptor(each.base, each.block_shape)
        if isinstance(each, torch.Tensor):  # what lies in memory, from its first element on
            return Pointer(each.as_strided((tiles.extent(each),), (1,)))
        return Integer(each) if type(each) is int else each


def emulate(monkeypatch, seed: int, folder: Path = FOLDER, first: int | None = None) -> None:
    """Kernels are emulated where others are interpreted, and new tensors are full of NaN."""
    monkeypatch.setattr(tuning, "capability_of", lambda device: (9, 0))
    if not runtime.INTERPRET:
        return
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
    for kernels in (by_row, by_block):
        monkeypatch.setattr(kernels, "programs", lambda device: PROGRAMS)
        monkeypatch.setattr(kernels, "launch", Emulated(seed, folder, first))


def operands(kind: str, M: int, N: int, K: int, seed: int = 0) -> tuple[Quantized, Quantized]:
    """a (M, K) and b (N, K) whose rows have different magnitudes."""
    source = torch.Generator().manual_seed(seed)
    x, y = ((torch.randn(n, K, generator=source) * (1 + torch.rand(n, 1, generator=source))).to(DEVICE) for n in (M, N))
    if kind == "block":
        return quantize(x, "e4m3", 128), quantize_blocks(y, square=True)
    return quantize(x, "e4m3", K if kind[0] == "r" else None), quantize(y, "e4m3", K if kind[-1] == "r" else None)


def error(a: Quantized, b: Quantized, dtype: torch.dtype = torch.bfloat16) -> float:
    """Largest error of a product as a share of the largest right value; NaN where only one of both has a NaN."""
    got = scaled_matmul(a, b, dtype).double()
    right = a.dequantize().double() @ b.dequantize().double().T
    off = torch.where(got.isnan() & right.isnan(), 0.0, got - right).abs().max()
    return (off / right.nan_to_num().abs().max()).item()


@pytest.fixture
def only_hopper(monkeypatch):
    """The kernels for every GPU are out of the way."""
    for name in ("scaled_matmul_kernel", "block_scaled_matmul_kernel"):
        monkeypatch.setattr(portable, name, None)


#: Scales (of rows, one for the tensor, both, or blocks), and M, N and K: fewer steps than stages, as many, more.
CASES = [
    ("rr", 130, 520, 384), ("rr", 300, 264, 1296), ("rt", 64, 128, 16), ("tr", 200, 136, 640), ("tt", 1, 8, 512),
    ("block", 130, 520, 384), ("block", 300, 264, 1280), ("block", 64, 128, 128), ("block", 1, 8, 512),
]  # fmt: skip


@runs_them
@pytest.mark.parametrize("case", thorough_but(CASES, CASES[1], CASES[6], CASES[7]))
def test_products_are_right_in_whatever_order_things_happen(monkeypatch, only_hopper, case):
    for seed, first in enumerate((None, -1, 1, 2)):
        dtype = list(ALLOWED)[seed % 2]
        with monkeypatch.context() as patched:
            emulate(patched, seed, first=first)
            assert error(*operands(*case, seed), dtype) < ALLOWED[dtype]


@runs_them
def test_rows_may_lie_apart_and_scales_in_any_strides(monkeypatch, only_hopper):
    emulate(monkeypatch, 1)
    a, b = operands("block", 70, 136, 384)
    home = torch.zeros(70, 512, dtype=torch.uint8, device=DEVICE)
    home[:, 64:448] = a.values.view(torch.uint8)
    apart = home.view(torch.float8_e4m3fn)[:, 64:448]
    turned = a.scales.T.contiguous().T
    assert error(Quantized(apart, turned, "e4m3", 128), b) < ALLOWED[torch.bfloat16]
    same = a.scales[:, :1].expand(70, 3)
    assert error(Quantized(apart, same, "e4m3", 128), b) < ALLOWED[torch.bfloat16]
    a, b = operands("rr", 70, 136, 384)
    apart = torch.stack([a.scales, a.scales + 1], 1)[:, 0]
    assert error(Quantized(a.values, apart, "e4m3", 384), b) < ALLOWED[torch.bfloat16]


@runs_them
@pytest.mark.parametrize("kind", ["rr", "block"])
def test_a_nan_stays_in_its_row_and_its_column(monkeypatch, only_hopper, kind):
    emulate(monkeypatch, 2)
    a, b = operands(kind, 130, 264, 256)
    a.scales[3] = float("nan")
    b.values[200, 5] = float("nan")
    found = scaled_matmul(a, b)
    assert found[3].isnan().all() and found[:, 200].isnan().all()
    assert int(found.isnan().sum()) == 264 + 130 - 1


#: What is changed in which file, and what the emulator then finds.
MISTAKES = {
    "a stage that is free while it is read": (
        "hopper_row_scaled", "mbarrier.arrive(empty.index((step + S - 1) % S))\n    return",
        "mbarrier.arrive(empty.index(step % S))\n    return", {"overwritten", "arrivals", "deadlock"},
    ),
    "a stage that is read before it is full": (
        "hopper_row_scaled", "    mbarrier.wait(full.index(s), (step // S) & 1)\n    a = a_tiles", "    a = a_tiles",
        {"early"},
    ),
    "scales of the next tile": (
        "hopper_row_scaled", "gl.load(b_scale_ptr + columns", "gl.load(b_scale_ptr + 0 * columns", {"wrong"},
    ),
    "a quarter that is stored twice": (
        "hopper_row_scaled", "c_odd, row, column + 64)", "c_odd, row, column)", {"wrong"},
    ),
    "a stage that is free before its last product": (
        "hopper_block_scaled",
        "            sums = multiply(a, b_tiles.index(s).slice(128, 128))\n"
        "            mbarrier.arrive(empty.index(s))\n",
        "            mbarrier.arrive(empty.index(s))\n"
        "            sums = multiply(a, b_tiles.index(s).slice(128, 128))\n",
        {"early", "overwritten", "wrong"},
    ),
    "the scales of the block before": (
        "hopper_block_scaled", "following = gl.minimum(block + 1, blocks - 1)", "following = block", {"wrong"},
    ),
    "one scale for both halves": ("hopper_block_scaled", "sums * right[:, None]", "sums * left[:, None]", {"wrong"}),
    "a buffer that is overwritten while it is stored": (
        "hopper_products", "tma.store_wait(1)", "tma.store_wait(2)", {"wrong"},
    ),
    "no fence before a store": (
        "hopper_products", "    fence_async_shared()\n    wait_for_all()\n    tma", "    tma", {"unfenced"},
    ),
    "stages of another size": ("hopper_products", "(128 + 256) * 128)", "256 * 128)", {"deadlock"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not runtime.INTERPRET, reason="mistakes are for the emulator")
@pytest.mark.parametrize("mistake", thorough_but(MISTAKES, *list(MISTAKES)[::4]))
def test_what_is_changed_shows(monkeypatch, tmp_path, mistake):
    changed, old, new, kinds = MISTAKES[mistake]
    for file in ("hopper_row_scaled", "hopper_block_scaled", "hopper_products"):
        text = (FOLDER / f"{file}.py").read_text()
        assert file != changed or text.count(old) == 1
        (tmp_path / f"{file}.py").write_text(text.replace(old, new) if file == changed else text)
    seen = set()
    for seed, first in enumerate((0, -1, 1, 2, *[None] * 12)):  # one partition always goes on if it can; whichever
        emulate(monkeypatch, seed, tmp_path, first)
        for kind in ("rr", "block"):
            try:
                seen |= set() if error(*operands(kind, 200, 264, 1280, seed)) < ALLOWED[torch.bfloat16] else {"wrong"}
            except Fault as fault:
                seen.add(fault.kind)
        if seen:
            break
    assert seen and seen <= kinds, seen


# ---- who takes them


@pytest.mark.parametrize(
    ("capability", "kind", "dtype", "change", "taken"),
    [
        ((9, 0), "rr", torch.bfloat16, lambda a, b: (a, b), "row"),
        ((9, 0), "tt", torch.float16, lambda a, b: (a, b), "row"),
        ((9, 0), "block", torch.bfloat16, lambda a, b: (a, b), "block"),
        ((9, 0), "rr", torch.float32, lambda a, b: (a, b), None),
        ((9, 0), "block", torch.float32, lambda a, b: (a, b), None),
        ((8, 9), "rr", torch.bfloat16, lambda a, b: (a, b), None),
        ((10, 0), "rr", torch.bfloat16, lambda a, b: (a, b), None),
        ((10, 0), "block", torch.bfloat16, lambda a, b: (a, b), None),
        ((12, 0), "block", torch.bfloat16, lambda a, b: (a, b), None),
        (None, "rr", torch.bfloat16, lambda a, b: (a, b), None),
        ((9, 0), "rr", torch.bfloat16, lambda a, b: (a, Quantized(b.values[:-1], b.scales[:-1], "e4m3", 256)), None),
        (
            (9, 0), "block", torch.bfloat16,
            lambda a, b: (a, Quantized(b.values, torch.ones(136, 2, device=DEVICE), "e4m3", 128)), None,
        ),
    ],
)  # fmt: skip
def test_hopper_takes_what_its_kernels_can_multiply(monkeypatch, capability, kind, dtype, change, taken):
    class Taken(Exception):
        """A kernel was launched: which."""

    def launched(name):
        def launch(*_, **__):
            raise Taken(name)

        return launch

    a, b = change(*operands(kind, 70, 136, 256))
    monkeypatch.setattr(tuning, "capability_of", lambda device: capability)
    monkeypatch.setattr(runtime, "INTERPRET", True)
    monkeypatch.setattr(by_row, "launch", launched("row"))
    monkeypatch.setattr(by_block, "launch", launched("block"))
    for name in ("scaled_matmul_kernel", "block_scaled_matmul_kernel"):
        monkeypatch.setattr(portable, name, {(1,): launched(None), (2,): launched(None), (4,): launched(None)})
    monkeypatch.setattr(portable, "programs", lambda device: 1)
    monkeypatch.setattr(portable.triton, "cdiv", lambda a, b: 1)
    with pytest.raises(Taken) as found:
        scaled_matmul(a, b, dtype)
    assert found.value.args == (taken,)


def test_scales_too_far_apart_for_32_bits_go_to_the_other_kernels():
    near, far = torch.ones(4, 1), torch.ones(1).as_strided((2, 1), (0, 1))
    assert tiles.extent(near) == 4 and tiles.extent(far) == 1 and tiles.extent(torch.ones(())) == 1
    given = ((9, 0), True, near)
    assert portable._hopper_multiplies(*given, near, torch.bfloat16)
    wide = torch.empty(0, device="meta").as_strided((2, 1), (2**31, 1))
    assert not portable._hopper_multiplies(*given, wide, torch.bfloat16)


# ---- launches


class Kernel:
    """Stands where a kernel is, and where Triton has compiled one.

    Attributes:
        searched: Launches that had Triton search for what it compiled: their arguments.
        launched: Launches without a search: their grid and arguments.
    """

    def __init__(self) -> None:
        self.searched, self.launched, self.__name__ = [], [], "kernel"

    def __getitem__(self, grid: tuple[int]):
        def search(*arguments, num_warps: int, maxnreg: int) -> Compiled:
            self.searched.append(arguments)
            return Compiled(self)

        return search


@dataclass
class Compiled:
    """What a search has found."""

    kernel: Kernel

    def __getitem__(self, grid: tuple[int, int, int]):
        return lambda *arguments: self.kernel.launched.append((grid, arguments))


@pytest.fixture
def launched(monkeypatch):
    """Launches one after another of a kernel, and the kernel."""
    kernel, gpu = Kernel(), SimpleNamespace(get_current_device=lambda: gpu.device, device=0)
    monkeypatch.setattr(products, "compiled", {})
    monkeypatch.setattr(driver, "_active", gpu)
    c = SimpleNamespace(base=torch.empty(0, dtype=torch.bfloat16))
    scales = torch.ones(8, 2)

    def launch(count=1, c=c, a_scales=scales, b_scales=scales, *sizes):
        products.launch(kernel, count, "a", "b", c, a_scales, b_scales, *sizes)

    return kernel, launch, gpu


def test_sizes_and_addresses_of_a_second_launch_make_no_search(launched):
    kernel, launch, _gpu = launched
    launch()
    assert len(kernel.searched) == 1 and not kernel.launched
    moved = torch.ones(8, 2)
    other = SimpleNamespace(base=torch.empty(0, dtype=torch.bfloat16))
    launch(7, other, moved, moved, 3, 4)
    assert len(kernel.searched) == 1 and kernel.launched == [((7, 1, 1), ("a", "b", other, moved, moved, 3, 4))]


@pytest.mark.parametrize("change", ["dtype of c", "strides", "alignment", "GPU", "kernel"])
def test_what_may_be_compiled_anew_is_searched_for(launched, change):
    kernel, launch, gpu = launched
    launch()
    scales = torch.ones(8, 2)
    if change == "GPU":
        gpu.device = 1
    elif change == "kernel":
        kernel.__name__ = "another"
    changed = {
        "dtype of c": {"c": SimpleNamespace(base=torch.empty(0, dtype=torch.float16))},
        "strides": {"b_scales": torch.ones(2, 8).T},
        "alignment": {"a_scales": torch.ones(20)[1:17].view(8, 2)},
    }
    launch(**{"a_scales": scales, **changed.get(change, {})})
    assert len(kernel.searched) == 2 and not kernel.launched


@pytest.mark.parametrize("kernels", [by_row, by_block])
def test_triton_specialises_for_what_launches_are_told_apart_by(kernels):
    name = kernels.__name__.split(".")[-1]
    params = getattr(kernels, f"{name}_kernel").params
    specialised = {param.name for param in params if not (param.is_constexpr or param.do_not_specialize)}
    strides = {param.name for param in params if "stride" in param.name}
    assert specialised == {"a_desc", "b_desc", "c_desc", "a_scale_ptr", "b_scale_ptr"} | strides
