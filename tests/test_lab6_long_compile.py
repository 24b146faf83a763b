"""Lab 6's kernels for long sequences compile for Ampere, Hopper and Blackwell; those of 16 bits spill nothing."""

from __future__ import annotations

import pytest
import torch
from parameters import few_on_hopper

from solutions.lab3_flash_attention.tiles import Access
from solutions.lab3_flash_attention.tuning import block_d
from solutions.lab5_serving.merge import merge_parts_kernel
from solutions.lab6_frontiers import long_tuning
from solutions.lab6_frontiers.flash_kernels import flash_dkdv_kernel, flash_dq_kernel, flash_forward_kernel
from solutions.lab6_frontiers.mla_decode import mla_decode_kernel
from solutions.lab6_frontiers.visible_tiles import Kind
from utils import runtime
from utils.compile_only import Request, resource_usages

import triton.language as tl  # isort: skip

#: Compute capability times ten -> bytes of shared memory that one program may take.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
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


def flash(name, capability, head_dim=128, dtype="bf16", causal=True, window=True, packed=True, group=4):
    """A kernel of attention as its launch specialises it for contiguous heads, of 8 documents if packed."""
    kernel, tensors = FLASH[name]
    tile = long_tuning.flash(name, head_dim, DTYPES[dtype], causal, divmod(capability, 10))
    signature = {f"{x}_ptr": f"*{dtype}" for x in tensors.split()}
    signature |= {"lse_ptr": "*fp32", "table_ptr": "*i32"} | ({} if name == "forward" else {"delta_ptr": "*fp32"})
    signature |= {f"stride_{x}": ("i32:16", "i32:16", "i32:16", 1) for x in tensors.split()}
    signature |= {"sizes": ("i32",) * 9, "scale": "fp32", "nheads_in_l2": "i32"}
    constants = {
        "BLOCK_D": block_d(head_dim), "BLOCK_M": tile.m, "BLOCK_N": tile.n, "GQA_GROUP_SIZE": group,
        "KIND": Kind(causal, window, packed, 8 if packed else 1), "ACCESS": Access(head_dim, tl.int32),
    }  # fmt: skip
    aligned = [name for name, kind in signature.items() if kind[0] == "*"]
    return Request(kernel, signature, constants, capability, tile.warps, tile.stages, aligned)


#: A window and documents, documents alone without a mask, and a batch with a window.
MASKS = ({}, {"causal": False, "window": False}, {"packed": False})


@pytest.mark.slow
@pytest.mark.parametrize("name", FLASH)
def test_no_attention_of_documents_spills_on_hopper(name):
    assert_fit([flash(name, 90, 128, **MASKS[0])])


@pytest.mark.thorough
@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_attention_of_documents_spills(name, capability, dtype):
    head_dims = (64, 80, 128, 256) if dtype == "bf16" else (64, 128, 256)
    requests = [flash(name, capability, D, dtype, **mask) for D in head_dims for mask in MASKS]
    assert_fit(requests, FLOAT32_SPILLS if dtype == "fp32" else 0)
