"""One source of Gluon kernels for each version of Triton: names, the order of reductions, and the right assembler."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest
import torch

from utils import triton_versions
from utils.compile_only import Request, resource_usages
from utils.environment import version_tuple
from utils.gluon import launch
from utils.triton_versions import RENAMED, give_both_names, goes_in_order, reduced_in_order

import triton  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma  # isort: skip
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # isort: skip
from triton.runtime import cache  # isort: skip

pytestmark = pytest.mark.compat

LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def names_before_kernel(x_desc, out_desc, N: gl.constexpr):
    """Copies a tile, with the names of Triton 3.7."""
    tiles = gl.allocate_shared_memory(x_desc.dtype, [1, N, N], x_desc.layout)
    tile = tiles._reinterpret(x_desc.dtype, [N, N], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(full, 1)
    fence_async_shared()
    mbarrier.expect(full, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [0, 0], full, tile)
    mbarrier.wait(full, 0)
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [0, 0], tile)
    tma.store_wait(0)


@gluon.jit
def names_after_kernel(x_desc, out_desc, N: gl.constexpr):
    """Copies a tile, with the names of Triton 3.9."""
    tiles = gl.allocate_shared_memory(x_desc.dtype, [1, N, N], x_desc.layout)
    tile = tiles.reinterpret(x_desc.dtype, [N, N], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(full, 1)
    fence_async_shared()
    mbarrier.expect(full, x_desc.block_type.nbytes)
    tma.async_load(x_desc, [0, 0], full, tile)
    mbarrier.wait(full, 0)
    gl.barrier()
    tma.async_store(out_desc, [0, 0], tile)
    tma.store_wait(0)


KERNELS = (names_before_kernel, names_after_kernel)


def removed(*_: object) -> None:
    raise RuntimeError("this name has been removed")


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_both_names_lead_to_the_function_that_a_version_has(version):
    def there(owner: SimpleNamespace, each: triton_versions.Renamed) -> triton_versions.Renamed:
        if version_tuple(version) >= version_tuple(each.version):
            setattr(owner, each.after, each.after)
            setattr(owner, each.before, removed)  # as Triton 3.9 keeps some of them
        else:
            setattr(owner, each.before, each.before)
        return each._replace(owner=owner)

    renamed = [there(SimpleNamespace(), each) for each in RENAMED]
    give_both_names(renamed)
    for owner, before, after, since in renamed:
        expected = after if version_tuple(version) >= version_tuple(since) else before
        assert getattr(owner, before) == getattr(owner, after) == expected


def test_a_triton_that_has_neither_name_is_told_which_it_lacks():
    nothing = [each._replace(owner=SimpleNamespace()) for each in RENAMED]
    with pytest.raises(AttributeError, match="thread_barrier"):
        give_both_names(nothing)


def test_this_triton_has_each_name_from_the_version_on_that_is_stated():
    for owner, before, after, since in RENAMED:
        ours = getattr(owner, before) is getattr(owner, after)
        named = getattr(owner, after).__name__
        assert ours and named == (after if version_tuple(triton.__version__) >= version_tuple(since) else before)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_emulator_takes_either_name(kernel):
    x, out = torch.randn(64, 64).bfloat16(), torch.empty(64, 64, dtype=torch.bfloat16)
    launch(kernel, (1,), *(TensorDescriptor.from_tensor(each, [64, 64], LAYOUT) for each in (x, out)), N=64)
    assert torch.equal(out, x)


@pytest.mark.slow
def test_a_kernel_compiles_with_either_name_to_the_same():
    kind = f"tensordesc<bf16[64, 64],{LAYOUT!r}>"
    types = {"x_desc": kind, "out_desc": kind}
    before, after = resource_usages([Request(kernel, types, {"N": 64}) for kernel in KERNELS])
    assert before.shared_bytes == after.shared_bytes >= 2 * 64 * 64
    assert (before.registers, before.stack_bytes) == (after.registers, after.stack_bytes)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_assembler_is_the_one_that_triton_itself_asks_for_the_version_of_its_text(capability):
    from triton.backends.nvidia.compiler import get_ptxas_version

    path = triton_versions.ptxas(capability)
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    assert os.access(path, os.X_OK) and said == get_ptxas_version(capability)


# ---- the order in which a thread reduces its columns of a row --------------------------------------------------------

#: 64 rows and 128 columns as Hopper's tensor cores leave them: a thread has columns 8 e and 8 e + 1, or the next two...
SCORES = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])


@gluon.jit
def reduced_kernel(x_desc, out_desc, COLUMNS: gl.constexpr, MAX: gl.constexpr):
    """A tile reduced to ``COLUMNS`` columns."""
    tile = gl.allocate_shared_memory(x_desc.dtype, [64, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(full, 1)
    fence_async_shared()
    mbarrier.expect(full, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [0, 0], full, tile)
    mbarrier.wait(full, 0)
    out = gl.allocate_shared_memory(out_desc.dtype, [64, COLUMNS], out_desc.layout)
    out.store(reduced_in_order(tile.load(SCORES), COLUMNS, MAX))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [0, 0], out)
    tma.store_wait(0)


@pytest.mark.parametrize("columns", [4, 8])
def test_columns_are_added_and_compared_from_the_first_to_the_last(columns):
    layout = gl.NVMMASharedLayout(0, 32, 2)
    x = torch.randn(64, 128) * torch.logspace(-4, 4, 128)  # what rounding does to a sum shows its order
    for largest in (True, False):
        out = torch.empty(64, columns)
        descriptors = (TensorDescriptor.from_tensor(each, [64, each.shape[1]], layout) for each in (x, out))
        launch(reduced_kernel, (1,), *descriptors, COLUMNS=columns, MAX=largest)
        groups = x.view(64, 16, 8)
        groups = groups if columns == 8 else groups.view(64, 16, 4, 2).transpose(2, 3).reshape(64, 32, 4)
        expected = groups[:, 0]
        for group in groups.unbind(1)[1:]:
            expected = torch.maximum(expected, group) if largest else expected + group
        assert torch.equal(out, expected)
        assert largest or not torch.equal(groups.sum(1), expected)


LINEAR = gl.DistributedLinearLayout(
    [[0, 0, 1], [8, 0, 0], [0, 1, 0], [0, 2, 0]], [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    [[16, 0, 0], [32, 0, 0]], [], [64, 4, 8])  # fmt: skip
ACROSS = gl.DistributedLinearLayout(
    [[0, 0, 1], [8, 0, 0], [0, 0, 2], [0, 0, 4]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    [[16, 0, 0], [32, 0, 0]], [], [64, 4, 8])  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "layout", "axis", "expected"),
    [
        ([64, 128], SCORES, 1, True),
        ([64, 128], SCORES, 0, False),
        ([64, 128], SCORES, None, False),
        ([64, 8], SCORES, 1, False),
        ([64, 128], gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]), 1, False),
        ([64, 128], gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]), 1, False),
        ([64, 4, 8], LINEAR, 1, True),
        ([64, 4, 8], LINEAR, 2, False),
        ([64, 8, 4], LINEAR, 1, False),
        ([64, 4, 8], ACROSS, 1, False),
    ],
)
def test_only_results_of_the_tensor_cores_are_reduced_column_by_column(shape, layout, axis, expected):
    assert goes_in_order(shape, layout, axis) is expected


def test_gluons_max_and_sum_are_exchanged_from_the_version_on_that_reduces_pairwise():
    exchanged = version_tuple(triton.__version__) >= version_tuple("3.8")
    assert (gl.max is triton_versions.max_in_order) == (gl.sum is triton_versions.sum_in_order) == exchanged
    assert triton_versions.PAIRWISE == exchanged == (cache.triton_key.__module__ == triton_versions.__name__)


def test_the_cache_on_disk_sees_whose_reductions_a_kernel_has(monkeypatch):
    keys = []
    for pairwise in (False, True):
        monkeypatch.setattr(triton_versions, "PAIRWISE", pairwise)
        keys.append(triton_versions.key_with_reductions(lambda: "this Triton")())
    assert keys[0] == "this Triton" and keys[1].startswith("this Triton ")
