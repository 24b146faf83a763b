"""Lab 6's kernels for long sequences compile for Ampere, Hopper and Blackwell as they are tuned, and spill nothing."""

from __future__ import annotations

import pytest
import torch
from parameters import thorough_but

from solutions.lab5_serving.merge import merge_parts_kernel
from solutions.lab6_frontiers import long_tuning
from solutions.lab6_frontiers.mla_decode import mla_decode_kernel
from utils import runtime
from utils.compile_only import Request, resource_usages

#: Compute capability times ten -> bytes of shared memory that one program may take.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """The tuning tables answer as on a GPU."""
    monkeypatch.setattr(runtime, "INTERPRET", False)


def assert_fit(requests):
    """Every kernel fits an SM and keeps its values in registers."""
    for asked, used in zip(requests, resource_usages(requests), strict=True):
        case = f"{used.name} for sm_{asked.capability}: {dict(asked.constexprs)}"
        assert used.registers * used.threads <= 65536, f"{case} does not fit an SM: {used}"
        assert used.shared_bytes <= SHARED_MEMORY[asked.capability], f"{case} takes too much shared memory: {used}"
        assert used.stack_bytes == 0, f"{case} spills {used.stack_bytes} bytes a thread"


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
@pytest.mark.parametrize("capability", thorough_but(SHARED_MEMORY, 90))
def test_no_attention_over_latents_spills(capability):
    requests = [mla(capability, heads, split=split) for heads, split in ((128, True), (128, False), (16, True))]
    assert_fit([*requests, mla(capability, 128, "fp32"), merge(capability)])
