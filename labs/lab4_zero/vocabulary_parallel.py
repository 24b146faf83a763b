"""The two ends of a GPT cut over the vocabulary: its embedding, its head, and the loss without the whole logits.

A vocabulary of 50,000 makes embedding and head large, and the logits (B, N, V) the largest activation of all. Cut by
rows of the embedding, which are columns of the head's matrix, no rank ever has all logits (Shoeybi et al. 2019,
section 3): a softmax needs of the other ranks only its maximum and its sum, two numbers a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from utils.gpt import GPT

from .partitioned_module import PartitionedModule
from .tensor_parallel import ColumnParallelLinear, reduce_from_tp_region


class VocabularyParallelEmbedding(PartitionedModule):
    """This rank's rows of an embedding: (B, N) int64 to (B, N, C), the same on all ranks.

    One all-reduce of B N C elements forward: each token's row is on one rank, the others add 0.

    Args:
        embedding: the whole, the same on all ranks; its weight is copied.
        group: the ranks that share it, by default all.
    """

    def __init__(self, embedding: nn.Embedding, group: ProcessGroup | None = None) -> None:
        super().__init__(embedding.num_embeddings, {"weight": 0}, group)
        self.take("weight", embedding.weight)
        self.first = int(self.indices(dist.get_rank(group))[0])

    def forward(self, tokens: Tensor) -> Tensor:
        row = tokens - self.first
        elsewhere = (row < 0) | (row >= len(self.weight))
        x = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        return reduce_from_tp_region(x.masked_fill(elsewhere[..., None], 0), self.group)


def partition_vocab(model: GPT, group: ProcessGroup | None = None) -> GPT:
    """Cut a model's embedding and head over the vocabulary, in place; tied ones stay tied.

    Its ``logits`` are then this rank's, (B, N, V of this rank). For the loss use a pipeline's stage, which knows: also
    the only one, ``split_gpt(model, 1)[0]``.

    Raises:
        ValueError: fewer tokens in the vocabulary than ranks.
    """
    ranks = dist.get_world_size(group)
    if model.config.vocabulary < ranks:
        raise ValueError(f"each of {ranks} ranks needs a token, the vocabulary has {model.config.vocabulary}")
    model.embedding = VocabularyParallelEmbedding(model.embedding, group)
    model.head = ColumnParallelLinear.from_linear(model.head, group)
    if model.config.tied:
        model.head.weight = model.embedding.weight
    return model


def vocabulary_parallel_loss(logits: Tensor, targets: Tensor, head: ColumnParallelLinear) -> Tensor:
    """Mean cross-entropy from each rank's logits.

    Two all-reduces, of B N maxima and of 2 B N sums (one of exponentials, one of the target's logit, which one rank
    has); nothing is sent in the backward pass: a rank's gradient is its softmax less its targets.

    Args:
        logits: (B, N, V of this rank), what ``head`` returned.
        targets: (B, N) int64; -100 counts as no target.

    Returns:
        A scalar, computed in float32 at least, the same on all ranks.
    """
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.flatten()
    largest = logits.detach().amax(-1)
    if dist.get_world_size(head.group) > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=head.group)
    shifted = logits - largest[:, None]
    column = targets - head.indices(dist.get_rank(head.group))[0].item()
    elsewhere = (column < 0) | (column >= logits.shape[-1])
    at_target = shifted.gather(-1, column.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0)
    sums, at_target = reduce_from_tp_region(torch.stack([shifted.exp().sum(-1), at_target]), head.group)
    counts = targets != -100
    return ((sums.log() - at_target) * counts).sum() / counts.sum().clamp(min=1)
