"""What the answer should be: operators of the course in float64, written for clarity and never for speed.

Inputs may be of any floating dtype, on any device, contiguous or not; they are converted to float64 on the CPU first,
so that a reference errs by about 1e-15 and whatever a kernel differs by is the kernel's own. Results are float64 CPU
tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def exact(x: Tensor, name: str = "x") -> Tensor:
    """``x`` as a float64 CPU tensor, detached.

    Raises:
        TypeError: ``x`` is not a tensor of real numbers.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must hold real numbers, got {x.dtype}")
    return x.detach().to(device="cpu", dtype=torch.float64)


def gelu(x: Tensor, approximate: str = "tanh") -> Tensor:
    """GeLU of any shape (Hendrycks and Gimpel 2016).

    ``approximate="tanh"``: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); ``"none"``: x Phi(x) by the error function.

    Raises:
        ValueError: another ``approximate``.
    """
    x = exact(x)
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if approximate == "none":
        return 0.5 * x * torch.special.erfc(-x / math.sqrt(2))
    raise ValueError(f"approximate must be 'tanh' or 'none', got {approximate!r}")


def logsumexp(x: Tensor, dim: int = -1) -> Tensor:
    """log(sum(exp(x))) over ``dim``, which disappears; -inf where every entry is -inf."""
    x = exact(x)
    maximum = x.amax(dim, keepdim=True)
    finite = torch.where(maximum.isinf(), torch.zeros_like(maximum), maximum)
    return ((x - finite).exp().sum(dim, keepdim=True).log() + finite).squeeze(dim)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) over ``dim``, same shape as ``x``; 0 where a whole row is -inf."""
    x = exact(x)
    maximum = x.amax(dim, keepdim=True)
    weights = (x - torch.where(maximum == -math.inf, torch.zeros_like(maximum), maximum)).exp()
    total = weights.sum(dim, keepdim=True)
    return weights / torch.where(total == 0, torch.ones_like(total), total)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(..., M, K) @ (..., K, N) -> (..., M, N).

    Raises:
        ValueError: the inner sizes differ.
    """
    a, b = exact(a, "a"), exact(b, "b")
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matmul needs (..., M, K) and (..., K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    return a @ b


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """sum over the last axis of weight * x: (..., D), (D,) -> (...).

    Raises:
        ValueError: ``weight`` is not a vector as long as the last axis of ``x``.
    """
    x, weight = exact(x), exact(weight, "weight")
    if weight.dim() != 1 or x.dim() < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"weighted_sum needs (..., D) and (D,), got {tuple(x.shape)} and {tuple(weight.shape)}")
    return (x * weight).sum(-1)


def causal_mask(num_queries: int, num_keys: int) -> Tensor:
    """Bool (Nq, Nk), True where a query sees a key. Aligned bottom-right: the last query sees every key, and query i
    sees key j iff j <= i + Nk - Nq. With Nq > Nk the first Nq - Nk queries see none."""
    queries = torch.arange(num_queries)[:, None]
    return torch.arange(num_keys)[None, :] <= queries + (num_keys - num_queries)


def _heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Float64 q, and k and v repeated for its heads, after checking that the shapes fit."""
    q, k, v = exact(q, "q"), exact(k, "k"), exact(v, "v")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v must be (B, H, N, D), got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q (B, H, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv) do not fit: {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"heads of q must be a multiple of those of k and v, got {q.shape[1]} and {k.shape[1]}")
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), group


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    return scores.masked_fill(~causal_mask(q.shape[2], k.shape[2]), -math.inf) if causal else scores


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention and its logsumexp.

    Args:
        q: (B, H, Nq, D). k: (B, Hkv, Nk, D). v: (B, Hkv, Nk, Dv), Hkv dividing H: head h reads group h // (H / Hkv).
        causal: mask as in :func:`causal_mask`, aligned bottom-right.
        scale: factor of the scores, 1 / sqrt(D) unless given.

    Returns:
        o (B, H, Nq, Dv) and L (B, H, Nq) = logsumexp of the scaled, masked scores. A query that sees no key gets o = 0
        and L = -inf.

    Raises:
        ValueError: shapes that do not fit.
    """
    q, k, v, _ = _heads(q, k, v)
    scores = _scores(q, k, causal, 1 / math.sqrt(q.shape[3]) if scale is None else scale)
    return softmax(scores) @ v, logsumexp(scores)


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of ``(o * do).sum()``, o from :func:`attention`; each of the shape of q, k, v.

    dV = P^T dO; dP = dO V^T; dS = P * (dP - rowsum(dO * O)); dQ = scale dS K; dK = scale dS^T Q (Dao 2023, section 3).
    Gradients of K and V are summed over the query heads that share them.

    Raises:
        ValueError: shapes that do not fit.
    """
    kv_heads = k.shape[1] if k.dim() == 4 else 0
    q, k, v, group = _heads(q, k, v)
    do = exact(do, "do")
    if do.shape != (*q.shape[:3], v.shape[3]):
        raise ValueError(f"do must have the shape of o, {(*q.shape[:3], v.shape[3])}, got {tuple(do.shape)}")
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    p = softmax(_scores(q, k, causal, scale))
    dv = p.transpose(-1, -2) @ do
    dp = do @ v.transpose(-1, -2)
    ds = p * (dp - (do * (p @ v)).sum(-1, keepdim=True))
    dq = scale * ds @ k
    dk = scale * ds.transpose(-1, -2) @ q

    def over_group(gradient: Tensor) -> Tensor:
        return gradient.unflatten(1, (kv_heads, group)).sum(2)

    return dq, over_group(dk), over_group(dv)
