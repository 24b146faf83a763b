"""Draft heads: they predict the tokens behind the next one from the target's last hidden state, without a cache.

Head k is what DeepSeek-V3 calls a multi-token-prediction module, less its attention: it joins the state before it with
the embedding of the newest token, passes the result through a feed-forward block, and hands it on to head k + 1; the
target's own embedding and output matrix serve all of them (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2). So a head
knows which candidates stand before it on its path, which Medusa's heads do not (Cai et al. 2024, arXiv 2401.10774);
heads that do accept more (Hydra, Ankner et al. 2024, arXiv 2402.05109). Without attention nothing of a refused branch
is left anywhere.

Letters: C hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.serving.model import Decoder, RMSNorm

EPS = 1e-6


class Head(nn.Module):
    """One head: the state (..., C) behind a token, from the state before it and the token's embedding."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.state_norm, self.token_norm = RMSNorm(hidden_size, EPS), RMSNorm(hidden_size, EPS)
        self.join = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.mlp_norm = RMSNorm(hidden_size, EPS)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, state: Tensor, token: Tensor) -> Tensor:
        x = self.join(torch.cat((self.state_norm(state), self.token_norm(token)), -1))
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class DraftHeads(nn.Module):
    """``depth`` heads, one behind the other.

    Args:
        hidden_size: C, of the target.
        intermediate_size: of each head's feed-forward block.
        depth: heads: tokens that they draft at most.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, depth: int) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size, self.depth = hidden_size, intermediate_size, depth
        self.heads = nn.ModuleList(Head(hidden_size, intermediate_size) for _ in range(depth))
        self.norm = RMSNorm(hidden_size, EPS)

    def step(self, depth: int, state: Tensor, tokens: Tensor, target: Decoder) -> tuple[Tensor, Tensor]:
        """The state behind some tokens, and the scores of the next one.

        Args:
            depth: 0 behind the newest token of the text, 1 behind a candidate for its next, and so on.
            state: (..., C): at depth 0 the target's last hidden state, from which the newest token was chosen; then
                what this method gave for the parent.
            tokens: (...,) integers.
            target: whose embedding and output matrix are used.

        Returns:
            (..., C) and (..., V).
        """
        state = self.heads[depth](state, F.embedding(tokens, target.embed_tokens.weight))
        return state, target.logits(self.norm(state))
