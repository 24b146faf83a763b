"""Lab 6's kernels for long sequences compile for Ampere, Hopper and Blackwell; those of 16 bits spill nothing."""

from __future__ import annotations

import pytest
import torch
from parameters import few_on_hopper

from solutions.lab3_flash_attention.tiles import Access
from solutions.lab3_flash_attention.tuning import block_d
from solutions.lab5_serving.merge import merge_parts_kernel
from solutions.lab6_frontiers import long_tuning
from solutions.lab6_frontiers.flash_kernels import (
    flash_delta_kernel,
    flash_dkdv_kernel,
    flash_dq_kernel,
    flash_forward_kernel,
)
from solutions.lab6_frontiers.mla_decode import mla_decode_kernel
from solutions.lab6_frontiers.visible_tiles import ALIGNMENT, Kind, plan_kernel
from utils import runtime
from utils.compile_only import Request, resource_usages

import triton.language as tl  # isort: skip

#: Compute capability times ten -> bytes of shared memory that one program may take.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Documents with a window and sinks; documents without a mask; a batch with a window; documents with a causal mask.
MASKS = (
    Kind(True, True, True, True),
    Kind(False, False, False, True),
    Kind(True, True, False, False),
    Kind(True, False, False, True),
)
#: Kernel of attention -> itself, and the (B, H, N, D) tensors that it takes.
FLASH = {
    "forward": (flash_forward_kernel, "q k v o"),
    "dkdv": (flash_dkdv_kernel, "q k v do dk dv"),
    "dq": (flash_dq_kernel, "q k v do dq"),
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """The tuning tables answer as on a GPU."""
    monkeypatch.setattr(runtime, "INTERPRET", False)


#: Bytes that a thread of a float32 kernel may keep in memory: with 80 or 128 registers the compiler moves a few numbers
#: there rather than take more. Those of 16 bits keep none.
FLOAT32_SPILLS = 24


#: The same of Hopper's tiles through descriptors that are faster nevertheless (long_tuning's table): kernel, columns.
#: A window with sinks in documents takes the most of each. The forward kernel moves a few numbers in every step; dkdv,
#: which is held to 168 registers for 64 columns, none within its loop over queries.
HOPPER_SPILLS = {("forward", 128): 80, ("dkdv", 64): 40, ("dkdv", 128): 16}


def assert_fit(requests, spilled=0):
    """Every kernel fits an SM and keeps its values in registers, all but ``spilled`` bytes of a thread."""
    for asked, used in zip(requests, resource_usages(requests), strict=True):
        case = f"{used.name} for sm_{asked.capability}: {dict(asked.constexprs)}"
        assert used.registers * used.threads <= 65536, f"{case} does not fit an SM: {used}"
        assert used.shared_bytes <= SHARED_MEMORY[asked.capability], f"{case} takes too much shared memory: {used}"
        assert used.stack_bytes <= spilled, f"{case} spills {used.stack_bytes} bytes a thread"


def mla(capability, heads, dtype="bf16", split=True, block_size=64):
    """The decode kernel as its launch specialises it for DeepSeek-V3's sizes."""
    tile = long_tuning.mla_decode(heads, DTYPES[dtype], divmod(capability, 10))
    constants = {
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_SIZE": block_size, "LATENT_DIM": 512, "ROPE_DIM": 64,
        "BLOCK_L": 512, "BLOCK_R": 64, "SPLIT": split, "stride_bb": 1, "stride_cs": 1,
    }  # fmt: skip
    signature = {
        "q_latent_ptr": f"*{dtype}", "q_rope_ptr": f"*{dtype}", "cache_ptr": f"*{dtype}", "block_tables_ptr": "*i32",
        "context_lens_ptr": "*i32", "o_ptr": "*fp32" if split else f"*{dtype}", "lse_ptr": "*fp32",
        "stride_ql": ("i32:16", "i32:16", 1), "stride_qr": ("i32:16", "i32:16", 1),
        "stride_c": ("i32:16", "i32:16", 1), "stride_bs": "i32", "scale_log2": "fp32", "heads": "i32", "parts": "i32",
    }  # fmt: skip
    aligned = [name for name, kind in signature.items() if kind[0] == "*"]
    return Request(mla_decode_kernel, signature, constants, capability, tile.warps, tile.stages, aligned)


def merge(capability):
    """Lab 5's merge of parts, for rows of 512."""
    tile = long_tuning.merge(long_tuning.MOST_PARTS, 512)
    strides = ("stride_is", "stride_ih", "stride_ip", "stride_ls", "stride_lh", "stride_os", "stride_oh")
    signature = {
        "outputs_ptr": "*fp32", "logsumexps_ptr": "*fp32", "o_ptr": "*bf16", **dict.fromkeys(strides, "i32"),
        "heads": "i32", "parts": "i32",
    }  # fmt: skip
    constants = {"stride_id": 1, "stride_lp": 1, "stride_od": 1, "BLOCK_P": tile.n, "HEAD_DIM": 512, "BLOCK_D": 512}
    aligned = [name for name, kind in signature.items() if kind[0] == "*"]
    return Request(merge_parts_kernel, signature, constants, capability, tile.warps, tile.stages, aligned)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_no_attention_over_latents_spills(capability, few):
    requests = [mla(capability, 128, split=True), merge(capability)]
    if not few:
        requests += [mla(capability, 128, split=False), mla(capability, 16, split=True), mla(capability, 128, "fp32")]
    assert_fit(requests)


def flash(name, capability, head_dim=128, dtype="bf16", mask=MASKS[0], described=False, length=None):
    """A kernel of attention as its launch specialises it for contiguous heads in groups of four, and whole tiles."""
    kernel, tensors = FLASH[name]
    window = 4096 if mask.window else None
    about = name, head_dim, DTYPES[dtype], mask.causal, divmod(capability, 10), described, window, length
    tile = long_tuning.flash(*about)
    width, rows = block_d(head_dim), {"q": tile.m, "k": tile.n, "v": tile.n, "do": tile.m}
    signature = {f"{x}_ptr": f"*{dtype}" for x in tensors.split()}
    if tile.descriptors:
        front = "1, 1, 1" if mask.packed else "1, 1"
        loaded = [x for x in tensors.split() if x in rows]
        signature |= {f"{x}_ptr": f"tensordesc<{dtype}[{front}, {rows[x]}, {width}]>" for x in loaded}
    signature |= {"lse_ptr": "*fp32", "plan_ptr": "*i32"} | ({} if name == "forward" else {"delta_ptr": "*fp32"})
    signature |= {f"stride_{x}": ("i32:16", "i32:16", "i32:16", 1) for x in tensors.split()}
    sizes = ("i32",) * 5 + ("i32:16",) + ("i32",) * 2
    signature |= {"sizes": sizes, "scale": "fp32", "nheads_in_l2": "i32"}
    access = Access(head_dim, tl.int32, tile.descriptors, tile.loads_first, tile.masked)
    constants = {
        "BLOCK_D": width, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "GQA_GROUP_SIZE": 4, "KIND": mask, "ACCESS": access,
    } | ({"ANCHORED": tile.anchored} if name == "forward" else {})  # fmt: skip
    aligned = [name for name, kind in signature.items() if kind[0] == "*"]
    return Request(kernel, signature, constants, capability, tile.warps, tile.stages, aligned, tile.registers)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLASH)
