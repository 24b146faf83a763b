"""Where each part of a large model lives when tensor, pipeline and data parallelism nest, and what that costs a GPU.

Ranks that share a layer (tensor parallelism) talk most and are neighbours, inside one machine; then come the replicas
of data parallelism, and the stages of the pipeline are furthest apart: rank = (stage * data + replica) * tensor + part,
the order of Megatron-LM (Narayanan et al. 2021, section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from utils.gpt import GPTConfig
from utils.operators import require_sizes
from utils.schedules import interleaved, one_f_one_b
from utils.transformer_math.activations import block_activations
from utils.transformer_math.communication import communication_volume, pipeline_volume, tensor_parallel_volume
from utils.transformer_math.flops import training_flops
from utils.transformer_math.memory import MIXED_ADAM, Precision, check_stage, memory_per_rank
from utils.transformer_math.parameters import block_parameters


class Coordinates(NamedTuple):
    """Where a rank stands in the three groups that it belongs to."""

    stage: int
    replica: int
    part: int


@dataclass(frozen=True)
class Placement:
    """A model on ``tensor * pipeline * data`` GPUs.

    Args:
        config: the model.
        tensor: t, GPUs that share each layer; must divide heads, hidden width and feed-forward width.
        pipeline: p, stages; ``pipeline * chunks`` must divide the layers.
        data: d, replicas of all that.
        global_batch: sequences of one optimizer step; ``data * micro_batch`` must divide it.
        micro_batch: sequences that pass through the pipeline together.
        seq_len: tokens of a sequence, by default the context.
        chunks: v, chunks of layers on each stage (interleaved 1F1B when above 1).
        zero: stage of ZeRO among the replicas, 0 to 3.
        sequence_parallel: between the split layers, activations are split over the tokens (Korthikanti et al. 2022).
        precision: bytes a parameter.

    Raises:
        ValueError: sizes that do not divide; the message names them.
    """

    config: GPTConfig
    tensor: int
    pipeline: int
    data: int
    global_batch: int
    micro_batch: int = 1
    seq_len: int | None = None
    chunks: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    precision: Precision = MIXED_ADAM

    def __post_init__(self) -> None:
        require_sizes(
            tensor=self.tensor, pipeline=self.pipeline, data=self.data, global_batch=self.global_batch,
            micro_batch=self.micro_batch, chunks=self.chunks,
        )  # fmt: skip
        check_stage(self.zero)
        c = self.config
        for what, whole, parts in (
            ("heads by tensor", c.heads, self.tensor),
            ("feed_forward by tensor", c.feed_forward, self.tensor),
            ("layers by pipeline * chunks", c.layers, self.pipeline * self.chunks),
            ("global_batch by data * micro_batch", self.global_batch, self.data * self.micro_batch),
        ):
            if whole % parts:
                raise ValueError(f"cannot divide {what}: {whole} by {parts}")

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tensor * self.pipeline * self.data

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self._seq_len

    @property
    def micro_batches(self) -> int:
        """m, micro-batches that each replica's pipeline works on in a step."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def layers_per_stage(self) -> int:
        """Blocks on each stage."""
        return self.config.layers // self.pipeline

    @property
    def bubble(self) -> float:
        """Idle over ideal time, (p - 1)/(v m)."""
        return (self.pipeline - 1) / (self.chunks * self.micro_batches)

    @property
    def _seq_len(self) -> int:
        return self.config.context if self.seq_len is None else self.seq_len

    def rank(self, stage: int, replica: int, part: int) -> int:
        """The rank at these coordinates."""
        for name, value, size in zip(Coordinates._fields, (stage, replica, part), self._sizes, strict=True):
            if not 0 <= value < size:
                raise ValueError(f"{name} must be between 0 and {size - 1}, got {value}")
        return (stage * self.data + replica) * self.tensor + part

    def coordinates(self, rank: int) -> Coordinates:
        """Stage, replica and part of a rank."""
        if not 0 <= rank < self.gpus:
            raise ValueError(f"rank must be between 0 and {self.gpus - 1}, got {rank}")
        return Coordinates(rank // (self.tensor * self.data), rank // self.tensor % self.data, rank % self.tensor)

    @property
    def ranks(self) -> list[list[list[int]]]:
        """All ranks as ranks[stage][replica][part]."""
        return [
            [[self.rank(stage, replica, part) for part in range(self.tensor)] for replica in range(self.data)]
            for stage in range(self.pipeline)
        ]

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.pipeline, self.data, self.tensor

    def parameters(self, stage: int) -> int:
        """Parameters on each GPU of a stage, before ZeRO.

        Matrices are split by t; norms and the biases added after an all-reduce are whole on each. The first stage has
        the embedding (its rows split by t) and the positions, the last one the head, or a copy of a tied embedding.
        """
        c, t = self.config, self.tensor
        block, bias = block_parameters(c), 2 * c.hidden * int(c.bias)  # of the output and of the second MLP layer
        split = block["attention"] + block["mlp"] - bias
        count = self.layers_per_stage * (split // t + bias + block["norms"])
        table = math.ceil(c.vocabulary / t) * c.hidden
        last = stage == self.pipeline - 1
        if stage == 0:
            count += table + c.context * c.hidden
        if last:
            count += (1 + int(c.bias)) * c.hidden + (0 if stage == 0 and c.tied else table)
        return count

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage the most micro-batches in flight, times the chunks they count for."""
        if self.chunks > 1:
            return interleaved(self.pipeline, self.micro_batches, self.chunks).peak_in_flight
        return one_f_one_b(self.pipeline, self.micro_batches).peak_in_flight

    def block_activations(self) -> float:
        """Bytes of activations of one block and one micro-batch on a GPU.

        In 16 bits, (8 + 24/t) a token and channel, and all of 32/t with sequence parallelism, plus statistics.
        """
        kept = block_activations(self.config, self.micro_batch, self._seq_len)
        width = 2 * self.micro_batch * self._seq_len * self.config.hidden  # bytes of one (B, N, C) in 16 bits
        whole = kept["norms"] + 2 * width  # and the inputs of the two split layers: the norms' outputs
        split = sum(kept.values()) - whole
        return split / self.tensor + whole / (self.tensor if self.sequence_parallel else 1)

    def memory(self, stage: int = 0) -> dict[str, float]:
        """Bytes on each GPU of a stage by component: the model's state as ZeRO divides it, and ``activations``.

        Activations of the blocks only; with checkpointing, the inputs of the blocks and one block being recomputed.
        """
        state = memory_per_rank(self.parameters(stage), self.data, self.zero, self.precision)
        each = self.block_activations()
        blocks = self.in_flight[stage] * self.layers_per_stage // self.chunks
        if self.config.checkpointing:
            split = self.tensor if self.sequence_parallel else 1
            inputs = 2 * self.micro_batch * self._seq_len * self.config.hidden / split
            return state | {"activations": blocks * inputs + each}
        return state | {"activations": blocks * each}

    def flops_per_gpu(self) -> float:
        """FLOPs of one optimizer step on each GPU, on average, all pairs of attention counted."""
        return sum(training_flops(self.config, self.global_batch, self._seq_len).values()) / self.gpus

    def sent(self, stage: int = 0) -> dict[str, float]:
        """Bytes that a GPU sends in one optimizer step, in 16 bits, by the kind of parallelism.

        ``tensor``: all-reduces of activations; ``pipeline``: activations and their gradients, to the next and the
        previous stage (each GPU of a part sends its t-th); ``data``: gradients and parameters as ZeRO needs them.
        """
        one_stage = self.config.replace(layers=self.layers_per_stage)
        micro, n = self.micro_batch, self._seq_len
        ends = (stage == 0) + (stage == self.pipeline - 1)  # where the pipeline begins and ends, nothing is sent on
        across = pipeline_volume(self.config, micro, n, virtual=self.chunks) - ends * micro * n * self.config.hidden
        return {
            "tensor": 2 * self.micro_batches * tensor_parallel_volume(one_stage, micro, n, tensor=self.tensor),
            "pipeline": 2 * self.micro_batches * across / self.tensor if self.pipeline > 1 else 0.0,
            "data": 2 * sum(communication_volume(self.parameters(stage), self.data, self.zero).values()),
        }
