"""Pipeline parallelism: stages of a model on ranks of their own, a batch in micro-batches, GPipe's order or 1F1B's.

Exercise 4.9 writes the step: what is done in which order, a micro-batch's forward pass and its backward pass. How
messages travel between the ranks is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import P2POp, ProcessGroup, Work
from torch.profiler import record_function

from .pipeline_order import Action, Exchange, Transfer, communication_plan, gpipe_order, one_f_one_b_order
from .pipeline_stages import GPTStage
from .tensor_parallel_gpt import scale_gradients, squared_norm

#: (stage, stages, micro_batches) to the stage's actions.
Order = Callable[[int, int, int], Sequence[Action]]
ORDERS: dict[str, Order] = {"1f1b": one_f_one_b_order, "gpipe": gpipe_order}


class Pipeline:
    """Runs one stage of a model on each rank of a group; the gradients are those of the whole model on the whole batch.

    Args:
        stage: this rank's stage: of ``split_gpt(model, world_size)`` the one of its own rank.
        group: the ranks in the order of the stages, by default all.
        schedule: "1f1b" or "gpipe"; or a function of (stage, stages, micro_batches) that returns the stage's actions in
            their order.

    Attributes:
        peak_in_flight: the most micro-batches of the last step that waited for their backward pass at once, each with
            its input and its autograd graph: min(stages - stage, micro_batches) under 1F1B, micro_batches under GPipe.

    Raises:
        ValueError: an unknown schedule.
    """

    def __init__(
        self, stage: GPTStage, group: ProcessGroup | None = None, schedule: Literal["1f1b", "gpipe"] | Order = "1f1b"
    ) -> None:
        if not callable(schedule) and schedule not in ORDERS:
            raise ValueError(f"schedule must be one of {', '.join(ORDERS)} or a function, got {schedule!r}")
        self.stage, self.group = stage, group
        self.order = schedule if callable(schedule) else ORDERS[schedule]
        self.rank, self.stages = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.peak_in_flight = 0
        if self.stages > 1:  # NCCL makes a group's communicator at its first call, which has to be one of all its ranks
            dist.all_reduce(torch.zeros(1, device=stage.boundary.device), group=group)
        self._ends = group  # the first and the last stage: of two stages both
        if stage.tied is not None and self.stages > 2:
            self._ends = dist.new_group([self.ranks[0], self.ranks[-1]], use_local_synchronization=True)

    def step(self, tokens: Tensor, targets: Tensor, micro_batches: int, scale: float = 1.0) -> Tensor | None:
        """Forward and backward passes of one batch; the gradients are added to ``.grad``.

        Each micro-batch counts by its number of targets, so that micro-batches of any sizes give the batch's own mean.

        Args:
            tokens, targets: (B, N) int64, the same on all ranks: the first stage reads the tokens, the last the
                targets, the others only their shape. Targets of -100 count as none.
            micro_batches: pieces that the batch is cut into; the first ones have one row more if it does not divide.
            scale: factor of the loss, such as a batch's share in accumulated gradients.

        Returns:
            The loss of the batch times ``scale`` on the last stage, a scalar without a graph; None on the others.

        Raises:
            ValueError: more micro-batches than rows, or none.
        """
        if not 1 <= micro_batches <= len(tokens):
            raise ValueError(f"micro_batches must be between 1 and the batch's {len(tokens)} rows, got {micro_batches}")
        tied = self.stage.tied
        if tied is None or not tied.requires_grad:
            return self._run(tokens, targets, micro_batches, scale)
        earlier, tied.grad = tied.grad, None
        loss = self._run(tokens, targets, micro_batches, scale)
        dist.all_reduce(tied.grad, group=self._ends)  # what the weight got as an embedding and what it got as a head
        if earlier is not None:
            tied.grad += earlier
        return loss

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip by the norm of the whole model's gradient; a tied weight, which two stages have, counts once.

        Returns:
            The norm before clipping, a scalar, the same on all ranks.
        """
        total = squared_norm(self.stage, without=self.stage.tied if self.stage.last else None)
        dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        scale_gradients(self.stage, norm, max_norm)
        return norm

    def _run(self, tokens: Tensor, targets: Tensor, micro_batches: int, scale: float) -> Tensor | None:
        """All actions of this stage and the messages between them, in the order of ``communication_plan``."""
        run = _Run(self, tokens, targets, micro_batches, scale)
        order = self.order(self.rank, self.stages, micro_batches)
        raise NotImplementedError("Lab 4, exercise 4.9: one step")
        run.finish()
        self.peak_in_flight = run.peak
        return run.loss


