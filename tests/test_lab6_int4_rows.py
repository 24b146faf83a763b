"""Lab 6's product of few activations with 4-bit weights, without a GPU: its PTX and its indices, step by step.

Its kernel is in Gluon, which Triton's interpreter does not know. Here PyTorch stands in for ``gl``, copies to shared
memory arrive as late as they may, and a small machine runs the PTX for the 32 threads of a warp.
"""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace

import pytest
import torch

from solutions.lab6_frontiers import int4_rows
from solutions.lab6_frontiers.int4_packing import pack_int4
from utils.fingerprint import ROOT
from utils.formats import quantize

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


# ---- PTX -----------------------------------------------------------------------------------------------------------


def halves(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(..., n) words of 32 bits as (..., n, 2) numbers of 16."""
    return words.to(torch.int32).contiguous().view(dtype).unflatten(-1, (-1, 2)).float()


def multiply(d: list, a: list, b: list, c: list, dtype: torch.dtype) -> None:
    """``mma.sync.m16n8k16`` as the PTX manual lays its operands out: registers are (G, 32), one number a thread."""
    count = len(a[0])
    left, right = torch.zeros(count, 16, 16), torch.zeros(count, 16, 8)
    for thread in range(32):
        r, t = divmod(thread, 4)
        for i in range(4):
            row, k = r + 8 * (i % 2), 2 * t + 8 * (i // 2)
            left[:, row, k : k + 2] = halves(a[i][:, thread : thread + 1], dtype)[:, 0]
        for i in range(2):
            right[:, 2 * t + 8 * i : 2 * t + 8 * i + 2, r] = halves(b[i][:, thread : thread + 1], dtype)[:, 0]
    product = left @ right
    for thread in range(32):
        r, t = divmod(thread, 4)
        for i in range(4):
            d[i][:, thread] = c[i][:, thread] + product[:, r + 8 * (i // 2), 2 * t + i % 2]


def run_ptx(text: str, inputs: list[torch.Tensor], first: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The operands before ``first`` after a piece of PTX; inputs (G, 32) are those from there on."""
    shape = inputs[0].shape
    registers: dict[str, torch.Tensor] = {f"${first + i}": x.long() & 0xFFFFFFFF for i, x in enumerate(inputs)}

    def value(name: str) -> torch.Tensor:
        if name.startswith("0f"):
            return torch.full(shape, float(int(name[2:], 16) != 0))  # only 0 is used
        return registers[name] if name in registers else torch.full(shape, int(name, 0))

    for line in re.split(r";\s*", text.strip("{}\n ")):
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        if name.startswith("mma"):
            d, a, b, c = (re.split(r",\s*", group) for group in re.findall(r"{([^}]*)}", rest))
            multiply(*([registers[x] for x in group] for group in (d, a, b, c)), dtype)
            continue
        target, *arguments = re.split(r",\s*", rest)
        x = [value(argument) for argument in arguments]
        match name.split(".")[0]:
            case "mov":
                result = x[0].clone()
            case "shr":
                result = x[0] >> x[1]
            case "shl":
                result = x[0] << x[1] & 0xFFFFFFFF
            case "lop3":
                assert arguments[3] == "0xEA"  # of the table of all functions: (a & b) | c
                result = x[0] & x[1] | x[2]
            case "fma":
                pairs = [halves(word, dtype) for word in x]
                numbers = (pairs[0] * pairs[1] + pairs[2]).to(dtype)
                result = numbers.contiguous().view(torch.int32).squeeze(-1).long() & 0xFFFFFFFF
            case "add":
                result = x[0] + x[1]
            case other:
                raise AssertionError(f"the machine does not know {other}")
        registers[target] = result
    return [registers[f"${i}"] for i in range(first)]


def group_products(low, high, x0, x1, x2, x3, dtype):
    """As the kernel's: thread 4 r + t has elements 4 t to 4 t + 3 of row r of each (G, 8, 16)."""
    inputs = [x.reshape(len(x), 32, 4)[:, :, i] for x in (low, high, x0, x1, x2, x3) for i in range(4)]
    found = run_ptx(int4_rows.products_of_a_group.fn(dtype), inputs, 4, DTYPES[dtype])
    return torch.stack(found, -1).reshape(len(low), 8, 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ptx_multiplies_each_code_with_its_activation(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(16, 128, generator=generator), "int4", 128)
    x = torch.randn(8, 128, generator=generator).to(DTYPES[dtype])
    words = pack_int4(weight).codes.view(torch.int32)  # (1, 16, 16)
    x_words = x.view(torch.int32).view(1, 8, 4, 16).unbind(2)
    sums = group_products(words[:, :8], words[:, 8:], *x_words, dtype)[0]
    found = sums.view(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8)  # r, t, h, u -> rows r + 8 h, activations 2 t + u
    codes = weight.dequantize() / weight.scales
    torch.testing.assert_close(found, codes @ x.float().T, rtol=1e-5, atol=1e-4)


# ---- the kernel ----------------------------------------------------------------------------------------------------


class Pointer:
    """A pointer, or a tensor of pointers, into a tensor."""

    def __init__(self, tensor: torch.Tensor, offset: torch.Tensor | int = 0) -> None:
        self.tensor, self.offset = tensor.view(-1), offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: torch.Tensor | int) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    def load(self, mask: torch.Tensor) -> torch.Tensor:
        offset, mask = torch.broadcast_tensors(self.offset, mask)
        return torch.where(mask, self.tensor[torch.where(mask, offset, 0)], 0)

    def store(self, value: torch.Tensor, mask: torch.Tensor) -> None:
        offset, mask = torch.broadcast_tensors(self.offset, mask)
        self.tensor[offset[mask]] = value[mask]


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def index(self, place: int) -> Shared:
        return Shared(self.tensor[int(place)])

    def slice(self, first: int, length: int, dim: int) -> Shared:
        return Shared(self.tensor.narrow(dim, first, length))

    def load(self, layout: object) -> torch.Tensor:
        return self.tensor.clone()


class Copies:
    """Copies to shared memory: what is there is lost at once, and what comes is there when it is waited for."""

    def __init__(self) -> None:
        self.open: list = []
        self.groups: list[list] = []

    def async_copy_global_to_shared(self, target: Shared, source: Pointer, mask: torch.Tensor) -> None:
        target.tensor.fill_(float("nan") if target.tensor.is_floating_point() else 0x5A5A5A5A)
        self.open.append((target.tensor, source.load(mask)))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, most: int) -> None:
        while len(self.groups) > most:
            for target, value in self.groups.pop(0):
                target.copy_(value)


