"""A decoder whose layers have 4-bit weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solutions.lab5_serving.fused_decoder import FusedDecoder, Layer
from utils.formats import quantize
from utils.serving import Decoder

from .int4_matmul import int4_matmul
from .int4_packing import GROUP, PackedInt4, pack_int4


class Int4Weight:
    """A weight (N, K) of 4 bits that ``F.linear`` takes where it takes a tensor; nothing else of PyTorch does.

    So a layer computes with it without knowing of it.

    Args:
        packed: codes and scales.
        kernels: multiply by :func:`.int4_matmul.int4_matmul`; if not, by PyTorch with dequantised weights, which are
            kept.
        dtype: of the dequantised weights.
    """

    def __init__(self, packed: PackedInt4, kernels: bool, dtype: torch.dtype) -> None:
        self.packed, self.dtype = packed, dtype
        self.dense = None if kernels else packed.dequantize().to(dtype)

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return torch.Size(self.packed.shape)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` for x (..., K): (..., N) of x's dtype."""
        if self.dense is not None:
            return F.linear(x, self.dense, bias)
        o = int4_matmul(x.reshape(-1, x.shape[-1]), self.packed).unflatten(0, x.shape[:-1])
        return o if bias is None else o + bias

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        if func is not F.linear:
            raise TypeError(f"a 4-bit weight can be multiplied by F.linear only, not {getattr(func, '__name__', func)}")
        x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
        return weight.linear(x, bias)


def quantize_weights(model: Decoder, kernels: bool) -> Decoder:
    """The same decoder with the weights of its layers rounded to int4, each group of 128 inputs with a scale.

    Embedding, head, norms and biases stay as they are, and are shared with ``model``, which is not changed.

    Args:
        kernels: see :class:`Int4Weight`.

    Raises:
        ValueError: a layer has inputs that are no multiple of 128.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    quantized = copy.deepcopy(model, memo=shared)
    for name, module in quantized.layers.named_modules():
        if isinstance(module, nn.Linear):
            if module.in_features % GROUP:
                raise ValueError(
                    f"layers.{name} has {module.in_features} inputs, and 4-bit weights come in groups of {GROUP}"
                )
            weight = module.weight.detach()
            del module.weight
            module.weight = Int4Weight(pack_int4(quantize(weight, "int4", GROUP)), kernels, weight.dtype)
    return quantized


def join(modules: Sequence[nn.Module]) -> Int4Weight:
    """The 4-bit weights of linear layers with the same inputs, one above the other, as one."""
    weights = [module.weight for module in modules]
    codes = torch.cat([weight.packed.codes for weight in weights], 1)
    scales = torch.cat([weight.packed.scales for weight in weights], 1)
    return Int4Weight(PackedInt4(codes, scales), weights[0].dense is None, weights[0].dtype)


def join_biases(modules: Sequence[nn.Module]) -> Tensor | None:
    """The biases of linear layers, one behind the other; None if they have none."""
    return None if modules[0].bias is None else torch.cat([module.bias.detach() for module in modules])


class Int4FusedDecoder(FusedDecoder):
    """Lab 5's fused decoder with the weights of a model that :func:`quantize_weights` made."""

    def _layer(self, layer: nn.Module) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, gate_up = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        norms = (attention.q_norm.weight, attention.k_norm.weight, self.eps) if attention.qk_norm else None
        return Layer(
            layer.input_layernorm.weight, join(qkv), join_biases(qkv), norms, attention.o_proj.weight,
            attention.o_proj.bias, layer.post_attention_layernorm.weight, join(gate_up), join_biases(gate_up),
            mlp.down_proj.weight, mlp.down_proj.bias,
        )  # fmt: skip
