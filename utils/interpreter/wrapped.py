"""Interpreted kernels in PyTorch's own operators: PyTorch 2.11 refuses them, though it would only launch them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._library import triton as torch_triton

from utils.interpreter.upstream import InterpretedFunction


def accept_interpreted_kernels() -> None:
    """Let ``torch.library.wrap_triton`` give an interpreted kernel back as it is, as it does from PyTorch 2.13 on."""
    if hasattr(torch_triton, "_is_interpreted_triton_kernel") or hasattr(torch.library.wrap_triton, "__wrapped__"):
        return
    refusing = torch.library.wrap_triton

    @functools.wraps(refusing)
    def wrap_triton(triton_kernel: Any) -> Any:
        return triton_kernel if isinstance(triton_kernel, InterpretedFunction) else refusing(triton_kernel)

    torch.library.wrap_triton = torch_triton.wrap_triton = wrap_triton
