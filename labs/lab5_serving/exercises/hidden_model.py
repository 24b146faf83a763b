"""A decoder so small that a scenario runs it in milliseconds, and that counts what goes through it."""

from __future__ import annotations

import torch
from torch import Tensor

from utils.checks.hidden import Draw
from utils.serving import Attend, Decoder, ModelConfig


class CountingModel(Decoder):
    """A decoder; ``tokens`` have gone through it, in ``passes`` passes."""

    tokens = passes = 0

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.tokens, self.passes = self.tokens + tokens.numel(), self.passes + 1
        return super().hidden(tokens, positions, attend)


def tiny_model(draw: Draw, vocabulary: int = 19, eos: tuple[int, ...] = (), layers: int = 2) -> CountingModel:
    """Drawn weights in float64: two right computations agree far beyond the distance of two tokens.

    Key heads are shared, and positions and the past matter to what comes next.
    """
    groups = draw.between(1, 3)
    config = ModelConfig(
        family="qwen3", vocab_size=vocabulary, hidden_size=20, intermediate_size=28, num_layers=layers,
        num_heads=groups * draw.between(2, 3), num_kv_heads=groups, head_dim=8, max_seq_len=64, rope_theta=40.0,
        qk_norm=True, eos_token_ids=eos,
    )  # fmt: skip
    model = CountingModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(draw.normal(*parameter.shape, scale=1.0 if "head" in name else 0.5))
    return model.double().eval()


def nearly(model: CountingModel, draw: Draw, noise: float) -> CountingModel:
    """The same model with some noise on its head: it agrees now and then."""
    other = CountingModel(model.config).double().eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.lm_head.weight += draw.normal(*other.lm_head.weight.shape, scale=noise)
    return other
