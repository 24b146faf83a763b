"""A GPT cut into the stages of a pipeline: some blocks each, the embedding on the first, the head on the last."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from utils.gpt import GPT, loss_of

from .tensor_parallel import ColumnParallelLinear
from .vocabulary_parallel import vocabulary_parallel_loss


class GPTStage(nn.Module):
    """Consecutive blocks of a GPT; the first stage also embeds, the last also computes the loss.

    Its modules are the model's own, under the names that they have there, so that a stage's ``state_dict`` is a part of
    the model's.

    Args:
        model: the whole.
        start, stop: it has blocks start, ..., stop - 1, possibly none.
        first, last: it is the pipeline's first or last stage (a pipeline of one stage is both).

    Attributes:
        tied: the parameter that the first and the last stage both have, each its own copy; None on other stages, in a
            pipeline of one stage, and if the model's embedding and head are not tied.
    """

    embed = GPT.embed
    logits = GPT.logits

    def __init__(self, model: GPT, start: int, stop: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.config, self.first, self.last = model.config, first, last
        if first:
            self.embedding, self.positions = model.embedding, model.positions
            if model.config.unused_parameter:
                self.unused = model.unused
        self.blocks = nn.ModuleDict({str(k): model.blocks[k] for k in range(start, stop)})
        if last:
            self.norm, self.head = model.norm, model.head
        like = model.embedding.weight
        self.register_buffer(
            "boundary", torch.empty(0, model.config.hidden, dtype=like.dtype, device=like.device), False
        )

    @property
    def tied(self) -> nn.Parameter | None:
        if self.first == self.last or not self.config.tied:
            return None
        return self.embedding.weight if self.first else self.head.weight

    def empty_activation(self, tokens: Tensor) -> Tensor:
        """Room for what one stage hands to the next: (B, N, C), for tokens (B, N)."""
        return self.boundary.new_empty(*tokens.shape, self.config.hidden)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens (B, N) on the first stage, else what the stage before it returned; the last stage wants ``targets``.

        Returns:
            (B, N, C), of the last stage the mean cross-entropy as a scalar (without ``targets``: the logits (B, N, V)).
            A head that is cut over the vocabulary gives the same loss, and its own logits.
        """
        if self.first:
            x = self.embed(x)
        for block in self.blocks.values():
            if self.config.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        if not self.last:
            return x
        logits = self.logits(x)
        if targets is None:
            return logits
        if isinstance(self.head, ColumnParallelLinear):
            return vocabulary_parallel_loss(logits, targets, self.head)
        return loss_of(logits, targets)


def split_gpt(model: GPT, stages: int) -> list[GPTStage]:
    """The stages of a pipeline, as even in blocks as can be; the first ones have one block more.

    Each rank keeps the stage of its own rank and drops the model:

        stage = split_gpt(GPT(config), world_size)[rank]

    Raises:
        ValueError: stages below 1.
    """
    if stages < 1:
        raise ValueError(f"stages must be at least 1, got {stages}")
    pieces = torch.arange(len(model.blocks)).tensor_split(stages)
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return [
        GPTStage(model, start, stop, first=k == 0, last=k == stages - 1)
        for k, (start, stop) in enumerate(zip(starts, ends, strict=True))
    ]