class _Run:
    """One step of a pipeline on one rank: what it holds while it lasts.

    Attributes:
        tokens, targets: of each micro-batch, (rows, N).
        weights: each micro-batch's share of the batch's loss, times ``scale``, float64 scalars; 0 without targets.
        loss: what the step returns; on the last stage the sum of the weighted losses so far, without a graph.
        in_flight: micro-batch -> (x, end), from its forward pass to its backward pass and no longer. x is the stage's
            input, None if that is tokens; end is where the backward pass starts: the weighted loss on the last stage,
            on others the graph's edge at the output (``get_gradient_edge``), None if nothing in it needs a gradient.
        received: ("activation", i) and ("gradient", i) -> what has come for micro-batch i, and waits for its action.
        made: ("activation", i) and ("gradient", i) -> what is to be sent, without a graph, contiguous.
        peak: the most micro-batches in flight so far.
    """

    def __init__(self, pipeline: Pipeline, tokens: Tensor, targets: Tensor, micro_batches: int, scale: float) -> None:
        self.stage, self.group, self.ranks = pipeline.stage, pipeline.group, pipeline.ranks
        self.tokens, self.targets = tokens.tensor_split(micro_batches), targets.tensor_split(micro_batches)
        counted = (targets != -100).sum().double()
        self.weights = [scale * (piece != -100).sum() / counted for piece in self.targets]
        self.loss: Tensor | None = None
        self.peak = 0
        #: micro-batch -> its input (None: tokens) and the end of its graph (None: nothing to train), from F to B
        self.in_flight: dict[int, tuple[Tensor | None, GradientEdge | Tensor | None]] = {}
        self.received: dict[tuple[str, int], Tensor] = {}  # activations and gradients that wait for their action
        self.made: dict[tuple[str, int], Tensor] = {}  # activations and gradients that wait to be sent
        self.sending: list[tuple[Work, Tensor]] = []

    def forward(self, i: int) -> None:
        """The stage's forward pass of micro-batch i.

        ``self.stage(x, targets)`` computes. On the first stage x is the tokens, on the others the received activation,
        whose gradient the previous stage needs. The last stage takes the targets and returns their mean loss
        (NaN if there are none). The others take None and return the next stage's x, which the graph does not need.
        """
        raise NotImplementedError("Lab 4, exercise 4.9: a micro-batch forward")
        self.peak = max(self.peak, len(self.in_flight))

    def backward(self, i: int) -> None:
        """The stage's backward pass of micro-batch i: frees what its forward pass had saved.

        ``torch.autograd.backward(end, gradient)`` computes; the last stage's loss needs no gradient from outside. The
        gradient of x goes to the previous stage (zeros if x has none).
        """
        raise NotImplementedError("Lab 4, exercise 4.9: a micro-batch backward")

    def exchange(self, transfers: Exchange) -> None:
        """Post messages together; return when those to this rank have come. Those from it may still be under way."""
        tensors = [self._tensor(transfer) for transfer in transfers]
        # batch_isend_irecv even for one message: with NCCL, single sends and batches use different communicators, and
        # a message of the one never meets its peer in the other
        operations = [
            P2POp(dist.isend if transfer.kind == "send" else dist.irecv, tensor, self.ranks[transfer.peer], self.group)
            for transfer, tensor in zip(transfers, tensors, strict=True)
        ]
        works = dist.batch_isend_irecv(operations)
        for k, (transfer, tensor) in enumerate(zip(transfers, tensors, strict=True)):
            work = works[k] if len(works) == len(transfers) else works[0]  # NCCL: one handle for all
            if transfer.kind == "recv":
                work.wait()
                self.received[transfer.content, transfer.micro_batch] = tensor
            else:
                self.sending.append((work, tensor))
        while len(self.sending) > 2:
            self.sending.pop(0)[0].wait()

    def _tensor(self, transfer: Transfer) -> Tensor:
        """What is sent, or room for what comes: (rows of the micro-batch, N, C)."""
        if transfer.kind == "send":
            return self.made.pop((transfer.content, transfer.micro_batch))
        return self.stage.empty_activation(self.tokens[transfer.micro_batch])

    def finish(self) -> None:
        """Wait until everything is sent.

        Raises:
            RuntimeError: the order left a micro-batch without its backward pass.
        """
        if self.in_flight:
            raise RuntimeError(f"the schedule ended before the backward pass of micro-batches {sorted(self.in_flight)}")
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()
