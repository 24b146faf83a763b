"""The decoder of :mod:`utils.serving` for a GPU that serves: the same weights, a third of the launches.

Letters: T tokens, R rows of logits, C hidden size, H query heads, G key and value heads, D head dimension, V
vocabulary.

Queries, keys and values come from one matrix product, gates and ups from another, and what lies between the products is
done by the kernels of :mod:`.fused_layers`: nine launches per layer. The last norm and the head see only the rows whose
logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.serving import Decoder

from .batch import Batch
from .fused_layers import rms_norm, rotate_and_store, silu_and_multiply


@dataclass(frozen=True)
class Layer:
    """The weights of one layer, joined; biases and norms are None where the model has none."""

    input_norm: Tensor
    qkv: Tensor  # ((H + 2 G) D, C)
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor, float] | None  # of queries and keys
    output: Tensor  # (C, H D)
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor  # (2 I, C)
    gate_up_bias: Tensor | None
    down: Tensor  # (C, I)
    down_bias: Tensor | None


def join(modules: Sequence[nn.Module], name: str = "weight") -> Tensor | None:
    """The parameters ``name`` of linear layers, one above the other, in one piece of memory that they all live in.

    The modules' own parameters become views of it, so that nothing is held twice. Those that lie so already are left
    alone. None if the modules have no such parameter.
    """
    parts = [getattr(module, name) for module in modules]
    if parts[0] is None:
        return None
    rows, rest = sum(len(part) for part in parts), parts[0].shape[1:]
    place, together = parts[0].data_ptr(), True
    for part in parts:
        together &= part.is_contiguous() and part.data_ptr() == place
        place += part.numel() * part.element_size()
    storage = parts[0].untyped_storage()
    room = storage.nbytes() - parts[0].storage_offset() * parts[0].element_size()
    if together and place - parts[0].data_ptr() <= room:
        return parts[0].detach().as_strided((rows, *rest), parts[0].stride())
    joined = torch.cat([part.detach() for part in parts])
    for module, piece in zip(modules, joined.split([len(part) for part in parts]), strict=True):
        setattr(module, name, nn.Parameter(piece, requires_grad=False))
    return joined


class FusedDecoder:
    """Logits of a batch over a paged cache.

    Args:
        model: its weights are shared; parameters that are used together are moved together (:func:`join`).
        positions: how many the rotation is prepared for, D * 4 bytes each.
    """

    def __init__(self, model: Decoder, positions: int) -> None:
        config = self.config = model.config
        self.embedding, self.head = model.embed_tokens.weight, model.lm_head.weight
        self.norm, self.eps = model.norm.weight, config.rms_norm_eps
        self.layers = [self._layer(layer) for layer in model.layers]
        angles = torch.arange(positions, device=model.device)[:, None].float() * model.frequencies.float()
        self.cos, self.sin = angles.cos(), angles.sin()  # (positions, D/2) float32

    def _layer(self, layer: nn.Module) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, gate_up = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        norms = (attention.q_norm.weight, attention.k_norm.weight, self.eps) if attention.qk_norm else None
        return Layer(
            layer.input_layernorm.weight, join(qkv), join(qkv, "bias"), norms, attention.o_proj.weight,
            attention.o_proj.bias, layer.post_attention_layernorm.weight, join(gate_up), join(gate_up, "bias"),
            mlp.down_proj.weight, mlp.down_proj.bias,
        )  # fmt: skip

    @torch.no_grad()
    def logits(
        self, batch: Batch, key_cache: Tensor, value_cache: Tensor, attend: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Scores of the next token, (R, V), of ``batch.rows``; the batch's keys and values are in the cache then.

        Args:
            key_cache, value_cache: (L, num_blocks, block_size, G, D).
            attend: ``attend(layer, q (T, H, D)) -> (T, H, D)``, over a cache that holds the batch's keys already.
        """
        stream = F.embedding(batch.tokens, self.embedding)  # (T, C), what the layers add to
        added = None  # (T, C), what the last block adds
        for index, layer in enumerate(self.layers):
            x = self._normed(stream, added, layer.input_norm)
            qkv = F.linear(x, layer.qkv, layer.qkv_bias)
            q = rotate_and_store(
                qkv, batch.positions, batch.slots, self.cos, self.sin, key_cache[index], value_cache[index],
                self.config.num_heads, layer.norms,
            )  # fmt: skip
            added = F.linear(attend(index, q).flatten(1), layer.output, layer.output_bias)
            x = self._normed(stream, added, layer.post_norm)
            opened = silu_and_multiply(F.linear(x, layer.gate_up, layer.gate_up_bias))
            added = F.linear(opened, layer.down, layer.down_bias)
        if not batch.decode:
            stream, added = stream[batch.rows], added[batch.rows]
        return F.linear(self._normed(stream, added, self.norm), self.head)

    def _normed(self, stream: Tensor, added: Tensor | None, weight: Tensor) -> Tensor:
        """The stream, normalised, after what was added to it; the stream itself takes that up."""
        if added is None:
            return rms_norm(stream, weight, self.eps)
        return rms_norm(added, weight, self.eps, residual=stream)
