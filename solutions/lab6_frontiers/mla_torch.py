"""Multi-head latent attention in plain PyTorch, with projections where they are defined and where they are absorbed.

Letters: S sequences, H heads, N tokens of a context. Of a token the cache keeps a latent c of ``latent_dim`` numbers
and a key of ``rope_dim`` that carries the position, the same for all heads (DeepSeek-AI 2024, "DeepSeek-V2", section
2.1). A head's key is W_uk c beside that key, its value W_uv c.

The scores are q^T (W_uk c) = (W_uk^T q)^T c and the outputs sum_t p_t (W_uv c_t) = W_uv (sum_t p_t c_t): products may
be bracketed either way, so a query that is projected once meets the latents as they lie in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expand_latents(latents: Tensor, rope_keys: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of every head, as a prefill wants them.

    Args:
        latents: (..., N, latent_dim), of any floating dtype as all here.
        rope_keys: (..., N, rope_dim), of one key for all heads, turned by their positions.
        w_uk: (H, head_dim, latent_dim), of each head.
        w_uv: (H, value_dim, latent_dim).

    Returns:
        Keys (..., H, N, head_dim + rope_dim) and values (..., H, N, value_dim).
    """
    latents = latents.unsqueeze(-3)  # (..., 1, N, latent_dim)
    keys, values = latents @ w_uk.mT, latents @ w_uv.mT
    rope_keys = rope_keys.unsqueeze(-3).expand(*keys.shape[:-1], -1)
    return torch.cat((keys, rope_keys), -1), values


def absorb_queries(q: Tensor, w_uk: Tensor) -> Tensor:
    """Queries (..., H, head_dim), without the part with a position, as ones of the latents: W_uk^T q of each head.

    Returns:
        (..., H, latent_dim).
    """
    return torch.einsum("...hd,hdl->...hl", q, w_uk)


def project_values(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """Sums of latents (..., H, latent_dim) as outputs of the heads (..., H, value_dim): W_uv o of each head."""
    return torch.einsum("...hl,hvl->...hv", o_latent, w_uv)


def latent_attention(q_latent: Tensor, q_rope: Tensor, latents: Tensor, rope_keys: Tensor, scale: float) -> Tensor:
    """What :func:`.mla_decode.mla_decode` computes, without pages: one query of each head over N latents.

    Args:
        q_latent, q_rope: (..., H, latent_dim) and (..., H, rope_dim).
        latents, rope_keys: (..., N, latent_dim) and (..., N, rope_dim).
        scale: factor of the scores.

    Returns:
        (..., H, latent_dim), in the latents' space.
    """
    scores = scale * (q_latent @ latents.mT + q_rope @ rope_keys.mT)  # (..., H, N)
    return scores.softmax(-1) @ latents
