"""Lab 7 and the emulator of Gluon under it: what it takes for a GPU's rules, what it refuses, what is compiled."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from lab_answers import lab_answered, wrong_answer

from solutions.lab7_capstone import consumer, multiply
from solutions.lab7_capstone.exercises.consumer import check_consumer, compiled
from utils.checks.core import CheckFailed
from utils.compile_only import CompileError, Request, resource_usages
from utils.gluon import Fault, Launch, emulated, launch
from utils.gluon.machine import Descriptor, Integer, Shared
from utils.runtime import DEVICE

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language import bfloat16 as half  # isort: skip
from triton.experimental.gluon.language.nvidia import hopper as of_hopper  # isort: skip

pytestmark = pytest.mark.compat

EIGHT = gl.constexpr(8)


def factors(M: int, N: int, K: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(rows, K, generator=generator).to(device, torch.bfloat16) for rows in (M, N))


def test_the_product_is_right_where_kernels_run():
    hopper = DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) == (9, 0)
    for stages in (2, 3, 4):
        a, b = factors(200, 264, 712, DEVICE if hopper else "cpu")
        exact = a.double() @ b.double().T
        assert ((multiply(a, b, stages).double() - exact).abs() <= exact.abs() * 2**-8 + 0.03).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a.half(), b, 4), "a and b must be bfloat16"),
        (lambda a, b: (a[:, :8], b, 4), r"a must be \(M, K\) and b \(N, K\)"),
        (lambda a, b: (a[:, :12].contiguous(), b[:, :12].contiguous(), 4), "multiples of 8, got K = 12 and N = 16"),
        (lambda a, b: (a, b[:15], 4), "multiples of 8, got K = 16 and N = 15"),
        (lambda a, b: (a.T.contiguous().T, b, 4), "contiguous"),
        (lambda a, b: (a, b, 1), "stages must be 2, 3 or 4, got 1"),
    ],
)
def test_what_multiply_cannot_take_is_refused_by_value(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        multiply(*change(*factors(16, 16, 16)))


# ---- the emulator ----


def test_integers_of_a_kernel_round_towards_zero_as_in_c():
    assert [(int(x % 2), int(x // 2)) for x in map(Integer, (-3, -1, 1, 3))] == [(-1, -1), (-1, 0), (1, 0), (1, 1)]
    assert int((Integer(0) - 1) % 4) == -1 and type(1 - Integer(3)) is Integer


@gluon.jit
def rounded(x):
    return (x * EIGHT).to(half)


@gluon.jit
def doubling_kernel(x_desc, out_desc, N: gl.constexpr):
    """Reads a tile, multiplies it by eight and writes it, with the modules under other names."""
    tile = gl.allocate_shared_memory(x_desc.dtype, [N, N], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], of_hopper.mbarrier.MBarrierLayout()).index(0)
    of_hopper.mbarrier.init(full, 1)
    of_hopper.fence_async_shared()
    of_hopper.mbarrier.expect(full, x_desc.block_type.nbytes)
    of_hopper.tma.async_copy_global_to_shared(x_desc, [0, 0], full, tile)
    of_hopper.mbarrier.wait(full, 0)
    for _ in range(2):
        tile.store(rounded(tile.load(None)))
    of_hopper.fence_async_shared()
    of_hopper.tma.async_copy_shared_to_global(out_desc, [0, 0], tile)
    of_hopper.tma.store_wait(pendings=0)


@gluon.jit
def unknown_kernel(x_desc, out_desc, N: gl.constexpr):
    gl.atomic_add(x_desc, N)


@gluon.jit
def wide_kernel(x_desc, N: gl.constexpr):
    """A thread holds a row of N numbers until it knows the largest."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, N], [32, 1], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x_desc.dtype, [128, N], x_desc.layout)
    x = tile.load(ROWS).to(gl.float32)
    tile.store((x - gl.max(x, 1)[:, None]).to(x_desc.dtype))


def described(x: torch.Tensor):
    return consumer.descriptor_of(x, 64, 64)


def test_a_kernel_keeps_its_helpers_and_constants_whatever_it_calls_gluons_modules():
    x, out = torch.randn(64, 64).bfloat16(), torch.empty(64, 64, dtype=torch.bfloat16)
    with emulated(first=0) as launches:
        launch(doubling_kernel, (1,), described(x), described(out), N=64)
    assert torch.equal(out, 64 * x) and len(launches[0].programs) == 1
    assert [what for _, what, _, _ in launches[0].programs[0].events] == ["wait", "store"]