def kernel(program: int) -> dict[str, object]:
    """The names of the kernel's file with PyTorch in Gluon's place, for one program of the grid."""

    def jit(function=None, **_):
        return function or (lambda f: f)

    nothing = dict.fromkeys(("BlockedLayout", "SliceLayout", "SwizzledSharedLayout"), lambda *_: None)
    gl = SimpleNamespace(
        **nothing, int32=torch.int32, int64=torch.int64, float32=torch.float32, static_range=range,
        to_tensor=torch.tensor, arange=lambda first, end, layout: torch.arange(first, end),
        program_id=lambda axis: program,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), sum=torch.sum,
        where=lambda c, a, b: torch.where(c, a, b) if isinstance(c, torch.Tensor) else a if c else b,
        load=lambda pointer, mask, other: pointer.load(mask), store=Pointer.store,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.full(shape, 99, dtype=dtype)),
    )  # fmt: skip
    source = (ROOT / "solutions" / "lab6_frontiers" / "int4_rows.py").read_text()
    tree = ast.parse(source.replace("acc.type.layout", "None"))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module != "__future__")]
    names: dict[str, object] = {
        "gl": gl, "gluon": SimpleNamespace(jit=jit, constexpr_function=jit), "async_copy": Copies(),
    }  # fmt: skip
    exec(compile(tree, "int4_rows.py", "exec"), names)
    names["group_products"] = group_products
    return names


@pytest.mark.parametrize(
    ("M", "N", "groups", "step", "stages", "dtype"),
    [
        (1, 16, 4, 4, 3, "bf16"),  # one step
        (8, 32, 12, 4, 5, "f16"),  # fewer steps than places
        (5, 40, 9, 4, 3, "bf16"),  # rows, groups and activations that do not fill their tiles
        (2, 7, 3, 2, 4, "f16"),
        (3, 20, 20, 2, 3, "bf16"),  # places are used again
    ],
)
def test_the_kernel_multiplies_like_pytorch(M, N, groups, step, stages, dtype):
    generator = torch.Generator().manual_seed(N)
    packed = pack_int4(quantize(torch.randn(N, 128 * groups, generator=generator), "int4", 128))
    x = torch.randn(M, 128 * groups, generator=generator).to(DTYPES[dtype])
    guarded = torch.full((M * N + 64,), 7.0, dtype=DTYPES[dtype])
    words = x.view(torch.int32), packed.codes.view(torch.int32), packed.scales, guarded
    for program in range(-(-N // int4_rows.ROWS)):
        names = kernel(program)
        names["int4_rows_kernel"](
            *map(Pointer, words), M, N, groups,
            BLOCK_G=step, STAGES=stages, DTYPE=dtype, NEXT=int4_rows.AFTER, WARPS=4,
        )  # fmt: skip
    assert (guarded[M * N :] == 7).all(), "something is written behind the end"
    exact = x.double() @ packed.dequantize().double().T
    theirs = (x @ packed.dequantize().to(x.dtype).T).double()
    found = guarded[: M * N].view(M, N).double()
    allowed = 2 * (theirs - exact).abs().max() + 2 * torch.finfo(x.dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= allowed
