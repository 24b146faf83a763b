"""Collectives built from messages between neighbours on a ring (exercise 4.1).

Rank r sends to rank r + 1 and receives from rank r - 1. A tensor of n elements is cut into N chunks, chunk r belongs to
rank r; where N does not divide n, the first n mod N chunks have one element more. In N - 1 steps, in each of which
every rank sends one chunk, a *reduce-scatter* leaves on rank r the sum of all ranks' chunks r, and an *all-gather*
takes every chunk to every rank. One after the other they are an *all-reduce* (Patarasuk and Yuan 2009).

``group=None`` is the group of all ranks, everywhere in this lab; ranks are counted within the group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

OPERATIONS = ("sum", "mean")


def exchange(send: Tensor, receive: Tensor, group: ProcessGroup | None = None, distance: int = 1) -> None:
    """Send to rank r + distance and receive from rank r - distance at once; an empty tensor is not sent at all.

    Both messages start together: if every rank sent before it received, ranks could wait for each other forever.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + distance) % world_size, (rank - distance) % world_size
    messages = []
    if send.numel():
        messages.append(dist.P2POp(dist.isend, send, group=group, group_peer=right))
    if receive.numel():
        messages.append(dist.P2POp(dist.irecv, receive, group=group, group_peer=left))
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def reduce_scatter_steps(chunks: tuple[Tensor, ...], group: ProcessGroup | None = None) -> None:
    """In place: afterwards chunk r of rank r is the sum of all ranks' chunks r; the other chunks hold partial sums.

    Chunk c starts on rank c + 1 and goes round the ring to rank c; each rank on its way adds its own values to it.

    Args:
        chunks: N one-dimensional tensors; chunk c has the same size on every rank.
    """
    ### BEGIN SOLUTION 4.1: the steps of a ring reduce-scatter
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])  # the first chunk is as large as any
    for step in range(world_size - 1):
        outgoing, mine = chunks[(rank - step - 1) % world_size], chunks[(rank - step - 2) % world_size]
        incoming = arrived[: mine.numel()]
        exchange(outgoing, incoming, group)
        mine += incoming
    ### END SOLUTION


def all_gather_steps(chunks: tuple[Tensor, ...], group: ProcessGroup | None = None) -> None:
    """In place: every rank starts with its own chunk, chunk r on rank r, and ends with all of them.

    Args:
        chunks: N one-dimensional tensors; chunk c has the same size on every rank.
    """
    ### BEGIN SOLUTION 4.1: the steps of a ring all-gather
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(world_size - 1):
        exchange(chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size], group)
    ### END SOLUTION


@torch.no_grad()
def ring_all_reduce(tensor: Tensor, group: ProcessGroup | None = None, op: str = "sum") -> Tensor:
    """The sum or mean of all ranks' tensors, in place, the same bits on every rank.

    Each rank sends all chunks but one, twice: 2 n (N - 1) / N elements if N divides n, whatever N is.

    Args:
        tensor: of any shape, also empty or not contiguous; the same shape and dtype on every rank.
        op: "sum" or "mean"; the mean of integers is refused.

    Returns:
        ``tensor``.
    """
    _check(tensor, op)
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    ### BEGIN SOLUTION 4.1: ring all-reduce
    chunks = flat.tensor_split(dist.get_world_size(group))
    reduce_scatter_steps(chunks, group)
    if op == "mean":
        chunks[dist.get_rank(group)].div_(len(chunks))
    all_gather_steps(chunks, group)
    ### END SOLUTION
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
    return tensor


@torch.no_grad()
def ring_reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None, op: str = "sum") -> Tensor:
    """This rank's chunk of the sum or mean of all ranks' tensors; ``tensor`` stays as it is.

    Returns:
        One-dimensional, element for element ``tensor.flatten().tensor_split(N)[rank]`` of the sum.
    """
    _check(tensor, op)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = tensor.flatten().clone().tensor_split(world_size)
    reduce_scatter_steps(chunks, group)
    chunk = chunks[rank].clone()  # on its own, so that the other chunks are freed
    return chunk.div_(world_size) if op == "mean" else chunk


@torch.no_grad()
def ring_all_gather(chunk: Tensor, group: ProcessGroup | None = None, numel: int | None = None) -> Tensor:
    """All ranks' chunks, one after the other, on every rank.

    Args:
        chunk: one-dimensional.
        numel: elements of all chunks together, where they are not equally many on each rank (as
            :func:`ring_reduce_scatter` leaves them); by default N times those of ``chunk``.

    Returns:
        (numel,).

    Raises:
        ValueError: ``chunk`` does not have the size of this rank's chunk of ``numel`` elements.
    """
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = chunk.new_empty(chunk.numel() * world_size if numel is None else numel)
    chunks = whole.tensor_split(world_size)
    if chunk.shape != chunks[rank].shape:
        raise ValueError(
            f"rank {rank}'s chunk of {whole.numel()} elements on {world_size} ranks must have shape "
            f"{tuple(chunks[rank].shape)}, got {tuple(chunk.shape)}"
        )
    chunks[rank].copy_(chunk)
    all_gather_steps(chunks, group)
    return whole


def _check(tensor: Tensor, op: str) -> None:
    if op not in OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"the mean needs floating-point numbers, got {tensor.dtype}: take the sum")
