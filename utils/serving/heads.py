"""A draft head: it predicts the tokens behind the next one from the target's last hidden state, and keeps no cache.

The head says what the target's last hidden state would be one token later, from the last one and the token between
them; the target's own output matrix makes scores of it, and the head goes on from there, as often as one wants. What a
multi-token-prediction module of DeepSeek-V3 does (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2: the state before it
and the embedding of the newest token are joined; embedding and output matrix are the target's) is done here by one
module for every depth (as in EAGLE, Li et al. 2024, arXiv 2401.15077, and the recurrent drafter, Zhang et al. 2024,
arXiv 2403.09919), and with a feed-forward block in place of a layer with attention. So

- it knows which candidates stand before it on its path. The heads of Medusa (Cai et al. 2024, arXiv 2401.10774) do not,
  which costs acceptance (Hydra, Ankner et al. 2024, arXiv 2402.05109);
- it has no keys and values: nothing of a refused branch is left anywhere.

Letters: C hidden size, I size of the feed-forward block, V vocabulary.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from utils.serving.load import CheckpointError
from utils.serving.model import Decoder, RMSNorm

EPS = 1e-6


class DraftHead(nn.Module):
    """The module itself: ``2 C (C + 2 I) + I C + 4 C`` weights.

    Args:
        hidden_size: C, the target's.
        intermediate_size: I.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.token_norm = RMSNorm(hidden_size, EPS)
        self.join = nn.Linear(2 * hidden_size, hidden_size)
        self.mlp_norm = RMSNorm(2 * hidden_size, EPS)
        self.gate_proj = nn.Linear(2 * hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(2 * hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The state (..., C) behind a token, from the state before it and the token's embedding, (..., C) each."""
        x = torch.cat((state, self.token_norm(embedded)), -1)
        y = self.mlp_norm(x)
        return self.join(x) + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))

    def step(self, state: Tensor, tokens: Tensor, target: Decoder) -> tuple[Tensor, Tensor]:
        """The state behind some tokens, and the scores of the next one.

        Args:
            state: (..., C): the target's last hidden state from which ``tokens`` were chosen, or what this method gave
                for it.
            tokens: (...,) integers.
            target: whose embedding and output matrix are used.

        Returns:
            (..., C) and (..., V).
        """
        state = self(state, F.embedding(tokens, target.embed_tokens.weight))
        return state, target.logits(state)


def save_head(head: DraftHead, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors``, each beside its place first."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in head.state_dict().items()}
    save_file(weights, folder / ".model.safetensors", metadata={"format": "pt"})
    (folder / ".model.safetensors").chmod(0o644)  # the library writes for its owner alone
    os.replace(folder / ".model.safetensors", folder / "model.safetensors")
    settings = {"hidden_size": head.hidden_size, "intermediate_size": head.intermediate_size}
    (folder / ".config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    os.replace(folder / ".config.json", folder / "config.json")


def load_head(folder: str | Path, target: Decoder) -> DraftHead:
    """The head of a folder in its target's dtype and on its device, ready to draft.

    Raises:
        CheckpointError: a file is missing or cut off, tensors do not fit, or the target has another hidden size.
    """
    folder = Path(folder)
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        head = DraftHead(settings["hidden_size"], settings["intermediate_size"])
        head.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} holds no draft head (config.json, model.safetensors): {error}") from None
    if head.hidden_size != target.config.hidden_size:
        raise CheckpointError(
            f"the head of {folder} is made for a hidden size of {head.hidden_size}, the target has "
            f"{target.config.hidden_size}"
        )
    return head.to(target.device, target.dtype).eval().requires_grad_(False)