def test_no_attention_of_documents_spills_on_hopper(name):
    assert_fit([flash(name, 90)])
    assert_fit([flash(name, 90, mask=mask, described=True) for mask in MASKS], HOPPER_SPILLS.get((name, 128), 0))


@pytest.mark.slow
def test_three_programs_of_dk_and_dv_fit_an_sm_of_hopper_with_64_columns():
    asked = [flash("dkdv", 90, 64, mask=mask, described=True) for mask in MASKS if mask.causal]
    assert_fit(asked, HOPPER_SPILLS["dkdv", 64])
    for used in resource_usages(asked):
        assert 3 * used.registers * used.threads <= 65536 and 3 * (used.shared_bytes + 1024) <= 228 * 1024, used


@pytest.mark.slow
def test_the_forward_kernel_spills_nothing_where_queries_see_few_keys():
    assert_fit([flash("forward", 90, mask=mask, described=True, length=200) for mask in MASKS])


@pytest.mark.thorough
@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_attention_of_documents_spills(name, capability, dtype):
    head_dims = (64, 80, 128, 256) if dtype == "bf16" else (64, 128, 256)
    requests = [flash(name, capability, D, dtype, mask) for D in head_dims for mask in MASKS]
    assert_fit(requests, FLOAT32_SPILLS if dtype == "fp32" else 0)
    for D in head_dims if dtype == "bf16" and capability >= 90 else ():
        spilled = HOPPER_SPILLS.get((name, block_d(D)), 0) if capability == 90 else 0
        assert_fit([flash(name, capability, D, dtype, mask, True) for mask in MASKS], spilled)


def delta(capability, head_dim, dtype, rows, packed):
    """The delta kernel as its launch specialises it for contiguous heads."""
    strides = ("i32:16", "i32:16", "i32:16", 1)
    signature = {"o_ptr": f"*{dtype}", "do_ptr": f"*{dtype}", "delta_ptr": "*fp32", "plan_ptr": "*i32"}
    signature |= {"stride_o": strides, "stride_do": strides, "sizes": ("i32",) * 5 + ("i32:16",) + ("i32",) * 2}
    constants = {
        "BLOCK_D": block_d(head_dim), "BLOCK_M": rows, "KIND": Kind(False, False, False, packed),
        "ACCESS": Access(head_dim, tl.int32),
    }  # fmt: skip
    aligned = [name for name, kind in signature.items() if kind[0] == "*"]
    warps = long_tuning.delta_warps(head_dim, rows)
    return Request(flash_delta_kernel, signature, constants, capability, warps, 3, aligned)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_delta_of_documents_spills_nothing(capability):
    sizes = ((64, "bf16", 64), (128, "bf16", 128), (256, "bf16", 128), (256, "fp32", 16))
    asked = [delta(capability, *size, packed) for size in sizes for packed in (False, True)]
    assert_fit(asked, 8 if capability == 100 else 0)  # of 56 registers: as the compiler likes


@pytest.mark.slow
def test_the_plan_of_documents_compiles():
    signature = dict.fromkeys(("starts_q_ptr", "starts_k_ptr", "starts_ptr", "plan_ptr"), "*i32")
    signature |= {"documents": "i32", "slots": "i32"}
    constants = {"OF_KEYS": True, "BLOCK": 64, "BLOCK_T": 64, "BLOCK_S": 64, "ALIGNMENT": ALIGNMENT}
    assert_fit([Request(plan_kernel, signature, constants, capability, 4, 3) for capability in SHARED_MEMORY])
