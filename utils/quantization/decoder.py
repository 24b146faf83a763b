"""The layers of a decoder in few bits, one after the other, calibrated on text."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.quantization.weights import Calibration, calibrate
from utils.serving import Decoder, attend_causally

#: Linear layers of a decoder layer that share their input, and so are rounded as one matrix.
STACKS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
#: Bits of a scale.
SCALE_BITS = 16


@torch.no_grad()
def quantize_decoder(model: Decoder, tokens: Tensor, rounding: Callable[[Tensor, Calibration], Tensor]) -> Decoder:
    """The same decoder with the linear layers' weights rounded; embedding, head, norms and biases stay as they are.

    A layer is calibrated on what the layers before it make of ``tokens`` after their own rounding, so that it sees
    their errors. The result computes in the dtype of ``model``: it has the numbers of few bits, not their storage.

    Args:
        model: is not changed.
        tokens: (B, N) int64, calibration text.
        rounding: gets a weight (N, K) float32 and its :class:`Calibration`, and returns what to keep, (N, K); see
            :func:`utils.quantization.gptq` and its neighbours. With :func:`utils.quantization.awq`, a model that is
            served would divide each column's factor into the norm before a product, into the rows of ``up_proj`` before
            ``down_proj``, and into the rows of ``v_proj`` before ``o_proj``.
    """
    quantized = copy.deepcopy(model)
    share = model.config.num_heads // model.config.num_kv_heads

    def before(layer: nn.Module, inputs: tuple) -> None:
        calibrations = _calibrations(layer, inputs, share)
        for names in STACKS:
            modules = [layer.get_submodule(name) for name in names]
            kept = rounding(torch.cat([module.weight for module in modules]).float(), calibrations[names[0]])
            for module, rows in zip(modules, kept.split([len(module.weight) for module in modules])):
                module.weight.copy_(rows)

    hooks = [layer.register_forward_pre_hook(before) for layer in quantized.layers]
    quantized.hidden(tokens, torch.arange(tokens.shape[-1]).expand_as(tokens), attend_causally)
    for hook in hooks:
        hook.remove()
    return quantized


@torch.no_grad()
def window_losses(model: Decoder, tokens: Tensor, window: int = 256) -> Tensor:
    """Mean loss of the next token in each window of a text, in nats, (T // window,) float32.

    Args:
        tokens: (T,) int64, at least window + 1; what is left over at the end is not used.
        window: tokens that are predicted, and that the model sees of the text, at a time.
    """
    count = (len(tokens) - 1) // window
    x, y = (tokens[start : start + count * window].view(count, window) for start in (0, 1))
    logits = model(x, torch.arange(window).expand_as(x), attend_causally).float()
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


def bits_per_weight(model: Decoder, bits: int, group: int | None) -> float:
    """Bits that a weight of the linear layers takes, with its share of a 16-bit scale for each ``group`` of a row.

    Args:
        group: columns that share a scale; None for one scale per row.
    """
    weights = [module.weight for module in model.layers.modules() if isinstance(module, nn.Linear)]
    scales = sum(weight.numel() // (group or weight.shape[1]) for weight in weights)
    return bits + SCALE_BITS * scales / sum(weight.numel() for weight in weights)


def _calibrations(layer: nn.Module, inputs: tuple, share: int) -> dict[str, Calibration]:
    """Of each stack's first module, by its name: what the layer's own pass over ``inputs`` shows.

    ``share`` query heads read one value head. Their channels get the mean of their magnitudes, because AWQ's factor of
    a channel is to be divided into that value head.
    """
    seen = {}
    hooks = [
        layer.get_submodule(names[0]).register_forward_pre_hook(
            lambda _, x, name=names[0]: seen.update({name: calibrate(x[0])})
        )
        for names in STACKS
    ]
    layer.forward(*inputs)  # not layer(...), which would call the hook that calls this
    for hook in hooks:
        hook.remove()
    output, head_dim = seen["self_attn.o_proj"], layer.self_attn.head_dim
    heads = output.magnitude.unflatten(0, (-1, share, head_dim))
    shared = heads.mean(1, keepdim=True).expand_as(heads).flatten()
    return seen | {"self_attn.o_proj": Calibration(output.second_moment, shared)}