def test_what_the_emulator_does_not_know_is_named():
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    with pytest.raises(AttributeError, match=r"the emulator knows no 'atomic_add' here, but .*allocate_shared_memory"):
        launch(unknown_kernel, (1,), described(x), described(x), N=64)


def test_a_tile_of_another_dtype_or_out_of_bounds_is_refused():
    tile = Shared(torch.zeros(2, 4, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"holds torch.bfloat16, got torch.float32: convert it"):
        tile.store(torch.zeros(2, 4))
    with pytest.raises(Fault, match=r"\[2\] does not exist: .* has 2"):
        tile.index(2)
    with pytest.raises(Fault, match=r"a tile at \[-1, 0\] of a tensor of shape \(4, 4\)"):
        Descriptor(torch.zeros(4, 4), [2, 2]).read([-1, 0])


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("no wait", "reads a_tiles[0] before TMA has written it"),
        ("released at once", "TMA overwrites a_tiles[0] while a product that reads it is under way"),
        ("never released", "producer waits at empty[0] with parity 0 for phase 0, which lacks 1 of 1 arrivals"),
    ],
)
def test_a_mistake_at_the_barriers_is_a_fault_when_the_other_side_is_ahead(name, fault, tmp_path):
    a, b = factors(16, 16, 64 * 8)
    with lab_answered(wrong_answer("7.1", name), tmp_path) as lab, pytest.raises(Fault) as raised:
        for first in (0, -1):
            with emulated(first=first):
                lab.multiply(a, b, stages=2)
    assert fault in str(raised.value)


def test_a_product_that_is_computed_beside_the_launch_is_none_of_the_kernels(tmp_path):
    with lab_answered(wrong_answer("7.1", "starts anew"), tmp_path) as lab:

        def beside(a, b, stages=4):
            lab.multiply(a, b, stages=stages)
            return (a.float() @ b.float().T).to(a.dtype)

        with pytest.raises(CheckFailed, match="multiply does not return what its last launch wrote"):
            check_consumer(beside, seed=1)


# ---- what a GPU would make of it ----


def launched(lab, stages: int = 4):
    """A launch of a lab's kernel, whatever becomes of it."""
    with emulated(first=0) as launches, contextlib.suppress(Fault):
        lab.multiply(*factors(16, 16, 192), stages=stages)
    return launches[0]


@pytest.mark.slow
def test_a_sum_that_is_read_in_the_loop_makes_the_compiler_serialise_the_products(tmp_path):
    with lab_answered(wrong_answer("7.1", "the sum is read in the loop"), tmp_path) as lab:
        problem = compiled(launched(lab))
    assert problem.headline.startswith("ptxas serialises the products") and "wgmma" in problem.details[0]


@pytest.mark.slow
def test_a_tile_that_is_too_wide_for_the_registers_is_ptxass_error(monkeypatch):
    monkeypatch.setitem(consumer.OPTIONS, "maxnreg", 64)
    problem = compiled(launched(consumer))
    assert "does not compile it for sm_90" in problem.headline and "Insufficient registers (64)" in problem.details[0]


@pytest.mark.slow
def test_a_kernel_that_spills_is_told_how_much():
    given = (described(torch.zeros(64, 64, dtype=torch.bfloat16)),)
    problem = compiled(Launch(wide_kernel, given, {"N": 128}, {"num_warps": 4, "maxnreg": 40}))
    assert re.match(r"the compiled kernel spills: \d+ bytes of local memory per thread", problem.headline)


@pytest.mark.slow
def test_a_gluon_kernel_compiles_with_what_it_calls_and_an_unknown_function_is_an_error():
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    kind = f"tensordesc<bf16[64, 64],{described(x).layout!r}>"
    types = {"x_desc": kind, "out_desc": kind}
    with pytest.raises(CompileError, match="unknown_kernel does not compile for sm_90"):
        resource_usages([Request(unknown_kernel, types, {"N": 64})])
    (used,) = resource_usages([Request(consumer.matmul_kernel, *request(4), maxnreg=128)])
    assert used.threads == 256 and not used.spills and used.shared_bytes > 160 * 1024


def request(stages: int) -> tuple[dict[str, str], dict[str, int]]:
    """Types and constants of the lab's kernel."""
    made = launched(consumer, stages)
    names = made.kernel.arg_names
    types = [f"tensordesc<bf16{list(x.block_shape)},{x.layout!r}>" for x in made.arguments[:3]]
    return dict(zip(names, [*types, "i32"])), made.constants
